//! Values made from files, such as certificates that are renewed while a process runs.
//!
//! The files are checked when the value is requested, at most once a second, so that nothing runs in the
//! background and no handshake after that second uses the old certificate. If the files are invalid (a
//! certificate whose key is not written yet, a missing file), the error is logged once and the last good
//! value stays.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::reread::LOOK_EVERY;
use crate::tls::TlsError;

/// A value made from files.
pub(crate) struct Renewed<T> {
    paths: Vec<PathBuf>,
    make: Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>,
    look_every: Duration,
    hasher: RandomState,
    made: Mutex<Made<T>>,
}

struct Made<T> {
    value: T,
    /// Hash of the files' contents when last tried; private keys are not kept for comparison.
    tried: u64,
    looked: Instant,
}

impl<T: Clone> Renewed<T> {
    /// Makes the first value from the files at `paths`.
    pub(crate) fn new(
        paths: Vec<PathBuf>,
        make: impl Fn() -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let hasher = RandomState::new();
        let made = Made { tried: contents(&paths, &hasher), value: make()?, looked: Instant::now() };
        Ok(Self { paths, make: Box::new(make), look_every: LOOK_EVERY, hasher, made: Mutex::new(made) })
    }

    /// Returns the current value.
    pub(crate) fn now(&self) -> T {
        // A panic under the lock cannot have changed the value.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.looked.elapsed() < self.look_every {
            return made.value.clone();
        }
        made.looked = Instant::now();
        let contents = contents(&self.paths, &self.hasher);
        if contents != made.tried {
            made.tried = contents;
            let files: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
            match (self.make)() {
                Ok(value) => {
                    made.value = value;
                    tracing::info!(files = files.join(", "), "loaded the changed certificates");
                }
                Err(error) => {
                    tracing::error!(%error, "cannot use the changed certificates: the previous ones stay in use");
                }
            }
        }
        made.value.clone()
    }

    /// Checks the files on every call.
    #[cfg(test)]
    pub(crate) fn looking_always(mut self) -> Self {
        self.look_every = Duration::ZERO;
        self
    }
}

/// Hash of the files' contents; a file that cannot be read counts as its error.
fn contents(paths: &[PathBuf], hasher: &RandomState) -> u64 {
    let read = |path: &PathBuf| std::fs::read(path).map_err(|error| error.to_string());
    hasher.hash_one(paths.iter().map(read).collect::<Vec<_>>())
}

impl<T> fmt::Debug for Renewed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewed").field("paths", &self.paths).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
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
        let renewed = Renewed::new(vec![path.clone()], make).unwrap().looking_always();
        assert_eq!(renewed.now(), "one");
        write("broken");
        assert_eq!(renewed.now(), "one");
        write("two");
        assert_eq!(renewed.now(), "two");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(renewed.now(), "two");
        write("three");
        assert_eq!(renewed.now(), "three");
    }
}
