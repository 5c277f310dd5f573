//! Files that `git clone` leaves in place of large ones if Git LFS is not installed.

use std::io;

/// Start of such a file.
const START: &[u8] = b"version https://git-lfs.";

/// Returns an error if a file that begins with these bytes is a pointer of Git LFS.
pub fn check_lfs_pointer(bytes: &[u8]) -> io::Result<()> {
    if !bytes.starts_with(START) {
        return Ok(());
    }
    Err(io::Error::other("it is a pointer of Git LFS, run `git lfs pull` to get the file"))
}
