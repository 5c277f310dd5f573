//! The signals that ask a process to end.

use tokio::signal::unix::{SignalKind, signal};

/// Listens for SIGINT and SIGTERM from this call on; the future resolves to the name of the first to arrive.
///
/// Call it early, await it late: a signal that arrives in between is not lost. Needs a Tokio runtime with
/// I/O.
///
/// Cancel safety: safe.
pub fn termination_signal() -> impl Future<Output = &'static str> + Send {
    let listen = |kind| signal(kind).expect("a runtime with I/O can listen for SIGINT and SIGTERM");
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt()), listen(SignalKind::terminate()));
    async move {
        tokio::select! {
            biased;
            // Ctrl-C; also sent by `outrider up` to its children.
            _ = interrupt.recv() => "SIGINT",
            // Sent first by container runtimes.
            _ = terminate.recv() => "SIGTERM",
        }
    }
}
