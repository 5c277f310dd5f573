//! Rounds in closed form: the result of one k at a load, with the draft on the target's GPUs or on separate
//! ones. Pure.
//!
//! Sequences with drafts run in groups: some are drafted for while others are verified ([`super::groups`]). A
//! verification with more rows than fit into one forward takes several forwards, independent of the groups.

use super::groups::Groups;
use super::step_time::{ForwardBatch, StepCost};

/// The largest k considered.
pub const MAX_K: u32 = 10;

/// Where drafting runs.
#[derive(Clone, Copy)]
pub enum Drafting<'a> {
    /// Nowhere: every round is plain.
    Nowhere,
    /// On the target's GPUs, alternating with it.
    Colocated(&'a dyn StepCost),
    /// On separate workers, over a wire; each drafts for an equal share of the sequences.
    Apart {
        /// Step times of one worker.
        draft: &'a dyn StepCost,
        /// Number of workers per target: below 1 if targets share a worker.
        workers: f64,
        /// Round-trip time to a worker, microseconds.
        wire_us: f64,
    },
}

/// Parameters of one target's rounds.
#[derive(Clone, Copy)]
pub struct RoundModel<'a> {
    /// Step times of the target.
    pub target: &'a dyn StepCost,
    /// Step times as known to the target's worker, which profiles itself at some numbers of rows; it chooses
    /// its groups by them.
    pub known: &'a dyn StepCost,
    /// Round-trip time from the router to the target, microseconds.
    pub target_wire_us: f64,
    /// Router time per round for each sequence beyond the first, microseconds; the time for the first is part
    /// of the wires. If all processes share cores: the CPU time of all processes beyond their forwards,
    /// divided by the number of cores.
    pub router_us: f64,
    /// Maximum rows per forward of the target.
    pub target_rows_max: f64,
    /// Where drafting runs.
    pub drafting: Drafting<'a>,
    /// Acceptance by position: probability given that all earlier positions were accepted.
    pub acceptance: &'a [f64],
    /// Tokens per sequence.
    pub context: f64,
    /// The target's time for one more prompt, divided by the output tokens of a sequence, microseconds.
    pub prompt_us_per_token: f64,
}

/// Result of one k.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RoundEstimate {
    /// The k.
    pub k: u32,
    /// Expected tokens committed per round.
    pub expected_tokens: f64,
    /// Wait for the draft, milliseconds.
    pub draft_ms: f64,
    /// Verification time, milliseconds.
    pub verify_ms: f64,
    /// Time per output token of a sequence, milliseconds, including its share of other sequences' prompts.
    pub tpot_ms: f64,
    /// Tokens per second of all sequences at the target.
    pub tokens_per_second: f64,
}

