//! Price of a round from tables and network times ([`crate::cost`]). The caller learns the ratio of measured
//! times to it (`residual_filter.rs`).

use super::Load;
use crate::batch::groups::round_us;
use crate::cost::{ForwardShape, WorkerCost};
use crate::prompt_time::PromptTime;

/// Mean share of a running step that is left when a group or draft arrives at a random time and has to wait
/// for its end.
const MEAN_REMAINDER: f64 = 0.5;

/// A draft that returns later than this share of a forward after the second or a later forward began has
/// missed it. Before that it may still catch it, because forward times vary.
const MISSED_SHARE: f64 = 0.2;

/// Price of a round.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Price {
    /// Microseconds for its draft.
    pub(super) draft_us: f64,
    /// Microseconds from there to the result of verification.
    pub(super) verify_us: f64,
    /// The target's forwards during the round, which rounds of other lanes wait for.
    pub(super) forwards: Forwards,
}

/// The target's forwards during a round of the lane.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Forwards {
    /// Total number.
    pub(super) number: f64,
    /// Number with rows of the lane.
    pub(super) with_rows: f64,
    /// Microseconds by which the lane makes all of them together longer: by its rows, and by drafts that take
    /// turns with the target.
    pub(super) added_us: f64,
}

impl Forwards {
    /// All forwards have rows of the lane.
    fn each(added_us: f64) -> Self {
        Self { number: 1.0, with_rows: 1.0, added_us }
    }

    /// Mean time that the lane adds to a forward if rounds take `residual` times their price: a shorter round
    /// has fewer forwards without its rows.
    pub(super) fn mean_added_us(&self, residual: f64) -> f64 {
        self.added_us / (self.number * residual).max(self.with_rows)
    }
}

impl Price {
    pub(super) fn round_us(&self) -> f64 {
        self.draft_us + self.verify_us
    }
}

/// Inputs of the price.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundPricer<'a> {
    pub(super) load: &'a Load,
    /// Maximum number of alternating groups of sequences.
    pub(super) groups_max: u32,
    /// Prompts in the target's forwards.
    pub(super) prompts: PromptTime,
    pub(super) target: &'a WorkerCost,
    pub(super) draft: &'a WorkerCost,
}

