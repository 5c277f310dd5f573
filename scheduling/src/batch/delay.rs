//! Whether a forward that could start now is delayed for sequences that are about to return.
//!
//! A worker takes all ready steps into its next forward. Sequences that miss one run separately from then on,
//! each group waiting for the other's forward; where half the rows cost as much as all of them, all run at
//! half the speed. So a worker records the time between each sequence's reply and its next step. It delays a
//! forward if all sequences together lose less time by the delay than by missing each other.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cost::{duration_of_micros, micros};

/// How many different numbers of sequences to wait for are compared.
const NUM_COMPARED: usize = 8;

/// A sequence that is overdue by more than this share of a forward is not waited for.
const OVERDUE_SHARE: f64 = 0.25;

/// The ready sequences of the next forward's group ([`super::groups`]).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct ReadyGroup {
    /// Number of sequences.
    pub(crate) sequences: u32,
    /// Number of their rows.
    pub(crate) rows: u32,
    /// Mean time that drafting sequences will be away after the forward, in microseconds; infinite for others.
    pub(crate) away_us: f64,
    /// How many more drafting sequences may join the group.
    pub(crate) capacity: u32,
    /// How many more are needed to complete the group.
    pub(crate) missing: u32,
    /// How long waiting for them pays, in microseconds.
    pub(crate) max_wait_us: f64,
}

/// The sequences whose rounds draft, ready or away.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DraftingSequences {
    /// Number of sequences.
    pub(crate) sequences: u32,
    /// Total number of their rows.
    pub(crate) rows: u32,
    /// Mean time away (from a reply to the next step), in microseconds.
    pub(crate) away_us: f64,
    /// Mean time from one step to the next, in microseconds.
    pub(crate) round_us: f64,
}

/// A sequence that is expected to return.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ExpectedReturn {
    /// Microseconds from now; negative if it is overdue.
    due_us: f64,
    /// Number of rows of its next step.
    rows: u32,
}

/// Times at which a worker's sequences return after a reply. `K` identifies a sequence.
#[derive(Debug, Clone)]
pub(crate) struct ReturnTimes<K> {
    sequences: BTreeMap<K, ReturnTime>,
}

#[derive(Debug, Clone, Copy)]
struct ReturnTime {
    /// Microseconds from the previous reply to the latest step, if there was a reply.
    away_us: Option<f64>,
    /// When it was answered, while it is away.
    answered_at: Option<Duration>,
    /// When its latest step arrived; `round_us` is the time since the step before.
    arrived_at: Duration,
    round_us: f64,
    rows: u32,
}

impl<K> Default for ReturnTimes<K> {
    fn default() -> Self {
        Self { sequences: BTreeMap::new() }
    }
}

impl<K: Ord> ReturnTimes<K> {
    /// Records the arrival of a step with this number of rows.
    pub(crate) fn arrived(&mut self, key: K, now: Duration, rows: u32) {
        let first = ReturnTime { away_us: None, answered_at: None, arrived_at: now, round_us: 0.0, rows };
        let known = self.sequences.entry(key).or_insert(first);
        known.rows = rows;
        known.round_us = micros(now.saturating_sub(known.arrived_at));
        known.arrived_at = now;
        if let Some(answered_at) = known.answered_at.take() {
            known.away_us = Some(micros(now.saturating_sub(answered_at)));
        }
    }

    /// Records that the sequence was answered.
    pub(crate) fn answered(&mut self, key: &K, now: Duration) {
        if let Some(known) = self.sequences.get_mut(key) {
            known.answered_at = Some(now);
        }
    }

    /// Removes a sequence that will not return.
    pub(crate) fn forget(&mut self, key: &K) {
        self.sequences.remove(key);
    }

    /// Number of known sequences.
    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// The sequences whose latest step had a draft.
    pub(crate) fn drafting(&self) -> DraftingSequences {
        let mut found = DraftingSequences::default();
        for known in self.sequences.values().filter(|known| known.rows > 1) {
            let Some(away_us) = known.away_us else { continue };
            found.sequences += 1;
            found.rows += known.rows;
            found.away_us += away_us;
            found.round_us += known.round_us;
        }
        found.away_us /= f64::from(found.sequences.max(1));
        found.round_us /= f64::from(found.sequences.max(1));
        found
    }

