//! Request deadlines: how long a client waits for its complete answer. After the deadline the request ends
//! with an error, within the stream if it has started.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::error::RouterError;

/// HTTP header of the timeout, in milliseconds.
pub const REQUEST_TIMEOUT_HEADER: &str = "x-request-timeout-ms";

/// gRPC header of the timeout, as defined by gRPC.
pub const GRPC_TIMEOUT_HEADER: &str = "grpc-timeout";

/// A longer timeout is treated as no deadline.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Latest time at which a request ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// Deadline `timeout` from now; `None` if the timeout is so long that it counts as unlimited.
    pub fn after(timeout: Duration) -> Option<Self> {
        (timeout <= TIMEOUT_MAX).then(|| Self { at: Instant::now() + timeout, timeout })
    }

    /// Parses the value of [`REQUEST_TIMEOUT_HEADER`].
    pub fn from_millis_header(value: &[u8]) -> Result<Option<Self>, RouterError> {
        let number = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<u64>().ok());
        match number {
            Some(milliseconds @ 1..) => Ok(Self::after(Duration::from_millis(milliseconds))),
            _ => {
                Err(invalid_header(REQUEST_TIMEOUT_HEADER, "a positive whole number of milliseconds", value))
            }
        }
    }

    /// Parses the value of [`GRPC_TIMEOUT_HEADER`]: at most eight digits and a unit.
    pub fn from_grpc_timeout(value: &[u8]) -> Result<Option<Self>, RouterError> {
        let timeout = std::str::from_utf8(value).ok().and_then(grpc_timeout);
        timeout.map(Self::after).ok_or_else(|| {
            invalid_header(GRPC_TIMEOUT_HEADER, "at most eight digits and one of H, M, S, m, u, n", value)
        })
    }

    /// Returns the error for a passed deadline.
    pub fn error(self) -> RouterError {
        RouterError::DeadlineExceeded { timeout: self.timeout }
    }

    /// Runs `work` until the deadline.
    ///
    /// Cancel safety: that of `work`, which is dropped when the deadline passes.
    pub async fn enforce<T>(
        deadline: Option<Self>,
        work: impl Future<Output = Result<T, RouterError>>,
    ) -> Result<T, RouterError> {
        match deadline {
            None => work.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline.at, work).await.unwrap_or_else(|_| Err(deadline.error()))
            }
        }
    }
}

fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

fn invalid_header(header: &str, expected: &str, value: &[u8]) -> RouterError {
    let value = String::from_utf8_lossy(value);
    RouterError::invalid(header, format!("the header {header} must be {expected}, not `{value}`"))
}

/// Timer of a deadline; never fires without one.
#[derive(Debug, Default)]
pub(super) struct DeadlineTimer(Option<(Deadline, Pin<Box<Sleep>>)>);

impl DeadlineTimer {
    pub(super) fn new(deadline: Option<Deadline>) -> Self {
        Self(deadline.map(|deadline| (deadline, Box::pin(sleep_until(deadline.at)))))
    }

    /// Resolves to the error once the deadline has passed.
    pub(super) fn poll_expired(&mut self, context: &mut Context<'_>) -> Poll<RouterError> {
        match &mut self.0 {
            Some((deadline, timer)) => timer.as_mut().poll(context).map(|()| deadline.error()),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_parsed_in_the_format_of_each_api() {
        let milliseconds = |value: &str| Deadline::from_millis_header(value.as_bytes());
        assert_eq!(milliseconds("1500").unwrap().unwrap().timeout, Duration::from_millis(1_500));
        assert_eq!(milliseconds("18446744073709551615").unwrap(), None, "treated as unlimited");
        for bad in ["", "0", "-1", "1.5", "soon", "18446744073709551616"] {
            let error = milliseconds(bad).unwrap_err().to_string();
            assert!(error.contains("a positive whole number of milliseconds"), "{bad}: {error}");
        }
        for (value, expected) in [
            ("2H", Duration::from_secs(7_200)),
            ("3M", Duration::from_secs(180)),
            ("4S", Duration::from_secs(4)),
            ("00000100m", Duration::from_millis(100)),
            ("7u", Duration::from_micros(7)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(
                Deadline::from_grpc_timeout(value.as_bytes()).unwrap().unwrap().timeout,
                expected,
                "{value}"
            );
        }
        assert_eq!(Deadline::from_grpc_timeout(b"99999999H").unwrap(), None);
        for bad in ["", "S", "1", "123456789S", "+1S", "1s", "1 S", "1\u{e4}"] {
            assert!(Deadline::from_grpc_timeout(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn work_fails_when_the_deadline_passes() {
        let deadline = Deadline::after(Duration::from_millis(1));
        let late: Result<(), _> = Deadline::enforce(deadline, std::future::pending()).await;
        let timeout = Duration::from_millis(1);
        assert_eq!(late, Err(RouterError::DeadlineExceeded { timeout }));
        assert_eq!(Deadline::enforce(None, async { Ok(7) }).await, Ok(7));
    }
}
