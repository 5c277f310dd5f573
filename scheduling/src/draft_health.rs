//! Health of a draft worker: how long a round waits for it, and whether a round asks it at all. Pure: times
//! are passed in. The router keeps one [`DraftHealth`] per connected draft worker, shared by all sequences
//! that draft there.
//!
//! A deadline is the predicted arrival plus a margin. The prediction is the worker's cost for the number of
//! tokens. The ratio of actual to predicted time is measured on all replies, late ones included, and smoothed
//! as a transport protocol smooths round-trip times (Jacobson, "Congestion Avoidance and Control", SIGCOMM
//! 1988): mean + 4 mean deviations.
//!
//! A missed deadline alone tells little: the round continues without a draft, and the late proposal may still
//! be useful. A worker that has sent *nothing* since the request is silent: no round waits for it until it
//! has answered something. It still gets occasional probes, which are proposal requests that no round waits
//! for. So a stalled worker costs a sequence at most one deadline, at whatever time the sequence arrives.

use std::time::Duration;

use speculation::sequence::MAX_RETRY_WAIT;

use crate::cost::{WorkerCost, duration_of_micros};

/// Limits of deadlines. Below the minimum, ordinary delays by the operating system look like a stall. The
/// maximum bounds what each sequence loses once at an unresponsive worker.
const MIN_WAIT: Duration = Duration::from_millis(20);
/// See [`MIN_WAIT`].
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Minimum deadline before the worker's first answer.
const FIRST_WAIT_MIN: Duration = Duration::from_millis(250);

/// Weight of a new reply in the mean (as in the paper); its weight in the mean deviation is twice that.
const MEAN_GAIN: f64 = 1.0 / 8.0;

/// Deviations in a deadline (the paper's); before the worker's first answer, the multiple of the predicted
/// time.
const DEVIATIONS: f64 = 4.0;

/// Minimum ratio of a deadline to the mean predicted arrival, even if replies do not vary.
const MIN_MARGIN: f64 = 1.5;

/// Draft length of a probe. The tokens after the one that the round commits meanwhile may still be useful.
pub const PROBE_TOKENS: u32 = 2;

/// How a round may use its draft worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Ask it, and wait until the deadline.
    Wait,
    /// It is silent, and a probe is due: ask it for [`PROBE_TOKENS`] and do not wait.
    Probe,
    /// It is silent: continue without it.
    Skip,
}

/// Health of one draft worker. See the module documentation.
#[derive(Debug, Clone, Default)]
pub struct DraftHealth {
    reply: Option<ReplyTimeRatio>,
    answered_at: Option<Duration>,
    outage: Option<Outage>,
    missed: u64,
    outages: u64,
}

/// Ratio of actual to predicted reply times.
#[derive(Debug, Clone, Copy)]
struct ReplyTimeRatio {
    mean: f64,
    deviation: f64,
}

#[derive(Debug, Clone, Copy)]
struct Outage {
    since: Duration,
    /// The deadline that was missed.
    wait: Duration,
    probe_at: Duration,
    probe_wait: Duration,
}

/// Report on a draft worker's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct DraftHealthReport {
    /// Whether it has sent nothing since a request, and no round waits for it.
    pub is_silent: bool,
    /// Time since it became silent, milliseconds.
    pub silent_ms: u64,
    /// Number of deadlines that were missed.
    pub missed_deadlines: u64,
    /// Number of times it became silent.
    pub outages: u64,
}

/// Predicted time of `k` tokens at a worker shared by `sequences`, by its step times and network time: one
/// forward per token, the first of them with the `rows` committed ids that the worker lacks.
pub fn predicted_proposal(
    (rows, k): (u32, u32),
    sequences: u32,
    context: f64,
    draft: &WorkerCost,
) -> Duration {
    let step = draft.step_us(f64::from(sequences.max(1)), context);
    let catch_up_us = draft.catch_up_us(rows, k, (sequences, context));
    duration_of_micros(draft.wire_us() + f64::from(k) * step + catch_up_us)
}

