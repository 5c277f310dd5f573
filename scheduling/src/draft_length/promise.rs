//! What a lane would commit at another load than its own: the speed by which pools are sized ([`crate::pool_size`]). Decides no k.

use super::{DraftLength, Load};
use crate::cost::WorkerCost;

impl DraftLength {
    /// Tokens a second that so many sequences of this lane would commit, alone at one target for which `drafts` draft workers draft, at the best k.
    ///
    /// Drafts count as being in time, and rounds as being beyond their price by what plain ones were: drafts that are late, and rounds that
    /// are long, where there are too few draft workers, must not be a reason to want fewer.
    pub fn promise(
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
