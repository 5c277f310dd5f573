//! How a thread waits for another: it looks as long as it has patience, then sleeps until the bell is rung.
//! Nothing here may be lost: whoever sleeps has looked once more after saying so, and whoever rings looks for sleepers
//! after what they wait for has happened.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};

use super::patience::Patience;

/// Wakes those who wait for something that is told by atomics.
#[derive(Debug, Default)]
pub(super) struct Bell {
    sleepers: AtomicUsize,
    /// Held from a sleeper's last look until it sleeps, so that no ring falls between.
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Returns once `ready` says so; what makes it so must be followed by [`Bell::ring`].
    pub(super) fn wait_until(&self, patience: &Patience, ready: impl Fn() -> bool) {
        if !patience.look(&ready) {
            self.sleep_until(ready);
        }
    }

    /// Wakes all sleepers, of which there mostly are none.
    pub(super) fn ring(&self) {
        // Either this load sees the sleeper, or the sleeper's last look sees what has happened.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.rung.notify_all();
        }
    }

    #[cold]
    fn sleep_until(&self, ready: impl Fn() -> bool) {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !ready() {
            held = self.rung.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}