impl DraftHealth {
    /// How a round may use the worker.
    pub fn access(&self, now: Duration) -> Access {
        match &self.outage {
            None => Access::Wait,
            Some(outage) if now >= outage.probe_at => Access::Probe,
            Some(_) => Access::Skip,
        }
    }

    /// Deadline for a proposal with this predicted time.
    pub fn deadline(&self, predicted: Duration) -> Duration {
        let wait = match self.reply {
            None => predicted.mul_f64(DEVIATIONS).max(FIRST_WAIT_MIN),
            Some(ReplyTimeRatio { mean, deviation }) => {
                predicted.mul_f64((mean + DEVIATIONS * deviation).max(MIN_MARGIN * mean))
            }
        };
        wait.clamp(MIN_WAIT, MAX_WAIT)
    }

    /// Records a probe, and doubles the interval to the next one, up to the wait of a single sequence
    /// ([`MAX_RETRY_WAIT`]).
    pub fn probed(&mut self, now: Duration) {
        if let Some(outage) = &mut self.outage {
            outage.probe_wait = (outage.probe_wait * 2).min(MAX_RETRY_WAIT);
            outage.probe_at = now + outage.probe_wait;
        }
    }

    /// Records an answer; the worker is no longer silent.
    pub fn answered(&mut self, now: Duration) {
        self.answered_at = Some(now);
        self.outage = None;
    }

    /// Records that a proposal took `took`, in time or late, where `predicted` was expected.
    pub fn observe(&mut self, took: Duration, predicted: Duration) {
        // The duration of a stall tells nothing about the worker's speed.
        let took = took.min(MAX_WAIT).as_secs_f64();
        let factor = took / predicted.as_secs_f64().max(1e-6);
        self.reply = Some(match self.reply {
            None => ReplyTimeRatio { mean: factor, deviation: factor / 2.0 },
            Some(ReplyTimeRatio { mean, deviation }) => ReplyTimeRatio {
                mean: mean + MEAN_GAIN * (factor - mean),
                deviation: deviation + 2.0 * MEAN_GAIN * ((factor - mean).abs() - deviation),
            },
        });
    }

    /// Records a missed deadline of a proposal requested at `requested_at`. Returns whether the worker
    /// becomes silent by that.
    pub fn deadline_missed(&mut self, requested_at: Duration, now: Duration) -> bool {
        self.missed += 1;
        let has_answered = self.answered_at.is_some_and(|answered_at| answered_at >= requested_at);
        if has_answered || self.outage.is_some() {
            return false;
        }
        // Longer than any deadline if the router itself did not run; the worker is not to blame for that.
        let wait = now.saturating_sub(requested_at).clamp(MIN_WAIT, MAX_WAIT);
        self.outage = Some(Outage { since: now, wait, probe_at: now + wait, probe_wait: wait });
        self.outages += 1;
        true
    }

    /// Whether the worker is silent: no round waits for it.
    pub fn is_silent(&self) -> bool {
        self.outage.is_some()
    }

    /// Whether it has been silent for so long that its sequences should move to another worker: as long again
    /// as the deadline that it missed. A worker that is only late answers within that time.
    pub fn should_reassign(&self, now: Duration) -> bool {
        self.outage.as_ref().is_some_and(|outage| now >= outage.since + outage.wait)
    }

