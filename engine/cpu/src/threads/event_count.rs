//! An event count: a thread waits for a condition on atomics. It spins as long as [`SpinPolicy`] allows, then
//! blocks until it is notified. No wake-up is lost: a waiter checks its condition again after it has
//! registered, and a notifier looks for waiters after it has made the condition true.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};

use super::spin_policy::SpinPolicy;

/// Wakes threads that wait for a condition on atomics.
#[derive(Debug, Default)]
pub(super) struct EventCount {
    waiters: AtomicUsize,
    /// Held from a waiter's last check until it blocks, so that no notification falls in between.
    lock: Mutex<()>,
    condvar: Condvar,
}

impl EventCount {
    /// Returns once `ready` is true; code that makes it true must then call [`EventCount::notify_all`].
    pub(super) fn wait_until(&self, spin_policy: &SpinPolicy, ready: impl Fn() -> bool) {
        if !spin_policy.spin_until(&ready) {
            self.block_until(ready);
        }
    }

    /// Wakes all blocked waiters; usually there are none.
    pub(super) fn notify_all(&self) {
        // Either this load sees the waiter, or the waiter's last check sees the changed condition.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.condvar.notify_all();
        }
    }

    #[cold]
    fn block_until(&self, ready: impl Fn() -> bool) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}
