//! Rounds in closed form: what one k gives at a load, with the draft on the target's own GPUs or on others. Pure.
//!
//! Sequences move in groups, some drafted for while others are verified. They fall into about the number of groups that is best, with
//! exceptions. Those that began at one moment and share a draft worker come back in one frame, and stay together for good; where requests come and
//! go, nothing holds them ([`Beginning`]). All together go only those that the target's rule of late batches has wait for each other
//! ([`waits_for_the_rest`]). And a verification of more rows than a forward holds is several forwards, whatever the groups.

use super::step_time::{Forward, StepCost};

/// The largest k that is looked at.
pub const MAX_K: u32 = 10;

/// More groups than this are never better by much.
const GROUPS_MAX: u32 = 8;

/// Parts of those that come later that the rule of late batches looks at.
const LATE_CANDIDATES: u32 = 8;

/// Who drafts.
#[derive(Clone, Copy)]
pub enum Drafting<'a> {
    /// The target's own GPUs, in turns with it.
    Colocated(&'a dyn StepCost),
    /// Workers of their own, over a wire; each drafts for an equal part of the sequences.
    Apart {
        /// One worker.
        draft: &'a dyn StepCost,
        /// How many.
        workers: f64,
        /// To a worker and back, microseconds.
        wire_us: f64,
    },
}

/// How sequences came to be under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beginning {
    /// All at one moment, as in the simulator's closed traffic.
    Together,
    /// One after the other, as requests do.
    Apart,
}

/// What the rounds of one target are made of.
#[derive(Clone, Copy)]
pub struct Rounds<'a> {
    /// The target.
    pub target: &'a dyn StepCost,
    /// The router to the target and back, microseconds.
    pub target_wire_us: f64,
    /// How the sequences began.
    pub beginning: Beginning,
    /// What the router takes of a round for each further sequence in it, microseconds; that for one is part of the wires.
    pub router_us: f64,
    /// Rows that one forward of the target holds at most.
    pub target_rows_max: f64,
    /// Who drafts.
    pub drafting: Drafting<'a>,
    /// The chance of each drafted token to be accepted, those before it being so.
    pub acceptance: &'a [f64],
    /// Tokens that a sequence holds.
    pub context: f64,
    /// What the target's time for one more prompt, shared out over a sequence's output tokens, comes to: microseconds.
    pub prompt_us_per_token: f64,
}

/// What one k gives.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Outcome {
    /// Which k.
    pub k: u32,
    /// Tokens that a round commits.
    pub expected_tokens: f64,
    /// The wait for the draft, milliseconds.
    pub draft_ms: f64,
    /// The verification, milliseconds.
    pub verify_ms: f64,
    /// Time per output token of a sequence, milliseconds; its share of others' prompts included.
    pub tpot_ms: f64,
    /// Of all sequences at the target.
    pub tokens_per_second: f64,
}

