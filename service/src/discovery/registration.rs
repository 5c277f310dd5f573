//! Handle to an announced worker.

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Keeps a worker announced. Dropping it removes the worker from the list soon; [`leave`](Self::leave) waits
/// until that is done.
#[must_use = "dropping the registration removes the worker from the list"]
pub struct Registration {
    owner: RegistrationOwner,
    listed: watch::Receiver<bool>,
}

enum RegistrationOwner {
    /// The list is maintained by others.
    External,
    /// Runs on drop.
    Drop(#[expect(dead_code, reason = "held for its drop")] OnDrop),
    /// A task that withdraws the worker when the token is cancelled.
    Task { stop: DropGuard, task: JoinHandle<()> },
}

struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Registration {
    pub(super) fn external() -> Self {
        Self { owner: RegistrationOwner::External, listed: constant(true) }
    }

    pub(super) fn with_withdrawal(withdraw: impl FnOnce() + Send + Sync + 'static) -> Self {
        let owner = RegistrationOwner::Drop(OnDrop(Some(Box::new(withdraw))));
        Self { owner, listed: constant(false) }
    }

    pub(super) fn with_task(
        stop: CancellationToken,
        task: JoinHandle<()>,
        listed: watch::Receiver<bool>,
    ) -> Self {
        Self { owner: RegistrationOwner::Task { stop: stop.drop_guard(), task }, listed }
    }

    /// Whether the list contained the worker when last checked, and its changes. Always true for lists
    /// maintained by others, and always false for lists in memory, which routers of other processes never
    /// see.
    pub fn listed(&self) -> watch::Receiver<bool> {
        self.listed.clone()
    }

    /// Removes the worker from the list and waits until that is done, or has failed and is left to the lease.
    pub async fn leave(self) {
        match self.owner {
            RegistrationOwner::External | RegistrationOwner::Drop(_) => {}
            RegistrationOwner::Task { stop, task } => {
                drop(stop);
                // A panic of the task was already logged.
                drop(task.await);
            }
        }
    }
}

/// A value that never changes.
pub(super) fn constant(value: bool) -> watch::Receiver<bool> {
    watch::channel(value).1
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(withdraw) = self.0.take() {
            withdraw();
        }
    }
}
