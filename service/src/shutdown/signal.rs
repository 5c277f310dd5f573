//! The signals that ask a process to end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM, from [`TerminationSignals::listen`] on.
#[derive(Debug)]
pub struct TerminationSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl TerminationSignals {
    /// Listens from this call on: call it early, and a signal that arrives before [`next`](Self::next) is not
    /// lost. Needs a Tokio runtime with I/O.
    pub fn listen() -> Self {
        let listen = |kind| signal(kind).expect("a runtime with I/O can listen for SIGINT and SIGTERM");
        Self { interrupt: listen(SignalKind::interrupt()), terminate: listen(SignalKind::terminate()) }
    }

    /// Waits for the next signal and returns its name.
    ///
    /// Cancel safety: safe.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            biased;
            // Ctrl-C.
            _ = self.interrupt.recv() => "SIGINT",
            // Sent first by container runtimes, and by `outrider up` to its children.
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