impl RoundPricer<'_> {
    /// Price of a round at `k`, in which each sequence has `rows_each` rows in the verify step.
    ///
    /// A lane's sequences alternate in groups, one drafting while another is verified, in the number of
    /// groups that the target finds best (`crate::batch::groups`). The round time is the maximum of its own
    /// consecutive steps and of the verify steps of all groups. Draft workers run groups that are present at
    /// the same time in one forward.
    pub(super) fn round(&self, k: u32, rows_each: f64) -> Price {
        if k == 0 {
            let sequences = f64::from(self.load.sequences.max(1));
            let forward_us = self.forward_us(sequences, rows_each);
            let verify_us = round_us(1, self.target.wire_us(), forward_us);
            let forwards = Forwards::each(self.added_us(sequences, rows_each));
            return Price { draft_us: 0.0, verify_us, forwards };
        }
        let most = self.groups_max.min(self.load.sequences.max(1));
        let rounds = (1..=most).map(|groups| self.in_groups(groups, k, rows_each));
        rounds.min_by(|a, b| a.round_us().total_cmp(&b.round_us())).expect("at least one group exists")
    }

    /// Price of a round in the number of groups that its forward shows, by the numbers of sequences in it and in
    /// the one of the round before (0: there was none). `None` if groups were joining or splitting, which takes
    /// time that does not belong to this k. With other lanes at the target, forwards do not show the lane's
    /// groups.
    pub(super) fn round_by_forwards(&self, sequences: [u32; 2], k: u32, rows_each: f64) -> Option<Price> {
        if self.load.other_sequences > 0 {
            return Some(self.round(k, rows_each));
        }
        let [groups, before] = sequences.map(|sequences| {
            let groups = f64::from(self.load.sequences) / f64::from(sequences);
            (groups.round() as u32).clamp(1, self.groups_max)
        });
        if sequences[1] == 0 || groups != before {
            return None;
        }
        Some(if k == 0 { self.round(k, rows_each) } else { self.in_groups(groups, k, rows_each) })
    }

    /// Time of a forward with this number of the lane's sequences. Every forward also has the rows of other
    /// lanes, whose rounds are independent, and is stretched by prompts.
    fn forward_us(&self, sequences: f64, rows_each: f64) -> f64 {
        self.target.forward_us(self.forward(sequences, rows_each)) * self.prompts.stretch()
    }

    /// Time that this number of the lane's sequences adds to a forward of the other lanes.
    fn added_us(&self, sequences: f64, rows_each: f64) -> f64 {
        if self.load.other_sequences == 0 {
            return 0.0;
        }
        self.target.added_us(self.forward(0.0, 0.0), self.forward(sequences, rows_each))
    }

    fn forward(&self, sequences: f64, rows_each: f64) -> ForwardShape {
        let Load { other_rows, other_sequences, context, .. } = *self.load;
        ForwardShape {
            rows: sequences * rows_each + f64::from(other_rows),
            sequences: sequences + f64::from(other_sequences),
            context,
        }
    }

    /// Price of a round of a lane whose sequences are split into `num_groups` alternating groups.
    fn in_groups(&self, num_groups: u32, k: u32, rows_each: f64) -> Price {
        let Self { load, draft, .. } = *self;
        let groups = f64::from(num_groups);
        let in_group = f64::from(load.sequences.max(1)) / groups;
        let (verify_us, added_us) =
            (self.forward_us(in_group, rows_each), self.added_us(in_group, rows_each));
        // A group consists of sequences that returned together: all sequences of a draft worker, or a part of
        // them if there are more groups than workers.
        let at_worker = f64::from(load.draft_sequences.max(1));
        let num_workers = (f64::from(load.sequences) / at_worker).max(1.0);
        let groups_at_worker = (groups / num_workers).max(1.0);
        // Groups that draft at the same time share forwards, and begin when one ends. How many do depends on the
        // time that this takes, so both are found by iteration.
        let mut concurrent_groups = 1.0_f64;
        let mut found = Price::default();
        for _ in 0..self.groups_max {
            let step =
                draft.step_us((at_worker * concurrent_groups / groups_at_worker).max(1.0), load.context);
            let steps = draft.drafted_ahead.forwards(k) + MEAN_REMAINDER * (concurrent_groups - 1.0).min(1.0);
            let draft_us = draft.wire_us() + steps * step;
            let (round_us, (number, with_rows)) =
                self.at_target(num_groups, draft_us, verify_us, step * self.draft_offset_steps(k));
            let forwards = Forwards {
                number,
                with_rows,
                added_us: with_rows * added_us + self.drafting_us(steps, at_worker),
            };
            found = Price { draft_us, verify_us: round_us - draft_us, forwards };
            let concurrent_next = (groups_at_worker * steps * step / round_us).clamp(1.0, groups_at_worker);
            if concurrent_next == concurrent_groups {
                break;
            }
            concurrent_groups = concurrent_next;
        }
        found
    }

    /// Time that the lane's drafts, of this many forwards, take from a target on the same cores. Forwards
    /// that the draft worker shares with sequences of other lanes run without the lane as well; only what
    /// its sequences add to them counts.
    fn drafting_us(&self, steps: f64, at_worker: f64) -> f64 {
        let Load { sequences, other_sequences, other_plain_sequences, .. } = *self.load;
        if !self.load.shares_cores || other_sequences == 0 {
            return 0.0;
        }
        let step_us = |sequences: f64| self.draft.step_us(sequences, self.load.context);
        let own = f64::from(sequences.max(1)).min(at_worker);
        let others = at_worker - own;
        if others < 1.0 || other_sequences == other_plain_sequences {
            return steps * step_us(at_worker);
        }
        let shared = steps.min((self.others_rows_each() - 1.0).max(0.0));
        shared * (step_us(at_worker) - step_us(others)) + (steps - shared) * step_us(own)
    }

    /// Time of a whole round, and the number of the target's forwards during it: in total, and with rows of
    /// the lane. Inputs are the time of its draft, the verify time of one group, and how far apart the drafts
    /// of other lanes return.
    fn at_target(&self, num_groups: u32, draft_us: f64, verify_us: f64, offset_us: f64) -> (f64, (f64, f64)) {
        let wire_us = self.target.wire_us();
        let away_us = draft_us + wire_us;
        if self.load.other_sequences == 0 {
            return (round_us(num_groups, away_us, verify_us), (1.0, 1.0));
        }
        if self.load.other_plain_sequences == 0 {
            // Drafts that return together share a forward. One that returns apart from those of other lanes
            // arrives at a random time of their forward.
            let blocked_us = offset_us.min(MEAN_REMAINDER * verify_us);
            return (round_us(num_groups, away_us + blocked_us, verify_us), (1.0, 1.0));
        }
        // Plain steps of other lanes follow each other without a pause, so a draft waits for the next forward
        // to begin.
        let bare_us = self.target.forward_us(self.forward(0.0, 0.0));
        let plain_us = bare_us * self.prompts.stretch();
        let groups = f64::from(num_groups);
        let forwards = (1.0 + self.forwards_missed(away_us, bare_us + wire_us)).max(groups);
        let busy_us = groups * verify_us + (forwards - groups) * plain_us;
        (busy_us + forwards * wire_us, (forwards, groups))
    }

    /// Mean difference, in draft steps, between the drafts of other lanes and those at `k`.
    fn draft_offset_steps(&self, k: u32) -> f64 {
        (self.others_rows_each() - f64::from(k + 1)).abs()
    }

    /// Mean rows of the other lanes' drafting sequences: a drafted token each, and one more.
    fn others_rows_each(&self) -> f64 {
        let Load { other_rows, other_sequences, other_plain_sequences, .. } = *self.load;
        let drafting = other_sequences - other_plain_sequences;
        f64::from(other_rows - other_plain_sequences) / f64::from(drafting.max(1))
    }

    /// Number of forwards that begin while a draft is away, if without prompts one begins every `bare_us`.
    /// Forwards with prompts take longer.
    fn forwards_missed(&self, away_us: f64, bare_us: f64) -> f64 {
        let long_us = bare_us + self.prompts.added_where_present_us();
        let share = self.prompts.share();
        (1.0 - share) * forwards_begun(away_us / bare_us) + share * forwards_begun(away_us / long_us)
    }
}