impl RoundModel<'_> {
    /// The result of `k` for `sequences` that share the target.
    pub fn at(&self, sequences: f64, k: u32) -> RoundEstimate {
        let turns = Groups::of(self, sequences, k);
        // A group that does not fit into one forward is verified by several, and then drafted for in as many
        // parts.
        let shared = turns.size.min(self.sequences_max(k));
        let expected_tokens = expected_tokens(self.acceptance, k);
        let draft = if k == 0 { 0.0 } else { self.draft_us(turns.draft_batch.min(shared), k) };
        // Other groups are routed at other times.
        let router = self.routing_us(shared);
        let verify = self.target_wire_us + router + self.verify_us(shared, k);
        let forwards = turns.groups * self.verify_all_us(turns.size, k);
        // A group waits for its draft and verification, or until the target has finished the other groups;
        // the router works in parallel.
        let round = match self.drafting {
            Drafting::Apart { .. } => (draft + verify).max(forwards),
            Drafting::Colocated(_) | Drafting::Nowhere => draft + self.target_wire_us + router + forwards,
        };
        let tpot_us = round / expected_tokens + (sequences - 1.0).max(0.0) * self.prompt_us_per_token;
        RoundEstimate {
            k,
            expected_tokens,
            draft_ms: draft / 1e3,
            verify_ms: verify / 1e3,
            tpot_ms: tpot_us / 1e3,
            // A sequence's own prompt is not part of its time per token, but it does take the target's time.
            tokens_per_second: sequences * 1e6 / (tpot_us + self.prompt_us_per_token),
        }
    }

    /// The k that commits the most tokens per second.
    pub fn best(&self, sequences: f64) -> RoundEstimate {
        let max_k = if matches!(self.drafting, Drafting::Nowhere) { 0 } else { MAX_K };
        let all = (0..=max_k).map(|k| self.at(sequences, k));
        all.reduce(|best, next| if next.tokens_per_second > best.tokens_per_second { next } else { best })
            .unwrap_or_else(|| self.at(sequences, 0))
    }

    /// Speedup of the best k over k = 0.
    pub fn speedup(&self, sequences: f64) -> f64 {
        self.best(sequences).tokens_per_second / self.at(sequences, 0).tokens_per_second
    }

    /// Time in which one of `sequences` that run together is away from the target between two verifications,
    /// when `draft_batch` sequences are drafted for at once.
    pub(super) fn away_us(&self, sequences: f64, draft_batch: f64, k: u32) -> f64 {
        self.draft_us(draft_batch, k) + self.target_wire_us + self.routing_us(sequences)
    }

    /// Time of one forward of the target, as known to its worker.
    pub(super) fn profiled_us(&self, sequences: f64, k: u32) -> f64 {
        self.known.micros(ForwardBatch { sequences, rows_each: f64::from(k + 1), context: self.context })
    }

    /// Router time per round for `sequences` that run together.
    fn routing_us(&self, sequences: f64) -> f64 {
        (sequences - 1.0).max(0.0) * self.router_us
    }

    /// Number of sequences whose verifications fit into one forward; the last one is never split, so it may
    /// slightly exceed the limit.
    fn sequences_max(&self, k: u32) -> f64 {
        (self.target_rows_max / f64::from(k + 1)).ceil()
    }

    /// Time of one forward of the target.
    fn verify_us(&self, sequences: f64, k: u32) -> f64 {
        self.target.micros(ForwardBatch { sequences, rows_each: f64::from(k + 1), context: self.context })
    }

    /// Time of all forwards of the target that `sequences` need.
    fn verify_all_us(&self, sequences: f64, k: u32) -> f64 {
        let most = self.sequences_max(k);
        let full = (sequences / most).floor();
        let rest = sequences - full * most;
        let whole = if full > 0.0 { full * self.verify_us(most, k) } else { 0.0 };
        if rest > 0.0 { whole + self.verify_us(rest, k) } else { whole }
    }

    /// Time of k draft steps of one worker for `sequences` of this target, including the wire.
    fn draft_us(&self, sequences: f64, k: u32) -> f64 {
        let (draft, targets_per_worker, wire_us) = match self.drafting {
            Drafting::Nowhere => return 0.0,
            Drafting::Colocated(draft) => (draft, 1.0, 0.0),
            Drafting::Apart { draft, workers, wire_us } => (draft, (1.0 / workers).max(1.0), wire_us),
        };
        // The forwards of a shared worker also contain the sequences of the other targets.
        let sequences = sequences * targets_per_worker;
        let step =
            |rows_each: f64| draft.micros(ForwardBatch { sequences, rows_each, context: self.context });
        // The first step appends the ids committed since: the target's token and, if all drafts were
        // accepted, also the last draft, which was never run.
        let fed = 1.0 + accepted_up_to(self.acceptance, k);
        wire_us + step(fed) + f64::from(k.saturating_sub(1)) * step(1.0)
    }
}

/// Probability that `k` drafted tokens are all accepted. Beyond the end of `acceptance` its last rate is
/// repeated.
fn accepted_up_to(acceptance: &[f64], k: u32) -> f64 {
    let rate = |position: usize| acceptance.get(position).or(acceptance.last()).copied().unwrap_or(0.0);
    (0..k as usize).map(rate).product()
}

