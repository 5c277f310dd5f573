//! Health of a target worker: whether it answers, and whether sequences succeed there. Pure: times are passed
//! in. The scheduler keeps one [`TargetHealth`] per target.
//!
//! Two independent signs of failure. **Silence**: an answer is outstanding and no frame has arrived for
//! longer than the target's step times can explain. A stopped process or a broken network looks like this
//! long before a transport reports it. **Consecutive failures** without a success in between: refusals,
//! malformed replies, unanswered steps. After [`FAILURES_TO_OPEN`] of them the circuit breaker opens.
//!
//! A target with either sign gets sequences only if no other target serves them, until a probe succeeds,
//! which is one sequence after a back-off (M. Nygard, "Release It!", chapter 5). A silent target is probed
//! once no answer is outstanding there: it may have lost the steps that it was sent, and then would stay
//! silent.

use std::time::Duration;

use serde::Serialize;

use crate::smoothing::EWMA_WINDOW;

/// Minimum silence before a target counts as silent: an operating system can delay a healthy process for this
/// long.
pub const MIN_SILENCE: Duration = Duration::from_millis(100);

/// Minimum silence in one-row steps.
const SILENT_STEPS: u32 = 40;

/// Minimum silence as a multiple of the time of the target's whole workload.
const SILENT_WORKLOADS: u32 = 4;

/// Minimum silence as a multiple of the longest recent gap between two frames.
const SILENT_GAPS: u32 = 3;

/// How long a target may be busy with work unknown to this router: prompts from another router, or, for a
/// target without a profile, loading of kernels and memory.
pub(crate) const UNKNOWN_WORK: Duration = Duration::from_secs(2);

/// Consecutive failures that open the breaker.
pub const FAILURES_TO_OPEN: u32 = 3;

/// Back-off of an open breaker before its first probe, and the maximum.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// A target's step times by its cost model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpectedSteps {
    /// A step of one row.
    pub one_row: Duration,
    /// All work that the target has now.
    pub workload: Duration,
}

/// Health of one target. See the module documentation.
#[derive(Debug, Clone, Default)]
pub struct TargetHealth {
    /// Number of outstanding answers.
    num_outstanding: u32,
    /// Time of the last frame, or of the first request after a time without outstanding answers.
    last_activity_at: Duration,
    /// Whether it profiled itself, and so has already run every kind of step.
    is_profiled: bool,
    /// Longest gap between frames while an answer was outstanding; decays.
    longest_gap: Duration,
    /// Set while it is silent: when it may be probed, or again, if a sequence probes it.
    silent_probe_at: Option<Duration>,
    /// Whether a sequence probes it.
    is_probed: bool,
    /// Back-off after the latest silence; zero once a frame has arrived.
    silent_backoff: Duration,
    failures: u32,
    breaker: Option<Breaker>,
    outages: u64,
}

/// An open circuit breaker.
#[derive(Debug, Clone, Copy)]
struct Breaker {
    probe_at: Duration,
    backoff: Duration,
}

/// Report on a target's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TargetHealthReport {
    /// Whether an answer is outstanding and no frame arrives.
    pub is_silent: bool,
    /// Whether its circuit breaker is open.
    pub is_open: bool,
    /// Failures since the last success.
    pub failures: u32,
    /// Number of times it became silent or its breaker opened.
    pub outages: u64,
}

impl TargetHealth {
    /// Creates the health of a target that just joined. `crashes` is the number of consecutive connections to
    /// it that ended while answers were outstanding.
    pub fn new(now: Duration, crashes: u32, is_profiled: bool) -> Self {
        let mut health = Self { is_profiled, ..Self::default() };
        (0..crashes).for_each(|_| {
            health.failed(now);
        });
        health
    }

    /// Whether an answer is outstanding.
    pub fn has_outstanding(&self) -> bool {
        self.num_outstanding > 0
    }