    /// Creates the report.
    pub fn report(&self, now: Duration) -> DraftHealthReport {
        let silent_for = self.outage.map(|outage| now.saturating_sub(outage.since));
        DraftHealthReport {
            is_silent: silent_for.is_some(),
            silent_ms: silent_for.unwrap_or_default().as_millis() as u64,
            missed_deadlines: self.missed,
            outages: self.outages,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A worker whose proposals took these milliseconds where 10 were predicted.
    fn answering(took: &[u64]) -> DraftHealth {
        let mut health = DraftHealth::default();
        for (i, took) in took.iter().enumerate() {
            health.answered(ms(100 * i as u64));
            health.observe(ms(*took), ms(10));
        }
        health
    }

    #[test]
    fn deadlines_follow_how_replies_scatter() {
        assert_eq!(DraftHealth::default().deadline(ms(1)), FIRST_WAIT_MIN);
        assert_eq!(DraftHealth::default().deadline(ms(100)), ms(400));
        let (even, uneven) = (answering(&[40; 50]), answering(&[30, 50].repeat(25)));
        assert_eq!(even.deadline(ms(10)).as_millis(), 60, "1.5 times the mean");
        assert!(uneven.deadline(ms(10)) > ms(70), "{:?}", uneven.deadline(ms(10)));
        assert!(even.deadline(ms(100)) > ms(590), "a longer draft has a longer deadline");
        assert_eq!(even.deadline(ms(60_000)), MAX_WAIT);
        assert_eq!(even.deadline(Duration::ZERO), MIN_WAIT);
    }

    #[test]
    fn a_late_proposal_lengthens_the_next_deadline() {
        let mut health = answering(&[40; 50]);
        let before = health.deadline(ms(10));
        assert!(!health.deadline_missed(ms(4_000), ms(4_060)), "it has answered another sequence since");
        health.observe(ms(200), ms(10));
        assert!(health.deadline(ms(10)) > 2 * before);
    }

    #[test]
    fn a_worker_is_silent_after_one_deadline_until_it_answers() {
        let mut health = answering(&[40; 50]);
        assert!(health.deadline_missed(ms(10_000), ms(10_060)));
        assert!(!health.deadline_missed(ms(10_010), ms(10_070)), "one outage, not one per waiting round");
        let access = |health: &DraftHealth, at| health.access(ms(at));
        assert_eq!(access(&health, 10_100), Access::Skip);
        assert!(!health.should_reassign(ms(10_110)) && health.should_reassign(ms(10_130)));
        assert_eq!(access(&health, 10_120), Access::Probe);
        health.probed(ms(10_120));
        assert_eq!(access(&health, 10_239), Access::Skip);
        assert_eq!(access(&health, 10_240), Access::Probe);
        assert_eq!(
            health.report(ms(10_160)),
            DraftHealthReport { is_silent: true, silent_ms: 100, missed_deadlines: 2, outages: 1 }
        );
        health.answered(ms(20_000));
        assert_eq!(access(&health, 20_000), Access::Wait);
        assert!(!health.should_reassign(ms(30_000)));
    }

    #[test]
    fn a_router_that_was_suspended_prolongs_no_outage() {
        let mut health = answering(&[40; 50]);
        assert!(health.deadline_missed(ms(10_000), ms(70_000)));
        let silent_until = ms(70_000) + MAX_WAIT;
        assert_eq!(health.access(silent_until - ms(1)), Access::Skip);
        assert_eq!(health.access(silent_until), Access::Probe);
        assert!(!health.should_reassign(silent_until - ms(1)) && health.should_reassign(silent_until));
    }

    #[test]
    fn probes_grow_rarer_but_never_end() {
        let mut health = DraftHealth::default();
        health.deadline_missed(ms(0), ms(250));
        let (mut now, mut probes) = (ms(250), 0);
        while now < ms(60_000) {
            now += ms(10);
            if health.access(now) == Access::Probe {
                health.probed(now);
                probes += 1;
            }
        }
        assert!((12..=20).contains(&probes), "{probes} probes in a minute");
    }

    proptest! {
        /// Whatever a worker does, a sequence that asks whenever it may waits for a silent worker once.
        #[test]
        fn nobody_waits_twice_for_one_silence(took in proptest::collection::vec(1u64..3_000, 0..40), k in 1u64..200) {
            let mut health = answering(&took);
            let mut now = ms(1_000_000);
            let mut waits = 0;
            for _ in 0..100 {
                match health.access(now) {
                    Access::Wait => {
                        let wait = health.deadline(ms(k));
                        waits += 1;
                        health.deadline_missed(now, now + wait);
                        now += wait;
                    }
                    Access::Probe => health.probed(now),
                    Access::Skip => {}
                }
                now += ms(7);
            }
            prop_assert_eq!(waits, 1);
        }
    }
}
