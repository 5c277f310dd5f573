//! Finds out before a training whether the disk has room for its result.

use std::path::Path;

use nix::sys::statvfs::statvfs;

use super::error::DistillCommandError;

/// Fails if fewer than `needed` bytes are free in the directory of `out`, which must exist.
pub(super) fn check_space(out: &Path, needed: u64) -> Result<(), DistillCommandError> {
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A file system that reports no size has to be tried.
    let Some(disk) = statvfs(parent).ok().filter(|disk| disk.blocks() > 0) else { return Ok(()) };
    let free = disk.blocks_available().saturating_mul(disk.fragment_size());
    match needed <= free {
        true => Ok(()),
        false => Err(DistillCommandError::NoSpace { out: out.to_owned(), needed, free }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_that_does_not_fit_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("new");
        assert!(check_space(&out, 1).is_ok());
        let error = check_space(&out, u64::MAX).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}: ", out.display())), "{error}");
        assert!(error.contains("MB are free"), "{error}");
    }
}
