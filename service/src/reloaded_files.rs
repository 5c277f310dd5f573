//! Values made from files, such as certificates that are renewed while a process runs.
//!
//! The files are checked when the value is requested, at most once a second, so that nothing runs in the
//! background and no handshake after that second uses the old certificate. If the files are invalid (a
//! certificate whose key is not written yet, a missing file), the error is logged once and the last good
//! value stays. They are tried again at every check, because the cause may be transient, such as a lack of
//! file descriptors.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::polled_file::POLL_INTERVAL;
use crate::tls::TlsError;

/// A value made from files.
pub(crate) struct ReloadedFiles<T> {
    paths: Vec<PathBuf>,
    make: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    poll_interval: Duration,
    hasher: RandomState,
    loaded: Mutex<Loaded<T>>,
}

struct Loaded<T> {
    value: T,
    /// Hash of the contents from which `value` was made; private keys are not kept for comparison.
    contents_hash: u64,
    /// Hash of the contents whose error was logged last, until the files are valid.
    logged_hash: Option<u64>,
    checked_at: Instant,
}

impl<T: Clone> ReloadedFiles<T> {
    /// Makes the first value from the files at `paths`.
    pub(crate) fn new(
        paths: Vec<PathBuf>,
        make: impl Fn() -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let hasher = RandomState::new();
        let loaded = Loaded {
            contents_hash: contents(&paths, &hasher),
            logged_hash: None,
            value: make()?,
            checked_at: Instant::now(),
        };
        Ok(Self {
            paths,
            make: Box::new(make),
            poll_interval: POLL_INTERVAL,
            hasher,
            loaded: Mutex::new(loaded),
        })
    }

    /// Returns the current value.
    pub(crate) fn current(&self) -> T {
        // A panic under the lock cannot have changed the value.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.checked_at.elapsed() < self.poll_interval {
            return loaded.value.clone();
        }
        loaded.checked_at = Instant::now();
        self.reload(&mut loaded);
        loaded.value.clone()
    }

    /// Makes the value again if the files have changed.
    fn reload(&self, loaded: &mut Loaded<T>) {
        let contents_hash = contents(&self.paths, &self.hasher);
        if contents_hash == loaded.contents_hash {
            loaded.logged_hash = None;
            return;
        }
        match (self.make)() {
            Ok(value) => {
                loaded.value = value;
                loaded.contents_hash = contents_hash;
                loaded.logged_hash = None;
                let files: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
                tracing::info!(files = files.join(", "), "loaded the changed certificates");
            }
            Err(error) => {
                if loaded.logged_hash.replace(contents_hash) != Some(contents_hash) {
                    tracing::error!(%error, "cannot use the changed certificates: the previous ones stay in use");
                }
            }
        }
    }

    /// Checks the files on every call.
    #[cfg(test)]
    pub(crate) fn checking_always(mut self) -> Self {
        self.poll_interval = Duration::ZERO;
        self
    }
}

/// Hash of the files' contents; a file that cannot be read counts as its error.
fn contents(paths: &[PathBuf], hasher: &RandomState) -> u64 {
    let read = |path: &PathBuf| std::fs::read(path).map_err(|error| error.to_string());
    hasher.hash_one(paths.iter().map(read).collect::<Vec<_>>())
}

impl<T> fmt::Debug for ReloadedFiles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReloadedFiles").field("paths", &self.paths).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_change_is_taken_up_and_a_broken_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("one");
        let from = path.clone();
        let make = move || {
            let text = std::fs::read_to_string(&from)
                .map_err(|source| TlsError::Read { path: from.clone(), source })?;
            let broken = TlsError::Content { path: from.clone(), reason: "broken".into(), expected: "text" };
            if text.contains("broken") { Err(broken) } else { Ok(text) }
        };
        let renewed = ReloadedFiles::new(vec![path.clone()], make).unwrap().checking_always();
        assert_eq!(renewed.current(), "one");
        write("broken");
        assert_eq!(renewed.current(), "one");
        write("two");
        assert_eq!(renewed.current(), "two");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(renewed.current(), "two");
        write("three");
        assert_eq!(renewed.current(), "three");
    }

    #[test]
    fn a_change_is_tried_again_after_a_transient_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let is_failing = Arc::new(AtomicBool::new(false));
        let (from, fails) = (path.clone(), Arc::clone(&is_failing));
        let make = move || {
            let text = match fails.load(Ordering::Relaxed) {
                true => Err(std::io::Error::other("too many open files")),
                false => std::fs::read_to_string(&from),
            };
            text.map_err(|source| TlsError::Read { path: from.clone(), source })
        };
        let renewed = ReloadedFiles::new(vec![path.clone()], make).unwrap().checking_always();
        let logged = || renewed.loaded.lock().unwrap().logged_hash;
        is_failing.store(true, Ordering::Relaxed);
        std::fs::write(&path, "two").unwrap();
        assert_eq!((renewed.current().as_str(), logged().is_some()), ("one", true));
        let first = logged();
        assert_eq!((renewed.current().as_str(), logged()), ("one", first), "the error is logged once");
        is_failing.store(false, Ordering::Relaxed);
        assert_eq!((renewed.current().as_str(), logged()), ("two", None), "the file is the same as before");
    }
}
