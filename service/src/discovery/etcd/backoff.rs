//! Exponential backoff between attempts, with one log line per fault of an etcd member instead of one per
//! attempt.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Fault;

const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Backoff of one retried activity.
pub(super) struct Backoff {
    activity: &'static str,
    failures: u32,
    /// Members and faults of this outage.
    faults: BTreeSet<(String, String)>,
}

impl Backoff {
    pub(super) fn new(activity: &'static str) -> Self {
        Self { activity, failures: 0, faults: BTreeSet::new() }
    }

    /// Records a success.
    pub(super) fn succeeded(&mut self) {
        if self.failures > 0 {
            tracing::info!(activity = self.activity, attempts = self.failures, "etcd is reachable again");
        }
        self.failures = 0;
        self.faults.clear();
    }

    /// Records a failure at this etcd member and waits. Cancel safety: safe.
    pub(super) async fn failed(&mut self, member: &str, fault: &Fault) {
        let (activity, fault) = (self.activity, fault.to_string());
        if self.is_new(member, &fault) {
            tracing::warn!(activity, member, fault, "etcd request failed: retrying until it succeeds");
        } else {
            tracing::debug!(activity, member, fault, attempts = self.failures, "etcd still fails");
        }
        let pause = self.pause();
        self.failures = self.failures.saturating_add(1);
        tokio::time::sleep(pause).await;
    }

    /// Notes the fault; returns whether the member did not have it before in this outage.
    fn is_new(&mut self, member: &str, fault: &str) -> bool {
        self.faults.insert((member.to_owned(), fault.to_owned()))
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

    /// An etcd that comes back and refuses has another fault than one that is gone, and each member has its
    /// own. Faults that alternate are not new.
    #[test]
    fn a_fault_is_new_once_for_each_member_and_outage() {
        let mut backoff = Backoff::new("test");
        for (member, fault, is_new) in [
            ("one:2379", "connection refused", true),
            ("two:2379", "connection refused", true),
            ("one:2379", "connection refused", false),
            ("two:2379", "no space", true),
            ("two:2379", "connection refused", false),
            ("two:2379", "no space", false),
            ("one:2379", "no space", true),
        ] {
            assert_eq!(backoff.is_new(member, fault), is_new, "{member}: {fault}");
        }
        backoff.succeeded();
        assert!(backoff.is_new("one:2379", "connection refused"), "another outage");
    }
}
