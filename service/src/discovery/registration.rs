//! The handle of a worker that is announced.

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Load;

/// Keeps a worker announced. Dropping it takes the worker off the list soon; [`leave`](Self::leave) waits until
/// that is done.
#[must_use = "dropping the registration takes the worker off the list"]
pub struct Registration {
    kept_by: Keeper,
    listed: watch::Receiver<bool>,
    load: watch::Sender<Load>,
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
        Self { kept_by: Keeper::Nobody, listed: always(), load: watch::Sender::default() }
    }

    pub(super) fn withdrawn_by(withdraw: impl FnOnce() + Send + Sync + 'static) -> Self {
        let kept_by = Keeper::Drop(OnDrop(Some(Box::new(withdraw))));
        Self { kept_by, listed: always(), load: watch::Sender::default() }
    }

    pub(super) fn kept_by_task(
        stop: CancellationToken,
        task: JoinHandle<()>,
        listed: watch::Receiver<bool>,
        load: watch::Sender<Load>,
    ) -> Self {
        Self { kept_by: Keeper::Task { stop: stop.drop_guard(), task }, listed, load }
    }

    /// Whether the list held the worker when that was last made sure, now and after each change. Always true where
    /// the list is kept by others or is in memory.
    pub fn listed(&self) -> watch::Receiver<bool> {
        self.listed.clone()
    }

    /// Tells what the worker carries. etcd hears of it with the lease's next renewal; other lists do not.
    pub fn tell_load(&self, load: Load) {
        self.load.send_if_modified(|told| {
            let is_news = *told != load;
            *told = load;
            is_news
        });
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

fn always() -> watch::Receiver<bool> {
    watch::channel(true).1
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(withdraw) = self.0.take() {
            withdraw();
        }
    }
}