    /// Records a request.
    pub fn request_sent(&mut self, now: Duration) {
        if self.num_outstanding == 0 {
            self.last_activity_at = now;
        }
        self.num_outstanding += 1;
    }

    /// Records that a request was answered or abandoned.
    pub fn request_done(&mut self) {
        self.num_outstanding = self.num_outstanding.saturating_sub(1);
    }

    /// Records a frame. Returns whether it ends a silence.
    pub fn frame_received(&mut self, now: Duration) -> bool {
        (self.silent_probe_at, self.is_probed) = (None, false);
        let was_silent = !std::mem::take(&mut self.silent_backoff).is_zero();
        if self.num_outstanding > 0 && !was_silent {
            let gap = now.saturating_sub(self.last_activity_at);
            self.longest_gap = gap.max(self.longest_gap.mul_f64(1.0 - 1.0 / EWMA_WINDOW));
        }
        self.last_activity_at = now;
        was_silent
    }

    /// When the target counts as silent if no frame arrives. `None` if no answer is outstanding, or if it is
    /// silent already and no sequence probes it.
    pub fn silent_at(&self, expected: ExpectedSteps) -> Option<Duration> {
        (self.num_outstanding > 0 && !self.is_silent())
            .then(|| self.last_activity_at + self.silence_timeout(expected))
    }

    /// Checks the time, and returns whether the target has just become silent. If the scheduler was delayed
    /// itself, frames that wait in its sockets first get time to be read.
    pub fn check_silence(&mut self, now: Duration, expected: ExpectedSteps) -> bool {
        let Some(due) = self.silent_at(expected).filter(|due| now >= *due) else { return false };
        let lateness = now - due;
        if lateness >= MIN_SILENCE / 2 {
            self.last_activity_at += lateness + MIN_SILENCE / 2;
            return false;
        }
        self.silent_backoff = self.next_silent_backoff();
        (self.silent_probe_at, self.is_probed) = (Some(now + self.silent_backoff), false);
        self.outages += 1;
        true
    }

    /// Whether it has not answered since it became silent, and no sequence probes it.
    pub fn is_silent(&self) -> bool {
        self.silent_probe_at.is_some() && !self.is_probed
    }

    fn next_silent_backoff(&self) -> Duration {
        (self.silent_backoff * 2).clamp(FIRST_BACKOFF, MAX_BACKOFF)
    }

    /// How long it has been silent; `None` if it is not.
    pub fn silent_for(&self, now: Duration) -> Option<Duration> {
        self.is_silent().then(|| now.saturating_sub(self.last_activity_at))
    }

    fn silence_timeout(&self, expected: ExpectedSteps) -> Duration {
        let least = if self.is_profiled { MIN_SILENCE } else { UNKNOWN_WORK };
        let steps = expected.one_row.saturating_mul(SILENT_STEPS);
        let workload = expected.workload.saturating_mul(SILENT_WORKLOADS);
        least.max(steps).max(workload).max(self.longest_gap.saturating_mul(SILENT_GAPS))
    }

