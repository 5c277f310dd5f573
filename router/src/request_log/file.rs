//! [`RotatingFile`]: appends lines to a file that only its owner can read. When the file is full it is
//! renamed to `FILE.1`, replacing the previous one. A line is written completely or not at all, even if the
//! disk is full.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Readable and writable by the owner only.
const OWNER_ONLY: u32 = 0o600;

/// The file and its current length.
#[derive(Debug)]
pub(super) struct RotatingFile {
    path: PathBuf,
    bytes_max: u64,
    /// The open file and its length; `None` if it could not be reopened.
    open: Option<(File, u64)>,
}

impl RotatingFile {
    /// Opens or creates the file, which is rotated before it exceeds `bytes_max`.
    pub(super) fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let open = Some(open(path)?);
        Ok(Self { path: path.to_owned(), bytes_max, open })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line, including its newline. After an error the file is unchanged.
    pub(super) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let num_bytes = line.len() as u64;
        let is_full = |len: u64| len > 0 && len + num_bytes > self.bytes_max;
        if self.open.as_ref().is_some_and(|(_, len)| is_full(*len)) {
            match std::fs::rename(&self.path, previous(&self.path)) {
                // Moved away or deleted by someone else: there is nothing to keep.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
            self.open = None;
        }
        let (file, len) = match &mut self.open {
            Some(open) => open,
            none => none.insert(open(&self.path)?),
        };
        match file.write_all(line) {
            Ok(()) => *len += num_bytes,
            Err(error) => {
                // A partial line would make the next one unreadable, too.
                file.set_len(*len)?;
                return Err(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl RotatingFile {
    /// A file on a full disk.
    pub(super) fn full() -> Self {
        let device = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full exists on Linux");
        Self { path: "/dev/full".into(), bytes_max: u64::MAX, open: Some((device, 0)) }
    }
}

/// Path of the previous file.
pub(super) fn previous(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".1");
    PathBuf::from(name)
}

/// Opens the file for appending; returns it with its length. A line truncated by a crash is terminated.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).mode(OWNER_ONLY).open(path)?;
    file.set_permissions(Permissions::from_mode(OWNER_ONLY))?;
    let mut len = file.seek(SeekFrom::End(0))?;
    if len > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
            len += 1;
        }
    }
    Ok((file, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_full_file_is_rotated_and_two_files_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut file = RotatingFile::open(&path, 8).unwrap();
        for line in ["one\n", "two\n", "three\n", "four\n", "far too long\n", "six\n"] {
            file.append(line.as_bytes()).unwrap();
        }
        assert_eq!((read(&path), read(&previous(&path))), ("six\n".into(), "far too long\n".into()));
        drop(file);
        RotatingFile::open(&path, 8).unwrap().append(b"7\n").unwrap();
        assert_eq!(read(&path), "six\n7\n", "an existing file is appended to");
    }

    #[test]
    fn only_the_owner_can_read_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        drop(RotatingFile::open(&path, 8).unwrap());
        assert_eq!(mode(), OWNER_ONLY);
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        drop(RotatingFile::open(&path, 8).unwrap());
        assert_eq!(mode(), OWNER_ONLY, "permissions of an existing file are restricted");
    }

    #[test]
    fn a_truncated_line_is_terminated_before_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        std::fs::write(&path, "whole\nhal").unwrap();
        RotatingFile::open(&path, 80).unwrap().append(b"next\n").unwrap();
        assert_eq!(read(&path), "whole\nhal\nnext\n");
    }

    #[test]
    fn a_file_that_was_moved_away_is_replaced_by_a_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut file = RotatingFile::open(&path, 4).unwrap();
        file.append(b"one\n").unwrap();
        std::fs::rename(&path, directory.path().join("taken")).unwrap();
        file.append(b"two\n").unwrap();
        assert_eq!(read(&path), "two\n");
        assert!(!previous(&path).exists());
    }

    #[test]
    fn a_failed_rotation_is_an_error_and_is_retried() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut file = RotatingFile::open(&path, 4).unwrap();
        file.append(b"one\n").unwrap();
        // A directory cannot be replaced by a file, so the rotation fails.
        std::fs::create_dir(previous(&path)).unwrap();
        file.append(b"two\n").unwrap_err();
        assert_eq!(read(&path), "one\n");
        std::fs::remove_dir(previous(&path)).unwrap();
        file.append(b"two\n").unwrap();
        assert_eq!((read(&path), read(&previous(&path))), ("two\n".into(), "one\n".into()));
    }
}
