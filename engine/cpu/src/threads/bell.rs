//! An event count: a thread waits for a condition on atomics. It spins as long as [`Patience`] allows, then
//! blocks until it is notified. No wake-up is lost: a waiter checks its condition again after it has
//! registered, and a notifier looks for waiters after it has made the condition true.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};

use super::patience::Patience;

/// Wakes threads that wait for a condition on atomics.
#[derive(Debug, Default)]
pub(super) struct Bell {
    sleepers: AtomicUsize,
    /// Held from a waiter's last check until it blocks, so that no notification falls in between.
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Returns once `ready` is true; code that makes it true must then call [`Bell::ring`].
    pub(super) fn wait_until(&self, patience: &Patience, ready: impl Fn() -> bool) {
        if !patience.look(&ready) {
            self.sleep_until(ready);
        }
    }

    /// Wakes all blocked waiters; usually there are none.
    pub(super) fn ring(&self) {
        // Either this load sees the waiter, or the waiter's last check sees the changed condition.
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
