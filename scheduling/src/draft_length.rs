//! Draft length of a lane: the k in 0..=max with the highest expected throughput (committed tokens per
//! second) at the present load. Last part of the choice of k ([`crate::acceptance_by_position`],
//! [`crate::cost`], this module). The router's lanes and the simulator use the same code. Without a clock or
//! randomness.
//!
//! The throughput of each k is the expected number of committed tokens per round (from acceptance by
//! position), divided by the expected time of a round. That time is a price from the workers' tables
//! (`price.rs`) times a measured correction (`residual_filter.rs`). The price includes the wait for the draft
//! with its queue and network time, and the verify step with all rows that share the target's forward, in
//! alternating groups if that pays.
//!
//! k = 0 is a choice like the others. Acceptance is known there too if the draft worker reports which of the
//! committed tokens fed to it it would have drawn. A lane at k = 0 also runs an occasional round with a draft,
//! a probe. Feeds and probes are paid for from a fixed share of the lane's time (`evidence.rs`).

mod evidence;
mod explanation;
mod joint;
#[cfg(test)]
mod joint_tests;
mod load;
mod lookup;
mod outlook;
mod price;
mod residual_filter;
#[cfg(test)]
mod round_tests;
mod round_times;
mod rules;
#[cfg(test)]
mod tests;
mod throughput;

use std::collections::VecDeque;
use std::ops::Range;

use evidence::Budget;
pub use explanation::{Change, ChoiceReason, Explanation, Outlook};
use joint::Drafting;
pub use joint::{JointChoice, JointLoad};
pub use load::{LaneView, Load, Pace};
pub(crate) use lookup::COMPARED_LENGTHS;
pub use lookup::LookupLength;
use price::RoundPricer;
use residual_filter::ResidualFilter;
pub use residual_filter::ResidualRules;
pub use round_times::RoundTimes;
pub use rules::Rules;
use rules::{BUDGET_MAX, PRIOR_SUPPLY};

use crate::acceptance_by_position::AcceptanceByPosition;
use crate::cost::{WorkerCost, micros};
use crate::prompt_time::PromptTime;
use crate::smoothing::{EWMA_WINDOW, LONG_EWMA_WINDOW, toward};
use crate::tree_size::SiblingRates;
use speculation::step::MAX_DRAFT_TOKENS;
use speculation::tree::DraftOutcome;

/// Number of recent changes kept for explanations.
const CHANGES_KEPT: usize = 16;

/// Draft length of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Number of tokens to draft.
    pub num_draft_tokens: u32,
    /// Whether this round is a probe.
    pub is_probe: bool,
}

/// Controller of one lane's draft length.
#[derive(Debug, Clone)]
pub struct DraftLength {
    rules: Rules,
    max_k: u32,
    k: u32,
    acceptance: AcceptanceByPosition,
    supply: AcceptanceByPosition,
    siblings: SiblingRates,
    /// Lane round of the latest draft request, and the number of lane rounds after it for which poor supply
    /// is remembered: it doubles whenever poor supply is confirmed.
    last_draft_request: u64,
    supply_memory: u64,
    /// Ratio of measured to priced round times.
    residuals: ResidualFilter,
    /// By k.
    excess_by_k: Vec<ExcessSum>,
    outlook: Vec<Outlook>,
    /// The lane's choice if all lanes of its target drafted, and how they draft.
    joint: JointChoice,
    drafting: Drafting,
    load: Option<Load>,
    /// The k of this lane round if it is a probe.
    probe: Option<u32>,
    /// Lane rounds' worth of time that the lane may spend on probes, and on feeds at k = 0.
    probe_budget: Budget,
    feed_budget: Budget,
    probes: u64,
    /// Lane round of the latest verification of a draft, or of the latest probe.
    last_judged_at: u64,
    /// Lane round in which a draft worker last reported which fed tokens it would have drawn.
    last_compared_at: Option<u64>,
    lane_rounds: u64,
    /// Share of recent lane rounds with drafts, probes aside.
    drafting_share: f64,
    /// Whether a longer draft was best in the latest lane round, beside other lanes.
    longer_was_best: bool,
    /// Number of sequences that still begin a round in this lane round.
    sequences_left: u32,
    /// Number of further lane rounds at this k before the next choice.
    lane_rounds_left: u64,
    changes: VecDeque<Change>,
    why: ChoiceReason,
    speed: Speed,
}

/// Decayed sums over rounds at the present k.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    rounds: f64,
    tokens: f64,
    micros: f64,
}

