//! Throughput of a lane at a hypothetical load, used to size pools ([`crate::pool_size`]). Chooses no k.

use super::{DraftLength, Load};
use crate::cost::WorkerCost;

impl DraftLength {
    /// Tokens per second that this number of sequences of the lane would commit at the best k, alone at one
    /// target with `drafts` draft workers.
    ///
    /// Assumes that drafts arrive in time, and corrects all prices by the residual of plain rounds. Late
    /// drafts and long rounds due to too few draft workers must not reduce the wanted number of draft
    /// workers.
    pub fn predict_throughput(
        &self,
        (sequences, drafts): (f64, f64),
        context: f64,
        (target, draft): (&WorkerCost, &WorkerCost),
    ) -> f64 {
        let whole = sequences.ceil().max(1.0) as u32;
        let max_k = if drafts > 0.0 { self.max_k } else { 0 };
        let draft_sequences = if drafts > 0.0 { (sequences / drafts).ceil().max(1.0) as u32 } else { whole };
        let load = Load { draft_sequences, ..Load::alone(whole, context) };
        let prices = self.prices(&load, target, draft);
        let accepted = self.acceptance.cumulative(max_k);
        let (mut expected_tokens, mut most) = (1.0, 0.0_f64);
        for k in 0..=max_k {
            if k > 0 {
                expected_tokens += accepted[k as usize - 1];
            }
            let rows_each = f64::from(k + 1);
            let round_us = prices.round(k, rows_each).round_us() * self.residuals.factor(0);
            most = most.max(sequences * expected_tokens * 1e6 / round_us.max(1.0));
        }
        most
    }
}
