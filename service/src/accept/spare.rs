//! A reserve file descriptor of a listener: when the process has none left, it is released for one connection
//! and reacquired when that ends. So health checks are answered even then.

use std::io::stderr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The reserve descriptor. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Spare(Arc<Mutex<Option<OwnedFd>>>);

impl Spare {
    /// Acquires a descriptor, if one is available.
    pub(super) fn take() -> Self {
        let spare = Self(Arc::default());
        spare.renew();
        spare
    }

    /// Releases the descriptor. Returns false if it is in use already.
    pub(super) fn give_up(&self) -> bool {
        self.kept().take().is_some()
    }

    /// Reacquires the descriptor, if it was released and one is available.
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