/// Excess of round times over the price in one lane round, for one k.
#[derive(Debug, Clone, Copy, Default)]
struct ExcessSum {
    rounds: f64,
    excess: f64,
}

impl DraftLength {
    /// Creates the controller of a new lane. Its first round already leaves k = 0 if the prior favours that.
    pub fn new(max_k: u32) -> Self {
        Self::with_rules(max_k, Rules::default())
    }

    /// Creates the controller of a new lane with other rules.
    pub fn with_rules(max_k: u32, rules: Rules) -> Self {
        let max_k = max_k.min(MAX_DRAFT_TOKENS as u32);
        Self {
            rules,
            max_k,
            k: 0,
            acceptance: AcceptanceByPosition::with_rules(rules.prior_acceptance, rules.acceptance),
            supply: AcceptanceByPosition::new(PRIOR_SUPPLY),
            siblings: SiblingRates::default(),
            last_draft_request: 0,
            supply_memory: rules.probe_spacing,
            residuals: ResidualFilter::new(max_k, rules.residuals),
            excess_by_k: vec![ExcessSum::default(); max_k as usize + 1],
            outlook: Vec::new(),
            joint: JointChoice::default(),
            drafting: Drafting::default(),
            load: None,
            probe: None,
            probe_budget: Budget(BUDGET_MAX / 4.0),
            feed_budget: Budget(BUDGET_MAX),
            probes: 0,
            last_judged_at: 0,
            last_compared_at: None,
            lane_rounds: 0,
            drafting_share: 0.0,
            longer_was_best: false,
            sequences_left: 0,
            lane_rounds_left: 0,
            changes: VecDeque::new(),
            why: ChoiceReason::Best,
            speed: Speed::default(),
        }
    }

    /// Chooses k for the next round of one of the lane's sequences. Decides anew after each of them began a
    /// round.
    pub fn choose(&mut self, load: Load, target: &WorkerCost, draft: &WorkerCost) -> Choice {
        if self.sequences_left == 0 {
            self.sequences_left = load.lane_sequences.max(1);
            self.load = Some(load);
            self.begin_lane_round(&load, (target, draft));
        }
        self.next_in_lane_round(load.lane_sequences).expect("a lane round has at least one sequence")
    }

    /// Returns k for another sequence in the current lane round, or in the next one if that is at the same k;
    /// `None` if all of the lane's `sequences` had their turn and [`Self::choose`] must decide. Sequences that
    /// left the lane have no more turns.
    pub fn next_in_lane_round(&mut self, sequences: u32) -> Option<Choice> {
        if self.sequences_left == 0 && self.lane_rounds_left > 0 {
            self.lane_rounds_left -= 1;
            self.sequences_left = sequences.max(1);
            self.end_lane_round(sequences);
        }
        self.sequences_left = self.sequences_left.min(sequences.max(1)).checked_sub(1)?;
        Some(Choice { num_draft_tokens: self.probe.unwrap_or(self.k), is_probe: self.probe.is_some() })
    }

    /// Records that a draft worker was asked for `asked` tokens and proposed `supplied` in time.
    pub fn observe_proposal(&mut self, asked: u32, supplied: u32) {
        self.supply.observe(0..asked, supplied.min(asked), self.sequences());
    }

    /// Records that a verification judged `judged` drafted tokens and accepted the first `accepted`.
    pub fn observe_verification(&mut self, judged: u32, accepted: u32) {
        if judged > 0 {
            self.last_judged_at = self.lane_rounds;
            self.acceptance.observe(0..judged, accepted.min(judged), self.sequences());
        }
    }

    /// Records the siblings in a verified tree.
    pub fn observe_siblings(&mut self, judged: &DraftOutcome) {
        self.siblings.observe(judged, &self.acceptance.rates(self.max_k));
    }

    /// Number of tokens that the lane's drafts get beside the chain.
    pub fn num_leaves(&self) -> u32 {
        self.outlook.get(self.k as usize).map_or(0, |at| at.num_leaves)
    }

    /// Records that a draft worker would have drawn the fed tokens in `positions` up to `accepted` itself.
    /// Positions count from where its draft would have begun.
    pub fn observe_agreement(&mut self, positions: Range<u32>, accepted: u32) {
        if !positions.is_empty() {
            self.last_compared_at = Some(self.lane_rounds);
            self.acceptance.observe(positions, accepted, self.sequences());
        }
    }

