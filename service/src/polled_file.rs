//! Files that are reread when they change, such as lists of workers and API keys.
//!
//! A file is polled, and an edit is accepted once two polls in a row have read the same, so that a
//! half-written file is not mistaken for a shorter one. The content is compared, because modification times
//! are coarse and orchestrators replace mounted files through symlinks. Only a hash of the content is kept,
//! because such files contain secrets.

use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior};

/// Polling interval of files.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A file that is watched for edits.
#[derive(Debug)]
pub struct PolledFile {
    path: PathBuf,
    hasher: RandomState,
    detector: EditDetector,
    interval: Interval,
}

impl PolledFile {
    /// A file that was already read, with the content `first`.
    pub fn new(path: PathBuf, first: &str, poll_interval: Duration) -> Self {
        let hasher = RandomState::new();
        let detector = EditDetector { accepted: Ok(hasher.hash_one(first)), candidate: None };
        let mut interval = tokio::time::interval(poll_interval);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { path, hasher, detector, interval }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next stable edit; returns the content, or why the file cannot be read.
    ///
    /// Cancel safety: safe.
    pub async fn next_edit(&mut self) -> Result<String, String> {
        loop {
            self.interval.tick().await;
            let now = tokio::fs::read_to_string(&self.path).await.map_err(|error| error.to_string());
            let seen = now.as_ref().map(|text| self.hasher.hash_one(text.as_str())).map_err(String::clone);
            if self.detector.accept(seen) {
                return now;
            }
        }
    }
}

/// Result of a read: the hash of the text, or the error.
type Read = Result<u64, String>;

/// Distinguishes stable edits from files that are still being written.
#[derive(Debug)]
struct EditDetector {
    accepted: Read,
    candidate: Option<Read>,
}

impl EditDetector {
    /// Whether to accept `now`: it differs from the last accepted read and was read twice in a row.
    fn accept(&mut self, now: Read) -> bool {
        if now == self.accepted {
            self.candidate = None;
            return false;
        }
        if self.candidate.as_ref() != Some(&now) {
            self.candidate = Some(now);
            return false;
        }
        self.candidate = None;
        self.accepted = now;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_counts_once_it_stands_still() {
        let mut detector = EditDetector { accepted: Ok(1), candidate: None };
        for half_written in [1, 2, 3, 4, 5] {
            assert!(!detector.accept(Ok(half_written)));
        }
        assert!(detector.accept(Ok(5)));
        assert!(!detector.accept(Ok(5)), "an edit is accepted once");
        let gone = || Err("no such file".to_owned());
        assert_eq!((detector.accept(gone()), detector.accept(gone())), (false, true));
        assert_eq!(
            (detector.accept(Ok(5)), detector.accept(Ok(5))),
            (false, true),
            "a file that came back is read"
        );
    }

    #[tokio::test]
    async fn edits_and_a_missing_file_are_told_and_a_rewrite_of_the_same_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let mut file = PolledFile::new(path.clone(), "one", Duration::from_millis(1));
        std::fs::write(&path, "two").unwrap();
        assert_eq!(file.next_edit().await.as_deref(), Ok("two"));
        std::fs::write(&path, "two").unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(file.next_edit().await.unwrap_err().contains("No such file"));
        std::fs::write(&path, "three").unwrap();
        assert_eq!(file.next_edit().await.as_deref(), Ok("three"));
    }
}
