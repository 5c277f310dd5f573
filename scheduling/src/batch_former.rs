//! The batch former: decides which of a worker's ready steps run in the next forward, and when it starts.
//!
//! A worker's device thread and the simulator's worker use it in the same way. They report arrivals, answers
//! and forward times, and request one decision whenever no forward runs. It holds the rules of
//! [`mod@crate::batch`] that need state: predicted forward times, return times, groups and the current delay.
//! It knows no ids, no KV and no clock; `now` is any monotonic clock.

#[cfg(test)]
mod tests;

use std::time::Duration;

use speculation::cached_sequence::CachedSequence;
use speculation::tree::ROWS_PER_FORWARD;
use speculation::{Step, Work};

use crate::batch::{
    Group, GroupRules, Groups, LaneRows, MAX_ROUND_CONTEXT, ReadyGroup, ReturnTimes, StepRows,
};
use crate::cost::{ForwardShape, StepTimes, WorkerCost};

/// Shortest delay; a thread cannot wake up sooner.
const MIN_DELAY: Duration = Duration::from_micros(50);

/// While other sequences are served, a forward with prompts takes at most this multiple of its time without
/// them, or as many prompt rows as [`MIN_SPEED_SHARE`] requires.
const PROMPT_STRETCH: f64 = 4.0;

/// Minimum size of a forward with prompts, as the share of a full forward's speed per row that it must reach.
const MIN_SPEED_SHARE: f64 = 0.87;

/// Maximum time of a draft forward with several rows of each sequence's tree, as a multiple of its time with
/// one row each.
const MAX_TREE_STRETCH: f64 = 1.05;

/// A step that could run now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadyStep<K> {
    /// Its sequence.
    pub key: K,
    /// The sequence's lane.
    pub lane: u32,
    /// Rows that are still to run.
    pub rows: StepRows,
    /// Tokens that the sequence holds, including the step's context.
    pub context_len: u32,
    /// Whether a target verifies or decodes; false if a step only feeds or drafts.
    pub is_verify: bool,
}

impl<K> ReadyStep<K> {
    /// Creates it from an admitted step with its remaining rows; `cached` includes the step's context.
    pub fn new(key: K, step: &Step, cached: &CachedSequence, rows: StepRows) -> Self {
        Self {
            key,
            lane: cached.spec().map_or(0, |spec| spec.lane),
            rows,
            context_len: cached.len(),
            is_verify: matches!(step.work, Work::Verify { .. }),
        }
    }
}

/// The decision for the next forward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Decide again when a step arrives, or after this time.
    Wait(Duration),
    /// Run a forward.
    Run(Batch),
}

/// Steps that take part in a forward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// One entry per ready step.
    pub members: Vec<bool>,
    /// Maximum context ids of prompts and replays.
    pub prompt_rows: u32,
}

/// A completed forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompletedForward {
    /// Number of rows.
    pub rows: u32,
    /// Rows of these that belong to prompts.
    pub prefill_rows: u32,
    /// Number of sequences.
    pub sequences: u32,
    /// KV tokens read, each sequence counted once.
    pub kv_tokens: u64,
}

/// The batch former; see the module documentation. `K` identifies a sequence.
#[derive(Debug, Clone)]
pub struct BatchFormer<K> {
    cost: WorkerCost,
    return_times: ReturnTimes<K>,
    groups: Groups,
    /// See [`MIN_SPEED_SHARE`].
    efficient_rows: u32,
    /// When the delay of the next forward began.
    delayed_since: Option<Duration>,
}

impl<K: Ord + Copy> BatchFormer<K> {
    /// Creates a batch former for a worker with these profiled step times; without any, no forward is ever
    /// delayed.
    pub fn new(times: StepTimes, rules: GroupRules) -> Self {
        Self {
            efficient_rows: times.rows_at_speed(MIN_SPEED_SHARE),
            cost: WorkerCost::new(times),
            return_times: ReturnTimes::default(),
            groups: Groups::with_rules(rules),
            delayed_since: None,
        }
    }

    /// Records that a step of a sequence arrived at `at`, with all of its rows. May be called later, after a
    /// forward.
    pub fn arrived(&mut self, at: Duration, key: K, rows: StepRows) {
        // A longer context belongs to a prompt and tells nothing about the next round.
        self.return_times.arrived(key, at, rows.context.min(MAX_ROUND_CONTEXT) + rows.tail);
    }

    /// Records that a step of the sequence was answered.
    pub fn answered(&mut self, now: Duration, key: &K) {
        self.return_times.answered(key, now);
    }

    /// Removes a sequence that will not return.
    pub fn forget(&mut self, key: &K) {
        self.return_times.forget(key);
    }

    /// Records a completed forward.
    pub fn forward_done(&mut self, forward: CompletedForward, took: Duration) {
        self.delayed_since = None;
        let CompletedForward { rows, prefill_rows, sequences, kv_tokens } = forward;
        if prefill_rows == 0 {
            self.cost.observe_forward(ForwardShape::measured(rows, sequences, kv_tokens), took);
        }
    }

