//! Length of a lookup draft ([`crate::lookup_rates`]): the one with the highest throughput at the price of
//! its rows. No lookup draft is used if the round that the sequence would run otherwise has a higher
//! throughput.

use super::{DraftLength, Load};
use crate::cost::{ForwardShape, WorkerCost};

/// Lengths and numbers of leaves that are compared; values in between differ little.
pub(crate) const COMPARED_LENGTHS: [u32; 10] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

/// Number of tokens of a lookup draft to verify.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LookupLength {
    /// Number of tokens.
    pub num_draft_tokens: u32,
    /// Predicted throughput of its sequence.
    pub tokens_per_second: f64,
}

impl DraftLength {
    /// Chooses the length of a lookup draft; `None` if none pays. `reached[i]` is the probability that it is
    /// right up to token i. `asks_worker`: without a lookup draft, the round would ask a draft worker for the
    /// lane's k.
    pub fn choose_lookup(
        &self,
        reached: &[f64],
        (load, target): (&Load, &WorkerCost),
        asks_worker: bool,
    ) -> Option<LookupLength> {
        // No draft worker is asked, so its cost does not matter.
        let prices = self.prices(load, target, target);
        let round_us =
            |k: u32| (prices.round(0, 1.0 + f64::from(k)).verify_us * self.residuals.factor(0)).max(1.0);
        let plain = 1.0 / round_us(0);
        let drafted = self.outlook.get(self.k as usize).filter(|at| asks_worker && at.k > 0);
        let baseline = drafted
            .map_or(plain, |at| plain.max(at.expected_tokens / (at.draft_wait_us + at.verify_us).max(1.0)));
        let pace = |k: u32| (1.0 + reached[..k as usize].iter().sum::<f64>()) / round_us(k);
        let fits = |k: &u32| *k as usize <= reached.len() && self.spares_other_lanes(*k, load, target);
        let best = COMPARED_LENGTHS
            .into_iter()
            .filter(fits)
            .map(|k| (pace(k), k))
            .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let least = baseline * (1.0 + self.rules.hysteresis);
        let (pace, num_draft_tokens) = best.filter(|(pace, _)| *pace > least)?;
        Some(LookupLength { num_draft_tokens, tokens_per_second: pace * 1e6 })
    }

    /// Whether `k` rows of one sequence delay lanes that share its target by no more than is allowed.
    fn spares_other_lanes(&self, k: u32, load: &Load, target: &WorkerCost) -> bool {
        if load.other_sequences == 0 {
            return true;
        }
        let sequences = f64::from(load.sequences + load.other_sequences);
        let rows = f64::from(load.sequences + load.other_rows);
        let plain = ForwardShape { rows, sequences, context: load.context };
        let added_us = target.added_us(plain, ForwardShape { rows: rows + f64::from(k), ..plain });
        added_us / load.others_round_us.max(target.forward_us(plain)) <= self.rules.hysteresis
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Rules;
    use super::*;
    use crate::cost::StepTimes;

    fn target(row_us: u64) -> WorkerCost {
        let point = |rows: u32| (rows, 10_000 + row_us * u64::from(rows - 1));
        WorkerCost::new(StepTimes::of_rows(&[1, 8, 64].map(point)))
    }

    /// Each token is right with probability `rate` if all before it were.
    fn chances(rate: f64) -> Vec<f64> {
        (1..=32).map(|i| rate.powi(i)).collect()
    }

    fn length(rate: f64, (row_us, sequences): (u64, u32)) -> u32 {
        let lane = DraftLength::new(8);
        let chosen =
            lane.choose_lookup(&chances(rate), (&Load::alone(sequences, 100.0), &target(row_us)), false);
        chosen.map_or(0, |chosen| chosen.num_draft_tokens)
    }

    #[test]
    fn a_draft_is_verified_as_far_as_its_rows_pay() {
        assert_eq!(length(0.95, (0, 1)), 32, "rows are free");
        assert!((8..=24).contains(&length(0.95, (300, 1))), "{}", length(0.95, (300, 1)));
        assert!((1..=3).contains(&length(0.5, (1_000, 1))), "{}", length(0.5, (1_000, 1)));
        assert_eq!(length(0.05, (1_000, 1)), 0, "no length pays");
        // Each row costs as much as a step, so only certain tokens would pay.
        assert_eq!(length(0.95, (10_000, 1)), 0);
        // Rows of all sequences in the forward.
        assert!(length(0.7, (300, 16)) < length(0.7, (300, 1)));
        assert_eq!(DraftLength::new(8).choose_lookup(&[], (&Load::alone(1, 100.0), &target(0)), false), None);
        // 33 tokens per round instead of 1 are not 40 times as many.
        let choosy = DraftLength::with_rules(8, Rules { hysteresis: 39.0, ..Rules::default() });
        let load = Load::alone(1, 100.0);
        assert_eq!(choosy.choose_lookup(&chances(1.0), (&load, &target(0)), false), None);
    }

    #[test]
    fn a_draft_workers_round_is_a_rival_where_one_is_asked() {
        let (target, draft) = (target(100), WorkerCost::new(StepTimes::of_rows(&[(1, 400), (64, 400)])));
        let mut lane = DraftLength::new(8);
        for _ in 0..200 {
            lane.choose(Load::alone(1, 100.0), &target, &draft);
            lane.observe_proposal(8, 8);
            lane.observe_verification(8, 6);
        }
        let poor = chances(0.6);
        let chosen =
            |reached: &[f64], asks| lane.choose_lookup(reached, (&Load::alone(1, 100.0), &target), asks);
        assert!(chosen(&poor, false).is_some());
        assert_eq!(chosen(&poor, true), None, "the draft worker's round has a higher prediction");
        assert!(chosen(&chances(0.98), true).is_some());
    }

    #[test]
    fn rows_that_slow_down_other_lanes_are_not_taken() {
        let others_round_us = 10_000.0;
        let shared = Load { other_rows: 4, other_sequences: 4, others_round_us, ..Load::alone(1, 100.0) };
        let mut target = target(50);
        target.observe_step(1, 100.0, Duration::from_millis(10));
        let lane = DraftLength::new(8);
        let chosen = lane.choose_lookup(&chances(0.99), (&shared, &target), false).unwrap();
        assert!(chosen.num_draft_tokens <= 4, "{chosen:?}");
    }
}