    /// Mean time away of these sequences, in microseconds; infinite if one was never answered.
    pub(crate) fn mean_away_us<'a>(&self, keys: impl Iterator<Item = &'a K>) -> f64
    where
        K: 'a,
    {
        let (mut sum, mut count) = (0.0, 0_u32);
        for key in keys {
            sum += self.sequences.get(key).and_then(|known| known.away_us).unwrap_or(f64::INFINITY);
            count += 1;
        }
        sum / f64::from(count.max(1))
    }

    /// Sequences that are away and expected back within `horizon_us`, soonest first.
    fn expected(&self, now: Duration, horizon_us: f64) -> Vec<ExpectedReturn> {
        let expected = |known: &ReturnTime| {
            let away = micros(now.saturating_sub(known.answered_at?));
            Some(ExpectedReturn { due_us: known.away_us? - away, rows: known.rows })
        };
        let near = |expected: &ExpectedReturn| {
            expected.due_us < horizon_us && expected.due_us > -OVERDUE_SHARE * horizon_us
        };
        let mut list: Vec<ExpectedReturn> =
            self.sequences.values().filter_map(expected).filter(near).collect();
        list.sort_by(|a, b| a.due_us.total_cmp(&b.due_us));
        list
    }

    /// Delay of the forward of `ready`; `None`: it starts now. `delayed` is the delay so far; `step_us`
    /// predicts a forward of that many rows.
    pub(crate) fn delay(
        &self,
        now: Duration,
        (ready, delayed): (ReadyGroup, Duration),
        step_us: impl Fn(u32) -> f64,
    ) -> Option<Duration> {
        if ready.sequences == 0 {
            return None;
        }
        if let Some(wait_us) = self.completion_wait_us(now, (ready, delayed)) {
            return Some(duration_of_micros(wait_us));
        }
        // A sequence that returns later than a forward takes loses nothing by missing it. No delay exceeds
        // the forward's own time.
        let alone_us = step_us(ready.rows);
        let left_us = alone_us.max(ready.max_wait_us) - micros(delayed);
        if left_us <= 0.0 {
            return None;
        }
        let mut expected = self.expected(now, left_us.min(alone_us));
        let mut capacity = ready.capacity;
        expected.retain(|expected| {
            let fits = expected.rows <= 1 || capacity > 0;
            capacity = if expected.rows > 1 { capacity.saturating_sub(1) } else { capacity };
            fits
        });
        let wait_us = best_wait_us(ready, &expected, step_us)?;
        // Give an overdue sequence a share of the time left.
        let wait_us = if wait_us > 0.0 { wait_us } else { OVERDUE_SHARE * left_us };
        Some(duration_of_micros(wait_us))
    }

    /// Time until the group of `ready` is complete, if waiting pays.
    fn completion_wait_us(&self, now: Duration, (ready, delayed): (ReadyGroup, Duration)) -> Option<f64> {
        let left_us = ready.max_wait_us - micros(delayed);
        if ready.missing == 0 || left_us <= 0.0 {
            return None;
        }
        let drafting = self.expected(now, left_us).into_iter().filter(|expected| expected.rows > 1);
        let last = drafting.map(|expected| expected.due_us).nth(ready.missing as usize - 1)?;
        Some(if last > 0.0 { last } else { OVERDUE_SHARE * left_us })
    }
}

