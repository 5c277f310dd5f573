//! [`WaitStats`]: waiting times by priority, for `/debug/lanes`. Only reported; `scheduling::fair_queue`
//! decides the order.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// Statistics of waiting times by priority.
#[derive(Debug, Default)]
pub struct WaitStats {
    classes: BTreeMap<u8, Served>,
}

#[derive(Debug, Default)]
struct Served {
    count: u64,
    total: Duration,
    worst: Duration,
}

/// Waiting times of one priority, as in `/debug/lanes`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WaitReport {
    /// Lower is more urgent.
    pub priority: u8,
    /// Number that wait now.
    pub waiting: usize,
    /// Waiting time of the first of them.
    pub oldest_ms: u64,
    /// Number served since the router started.
    pub served: u64,
    /// Mean waiting time of those served.
    pub mean_ms: f64,
    /// Longest waiting time of those served.
    pub worst_ms: u64,
}

impl WaitStats {
    /// Records the waiting time of one that was served.
    pub fn observe(&mut self, priority: u8, waited: Duration) {
        let class = self.classes.entry(priority).or_default();
        class.count += 1;
        class.total += waited;
        class.worst = class.worst.max(waited);
    }

    /// Reports by priority; `waiting` is the number that wait now and when the first of them began to wait.
    pub fn report(&self, waiting: &BTreeMap<u8, (usize, Duration)>, now: Duration) -> Vec<WaitReport> {
        let mut priorities: Vec<u8> = self.classes.keys().chain(waiting.keys()).copied().collect();
        priorities.sort_unstable();
        priorities.dedup();
        let nobody = Served::default();
        let of = |priority: u8| {
            let served = self.classes.get(&priority).unwrap_or(&nobody);
            let (count, since) = waiting.get(&priority).copied().unwrap_or((0, now));
            WaitReport {
                priority,
                waiting: count,
                oldest_ms: now.saturating_sub(since).as_millis() as u64,
                served: served.count,
                mean_ms: served.total.as_secs_f64() * 1e3 / served.count.max(1) as f64,
                worst_ms: served.worst.as_millis() as u64,
            }
        };
        priorities.into_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_had_their_turn_and_those_that_wait_are_told_apart_by_priority() {
        let mut waits = WaitStats::default();
        for (priority, ms) in [(0, 10), (5, 400), (0, 30)] {
            waits.observe(priority, Duration::from_millis(ms));
        }
        let waiting = BTreeMap::from([(5, (2, Duration::from_millis(700))), (9, (1, Duration::ZERO))]);
        let report = waits.report(&waiting, Duration::from_secs(1));
        let told: Vec<_> = report
            .iter()
            .map(|at| (at.priority, at.waiting, at.oldest_ms, at.served, at.mean_ms as u64, at.worst_ms))
            .collect();
        assert_eq!(told, [(0, 0, 0, 2, 20, 30), (5, 2, 300, 1, 400, 400), (9, 1, 1_000, 0, 0, 0)]);
    }
}