impl Rounds<'_> {
    /// What `k` gives `sequences` that share the target.
    pub fn at(&self, sequences: f64, k: u32) -> Outcome {
        let parts = self.parts(sequences, k);
        let best = |best: Outcome, next: Outcome| {
            if next.tokens_per_second > best.tokens_per_second { next } else { best }
        };
        let all = (1..=parts).map(|groups| self.in_groups(sequences, k, groups));
        match self.stay_together(sequences, k, parts) {
            true => all.reduce(best),
            false => all.skip(1).reduce(best),
        }
        .expect("there are two parts at least where they may not stay together")
    }

    /// The k that commits the most.
    pub fn best(&self, sequences: f64) -> Outcome {
        let all = (0..=MAX_K).map(|k| self.at(sequences, k));
        all.reduce(|best, next| if next.tokens_per_second > best.tokens_per_second { next } else { best })
            .unwrap_or_else(|| self.at(sequences, 0))
    }

    /// How much faster the best k is than none.
    pub fn speedup(&self, sequences: f64) -> f64 {
        self.best(sequences).tokens_per_second / self.at(sequences, 0).tokens_per_second
    }

    /// Groups that sequences can fall into.
    fn parts(&self, sequences: f64, k: u32) -> u32 {
        let most = match (self.drafting, self.beginning) {
            (Drafting::Apart { workers, .. }, Beginning::Together) => sequences.min(workers),
            (Drafting::Apart { .. }, Beginning::Apart) => sequences,
            (Drafting::Colocated(_), _) => 1.0,
        };
        if k > 0 { (most.min(f64::from(GROUPS_MAX)) as u32).max(1) } else { 1 }
    }

    /// Whether sequences whose drafts are done at different moments find together again at the target. The first part to come is
    /// verified alone, for it does not know of the others yet; these share the next forward.
    fn stay_together(&self, sequences: f64, k: u32, parts: u32) -> bool {
        let away = self.draft_us(sequences, k) + self.target_wire_us;
        let first = sequences / f64::from(parts);
        parts == 1 || waits_for_the_rest((first, sequences - first), away, |n| self.verify_us(n, k))
    }

    /// With the sequences in so many groups.
    fn in_groups(&self, sequences: f64, k: u32, groups: u32) -> Outcome {
        let groups = f64::from(groups);
        let each = sequences / groups;
        // A group that is too large for one forward is verified by several, and drafted for in as many parts from then on.
        let shared = each.min(self.sequences_max(k));
        let expected_tokens = expected_tokens(self.acceptance, k);
        // What began together is whole workers' shares; else each worker drafts for a part of every group.
        let drafted = if self.beginning == Beginning::Together { shared * groups } else { shared };
        let draft = if k == 0 { 0.0 } else { self.draft_us(drafted, k) };
        // Other groups' sequences are in the router's way, too.
        let router = (shared * groups - 1.0).max(0.0) * self.router_us;
        let verify = self.target_wire_us + router + self.verify_us(shared, k);
        // A group waits for its own draft and verification, or for the target to be done with the others.
        let round = match self.drafting {
            Drafting::Apart { .. } => (draft + verify).max(groups * self.verify_all_us(each, k) + router),
            Drafting::Colocated(_) => draft + self.target_wire_us + router + self.verify_all_us(each, k),
        };
        let tpot_us = round / expected_tokens + (sequences - 1.0).max(0.0) * self.prompt_us_per_token;
        Outcome {
            k,
            expected_tokens,
            draft_ms: draft / 1e3,
            verify_ms: verify / 1e3,
            tpot_ms: tpot_us / 1e3,
            // A sequence's own prompt is no part of its time per token, but the target's time all the same.
            tokens_per_second: sequences * 1e6 / (tpot_us + self.prompt_us_per_token),
        }
    }

    /// Sequences whose verifications one forward holds; the last one is never split, so that it may be a little over.
    fn sequences_max(&self, k: u32) -> f64 {
        (self.target_rows_max / f64::from(k + 1)).ceil()
    }

    /// One forward of the target.
    fn verify_us(&self, sequences: f64, k: u32) -> f64 {
        self.target.micros(Forward { sequences, rows_each: f64::from(k + 1), context: self.context })
    }

    /// As many forwards of the target as so many sequences need.
    fn verify_all_us(&self, sequences: f64, k: u32) -> f64 {
        let most = self.sequences_max(k);
        let full = (sequences / most).floor();
        let rest = sequences - full * most;
        let whole = if full > 0.0 { full * self.verify_us(most, k) } else { 0.0 };
        if rest > 0.0 { whole + self.verify_us(rest, k) } else { whole }
    }

    /// The wait for k draft steps.
    fn draft_us(&self, sequences: f64, k: u32) -> f64 {
        let (draft, sequences, wire_us) = match self.drafting {
            Drafting::Colocated(draft) => (draft, sequences, 0.0),
            Drafting::Apart { draft, workers, wire_us } => (draft, (sequences / workers).max(1.0), wire_us),
        };
        let step = |rows_each: f64| draft.micros(Forward { sequences, rows_each, context: self.context });
        // The first step feeds what was committed since: the target's own token, and the last guess, which was never run, where all were accepted.
        let fed = 1.0 + survival(self.acceptance, k);
        wire_us + step(fed) + f64::from(k.saturating_sub(1)) * step(1.0)
    }
}

