//! Liveness and readiness of a process: one state, served over HTTP and gRPC.
//!
//! A process starts *not ready*, becomes *ready* when it can serve, may lose and regain readiness, and ends
//! *draining*. *Failed* is for faults that only a restart fixes, such as a dead device thread. This module
//! shows the state; it must never decide it.

mod grpc;
mod http;
mod metrics;

use std::borrow::Cow;
use std::sync::Arc;

use tokio::sync::watch;

pub use self::http::{probes, router, serve_admin};

/// The state of one process; clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    state: Arc<watch::Sender<State>>,
}

/// Liveness and readiness of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Alive, but cannot serve for the given reason: loading, or without a worker.
    NotReady(Cow<'static, str>),
    /// Serving.
    Ready,
    /// Finishing work in flight and accepting nothing new, for the given reason.
    Draining(Cow<'static, str>),
    /// Broken in a way that only a restart fixes.
    Failed(Cow<'static, str>),
}

impl Health {
    /// Starts in the state *not ready*.
    pub fn new() -> Self {
        Self { state: Arc::new(watch::Sender::new(State::NotReady("starting".into()))) }
    }

    /// Sets *ready*, unless the process drains or has failed already.
    pub fn set_ready(&self) {
        self.change(State::Ready);
    }

    /// Sets *not ready*: the process cannot serve for now.
    pub fn set_not_ready(&self, reason: impl Into<Cow<'static, str>>) {
        self.change(State::NotReady(reason.into()));
    }

    /// If the process is not ready for the reason `from`, replaces the reason by `to`.
    pub fn replace_reason(&self, from: &'static str, to: &'static str) {
        self.state.send_if_modified(|state| {
            let is_replaced = *state == State::NotReady(from.into());
            if is_replaced {
                *state = State::NotReady(to.into());
            }
            is_replaced
        });
    }

    /// Sets *draining*: the process accepts nothing new anymore. Only a failure can follow.
    pub fn set_draining(&self, reason: impl Into<Cow<'static, str>>) {
        self.change(State::Draining(reason.into()));
    }

    /// Sets *failed*: the process is broken for good, and its liveness probe fails.
    pub fn set_failed(&self, reason: impl Into<Cow<'static, str>>) {
        self.change(State::Failed(reason.into()));
    }

    /// The current state.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Whether the process is ready.
    pub fn is_ready(&self) -> bool {
        *self.state.borrow() == State::Ready
    }

    /// Subscribes to the state and its changes.
    pub fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    fn change(&self, next: State) {
        self.state.send_if_modified(|state| {
            let changes = next.finality() >= state.finality() && next != *state;
            if changes {
                *state = next;
            }
            changes
        });
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    /// Name of the state.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NotReady(_) => "not_ready",
            Self::Ready => "ready",
            Self::Draining(_) => "draining",
            Self::Failed(_) => "failed",
        }
    }

    /// Why the process does not serve.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Ready => None,
            Self::NotReady(reason) | Self::Draining(reason) | Self::Failed(reason) => Some(reason),
        }
    }

    /// A state is replaced only by one that is at least as final.
    fn finality(&self) -> u8 {
        match self {
            Self::NotReady(_) | Self::Ready => 0,
            Self::Draining(_) => 1,
            Self::Failed(_) => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Health, State};

    #[test]
    fn readiness_comes_and_goes_but_draining_and_failure_stay() {
        let health = Health::new();
        assert_eq!(health.state(), State::NotReady("starting".into()));
        health.set_ready();
        assert!(health.is_ready());
        health.set_not_ready("no target worker");
        assert!(!health.is_ready());
        health.set_draining("SIGTERM");
        health.set_ready();
        assert_eq!(health.state(), State::Draining("SIGTERM".into()));
        health.set_failed("device thread died");
        health.set_draining("SIGTERM");
        assert_eq!(health.state(), State::Failed("device thread died".into()));
    }

    #[test]
    fn a_reason_is_replaced_only_while_it_holds() {
        let health = Health::new();
        health.replace_reason("loading", "no target worker");
        assert_eq!(health.state(), State::NotReady("starting".into()));
        health.replace_reason("starting", "loading");
        assert_eq!(health.state(), State::NotReady("loading".into()));
        health.set_ready();
        health.replace_reason("loading", "no target worker");
        assert!(health.is_ready());
    }

    #[test]
    fn saying_the_same_again_wakes_nobody() {
        let health = Health::new();
        let watcher = health.subscribe();
        health.set_not_ready("starting");
        assert!(!watcher.has_changed().unwrap());
    }
}
