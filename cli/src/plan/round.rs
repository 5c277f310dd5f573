//! Rounds in closed form: what one k gives at a load, with the draft on the target's own GPUs or on others. Pure.
//!
//! All sequences that share a target leave for a round together, as the router's lanes do; then a round is the wait for k draft
//! steps and one verification. Where the draft has machines of its own, two halves may take turns instead: one is drafted for while
//! the other is verified. That pays where a verification of half the rows is cheaper; the better of the two is taken.

use super::step_time::{Forward, StepCost};

/// The largest k that is looked at.
pub const MAX_K: u32 = 10;

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

/// What the rounds of one target are made of.
#[derive(Clone, Copy)]
pub struct Rounds<'a> {
    /// The target.
    pub target: &'a dyn StepCost,
    /// The router to the target and back, microseconds.
    pub target_wire_us: f64,
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
        let together = self.in_parts(sequences, k, 1.0);
        match self.drafting {
            Drafting::Apart { .. } if k > 0 && sequences >= 2.0 => {
                let in_turns = self.in_parts(sequences, k, 2.0);
                if in_turns.tokens_per_second > together.tokens_per_second { in_turns } else { together }
            }
            _ => together,
        }
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

    /// With the sequences in `parts` that take turns.
    fn in_parts(&self, sequences: f64, k: u32, parts: f64) -> Outcome {
        let each = sequences / parts;
        let expected_tokens = expected_tokens(self.acceptance, k);
        let rows = Forward { sequences: each, rows_each: f64::from(k + 1), context: self.context };
        let verify = self.target_wire_us + self.target.micros(rows);
        let draft = if k == 0 { 0.0 } else { self.draft_us(each, k) };
        // A part waits for its own draft, or for the target and the draft workers to be done with the others.
        let busiest = if parts > 1.0 { parts * draft.max(verify - self.target_wire_us) } else { 0.0 };
        let round = (draft + verify).max(busiest);
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

    /// The wait for k draft steps.
    fn draft_us(&self, sequences: f64, k: u32) -> f64 {
        let (draft, sequences, wire_us) = match self.drafting {
            Drafting::Colocated(draft) => (draft, sequences, 0.0),
            Drafting::Apart { draft, workers, wire_us } => (draft, (sequences / workers).max(1.0), wire_us),
        };
        // The first step takes the tokens that were committed since, too: a row or two more, which is not counted.
        wire_us + f64::from(k) * draft.micros(Forward { sequences, rows_each: 1.0, context: self.context })
    }
}

/// Tokens that a round commits: its own, and each drafted one that survives. Beyond `acceptance` its last rate goes on.
pub fn expected_tokens(acceptance: &[f64], k: u32) -> f64 {
    let (mut survived, mut expected) = (1.0, 1.0);
    for position in 0..k as usize {
        let rate = acceptance.get(position).or(acceptance.last()).copied().unwrap_or(0.0);
        survived *= rate;
        expected += survived;
    }
    expected
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
        Rounds { target, target_wire_us: 0.0, drafting, acceptance, context: 0.0, prompt_us_per_token: 0.0 }
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
    fn in_parts_take_turns_where_rows_cost_and_not_where_they_are_free() {
        let draft = Line(5_000.0, 0.0);
        let apart = Drafting::Apart { draft: &draft, workers: 1.0, wire_us: 0.0 };
        let by_row = Line(0.0, 1_000.0);
        // 8 sequences of 2 rows: together 5 + 16 ms; in turns the draft hides behind the other half's 8 ms.
        assert!((rounds(&by_row, apart, &[1.0]).at(8.0, 1).tpot_ms - 16.0 / 2.0).abs() < 1e-9);
        let flat = Line(16_000.0, 0.0);
        assert!((rounds(&flat, apart, &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs() < 1e-9);
        assert!(
            (rounds(&by_row, Drafting::Colocated(&draft), &[1.0]).at(8.0, 1).tpot_ms - 21.0 / 2.0).abs()
                < 1e-9
        );
    }

    #[test]
    fn drafting_that_does_not_pay_is_not_chosen() {
        let (target, draft) = (Line(0.0, 1_000.0), Line(500.0, 0.0));
        let rounds = rounds(&target, Drafting::Colocated(&draft), &[0.6]);
        assert_eq!((rounds.best(32.0).k, rounds.speedup(32.0)), (0, 1.0));
    }
}