/// Whether a forward of `first` sequences that could leave now waits for the `rest`, who come back in `away_us`: the rule of
/// [`speculation::batch::Returns::hold`] for two groups, each of which comes back as one. It waits if joining any part of the rest loses
/// less time, summed over all, than leaving at once.
fn waits_for_the_rest((first, rest): (f64, f64), away_us: f64, step_us: impl Fn(f64) -> f64) -> bool {
    let alone = step_us(first);
    let apart = first * alone + rest * ((alone - away_us).max(0.0) + step_us(rest));
    let pays = |joined: f64| {
        let step = step_us(first + joined);
        let left = rest - joined;
        let next = if left > 0.0 { step_us(left) } else { 0.0 };
        first * (away_us + step) + joined * step + left * (step + next) < apart
    };
    away_us < alone
        && (1..=LATE_CANDIDATES)
            .any(|part| pays((rest * f64::from(part) / f64::from(LATE_CANDIDATES)).ceil().min(rest)))
}

/// The chance that `k` drafted tokens are all accepted. Beyond `acceptance` its last rate goes on.
fn survival(acceptance: &[f64], k: u32) -> f64 {
    let rate = |position: usize| acceptance.get(position).or(acceptance.last()).copied().unwrap_or(0.0);
    (0..k as usize).map(rate).product()
}