/// Expected tokens committed per round: the target's own, and each accepted draft.
pub fn expected_tokens(acceptance: &[f64], k: u32) -> f64 {
    (0..=k).map(|accepted| accepted_up_to(acceptance, accepted)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fixed microseconds, and microseconds per row.
    struct Line(f64, f64);

    impl StepCost for Line {
        fn micros(&self, forward: ForwardBatch) -> f64 {
            self.0 + self.1 * forward.sequences * forward.rows_each
        }
    }

    fn rounds<'a>(target: &'a Line, drafting: Drafting<'a>, acceptance: &'a [f64]) -> RoundModel<'a> {
        RoundModel {
            target,
            known: target,
            target_wire_us: 0.0,
            router_us: 0.0,
            target_rows_max: 512.0,
            drafting,
            acceptance,
            context: 0.0,
            prompt_us_per_token: 0.0,
        }
    }

    #[test]
    fn a_round_is_its_draft_and_its_verification() {
        let (target, draft) = (Line(10_000.0, 0.0), Line(1_000.0, 0.0));
        let rounds = rounds(&target, Drafting::Colocated(&draft), &[0.5]);
        assert_eq!(expected_tokens(&[0.5], 2), 1.75);
        let at = rounds.at(4.0, 2);
        assert_eq!((at.draft_ms, at.verify_ms), (2.0, 10.0));
        assert!((at.tokens_per_second - 4.0 * 1.75 / 0.012).abs() < 1e-6);
        assert!((rounds.at(4.0, 0).tpot_ms - 10.0).abs() < 1e-9);
        // 1.5 / 11, 1.75 / 12, 1.875 / 13: k = 2 is best.
        assert_eq!(rounds.best(4.0).k, 2);
    }

    #[test]
    fn groups_take_turns_where_rows_cost_and_not_where_they_are_free() {
        let draft = Line(5_000.0, 0.0);
        let apart = |workers| Drafting::Apart { draft: &draft, workers, wire_us: 0.0 };
        let by_row = Line(0.0, 1_000.0);
        // 8 sequences of 2 rows: together 5 + 16 ms; with two groups the draft overlaps with the other
        // group's 8 ms.
        assert!((rounds(&by_row, apart(2.0), &[1.0]).at(8.0, 1).tpot_ms - 16.0 / 2.0).abs() < 1e-9);
        let flat = Line(16_000.0, 0.0);
        assert!((rounds(&flat, apart(8.0), &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        // On the target's GPUs nothing overlaps.
        let colocated = Drafting::Colocated(&draft);
        assert!((rounds(&by_row, colocated, &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_forward_holds_so_many_rows_and_the_rest_hides_behind_the_draft() {
        let (target, draft) = (Line(0.0, 1_000.0), Line(5_000.0, 0.0));
        let drafting = Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 };
        let rounds = RoundModel { target_rows_max: 12.0, ..rounds(&target, drafting, &[1.0]) };
        // 8 sequences of 2 rows take two forwards of 8 rows each.
        assert!((rounds.at(8.0, 1).tpot_ms - 16.0 / 2.0).abs() < 1e-9);
        let colocated = RoundModel { drafting: Drafting::Colocated(&draft), ..rounds };
        assert!((colocated.at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        // Plain steps of 30 sequences: forwards of 12, 12 and 6 rows.
        assert!((rounds.at(30.0, 0).tpot_ms - 30.0).abs() < 1e-9);
    }

    #[test]
    fn a_router_takes_its_time_for_each_sequence() {
        let (target, draft) = (Line(10_000.0, 0.0), Line(1_000.0, 0.0));
        let drafting = Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 };
        let rounds = RoundModel { router_us: 100.0, ..rounds(&target, drafting, &[1.0]) };
        assert!((rounds.at(1.0, 1).tpot_ms - 11.0 / 2.0).abs() < 1e-9);
        assert!((rounds.at(41.0, 1).tpot_ms - 15.0 / 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_draft_worker_that_targets_share_drafts_for_the_sequences_of_all() {
        let (target, draft) = (Line(10_000.0, 0.0), Line(0.0, 100.0));
        let draft_ms = |workers| {
            let drafting = Drafting::Apart { draft: &draft, workers, wire_us: 0.0 };
            rounds(&target, drafting, &[0.0]).at(8.0, 1).draft_ms
        };
        // 100 us for each of 4, 8, 16 and 32 sequences.
        assert_eq!([2.0, 1.0, 0.5, 0.25].map(draft_ms), [0.4, 0.8, 1.6, 3.2]);
    }

    #[test]
    fn drafting_that_does_not_pay_is_not_chosen() {
        let (target, draft) = (Line(0.0, 1_000.0), Line(500.0, 0.0));
        let rounds = rounds(&target, Drafting::Colocated(&draft), &[0.6]);
        assert_eq!((rounds.best(32.0).k, rounds.speedup(32.0)), (0, 1.0));
    }
}
