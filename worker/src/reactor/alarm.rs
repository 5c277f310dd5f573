//! A timer of the system, for waits of a fraction of a millisecond: tokio's own are whole ones.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::unix::AsyncFd;

/// Rings once for each time that it is set.
#[derive(Debug)]
pub(super) struct Alarm(AsyncFd<Timer>);

#[derive(Debug)]
struct Timer(TimerFd);

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Alarm {
    /// One that is not set, on the runtime that is entered.
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for what closes its descriptor while registered; a timer does not"
    )]
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self(AsyncFd::new(Timer(TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?))?))
    }

    /// Sets it and waits for it; at once where it cannot be set or read.
    pub(super) async fn rings_after(&self, wait: Duration) {
        // Nothing would take the alarm off.
        let wait = TimeSpec::from_duration(wait.max(Duration::from_nanos(1)));
        let timer = &self.0.get_ref().0;
        if timer.set(Expiration::OneShot(wait), TimerSetTimeFlags::empty()).is_err() {
            return;
        }
        while let Ok(mut guard) = self.0.readable().await {
            // It may say so of an earlier time, which was seen.
            if guard.try_io(|timer| Ok(timer.get_ref().0.wait()?)).is_ok() {
                return;
            }
        }
    }

    /// Takes it off where it did not ring.
    pub(super) fn silence(&self) {
        // One that cannot be taken off rings in vain.
        self.0.get_ref().0.unset().unwrap_or_default();
    }
}
