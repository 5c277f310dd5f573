//! Logs of the processes of a run, one file each, with markers for the times of faults.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use outrider_cli::cluster::LogSink;
use tempfile::TempDir;

/// The log files.
#[derive(Debug)]
pub struct FileLogs {
    directory: PathBuf,
    /// Removes the files when dropped, unless they are kept.
    temporary: Mutex<Option<TempDir>>,
    files: Mutex<BTreeMap<String, File>>,
}

impl FileLogs {
    /// Files in `directory`, which are kept; without one, in a temporary directory that is removed on drop.
    pub fn new(directory: Option<&Path>) -> anyhow::Result<Self> {
        let temporary = match directory {
            Some(directory) => {
                std::fs::create_dir_all(directory)?;
                None
            }
            None => Some(tempfile::Builder::new().prefix("outrider-chaos-").tempdir()?),
        };
        let own = temporary.as_ref().map(|temporary| temporary.path().to_owned());
        let directory = own.or_else(|| directory.map(Path::to_owned)).unwrap_or_default();
        Ok(Self { directory, temporary: Mutex::new(temporary), files: Mutex::default() })
    }

    /// Keeps the files, and returns their directory.
    pub fn keep(&self) -> &Path {
        let temporary = self.temporary.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The path is already known.
        drop(temporary.map(TempDir::keep));
        &self.directory
    }

    /// Writes a line into every file.
    pub fn mark(&self, line: &str) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        for file in files.values_mut() {
            // On a full disk lines are lost, but the run continues.
            writeln!(file, "---- {} {line}", jiff::Timestamp::now()).ok();
        }
    }
}

impl LogSink for FileLogs {
    fn line(&self, process: &str, line: &str) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if !files.contains_key(process) {
            let path = self.directory.join(process).with_extension("log");
            let Ok(file) = File::options().create(true).append(true).open(path) else { return };
            files.insert(process.to_owned(), file);
        }
        if let Some(file) = files.get_mut(process) {
            writeln!(file, "{line}").ok();
        }
    }
}