    /// Records the times of a round without prompt rows of its own; `target` and `draft` are its workers.
    pub fn observe_round(&mut self, round: &RoundTimes, target: &WorkerCost, draft: &WorkerCost) {
        let k = round.num_draft_tokens;
        let (draft_wait, verify) = (micros(round.draft_wait), micros(round.verify));
        let is_settled =
            k == self.k && self.since_change().is_none_or(|since| since >= self.rules.settling_lane_rounds);
        if is_settled {
            let (tokens, micros) = (f64::from(round.committed), draft_wait + verify);
            for (sum, new) in [
                (&mut self.speed.rounds, 1.0),
                (&mut self.speed.tokens, tokens),
                (&mut self.speed.micros, micros),
            ] {
                *sum = *sum * (1.0 - 1.0 / EWMA_WINDOW) + new;
            }
        }
        let is_informative = (is_settled || self.probe == Some(k)) && k <= self.max_k;
        let Some(load) = self.load.filter(|_| is_informative) else { return };
        let load = load.where_others_draft(self.drafting);
        // How long a prompt delays a round depends on its length and on when it came, not on k.
        if round.met_prompts {
            return;
        }
        let chain_rows = 1.0 + self.supply.cumulative(k).iter().sum::<f64>();
        let rows_each = chain_rows + f64::from(round.num_leaves);
        let prices = RoundPricer { prompts: PromptTime::default(), ..self.prices(&load, target, draft) };
        let Some(price) = prices.round_by_forwards(round.forward_sequences, k, rows_each) else { return };
        let catch_up_us = draft.catch_up_us(round.draft_rows, k, (load.draft_sequences, load.context));
        let excess = (draft_wait + verify) / (price.round_us() + catch_up_us) - 1.0;
        if excess.is_finite() {
            let sum = &mut self.excess_by_k[k as usize];
            sum.rounds += 1.0;
            sum.excess += excess;
        }
    }

    /// Pace of `sequences` sequences of the lane at the present k; zero before its first round.
    pub fn pace(&self, sequences: u32) -> Pace {
        let Speed { rounds, tokens, micros } = self.speed;
        if micros <= 0.0 {
            return Pace::default();
        }
        Pace { tokens_per_second: f64::from(sequences) * tokens * 1e6 / micros, round_us: micros / rounds }
    }

    /// Acceptance rate of the first drafted token; `None` without enough evidence.
    pub fn acceptance_rate(&self) -> Option<f64> {
        let is_known = self.acceptance.evidence() >= EWMA_WINDOW;
        self.acceptance.rates(1).first().copied().filter(|_| is_known)
    }

    /// Returns everything that the next choice is based on.
    pub fn explain(&self) -> Explanation {
        let sequences = self.load.map_or(1, |load| load.sequences);
        Explanation {
            k: self.k,
            max_k: self.max_k,
            leaves: self.num_leaves(),
            siblings: self.siblings.rates().to_vec(),
            continuation: self.siblings.continuation(),
            why: self.why,
            load: self.load,
            joint: self.joint,
            acceptance: self.acceptance.rates(self.max_k),
            acceptance_by_position: self.acceptance.cumulative(self.max_k),
            supply: self.supply.cumulative(self.max_k),
            judged: self.acceptance.evidence(),
            outlook: self
                .outlook
                .iter()
                .map(|at| at.corrected(self.residuals.factor(at.k), sequences))
                .collect(),
            measured_tokens_per_second: self.pace(sequences).tokens_per_second,
            lane_rounds: self.lane_rounds,
            probes: self.probes,
            changes: self.changes.iter().copied().collect(),
        }
    }

    /// Number of lane rounds since k changed.
    fn since_change(&self) -> Option<u64> {
        self.changes.back().map(|change| self.lane_rounds - change.lane_round)
    }

    fn sequences(&self) -> u32 {
        self.load.map_or(1, |load| load.lane_sequences.max(1))
    }

    fn begin_lane_round(&mut self, load: &Load, (target, draft): (&WorkerCost, &WorkerCost)) {
        self.end_lane_round(load.lane_sequences);
        self.outlook = self.compute_outlook(load, (target, draft));
        self.apply_joint_choice(load, (target, draft));
        if !self.update_k(load) {
            self.probe = self.due_probe(draft);
        }
        let is_far = self.k == 0
            && self.joint.k == 0
            && self.probe.is_none()
            && self.acceptance_rate().is_some()
            && self.lags_far_behind();
        let lane_rounds = if is_far { self.rules.confirming_lane_rounds() } else { 1 };
        self.lane_rounds_left = lane_rounds.saturating_sub(1);
    }