/// Tokens that a round commits: its own, and each drafted one that survives.
pub fn expected_tokens(acceptance: &[f64], k: u32) -> f64 {
    (0..=k).map(|accepted| survival(acceptance, accepted)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many microseconds, and so many more a row.
    struct Line(f64, f64);

    impl StepCost for Line {
        fn micros(&self, forward: Forward) -> f64 {
            self.0 + self.1 * forward.sequences * forward.rows_each
        }
    }

    fn rounds<'a>(target: &'a Line, drafting: Drafting<'a>, acceptance: &'a [f64]) -> Rounds<'a> {
        Rounds {
            target,
            target_wire_us: 0.0,
            beginning: Beginning::Together,
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
        // 1.5 / 11, 1.75 / 12, 1.875 / 13: two is best.
        assert_eq!(rounds.best(4.0).k, 2);
    }

    #[test]
    fn groups_take_turns_where_rows_cost_and_not_where_they_are_free() {
        let draft = Line(5_000.0, 0.0);
        let apart = |workers| Drafting::Apart { draft: &draft, workers, wire_us: 0.0 };
        let by_row = Line(0.0, 1_000.0);
        // 8 sequences of 2 rows: together 5 + 16 ms; in two groups the draft hides behind the other group's 8 ms.
        assert!((rounds(&by_row, apart(2.0), &[1.0]).at(8.0, 1).tpot_ms - 16.0 / 2.0).abs() < 1e-9);
        let flat = Line(16_000.0, 0.0);
        assert!((rounds(&flat, apart(8.0), &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        // One after the other, one worker's sequences take turns as well.
        let come_and_go = Rounds { beginning: Beginning::Apart, ..rounds(&by_row, apart(1.0), &[1.0]) };
        assert!((come_and_go.at(8.0, 1).tpot_ms - 16.0 / 2.0).abs() < 1e-9);
        // What one worker drafts for, and began at one moment, comes back as one.
        for drafting in [apart(1.0), Drafting::Colocated(&draft)] {
            assert!((rounds(&by_row, drafting, &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        }
    }

    #[test]
    fn two_that_do_not_wait_for_each_other_take_turns_though_it_costs_them() {
        let (target, draft) = (Line(10_000.0, 0.0), Line(6_000.0, 0.0));
        let drafting = Drafting::Apart { draft: &draft, workers: 2.0, wire_us: 0.0 };
        let both = rounds(&target, drafting, &[1.0]);
        // Together it would be 16 ms; neither waits 6 ms for the other, so each waits for the other's 10.
        assert!((both.at(2.0, 1).tpot_ms - 20.0 / 2.0).abs() < 1e-9);
        let quick = Line(4_000.0, 0.0);
        let drafting = Drafting::Apart { draft: &quick, workers: 2.0, wire_us: 0.0 };
        assert!((Rounds { drafting, ..both }.at(2.0, 1).tpot_ms - 14.0 / 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_forward_holds_so_many_rows_and_the_rest_hides_behind_the_draft() {
        let (target, draft) = (Line(0.0, 1_000.0), Line(5_000.0, 0.0));
        let drafting = Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 };
        let rounds = Rounds { target_rows_max: 12.0, ..rounds(&target, drafting, &[1.0]) };
        // 8 sequences of 2 rows are forwards of 12 and 4 rows: 12 + 5 ms, and the other 4 meanwhile.
        assert!((rounds.at(8.0, 1).tpot_ms - 17.0 / 2.0).abs() < 1e-9);
        let colocated = Rounds { drafting: Drafting::Colocated(&draft), ..rounds };
        assert!((colocated.at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        // Plain steps of 30 sequences: 12, 12 and 6.
        assert!((rounds.at(30.0, 0).tpot_ms - 30.0).abs() < 1e-9);
    }

    #[test]
    fn a_router_takes_its_time_for_each_sequence() {
        let (target, draft) = (Line(10_000.0, 0.0), Line(1_000.0, 0.0));
        let drafting = Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 };
        let rounds = Rounds { router_us: 100.0, ..rounds(&target, drafting, &[1.0]) };
        assert!((rounds.at(1.0, 1).tpot_ms - 11.0 / 2.0).abs() < 1e-9);
        assert!((rounds.at(41.0, 1).tpot_ms - 15.0 / 2.0).abs() < 1e-9);
    }

    /// The rule in closed form against the one that workers run.
    #[test]
    fn whether_a_group_waits_is_what_workers_decide() {
        use std::time::Duration;

        use speculation::batch::{Ready, Returns};

        let at = |us: f64| Duration::from_secs_f64(us / 1e6);
        let mut waited = 0;
        for (first, rest) in [(1u32, 1u32), (1, 7), (2, 2), (4, 12), (7, 1)] {
            for away in [500.0, 2_000.0, 4_000.0, 7_000.0, 9_500.0] {
                for line in [Line(10_000.0, 0.0), Line(8_000.0, 300.0), Line(0.0, 1_000.0)] {
                    let step_us = |n: f64| line.0 + line.1 * n;
                    let mut returns = Returns::default();
                    for key in 0..rest {
                        returns.arrived(key, at(0.0), 1);
                        returns.answered(&key, at(1.0));
                        returns.arrived(key, at(1.0 + away), 1);
                        returns.answered(&key, at(50_000.0));
                    }
                    let ready = Ready { sequences: first, rows: first };
                    let held =
                        returns.hold(at(50_000.0), (ready, Duration::ZERO), |rows| step_us(f64::from(rows)));
                    let ours = waits_for_the_rest((f64::from(first), f64::from(rest)), away, step_us);
                    assert_eq!(held.is_some(), ours, "{first}, {rest}, {away}");
                    waited += u32::from(ours);
                }
            }
        }
        assert!((10..60).contains(&waited), "both answers occur: {waited}");
    }

    #[test]
    fn drafting_that_does_not_pay_is_not_chosen() {
        let (target, draft) = (Line(0.0, 1_000.0), Line(500.0, 0.0));
        let rounds = rounds(&target, Drafting::Colocated(&draft), &[0.6]);
        assert_eq!((rounds.best(32.0).k, rounds.speedup(32.0)), (0, 1.0));
    }
}
