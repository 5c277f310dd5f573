//! Exponential backoff between attempts, with one log line per outage instead of one per attempt.

use std::time::Duration;

use super::Fault;

const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Backoff of one retried activity.
pub(super) struct Backoff {
    activity: &'static str,
    failures: u32,
}

impl Backoff {
    pub(super) fn new(activity: &'static str) -> Self {
        Self { activity, failures: 0 }
    }

    /// Records a success.
    pub(super) fn succeeded(&mut self) {
        if self.failures > 0 {
            tracing::info!(activity = self.activity, attempts = self.failures, "etcd is reachable again");
        }
        self.failures = 0;
    }

    /// Records a failure and waits. Cancel safety: safe.
    pub(super) async fn failed(&mut self, fault: &Fault) {
        if self.failures == 0 {
            tracing::warn!(activity = self.activity, %fault, "etcd request failed: retrying until it succeeds");
        } else {
            tracing::debug!(activity = self.activity, %fault, attempts = self.failures, "etcd still fails");
        }
        let pause = self.pause();
        self.failures = self.failures.saturating_add(1);
        tokio::time::sleep(pause).await;
    }

    fn pause(&self) -> Duration {
        SHORTEST.saturating_mul(1 << self.failures.min(16)).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::{Backoff, LONGEST, SHORTEST};

    #[test]
    fn pauses_double_up_to_a_limit_and_start_over_after_success() {
        let mut backoff = Backoff::new("test");
        let mut pauses = Vec::new();
        for failures in 0..40 {
            backoff.failures = failures;
            pauses.push(backoff.pause());
        }
        assert_eq!(pauses[..3], [SHORTEST, SHORTEST * 2, SHORTEST * 4]);
        assert!(pauses.is_sorted() && pauses.ends_with(&[LONGEST; 30]));
        backoff.succeeded();
        assert_eq!(backoff.pause(), SHORTEST);
    }
}