    /// Records that a sequence got tokens there.
    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.breaker = None;
    }

    /// Records that a sequence failed there. Returns whether that opens the breaker.
    pub fn failed(&mut self, now: Duration) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.failures < FAILURES_TO_OPEN || self.breaker.is_some() {
            return false;
        }
        self.breaker = Some(Breaker { probe_at: now + FIRST_BACKOFF, backoff: FIRST_BACKOFF });
        self.outages += 1;
        true
    }

    /// Records an assigned sequence. If the breaker is open it is a probe, and the back-off doubles. At a
    /// silent target without outstanding answers it is a probe too, and others follow only if it ends without
    /// an answer, after twice the back-off.
    pub fn assigned(&mut self, now: Duration) {
        if self.silent_probe_at.is_some() && self.num_outstanding == 0 {
            (self.silent_probe_at, self.is_probed) = (Some(now + self.next_silent_backoff()), true);
        }
        if let Some(breaker) = &mut self.breaker {
            breaker.backoff = (breaker.backoff * 2).min(MAX_BACKOFF);
            breaker.probe_at = now + breaker.backoff;
        }
    }

    /// Whether other targets must be preferred.
    pub fn is_unhealthy(&self, now: Duration) -> bool {
        let is_silent = self.silent_probe_at.is_some_and(|at| self.num_outstanding > 0 || now < at);
        is_silent || self.breaker.is_some_and(|breaker| now < breaker.probe_at)
    }

    /// Whether it gets probes only, because it was silent or failed repeatedly, and no probe has succeeded
    /// since.
    pub fn is_avoided(&self) -> bool {
        !self.silent_backoff.is_zero() || self.breaker.is_some()
    }

    /// When a probe may be sent there; `None` if it may be now, or if only a frame can end the silence.
    pub fn next_probe(&self, now: Duration) -> Option<Duration> {
        if self.silent_probe_at.is_some() && self.num_outstanding > 0 {
            return None;
        }
        let breaker_probe_at = self.breaker.map(|breaker| breaker.probe_at);
        self.silent_probe_at.max(breaker_probe_at).filter(|at| now < *at)
    }

    /// Creates the report.
    pub fn report(&self) -> TargetHealthReport {
        TargetHealthReport {
            is_silent: !self.silent_backoff.is_zero(),
            is_open: self.breaker.is_some(),
            failures: self.failures,
            outages: self.outages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: ExpectedSteps =
        ExpectedSteps { one_row: Duration::from_millis(1), workload: Duration::from_millis(2) };

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A profiled target with one outstanding answer that sent a frame every millisecond until 1 s.
    fn steady() -> TargetHealth {
        let mut health = TargetHealth::new(ms(0), 0, true);
        health.request_sent(ms(0));
        for millis in 1..=1_000 {
            assert!(!health.frame_received(ms(millis)));
        }
        health
    }

    #[test]
    fn a_probe_is_due_after_the_back_off_and_not_while_an_answer_is_outstanding() {
        let mut health = steady();
        assert_eq!(health.next_probe(ms(1_000)), None, "a healthy target needs no probe");
        assert!(health.check_silence(ms(1_100), STEP));
        assert_eq!(health.next_probe(ms(1_100)), None, "only a frame ends the silence");
        health.request_done();
        assert_eq!(health.next_probe(ms(1_100)), Some(ms(2_100)));
        for _ in 0..FAILURES_TO_OPEN {
            health.failed(ms(1_500));
        }
        assert_eq!(health.next_probe(ms(1_500)), Some(ms(2_500)), "the later of the two");
        assert!(health.is_unhealthy(ms(2_499)) && !health.is_unhealthy(ms(2_500)));
        assert_eq!(health.next_probe(ms(2_500)), None, "it may be probed now");
    }

    #[test]
    fn a_target_that_says_nothing_for_a_hundred_milliseconds_is_silent_until_it_speaks() {
        let mut health = steady();
        assert_eq!(health.silent_at(STEP), Some(ms(1_100)));
        assert!(!health.check_silence(ms(1_099), STEP) && !health.is_unhealthy(ms(1_099)));
        assert!(health.check_silence(ms(1_100), STEP) && health.is_unhealthy(ms(1_100)));
        assert!(!health.check_silence(ms(1_200), STEP), "a silence is reported once");
        assert_eq!(health.silent_for(ms(1_300)), Some(ms(300)));
        assert!(health.frame_received(ms(5_000)) && !health.is_unhealthy(ms(5_000)));
        assert_eq!(health.silent_at(STEP), Some(ms(5_100)), "a silence does not count as a gap");
    }

    #[test]
    fn patience_grows_with_steps_workload_and_gaps() {
        let silent_after = |health: &TargetHealth, one_row, workload| {
            let expected = ExpectedSteps { one_row: ms(one_row), workload: ms(workload) };
            health.silent_at(expected).map(|at| at - ms(1_000))
        };
        let mut health = steady();
        assert_eq!(silent_after(&health, 10, 20), Some(ms(400)), "40 steps");
        assert_eq!(silent_after(&health, 1, 800), Some(ms(3_200)), "4 times the workload");
        assert!(!health.frame_received(ms(1_400)));
        assert_eq!(silent_after(&health, 1, 2), Some(ms(400 + 1_200)), "3 times a gap of 400 ms");
        (1_401..=2_000).for_each(|millis| assert!(!health.frame_received(ms(millis))));
        assert_eq!(silent_after(&health, 1, 2), Some(ms(1_100)), "the gap has decayed");
        health.request_done();
        assert_eq!(silent_after(&health, 1, 2), None, "no answer is outstanding");
        let fresh = |is_profiled| {
            let mut health = TargetHealth::new(ms(0), 0, is_profiled);
            health.request_sent(ms(1_000));
            health
        };
        assert_eq!(silent_after(&fresh(false), 1, 2), Some(ms(2_000)), "it may be loading kernels");
        assert_eq!(silent_after(&fresh(true), 1, 2), Some(ms(100)), "a profiled target has loaded them");
    }

    #[test]
    fn a_scheduler_that_was_held_up_suspects_nobody_at_once() {
        let mut health = steady();
        assert!(!health.check_silence(ms(3_000), STEP), "due at 1100 ms, but frames may wait to be read");
        assert!(!health.check_silence(ms(3_049), STEP));
        assert!(health.check_silence(ms(3_050), STEP));
    }

    #[test]
    fn one_sequence_probes_a_silent_target() {
        let mut health = steady();
        assert!(health.check_silence(ms(1_100), STEP));
        health.request_done();
        assert!(health.is_unhealthy(ms(2_099)) && !health.is_unhealthy(ms(2_100)));
        health.assigned(ms(2_100));
        assert!(health.is_unhealthy(ms(2_100)) && !health.is_silent(), "others keep away from the probe");
        assert!(health.is_avoided());
        health.request_sent(ms(2_100));
        assert_eq!(health.silent_at(STEP), Some(ms(2_200)), "the probe is timed");
        health.request_done();
        assert_eq!(health.next_probe(ms(2_150)), Some(ms(4_100)), "cancelled: the next one comes later");
        health.assigned(ms(4_100));
        health.request_sent(ms(4_100));
        assert!(health.check_silence(ms(4_200), STEP) && health.is_silent());
        health.request_done();
        assert_eq!(health.next_probe(ms(4_200)), Some(ms(6_200)), "twice the back-off");
        health.assigned(ms(6_200));
        health.request_sent(ms(6_200));
        assert!(health.frame_received(ms(6_210)) && !health.is_unhealthy(ms(6_210)) && !health.is_avoided());
    }

    #[test]
    fn failures_in_a_row_open_the_breaker_and_a_probe_closes_it() {
        let mut health = TargetHealth::default();
        assert!(!health.failed(ms(0)) && !health.failed(ms(0)));
        health.succeeded();
        assert!(!health.failed(ms(0)) && !health.failed(ms(0)), "a success resets the count");
        assert!(health.failed(ms(100)) && health.is_unhealthy(ms(100)));
        assert!(!health.is_unhealthy(ms(1_100)), "half open: one sequence probes it");
        health.assigned(ms(1_100));
        assert!(
            health.is_unhealthy(ms(3_099)) && !health.is_unhealthy(ms(3_100)),
            "the next probe follows two seconds later"
        );
        assert!(health.is_avoided(), "also while it may be probed");
        assert!(TargetHealth::new(ms(0), 3, false).is_unhealthy(ms(999)), "a crash loop");
        assert!(!TargetHealth::new(ms(0), 2, true).is_unhealthy(ms(0)));
        health.succeeded();
        health.assigned(ms(3_100));
        assert!(!health.is_unhealthy(ms(3_100)) && !health.is_avoided());
        assert_eq!(health.report().outages, 1);
    }
}
