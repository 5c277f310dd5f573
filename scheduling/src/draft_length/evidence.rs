//! Evidence about drafts that a lane pays for at k = 0: ids that draft workers are fed and compare with their
//! own draws, and rounds with a draft as a probe.

use speculation::sequence::{DueFeed, FEED_LAG};

use super::DraftLength;
use super::rules::BUDGET_MAX;
use crate::cost::{ForwardShape, WorkerCost};
use crate::smoothing::LONG_EWMA_WINDOW;

/// Time that may be spent, in lane rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget(pub(super) f64);

impl Budget {
    pub(super) fn earn(&mut self, lane_rounds: f64) {
        self.0 = (self.0 + lane_rounds).min(BUDGET_MAX);
    }

    /// Spends this much, or returns `false` without budget. What exceeds the maximum budget leaves a debt.
    fn pay(&mut self, lane_rounds: f64) -> bool {
        let has_budget = self.0 >= lane_rounds.min(BUDGET_MAX);
        if has_budget {
            self.0 -= lane_rounds;
        }
        has_budget
    }
}

impl DraftLength {
    /// Whether draft workers are fed early at k = 0, as far as the lane pays for it: it may draft soon, or does
    /// not know its acceptance. Their replies tell which of the tokens they would have drawn.
    pub fn keeps_drafts_fed(&self) -> bool {
        self.drafting_share >= self.rules.idle_share || self.acceptance_rate().is_none()
    }

    /// Pays for a feed of one sequence at k = 0. Returns `false` without budget for a sequence's first feed
    /// or a long one, and in a lane that never chose a k (all its requests fix it). Other feeds leave a debt if
    /// necessary: without them the first one was for nothing.
    ///
    /// The price is the time of the draft worker, as if the rounds of all sequences at the target waited for
    /// it. They do if both share cores; if not, forwards of the target take so much longer than those of the
    /// draft worker that the price is small.
    pub fn pays_for_feed(&mut self, due: DueFeed, draft: &WorkerCost) -> bool {
        let (Some(load), Some(here)) = (self.load, self.outlook.get(self.k as usize)) else { return false };
        let sequences = f64::from(load.draft_sequences.max(1));
        let feed =
            ForwardShape { rows: sequences * f64::from(due.num_ids), sequences, context: load.context };
        let others = f64::from(load.other_sequences) / f64::from(load.sequences.max(1));
        let round_us = here.draft_wait_us + here.verify_us;
        let lane_rounds = (1.0 + others) * draft.forward_us(feed) / sequences / round_us.max(1.0);
        if due.is_first || due.num_ids > FEED_LAG {
            return self.feed_budget.pay(lane_rounds);
        }
        self.feed_budget.0 -= lane_rounds;
        true
    }

    /// Whether draft workers have recently compared fed tokens with their own draws, so that acceptance is
    /// known without drafts. This ends if the lane no longer feeds them, or if workers replace them that do
    /// not compare.
    fn is_compared(&self) -> bool {
        self.last_compared_at.is_some_and(|at| self.lane_rounds - at < LONG_EWMA_WINDOW as u64)
    }

    /// Returns the k of a probe if one is due and paid for.
    pub(super) fn due_probe(&mut self, draft: &WorkerCost) -> Option<u32> {
        let spacing = if self.is_compared() { LONG_EWMA_WINDOW as u64 } else { self.rules.probe_spacing };
        let is_due = self.lane_rounds - self.last_judged_at >= spacing && self.max_k > 0;
        let load = self.load.filter(|load| is_due && load.draft_lag <= FEED_LAG)?;
        // At k > 0 without evidence, the operator's policy holds back all drafts except probes.
        let probe = self.k.max(1);
        let (here, there) = (&self.outlook[self.k as usize], &self.outlook[probe as usize]);
        let catch_up_us = draft.catch_up_us(load.draft_lag, probe, (load.draft_sequences, load.context));
        let slower =
            (there.draft_wait_us + there.verify_us + catch_up_us) / (here.draft_wait_us + here.verify_us);
        let loss = (slower - there.expected_tokens / here.expected_tokens).max(0.0);
        if !self.probe_budget.pay(loss) {
            return None;
        }
        self.probes += 1;
        self.last_judged_at = self.lane_rounds;
        Some(probe)
    }
}