    /// Records the lane round that ended, and begins the next one.
    fn end_lane_round(&mut self, lane_sequences: u32) {
        let is_drafting = f64::from(u8::from(self.k > 0));
        let weight = (self.lane_rounds as f64).clamp(1.0, LONG_EWMA_WINDOW);
        toward(&mut self.drafting_share, is_drafting, weight);
        self.lane_rounds += 1;
        self.probe = None;
        self.probe_budget.earn(self.rules.evidence_share);
        self.feed_budget.earn(self.rules.evidence_share);
        self.residuals.age();
        for (k, sum) in (0..).zip(&mut self.excess_by_k) {
            let ExcessSum { rounds, excess } = std::mem::take(sum);
            if rounds > 0.0 {
                let part = rounds / f64::from(lane_sequences.max(1));
                self.residuals.observe(k, excess / rounds, part);
            }
        }
        self.expire_poor_supply();
    }

    /// Whether each draft length that is allowed is clearly slower than k = 0.
    fn lags_far_behind(&self) -> bool {
        let plain = self.outlook[0].tokens_per_second;
        let mut allowed = self.outlook.iter().skip(1).filter(|at| !at.delays_others());
        allowed.all(|at| at.tokens_per_second < (1.0 - self.rules.unconfirmed_hysteresis) * plain)
    }

    /// Resets poor supply after a time at k = 0. Drafts may have been late only because many prompts arrived
    /// at once.
    fn expire_poor_supply(&mut self) {
        if self.k > 0 {
            self.last_draft_request = self.lane_rounds;
            if self.since_change().is_some_and(|since| since >= self.rules.probe_spacing) {
                self.supply_memory = self.rules.probe_spacing;
            }
        } else if self.lane_rounds - self.last_draft_request >= self.supply_memory
            && self.supply.rates(1)[0] < PRIOR_SUPPLY
        {
            self.supply = AcceptanceByPosition::new(PRIOR_SUPPLY);
            self.last_draft_request = self.lane_rounds;
            self.supply_memory = self.supply_memory.saturating_mul(2);
        }
    }

    fn prices<'a>(&self, load: &'a Load, target: &'a WorkerCost, draft: &'a WorkerCost) -> RoundPricer<'a> {
        RoundPricer { load, groups_max: self.rules.groups_max, prompts: target.prompts, target, draft }
    }

    /// Changes k to the best value if that is worth it. Returns whether k changed.
    fn update_k(&mut self, load: &Load) -> bool {
        let longer_was_best = std::mem::take(&mut self.longer_was_best);
        let here = self.outlook[self.k as usize];
        // Others are delayed by a little more or less as their own rows change. A lane that stopped and began
        // again each time would delay them more.
        let must_leave = here.others_delay > self.rules.hysteresis;
        let margin =
            if self.is_unconfirmed() { self.rules.unconfirmed_hysteresis } else { self.rules.hysteresis };
        let best = self.outlook.iter().filter(|at| at.k != self.k && !at.delays_others()).map(|at| {
            let gain = (at.tokens_per_second / here.tokens_per_second).ln();
            // A smaller k needs no margin, because it does not delay other lanes.
            let margin = if at.k < self.k && !self.is_unconfirmed() { 0.0 } else { margin };
            (gain - margin, gain, at.k)
        });
        let Some((surplus, gain, best)) = best.max_by(|a, b| a.0.total_cmp(&b.0)) else { return false };
        if !must_leave && surplus <= 0.0 {
            self.why = match () {
                () if gain <= 0.0 => ChoiceReason::Best,
                () if self.is_unconfirmed() => ChoiceReason::Settling,
                () => ChoiceReason::WithinHysteresis,
            };
            return false;
        }
        // A request that ends is often followed by another. A longer draft that only the moment between them
        // allows would delay that one, and leave the lane's steps apart from those of the others.
        self.longer_was_best = best > self.k && load.other_sequences > 0;
        if self.longer_was_best && !longer_was_best && !must_leave {
            self.why = ChoiceReason::Confirming;
            return false;
        }
        let from = self.k;
        self.k = best;
        self.why = ChoiceReason::Moving;
        self.speed = Speed::default();
        self.changes.push_back(Change { lane_round: self.lane_rounds, from, to: best, gain });
        if self.changes.len() > CHANGES_KEPT {
            self.changes.pop_front();
        }
        true
    }

    /// Whether the last change has not been measured yet.
    fn is_unconfirmed(&self) -> bool {
        self.since_change().is_some_and(|since| since < self.rules.confirming_lane_rounds())
    }
}
