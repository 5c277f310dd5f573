//! The handle of a worker that is announced.

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Keeps a worker announced. Dropping it takes the worker off the list soon; [`leave`](Self::leave) waits until
/// that is done.
#[must_use = "dropping the registration takes the worker off the list"]
pub struct Registration {
    kept_by: Keeper,
}

enum Keeper {
    /// The list is kept by others.
    Nobody,
    /// Run at the drop.
    Drop(#[expect(dead_code, reason = "held for its drop")] OnDrop),
    /// A task that withdraws the worker when the token is cancelled.
    Task { stop: DropGuard, task: JoinHandle<()> },
}

struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Registration {
    pub(super) fn kept_by_nobody() -> Self {
        Self { kept_by: Keeper::Nobody }
    }

    pub(super) fn withdrawn_by(withdraw: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { kept_by: Keeper::Drop(OnDrop(Some(Box::new(withdraw)))) }
    }

    pub(super) fn kept_by_task(stop: CancellationToken, task: JoinHandle<()>) -> Self {
        Self { kept_by: Keeper::Task { stop: stop.drop_guard(), task } }
    }

    /// Takes the worker off the list and waits until that is done, or has failed and is left to the lease.
    pub async fn leave(self) {
        match self.kept_by {
            Keeper::Nobody | Keeper::Drop(_) => {}
            Keeper::Task { stop, task } => {
                drop(stop);
                // A panic in the task was logged where it happened.
                drop(task.await);
            }
        }
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(withdraw) = self.0.take() {
            withdraw();
        }
    }
}
