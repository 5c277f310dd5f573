//! Shutdown of a process: a cancellation token and a gate, always as a pair.
//!
//! Every task of a process runs under a [`Lifetime`]. The token tells tasks to stop; the gate waits until all
//! of them have ended, and names those that have not. Servers stop in three phases:
//!
//! 1. [`Lifetime::leave`]: peers are asked to connect elsewhere, new requests are still served (the lame-duck
//!    period);
//! 2. [`Lifetime::drain`]: intake stops, work in flight ([`Lifetime::work`]) may finish within a grace
//!    period;
//! 3. [`Lifetime::shut_down`]: everything is cancelled, and the gate is awaited.
//!
//! This is the only place that calls `tokio::spawn`. It must never kill a task: tasks that outlive the grace
//! period are named in the log and left running until the process ends.

mod gate;
mod signal;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use gate::Gate;
pub use gate::GateGuard;
pub use signal::TerminationSignals;

/// Token and gate of the tasks of a process, or of a part of it.
///
/// Clones are handles to the same lifetime. A [`child`](Self::child) ends with its parent and can end before
/// it; everything that runs under the child also holds the parent's gate open.
#[derive(Clone, Debug)]
pub struct Lifetime {
    inner: Arc<Inner>,
}

/// Result of waiting for the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownOutcome {
    /// All holders ended in time.
    Clean,
    /// The grace period expired; the remaining holders were logged.
    TimedOut,
}

#[derive(Debug, Default)]
struct Inner {
    leaving: CancellationToken,
    draining: CancellationToken,
    cancelled: CancellationToken,
    /// Requests and streams in flight: a drain waits for them.
    work: Gate,
    /// Tasks and threads: the shutdown waits for them.
    tasks: Gate,
    /// The first essential task or thread that panicked; shared with parents and children.
    failed: Arc<watch::Sender<Option<&'static str>>>,
    /// Why a task asked the process to stop; shared likewise.
    stop: Arc<watch::Sender<Option<String>>>,
}

impl Lifetime {
    /// Creates a lifetime without a parent.
    pub fn new() -> Self {
        Self { inner: Arc::new(Inner::default()) }
    }

    /// Creates a part of this lifetime that can be ended alone, such as one connection or one router's
    /// session.
    pub fn child(&self) -> Self {
        let Inner { leaving, draining, cancelled, work, tasks, failed, stop } = &*self.inner;
        let inner = Inner {
            leaving: leaving.child_token(),
            draining: draining.child_token(),
            cancelled: cancelled.child_token(),
            work: work.child(),
            tasks: tasks.child(),
            failed: Arc::clone(failed),
            stop: Arc::clone(stop),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Runs `future` as a task that holds the gate open under `name` until it ends.
    ///
    /// The task is not cancelled from outside: it has to watch [`cancelled`](Self::cancelled). A panic is
    /// logged with the task's name and then propagates to the handle. The current tracing span is not
    /// inherited; instrument the future if a task belongs to one request.
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let hold = self.inner.tasks.enter(name);
        let task = async move {
            let _hold = hold;
            match AssertUnwindSafe(future).catch_unwind().await {
                Ok(output) => output,
                Err(payload) => {
                    tracing::error!(task = name, panic = panic_text(payload.as_ref()), "a task panicked");
                    resume_unwind(payload)
                }
            }
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that spawns: the gate holds the task's name"
        )]
        tokio::spawn(task)
    }

    /// [`spawn`](Self::spawn) for a task that the process cannot do without, such as a listener: if it
    /// panics, [`failed`](Self::failed) resolves, and the process ends instead of going on without it.
    pub fn spawn_essential<F>(&self, name: &'static str, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let failed = Arc::clone(&self.inner.failed);
        self.spawn(name, async move {
            AssertUnwindSafe(future).catch_unwind().await.unwrap_or_else(|payload| {
                report_panicked(&failed, name);
                resume_unwind(payload)
            })
        })
    }

    /// [`spawn_essential`](Self::spawn_essential) for work that blocks: runs `body` on its own thread, which
    /// holds the gate open under `name` until it ends.
    ///
    /// The thread is not cancelled from outside, either.
    pub fn spawn_essential_thread(
        &self,
        name: &'static str,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let (hold, failed) = (self.thread(name), Arc::clone(&self.inner.failed));
        let run = move || {
            let _hold = hold;
            // The hook of panics has logged it.
            if catch_unwind(AssertUnwindSafe(body)).is_err() {
                report_panicked(&failed, name);
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
    }

    /// Resolves once an essential task or thread has panicked, with its name.
    ///
    /// Cancel safety: safe.
    pub fn failed(&self) -> impl Future<Output = &'static str> + Send + use<> {
        let mut failed = self.inner.failed.subscribe();
        async move {
            let name = failed.wait_for(Option::is_some).await.ok().and_then(|name| *name);
            match name {
                Some(name) => name,
                // No task runs any more.
                None => std::future::pending().await,
            }
        }
    }

    /// The first essential task or thread that has panicked.
    pub fn failed_task(&self) -> Option<&'static str> {
        *self.inner.failed.borrow()
    }