/// Number of consecutive forwards that begin within `time`, in forward times; the first begins at once. A
/// draft that is slightly late may still catch a later one.
fn forwards_begun(time: f64) -> f64 {
    (time.floor() + (time.fract() / MISSED_SHARE).min(1.0)).max(1.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cost::StepTimes;

    /// A worker whose forwards take the same time for any number of rows, without network time.
    fn flat(micros: u64) -> WorkerCost {
        remote(micros, Duration::ZERO)
    }

    /// The same with a network time.
    fn remote(micros: u64, delay: Duration) -> WorkerCost {
        let mut cost = WorkerCost::new(StepTimes::of_rows(&[(1, micros), (4_096, micros)]));
        (0..5).for_each(|_| cost.observe_wire(delay, Duration::ZERO));
        cost
    }

    fn load(other_sequences: u32, other_plain_sequences: u32) -> Load {
        let other_rows = other_sequences;
        Load { other_rows, other_sequences, other_plain_sequences, ..Load::alone(8, 0.0) }
    }

    fn round_us(load: &Load, target: &WorkerCost, k: u32) -> f64 {
        let prices =
            RoundPricer { load, groups_max: 4, prompts: target.prompts, target, draft: &flat(4_000) };
        prices.round(k, f64::from(k + 1)).round_us()
    }

    #[test]
    fn beside_plain_steps_a_round_takes_whole_forwards() {
        let (target, beside) = (flat(10_000), load(8, 8));
        let rounds = [0, 1, 2, 3, 4, 5].map(|k| round_us(&beside, &target, k).round());
        // Drafts of 4 to 8 ms miss one forward, those of 12 to 20 ms two.
        assert_eq!(rounds, [10_000.0, 20_000.0, 20_000.0, 30_000.0, 30_000.0, 30_000.0]);
        let alone = [1, 2, 3].map(|k| round_us(&load(0, 0), &target, k));
        assert_eq!(alone, [14_000.0, 18_000.0, 22_000.0]);
    }

    #[test]
    fn a_round_is_priced_in_the_groups_that_it_went_in() {
        let (load, target, draft) = (load(0, 0), flat(10_000), flat(4_000));
        let prompts = target.prompts;
        let prices = RoundPricer { load: &load, groups_max: 4, prompts, target: &target, draft: &draft };
        let round_us = |in_forward| prices.round_by_forwards([in_forward; 2], 1, 2.0).unwrap().round_us();
        // One group of eight drafts for 4 ms. Two groups wait for each other's forwards, and so do four or
        // more.
        assert_eq!([8, 7, 4, 2, 1].map(round_us), [14_000.0, 14_000.0, 20_000.0, 40_000.0, 40_000.0]);
        assert_eq!(prices.round(1, 2.0).round_us(), 14_000.0);
        let plain = prices.round_by_forwards([4; 2], 0, 1.0);
        assert_eq!(plain, Some(prices.round(0, 1.0)), "plain rounds run in one group");
        for joining_or_splitting in [[8, 4], [4, 8], [8, 0], [1, 0]] {
            assert_eq!(prices.round_by_forwards(joining_or_splitting, 1, 2.0), None);
        }
    }

    #[test]
    fn drafts_that_come_back_apart_from_those_of_others_are_in_their_way() {
        let beside = Load { other_rows: 24, ..load(8, 0) };
        let rounds = [1, 2, 3, 5].map(|k| round_us(&beside, &flat(10_000), k));
        // 14, 18, 22 and 30 ms alone. Other lanes draft two tokens, at 4 ms each; half a forward is 5 ms.
        assert_eq!(rounds, [18_000.0, 18_000.0, 26_000.0, 35_000.0]);
    }

    #[test]
    fn drafts_that_take_turns_with_the_target_delay_others() {
        let (target, draft) = (flat(10_000), flat(4_000));
        let added_us = |load: Load| {
            let prices = RoundPricer {
                load: &load,
                groups_max: 4,
                prompts: target.prompts,
                target: &target,
                draft: &draft,
            };
            [0, 1, 2].map(|k| prices.round(k, f64::from(k + 1)).forwards.mean_added_us(1.0))
        };
        assert_eq!(added_us(load(8, 8)), [0.0; 3], "rows cost no time, and drafts run elsewhere");
        let shared = Load { shares_cores: true, ..load(8, 8) };
        // Drafts of 4 and 8 ms during two forwards.
        assert_eq!(added_us(shared), [0.0, 2_000.0, 4_000.0]);
        let alone = Load { shares_cores: true, ..load(0, 0) };
        assert_eq!(added_us(alone), [0.0; 3], "there are no others");
    }

    #[test]
    fn forwards_of_the_draft_worker_that_run_anyway_delay_no_one() {
        let draft = WorkerCost::new(StepTimes::of_rows(&[(1, 4_000), (16, 5_500), (32, 5_500)]));
        let target = flat(10_000);
        // Of the 16 sequences at the draft worker 8 are the lane's; the others draft two tokens each.
        let load = Load { shares_cores: true, other_rows: 24, draft_sequences: 16, ..load(8, 0) };
        let prompts = target.prompts;
        let prices = RoundPricer { load: &load, groups_max: 4, prompts, target: &target, draft: &draft };
        let drafting_us = [1.0, 2.0, 3.0].map(|steps| prices.drafting_us(steps, 16.0).round());
        // A forward takes 0.1 ms longer for each sequence. The third is the lane's alone.
        assert_eq!(drafting_us, [800.0, 1_600.0, 1_600.0 + 4_700.0]);
        let alone = Load { other_rows: 8, other_plain_sequences: 8, draft_sequences: 8, ..load };
        let prices = RoundPricer { load: &alone, ..prices };
        assert_eq!(prices.drafting_us(2.0, 8.0).round(), 2.0 * 4_700.0);
    }

    #[test]
    fn a_draft_misses_the_forward_that_begins_at_once_however_short_it_is() {
        let rounds = [200_000, 10_000].map(|micros| round_us(&load(8, 8), &flat(micros), 1).round());
        assert_eq!(rounds, [400_000.0, 20_000.0]);
    }

    #[test]
    fn rows_are_in_more_of_the_forwards_where_rounds_are_shorter_than_priced() {
        let forwards = Forwards { number: 2.0, with_rows: 1.0, added_us: 4_000.0 };
        assert_eq!(
            [1.0, 0.75, 0.5, 0.25].map(|residual| forwards.mean_added_us(residual).round()),
            [2_000.0, 2_667.0, 4_000.0, 4_000.0]
        );
    }

    #[test]
    fn a_draft_that_comes_back_just_late_may_catch_the_forward() {
        assert_eq!([0.1, 0.5, 1.0, 1.125, 1.5, 2.0].map(forwards_begun), [1.0, 1.0, 1.0, 1.625, 2.0, 2.0]);
    }

    #[test]
    fn prompts_do_not_make_drafted_rows_cheaper() {
        let mut target = WorkerCost::new(StepTimes::of_rows(&[(8, 10_000), (16, 15_000)]));
        (0..5).for_each(|_| target.observe_wire(Duration::ZERO, Duration::ZERO));
        let verify_us = |target: &WorkerCost| {
            let (load, draft) = (load(0, 0), flat(0));
            let prices =
                RoundPricer { load: &load, groups_max: 1, prompts: target.prompts, target, draft: &draft };
            [0, 1].map(|k| prices.round(k, f64::from(k + 1)).verify_us.round())
        };
        assert_eq!(verify_us(&target), [10_000.0, 15_000.0]);
        // Prompts take as long as rows of rounds.
        (0..1_000).for_each(|_| target.prompts.observe(10_000.0, Some(10_000.0)));
        assert_eq!(verify_us(&target), [20_000.0, 30_000.0]);
    }

    #[test]
    fn prompts_make_forwards_longer_and_fewer_of_them_are_missed() {
        let mut target = flat(10_000);
        for _ in 0..1_000 {
            target.prompts.observe(10_000.0, Some(8_000.0));
        }
        let rounds = [0, 3, 4].map(|k| round_us(&load(8, 8), &target, k).round());
        assert_eq!(rounds, [18_000.0, 36_000.0, 36_000.0]);
    }

    #[test]
    fn prompts_stretch_forwards_and_no_network_time() {
        let (mut target, draft, load) = (remote(10_000, Duration::from_millis(20)), flat(4_000), load(8, 8));
        (0..1_000).for_each(|_| target.prompts.observe(10_000.0, Some(5_000.0)));
        let prompts = target.prompts;
        let prices = RoundPricer { load: &load, groups_max: 1, prompts, target: &target, draft: &draft };
        // A forward begins every 35 ms, and the draft is away for 20 ms more than it takes.
        let forwards = [14_000.0, 49_000.0].map(|draft_us| prices.at_target(1, draft_us, 15_000.0, 0.0).1.0);
        assert_eq!(forwards.map(f64::round), [2.0, 3.0]);
    }
}
