//! A descriptor that a listener keeps for a bad day: where the process has no other one left, it is given up for one connection,
//! and taken back when that ends. So a health check is answered even then.

use std::io::stderr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The descriptor. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Spare(Arc<Mutex<Option<OwnedFd>>>);

impl Spare {
    /// Takes one, unless there is none left.
    pub(super) fn take() -> Self {
        let spare = Self(Arc::default());
        spare.renew();
        spare
    }

    /// Gives it up. False where it is in use.
    pub(super) fn give_up(&self) -> bool {
        self.kept().take().is_some()
    }

    /// Takes it back, where it is not there and the process has one left.
    pub(super) fn renew(&self) {
        let mut kept = self.kept();
        if kept.is_none() {
            *kept = stderr().as_fd().try_clone_to_owned().ok();
        }
    }

    fn kept(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