/// The delay that minimises the total time to answer all sequences; `expected` is in order of return. `None`:
/// no delay.
fn best_wait_us(ready: ReadyGroup, expected: &[ExpectedReturn], step_us: impl Fn(u32) -> f64) -> Option<f64> {
    let total = expected.len();
    if total == 0 {
        return None;
    }
    let rows_of = |part: &[ExpectedReturn]| part.iter().map(|expected| expected.rows).sum::<u32>();
    // Total time lost by all sequences if the first `joined` are waited for. The others run in the next
    // forward. If there are decode steps among them, which wait for no drafts, drafts of this forward that return
    // find it running.
    let lost_us = |joined: usize| {
        let (with, without) = expected.split_at(joined);
        let starts = with.last().map_or(0.0, |last| last.due_us.max(0.0));
        let ends = starts + step_us(ready.rows + rows_of(with));
        let next = if without.is_empty() { 0.0 } else { step_us(rows_of(without)) };
        let decodes_follow = without.iter().any(|known| known.rows <= 1);
        let waits_again = if decodes_follow { (next - ready.away_us).max(0.0) } else { 0.0 };
        let of_with: f64 = with.iter().map(|expected| ends - expected.due_us.max(0.0)).sum();
        let of_without: f64 =
            without.iter().map(|expected| (ends - expected.due_us.max(0.0)).max(0.0) + next).sum();
        f64::from(ready.sequences) * (ends + waits_again) + of_with + of_without
    };
    let candidates = (1..=NUM_COMPARED).map(|part| (total * part).div_ceil(NUM_COMPARED));
    let (best, lost) = candidates
        .map(|joined| (joined, lost_us(joined)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .expect("at least one candidate exists");
    (lost < lost_us(0)).then(|| expected[best - 1].due_us.max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn flat(_: u32) -> f64 {
        10_000.0
    }

    fn steep(rows: u32) -> f64 {
        1_000.0 * f64::from(rows)
    }

    /// Eight sequences that are away for 5 ms; six were answered at `answered`, two one millisecond later.
    fn return_times(answered: Duration) -> ReturnTimes<u32> {
        let mut times = ReturnTimes::default();
        for key in 0..8 {
            let late = if key < 6 { Duration::ZERO } else { MS };
            times.arrived(key, Duration::ZERO, 1);
            times.answered(&key, MS);
            times.arrived(key, 6 * MS, 1);
            times.answered(&key, answered + late);
        }
        times
    }

    /// This many ready sequences without drafts.
    fn ready(sequences: u32) -> (ReadyGroup, Duration) {
        let away_us = f64::INFINITY;
        let ready =
            ReadyGroup { sequences, rows: sequences, away_us, capacity: u32::MAX, ..Default::default() };
        (ready, Duration::ZERO)
    }

    #[test]
    fn a_flat_forward_waits_for_those_that_are_about_to_come() {
        let times = return_times(10 * MS);
        let delay = |now, ready| times.delay(now, ready, flat).map(|wait| wait.as_micros());
        assert_eq!(delay(15 * MS, ready(6)), Some(1_000), "the other two return 1 ms later");
        assert_eq!(delay(11 * MS, ready(1)), Some(5_000));
        assert_eq!(delay(11 * MS, ready(0)), None, "no sequence is ready");
        assert_eq!(delay(11 * MS, ready(40)), None, "40 sequences do not wait for 8");
        let returning = ReadyGroup { away_us: 5_000.0, ..ready(40).0 };
        assert_eq!(
            delay(11 * MS, (returning, Duration::ZERO)),
            Some(5_000),
            "drafts would wait for them later"
        );
        assert_eq!(delay(30 * MS, ready(6)), None, "long overdue sequences are not waited for");
        assert_eq!(
            delay(15 * MS, (ready(6).0, 10 * MS)),
            None,
            "the delay already equals the forward's time"
        );
    }

    #[test]
    fn a_group_waits_until_it_is_complete_where_that_pays() {
        let mut times = return_times(10 * MS);
        (0..8).for_each(|key| times.arrived(key, 15 * MS, 3));
        (0..4).for_each(|key| times.answered(&key, 20 * MS));
        let delay = |missing, max_wait_us| {
            let ready =
                ReadyGroup { sequences: 4, rows: 12, away_us: 0.0, capacity: u32::MAX, missing, max_wait_us };
            times.delay(21 * MS, (ready, Duration::ZERO), steep).map(|wait| wait.as_millis())
        };
        assert_eq!(delay(0, 0.0), None, "no single sequence is worth the delay");
        assert_eq!(delay(3, 10_000.0), Some(4));
        assert_eq!(delay(3, 2_000.0), None, "the wait would exceed the limit");
        assert_eq!(delay(5, 10_000.0), None, "fewer sequences are away than are missing");
    }

    #[test]
    fn drafts_wait_for_decode_steps_that_would_follow_them_at_once() {
        let mut times = ReturnTimes::default();
        for key in 0..6 {
            times.arrived(key, Duration::ZERO, 1);
            times.answered(&key, MS);
            times.arrived(key, 2 * MS, 1);
            times.answered(&key, 20 * MS);
        }
        let delay = |away_us| {
            let drafts = ReadyGroup { sequences: 2, rows: 6, away_us, ..ReadyGroup::default() };
            let stairs = |rows: u32| 1_000.0 * if rows <= 6 { 16.0 } else { 30.0 };
            times.delay(20 * MS, (drafts, Duration::ZERO), stairs).map(|wait| wait.as_micros())
        };
        // Apart, a round of each takes both forwards, 32 ms; together it takes 31.
        assert_eq!(delay(2_000.0), Some(1_000));
        assert_eq!(delay(15_000.0), None, "away for nearly all of the other forward");
        assert_eq!(delay(f64::INFINITY), None, "without drafts they would return together");
    }

    #[test]
    fn where_each_row_costs_alike_nobody_waits() {
        assert_eq!(return_times(10 * MS).delay(13 * MS, ready(8), steep), None);
    }

    #[test]
    fn a_closed_sequence_is_not_waited_for() {
        let mut times = return_times(10 * MS);
        (0..8).for_each(|key| times.forget(&key));
        assert_eq!(times.delay(14 * MS, ready(1), flat), None);
    }
}
