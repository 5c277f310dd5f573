//! A timerfd, for waits of less than a millisecond: tokio's timers have a resolution of 1 ms.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::unix::AsyncFd;

/// A one-shot timer.
#[derive(Debug)]
pub(super) struct SubMillisTimer(AsyncFd<OwnedTimerFd>);

#[derive(Debug)]
struct OwnedTimerFd(TimerFd);

impl AsRawFd for OwnedTimerFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl SubMillisTimer {
    /// Creates an unset timer on the current runtime.
    #[expect(
        deprecated,
        reason = "the replacement is unsafe because a type could close its descriptor while registered; a TimerFd does not"
    )]
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self(AsyncFd::new(OwnedTimerFd(TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?))?))
    }

    /// Sets the timer and waits for it. Returns at once if it cannot be set or read.
    pub(super) async fn sleep(&self, wait: Duration) {
        // A duration of 0 would disarm the timer.
        let wait = TimeSpec::from_duration(wait.max(Duration::from_nanos(1)));
        let timer = &self.0.get_ref().0;
        if timer.set(Expiration::OneShot(wait), TimerSetTimeFlags::empty()).is_err() {
            return;
        }
        while let Ok(mut guard) = self.0.readable().await {
            // Readiness may be left over from an earlier expiration that was already handled.
            if guard.try_io(|timer| Ok(timer.get_ref().0.wait()?)).is_ok() {
                return;
            }
        }
    }

    /// Disarms the timer if it did not expire.
    pub(super) fn disarm(&self) {
        // If disarming fails, a stale expiration is harmless.
        self.0.get_ref().0.unset().unwrap_or_default();
    }
}
