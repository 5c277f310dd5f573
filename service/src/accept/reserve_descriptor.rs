//! A reserve file descriptor of a listener: when the process has none left, it is released for one connection
//! and reacquired when that ends. So health checks are answered even then.

use std::io::stderr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The reserve descriptor. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ReserveDescriptor(Arc<Mutex<Option<OwnedFd>>>);

impl ReserveDescriptor {
    /// Acquires a descriptor, if one is available.
    pub(super) fn acquire() -> Self {
        let reserve = Self(Arc::default());
        reserve.reacquire();
        reserve
    }

    /// Releases the descriptor. Returns false if it is in use already.
    pub(super) fn release(&self) -> bool {
        self.descriptor().take().is_some()
    }

    /// Reacquires the descriptor, if it was released and one is available.
    pub(super) fn reacquire(&self) {
        let mut descriptor = self.descriptor();
        if descriptor.is_none() {
            *descriptor = stderr().as_fd().try_clone_to_owned().ok();
        }
    }

    fn descriptor(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