    /// Asks the process to stop as a signal does: work in flight may finish. The first reason counts.
    pub fn request_stop(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.inner.stop.send_if_modified(|stop| stop.is_none() && stop.replace(reason).is_none());
    }

    /// Resolves once a task has asked the process to stop, with the reason.
    ///
    /// Cancel safety: safe.
    pub fn stop_requested(&self) -> impl Future<Output = String> + Send + use<> {
        let mut stop = self.inner.stop.subscribe();
        async move {
            let reason = stop.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
            match reason {
                Some(reason) => reason,
                // No task runs any more.
                None => std::future::pending().await,
            }
        }
    }

    /// Holds the gate open for a thread that the process can do without, or whose panics are caught; move the
    /// hold into the thread.
    pub fn thread(&self, name: &'static str) -> GateGuard {
        self.inner.tasks.enter(name)
    }

    /// Marks a piece of client work (a request, a stream) as in flight until the hold is dropped; a drain
    /// waits for it. Keep the hold inside the response body, so that streaming counts as work.
    pub fn work(&self, name: &'static str) -> GateGuard {
        self.inner.work.enter(name)
    }

    /// Resolves once peers should be asked to connect elsewhere: at [`leave`](Self::leave) and in the later
    /// phases.
    ///
    /// Cancel safety: safe.
    pub fn leaving(&self) -> impl Future<Output = ()> + Send + use<> {
        self.inner.leaving.clone().cancelled_owned()
    }

    /// Whether peers should be asked to connect elsewhere.
    pub fn is_leaving(&self) -> bool {
        self.inner.leaving.is_cancelled()
    }

    /// Resolves once intake should stop: at [`drain`](Self::drain) or [`shut_down`](Self::shut_down).
    ///
    /// Cancel safety: safe.
    pub fn draining(&self) -> impl Future<Output = ()> + Send + use<> {
        self.inner.draining.clone().cancelled_owned()
    }

    /// Whether intake should stop.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.is_cancelled()
    }

    /// Resolves once everything should stop.
    ///
    /// Cancel safety: safe.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        self.inner.cancelled.clone().cancelled_owned()
    }

    /// Runs `future`, which may be dropped at any of its waits, until it ends or everything should stop.
    pub fn until_cancelled<F>(&self, future: F) -> impl Future<Output = ()> + Send + use<F>
    where
        F: Future<Output = ()> + Send,
    {
        let cancelled = self.cancelled();
        async move {
            tokio::select! {
                biased;
                // Shutdown.
                () = cancelled => {}
                // The work ended by itself.
                () = future => {}
            }
        }
    }

    /// Whether everything should stop.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.is_cancelled()
    }

    /// First phase: peers are asked to connect elsewhere. Nothing is refused yet.
    pub fn leave(&self) {
        self.inner.leaving.cancel();
    }

    /// Second phase: intake stops at once, and work in flight gets up to `grace` to finish.
    pub async fn drain(&self, grace: Duration) -> ShutdownOutcome {
        self.leave();
        self.inner.draining.cancel();
        if tokio::time::timeout(grace, self.inner.work.emptied()).await.is_ok() {
            return ShutdownOutcome::Clean;
        }
        let held_by = self.inner.work.holders();
        tracing::warn!(%held_by, ?grace, "the drain timed out: requests or streams are still in flight");
        ShutdownOutcome::TimedOut
    }

    /// Third phase: cancels everything and waits up to `grace` until all holders have ended.
    ///
    /// Must not be awaited by a task that runs under this lifetime: it would wait for itself.
    pub async fn shut_down(&self, grace: Duration) -> ShutdownOutcome {
        self.leave();
        self.inner.draining.cancel();
        self.inner.cancelled.cancel();
        let let_go = async {
            self.inner.work.emptied().await;
            self.inner.tasks.emptied().await;
        };
        if tokio::time::timeout(grace, let_go).await.is_ok() {
            return ShutdownOutcome::Clean;
        }
        let (work, tasks) = (self.inner.work.holders(), self.inner.tasks.holders());
        tracing::warn!(%work, %tasks, ?grace, "the shutdown timed out: these tasks are left running until the process exits");
        ShutdownOutcome::TimedOut
    }

    /// Names of the tasks and threads that run.
    #[cfg(test)]
    pub(crate) fn tasks(&self) -> String {
        self.inner.tasks.holders().to_string()
    }
}

impl Default for Lifetime {
    fn default() -> Self {
        Self::new()
    }
}

/// Records that an essential task or thread panicked; the first one counts.
fn report_panicked(failed: &watch::Sender<Option<&'static str>>, name: &'static str) {
    failed.send_if_modified(|first| first.is_none() && first.replace(name).is_none());
}

/// Message of a panic, if it is text.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}