    /// Maximum rows per forward of a tree that is drafted for one of `num_sequences` sequences of this length:
    /// more than the fewest useful ones only where they take little time.
    pub fn tree_rows(&self, num_sequences: u32, len: u32) -> usize {
        let sequences = f64::from(num_sequences);
        let forward_us = |rows: usize| {
            let rows = sequences * rows as f64;
            self.cost.forward_us(ForwardShape { rows, sequences, context: f64::from(len) })
        };
        let most = MAX_TREE_STRETCH * forward_us(1);
        // Without a profile no time is known.
        let is_cheap = |rows: &usize| most > 0.0 && forward_us(*rows) <= most;
        ROWS_PER_FORWARD.rev().find(is_cheap).unwrap_or(*ROWS_PER_FORWARD.start())
    }

    /// Decides about the steps that are `ready`, oldest first.
    pub fn decide(&mut self, now: Duration, ready: &[ReadyStep<K>]) -> Decision {
        let group = self.group(ready);
        let away_us = self.away_us(ready, &group.members);
        let delay = self.delay(now, group.ready(&lane_rows(ready), away_us), mean_context(ready));
        if let Some(delay) = delay {
            self.delayed_since.get_or_insert(now);
            return Decision::Wait(delay.max(MIN_DELAY));
        }
        Decision::Run(Batch { prompt_rows: self.prompt_rows(ready, &group.members), members: group.members })
    }

    /// Mean time that a group of drafts will be away after its forward, in microseconds; infinite for others.
    /// Decode steps return together with those that they miss, and what is left of a prompt runs in any forward.
    fn away_us(&self, ready: &[ReadyStep<K>], members: &[bool]) -> f64 {
        let group = ready.iter().zip(members).filter(|(_, is_member)| **is_member).map(|(step, _)| step);
        match group.clone().all(|step| step.rows.tail > 0) {
            true => self.return_times.mean_away_us(group.map(|step| &step.key)),
            false => f64::INFINITY,
        }
    }

    /// Maximum number of prompt rows in a forward of these steps. All decode steps wait for these rows, and
    /// so do earlier prompts for later ones.
    fn prompt_rows(&self, ready: &[ReadyStep<K>], members: &[bool]) -> u32 {
        let is_alone = self.return_times.num_sequences() <= 1;
        if is_alone || ready.iter().all(|step| step.rows.is_round()) {
            return u32::MAX;
        }
        let rounds =
            ready.iter().zip(members).filter(|(step, is_member)| **is_member && step.rows.is_round());
        let (rows, sequences) =
            rounds.fold((0, 0), |(rows, sequences), (step, _)| (rows + step.rows.rows(), sequences + 1));
        let context = mean_context(ready);
        let with = |prompts: u32| {
            let (rows, sequences) = (f64::from(rows) + f64::from(prompts), f64::from(sequences + 1));
            self.cost.forward_us(ForwardShape { rows, sequences, context })
        };
        let at_most = PROMPT_STRETCH * with(u32::from(rows == 0));
        let (mut fits, mut too_many) = (self.efficient_rows, u32::MAX);
        if with(too_many) <= at_most {
            return u32::MAX;
        }
        while fits + 1 < too_many {
            let middle = fits.midpoint(too_many);
            if with(middle) <= at_most { fits = middle } else { too_many = middle }
        }
        fits
    }

    /// Group of the next forward: at a target a part of the drafting sequences, otherwise all steps.
    fn group(&mut self, ready: &[ReadyStep<K>]) -> Group {
        if !ready.iter().any(|step| step.is_verify) {
            return Group::all(ready.len());
        }
        let context = mean_context(ready);
        let forward_us = |rows, sequences| self.cost.forward_us(ForwardShape { rows, sequences, context });
        Group::form(self.groups.size(self.return_times.drafting(), forward_us), &lane_rows(ready))
    }

    /// Delay of a group's forward; `None`: it starts now.
    fn delay(&self, now: Duration, group: ReadyGroup, context: f64) -> Option<Duration> {
        let delayed = self.delayed_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let rows_each = f64::from(group.rows) / f64::from(group.sequences.max(1));
        let step_us = |rows: u32| {
            let rows = f64::from(rows);
            self.cost.forward_us(ForwardShape { rows, sequences: rows / rows_each.max(1.0), context })
        };
        self.return_times.delay(now, (group, delayed), step_us)
    }
}

/// Rows and lane of each ready step.
fn lane_rows<K>(ready: &[ReadyStep<K>]) -> Vec<LaneRows> {
    ready.iter().map(|step| LaneRows { lane: step.lane, rows: step.rows }).collect()
}

/// Mean number of tokens that the steps' sequences hold.
fn mean_context<K>(steps: &[ReadyStep<K>]) -> f64 {
    let (mut held, mut sequences) = (0_u64, 0_u32);
    for step in steps {
        held += u64::from(step.context_len);
        sequences += 1;
    }
    held as f64 / f64::from(sequences.max(1))
}
