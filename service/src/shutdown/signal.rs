//! The signals that ask a process to end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGTERM and SIGHUP, from [`TerminationSignals::listen`] on.
#[derive(Debug)]
pub struct TerminationSignals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if SIGHUP is ignored.
    hangup: Option<Signal>,
}

impl TerminationSignals {
    /// Listens from this call on: call it early, and a signal that arrives before [`next`](Self::next) is not
    /// lost. Needs a Tokio runtime with I/O.
    pub fn listen() -> Self {
        let listen = |kind| signal(kind).expect("a runtime with I/O can listen for signals");
        Self {
            interrupt: listen(SignalKind::interrupt()),
            terminate: listen(SignalKind::terminate()),
            // Listening would undo `nohup`.
            hangup: (!ignores_hangup()).then(|| listen(SignalKind::hangup())),
        }
    }

    /// Waits for the next signal and returns its name.
    ///
    /// Cancel safety: safe.
    pub async fn next(&mut self) -> &'static str {
        let Self { interrupt, terminate, hangup } = self;
        let hangup = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // Ctrl-C.
            _ = interrupt.recv() => "SIGINT",
            // Sent first by container runtimes, and by `outrider up` to its children.
            _ = terminate.recv() => "SIGTERM",
            // The terminal was closed. Without this arm the process would end at once, amid its streams.
            _ = hangup => "SIGHUP",
        }
    }
}

/// Whether this process ignores SIGHUP, as `nohup` arranges; false if the system does not tell.
fn ignores_hangup() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| is_hangup_ignored(&status))
}

/// The same from the text of `/proc/self/status`.
fn is_hangup_ignored(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Bit n - 1 stands for signal n, and SIGHUP is 1.
    mask.is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::is_hangup_ignored;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        for (status, expected) in [
            ("Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n", true),
            ("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000001\n", false),
            ("SigIgn:\tnothing\n", false),
            ("", false),
        ] {
            assert_eq!(is_hangup_ignored(status), expected, "{status}");
        }
    }
}
