//! How far a lane drafts: the k in 0..=max that promises the most committed tokens per second at the present load. Last link of the
//! choice of k ([`crate::acceptance_by_position`], [`crate::cost`], this). The router's lanes and the simulator drive this same code;
//! it reads no clock and draws no randomness.
//!
//! For each k: the tokens that a round is expected to commit (acceptance by position), over the time that it is expected to take: its price by the workers'
//! tables (`price.rs`: the wait for the draft, its queue and wire included, and the verification, with all rows that share the target's
//! forward, in groups by turns where that pays) times what rounds took beyond such prices (`residual_filter.rs`).
//!
//! k = 0 is a choice like the others. How far drafts would be accepted is known there, too, where a draft worker says which of the
//! committed tokens fed to it it would have drawn itself. Only where nobody tells anything of acceptance, a lane at k = 0 takes one drafting
//! round now and then: a probe, paid for out of a fixed share of the lane's time.

mod explanation;
mod joint;
mod load;
mod lookup;
mod price;
mod promise;
mod residual_filter;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

pub use explanation::{Change, Explanation, Outlook, Why};
pub use joint::{Joint, OthersJointly};
pub use load::{LaneView, Load, Pace};
pub(crate) use lookup::LENGTHS;
pub use lookup::LookupLength;
use price::{Price, Prices};
use residual_filter::ResidualFilter;
pub use residual_filter::ResidualRules;
pub use rules::Rules;
use rules::WORTHWHILE;
use rules::{PRIOR_SUPPLY, PROBE_CREDIT_MAX, SUPPLY_MEMORY};

use crate::acceptance_by_position::AcceptanceByPosition;
use crate::cost::{WorkerCost, micros};
use crate::memory::MEMORY;
use crate::tree_size::{Leaf, SiblingRates, TreeSize, tree_size};
use speculation::step::MAX_DRAFT_TOKENS;
use speculation::tree::Judged;

/// Changes that are kept to explain.
const CHANGES_KEPT: usize = 16;

/// The part by which the number of sequences in a forward may differ from that in the one before.
const STEADY: f64 = 0.25;

/// Judged positions that it takes to say what a lane's acceptance rate is.
const ACCEPTANCE_EVIDENCE: f64 = 32.0;

/// The k of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// How many tokens to have drafted.
    pub num_draft_tokens: u32,
    /// Whether this round is there to learn.
    pub is_probe: bool,
}

/// What a round took, as its sequence saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundTimes {
    /// How many tokens the draft worker was asked for; 0: it was not asked.
    pub num_draft_tokens: u32,
    /// From asking until verification began.
    pub draft_wait: Duration,
    /// From then until the span came.
    pub verify: Duration,
    /// Tokens that it committed.
    pub committed: u32,
    /// Rows that siblings took in its verification.
    pub num_leaves: u32,
    /// Sequences in the forward that verified it, and in that of the sequence's round before; 0: there was none.
    pub forward_sequences: [u32; 2],
}

impl RoundTimes {
    /// Whether the round was verified among as many sequences as the one before. Where not, groups were joining or parting: it took what that takes.
    fn is_steady(&self) -> bool {
        let [now, before] = self.forward_sequences.map(f64::from);
        (now - before).abs() <= STEADY * before
    }
}

/// The controller of one lane.
#[derive(Debug, Clone)]
pub struct DraftLength {
    rules: Rules,
    max_k: u32,
    k: u32,
    acceptance: AcceptanceByPosition,
    supply: AcceptanceByPosition,
    siblings: SiblingRates,
    /// The lane round in which drafts were last asked for, and for how many after it their being late is remembered.
    asked: u64,
    supply_memory: u64,
    /// What rounds take beyond their price.
    residuals: ResidualFilter,
    /// By k.
    gathered: Vec<Gathered>,
    outlook: Vec<Outlook>,
    /// What it would do if all lanes of its target drafted.
    joint: Joint,
    load: Option<Load>,
    /// The k of this lane round, where it is a probe.
    probe: Option<u32>,
    probe_credit: f64,
    probes: u64,
    /// The lane round in which something was last heard of acceptance.
    heard: u64,
    lane_rounds: u64,
    /// Sequences that still begin in this lane round.
    left_in_round: u32,
    changes: VecDeque<Change>,
    why: Why,
    speed: Speed,
}

/// Decayed sums over rounds at the present k.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    rounds: f64,
    tokens: f64,
    micros: f64,
}

/// What the rounds of one lane round took beyond their price, at one k.
#[derive(Debug, Clone, Copy, Default)]
struct Gathered {
    rounds: f64,
    excess: f64,
}

impl DraftLength {
    /// A fresh lane; its first round moves off k = 0 already, if the prior says so.
    pub fn new(max_k: u32) -> Self {
        Self::with_rules(max_k, Rules::default())
    }

    /// A fresh lane that goes by other rules.
    pub fn with_rules(max_k: u32, rules: Rules) -> Self {
        let max_k = max_k.min(MAX_DRAFT_TOKENS as u32);
        Self {
            rules,
            max_k,
            k: 0,
            acceptance: AcceptanceByPosition::with_rules(rules.prior_acceptance, rules.acceptance),
            supply: AcceptanceByPosition::new(PRIOR_SUPPLY),
            siblings: SiblingRates::default(),
            asked: 0,
            supply_memory: SUPPLY_MEMORY,
            residuals: ResidualFilter::new(max_k, rules.residuals),
            gathered: vec![Gathered::default(); max_k as usize + 1],
            outlook: Vec::new(),
            joint: Joint::default(),
            load: None,
            probe: None,
            // A fresh lane knows nothing: it may ask soon.
            probe_credit: PROBE_CREDIT_MAX / 4.0,
            probes: 0,
            heard: 0,
            lane_rounds: 0,
            left_in_round: 0,
            changes: VecDeque::new(),
            why: Why::Best,
            speed: Speed::default(),
        }
    }

    /// k for the round that one of the lane's sequences begins. Decides anew whenever each of them had its turn.
    pub fn choose(&mut self, load: Load, target: &WorkerCost, draft: &WorkerCost) -> Choice {
        if self.left_in_round == 0 {
            self.left_in_round = load.lane_sequences.max(1);
            self.load = Some(load);
            self.begin_lane_round(&load, (target, draft));
        }
        self.choose_as_decided().expect("a lane round has at least one sequence")
    }

    /// k for another sequence of the lane round under way; nothing where all had their turn, and [`Self::choose`] is to decide.
    pub fn choose_as_decided(&mut self) -> Option<Choice> {
        self.left_in_round = self.left_in_round.checked_sub(1)?;
        Some(Choice { num_draft_tokens: self.probe.unwrap_or(self.k), is_probe: self.probe.is_some() })
    }

    /// A draft worker was asked for `asked` tokens and proposed `supplied` in time.
    pub fn observe_proposal(&mut self, asked: u32, supplied: u32) {
        self.supply.observe(0..asked, supplied.min(asked), self.sequences());
    }

    /// A verification judged `judged` drafted tokens and accepted the first `accepted`.
    pub fn observe_verdict(&mut self, judged: u32, accepted: u32) {
        if judged > 0 {
            self.heard = self.lane_rounds;
            self.acceptance.observe(0..judged, accepted.min(judged), self.sequences());
        }
    }

    /// What a verification of a tree tells of its siblings, too.
    pub fn observe_siblings(&mut self, judged: &Judged) {
        self.siblings.observe(judged);
    }

    /// How many siblings the lane's drafts get as leaves.
    pub fn num_leaves(&self) -> u32 {
        self.outlook.get(self.k as usize).map_or(0, |at| at.num_leaves)
    }

    /// A draft worker was fed committed tokens, and says of those in `positions`, counted from where its draft would have begun, that it
    /// would have drawn them itself as far as `accepted`.
    pub fn observe_agreement(&mut self, positions: Range<u32>, accepted: u32) {
        if !positions.is_empty() {
            self.heard = self.lane_rounds;
            self.acceptance.observe(positions, accepted, self.sequences());
        }
    }

    /// A round is over. Only for rounds that were nothing but drafting and verifying; `target` and `draft` are their workers.
    pub fn observe_round(&mut self, round: &RoundTimes, target: &WorkerCost, draft: &WorkerCost) {
        let k = round.num_draft_tokens;
        let (draft_wait, verify) = (micros(round.draft_wait), micros(round.verify));
        let settled =
            k == self.k && self.since_change().is_none_or(|since| since >= self.rules.settling_lane_rounds);
        if settled {
            let (tokens, micros) = (f64::from(round.committed), draft_wait + verify);
            for (sum, new) in [
                (&mut self.speed.rounds, 1.0),
                (&mut self.speed.tokens, tokens),
                (&mut self.speed.micros, micros),
            ] {
                *sum = *sum * (1.0 - 1.0 / MEMORY) + new;
            }
        }
        let is_telling = (settled || self.probe == Some(k)) && k <= self.max_k;
        let Some(load) = self.load.filter(|_| is_telling) else { return };
        if load.other_sequences == 0 && !round.is_steady() {
            return;
        }
        let chain_rows = 1.0 + self.supply.cumulative(k).iter().sum::<f64>();
        let rows_each = chain_rows + f64::from(round.num_leaves);
        let among = round.forward_sequences[0];
        let price = self.prices(&load, target, draft).round_among(among, k, rows_each);
        let excess = (draft_wait + verify) / price.round_us() - 1.0;
        if excess.is_finite() {
            let gathered = &mut self.gathered[k as usize];
            gathered.rounds += 1.0;
            gathered.excess += excess;
        }
    }

    /// How fast `sequences` of the lane were at the present k; nothing before its first round.
    pub fn pace(&self, sequences: u32) -> Pace {
        let Speed { rounds, tokens, micros } = self.speed;
        if micros <= 0.0 {
            return Pace::default();
        }
        Pace { tokens_per_second: f64::from(sequences) * tokens * 1e6 / micros, round_us: micros / rounds }
    }

    /// The chance that a first guess is accepted; nothing before there is evidence of it.
    pub fn acceptance_rate(&self) -> Option<f64> {
        let is_known = self.acceptance.evidence() >= ACCEPTANCE_EVIDENCE;
        self.acceptance.rates(1).first().copied().filter(|_| is_known)
    }

    /// Everything that the next choice rests on.
    pub fn explain(&self) -> Explanation {
        Explanation {
            k: self.k,
            max_k: self.max_k,
            leaves: self.num_leaves(),
            siblings: self.siblings.rates().to_vec(),
            why: self.why,
            load: self.load,
            joint: self.joint,
            acceptance: self.acceptance.rates(self.max_k),
            acceptance_by_position: self.acceptance.cumulative(self.max_k),
            supply: self.supply.cumulative(self.max_k),
            judged: self.acceptance.evidence(),
            outlook: self.outlook.clone(),
            measured_tokens_per_second: self
                .pace(self.load.map_or(1, |load| load.sequences))
                .tokens_per_second,
            lane_rounds: self.lane_rounds,
            probes: self.probes,
            changes: self.changes.iter().copied().collect(),
        }
    }

    /// Lane rounds since k moved.
    fn since_change(&self) -> Option<u64> {
        self.changes.back().map(|change| self.lane_rounds - change.lane_round)
    }

    fn sequences(&self) -> u32 {
        self.load.map_or(1, |load| load.lane_sequences.max(1))
    }

    fn begin_lane_round(&mut self, load: &Load, (target, draft): (&WorkerCost, &WorkerCost)) {
        self.lane_rounds += 1;
        self.probe = None;
        self.residuals.age();
        for (k, gathered) in (0..).zip(&mut self.gathered) {
            let Gathered { rounds, excess } = std::mem::take(gathered);
            if rounds > 0.0 {
                let part = rounds / f64::from(load.lane_sequences.max(1));
                self.residuals.observe(k, excess / rounds, part);
            }
        }
        self.age_supply();
        self.outlook = self.look_ahead(load, target, draft);
        self.join_others(load, (target, draft));
        if !self.step_towards_best() {
            self.probe = self.due_probe();
        }
    }

    /// Drafts that were late, as they are where many prompts come at once, are no reason to draft nothing for ever.
    fn age_supply(&mut self) {
        if self.k > 0 {
            self.asked = self.lane_rounds;
            if self.since_change().is_some_and(|since| since >= SUPPLY_MEMORY) {
                self.supply_memory = SUPPLY_MEMORY;
            }
        } else if self.lane_rounds - self.asked >= self.supply_memory
            && self.supply.rates(1)[0] < PRIOR_SUPPLY
        {
            self.supply = AcceptanceByPosition::new(PRIOR_SUPPLY);
            self.asked = self.lane_rounds;
            self.supply_memory = self.supply_memory.saturating_mul(2);
        }
    }

    /// What each k promises.
    fn look_ahead(&self, load: &Load, target: &WorkerCost, draft: &WorkerCost) -> Vec<Outlook> {
        let accepted_by_position = self.acceptance.cumulative(self.max_k);
        let supply = self.supply.cumulative(self.max_k);
        let sequences = f64::from(load.sequences.max(1));
        let prices = self.prices(load, target, draft);
        let leaves = if load.takes_trees { self.siblings.leaves(&accepted_by_position) } else { Vec::new() };
        let (mut chain_tokens, mut rows_each) = (1.0, 1.0);
        let mut outlook = Vec::with_capacity(self.max_k as usize + 1);
        for k in 0..=self.max_k {
            if k > 0 {
                let (survived, supplied) = (accepted_by_position[k as usize - 1], supply[k as usize - 1]);
                chain_tokens += supplied * survived;
                rows_each += supplied;
            }
            let TreeSize { num_leaves, expected_tokens } =
                size_of_tree(&prices, (k, chain_tokens, rows_each), &leaves);
            let price = prices.round(k, rows_of((k, rows_each), num_leaves));
            let factor = self.residuals.factor(k);
            let (draft_wait_us, verify_us) = (price.draft_us * factor, price.verify_us * factor);
            outlook.push(Outlook {
                k,
                num_leaves,
                expected_tokens,
                table_draft_us: price.draft_us,
                table_verify_us: price.verify_us,
                draft_wait_us,
                verify_us,
                tokens_per_second: sequences * expected_tokens * 1e6 / (draft_wait_us + verify_us).max(1.0),
                others_delay: price.forwards.mean_us(factor / self.residuals.factor(0)),
            });
        }
        // Other lanes' rounds wait for this lane's rows. Those that have just moved do not know what theirs take: more than a forward.
        let plain_us = outlook[0].others_delay;
        let others_round_us = load.others.round_us.max(plain_us);
        for at in &mut outlook {
            at.others_delay =
                if load.other_sequences > 0 { (at.others_delay - plain_us) / others_round_us } else { 0.0 };
        }
        outlook
    }

    fn prices<'a>(&self, load: &'a Load, target: &'a WorkerCost, draft: &'a WorkerCost) -> Prices<'a> {
        Prices { load, groups_max: self.rules.groups_max, target, draft }
    }

    /// Moves k towards the one that it is worth the most to be at.
    fn step_towards_best(&mut self) -> bool {
        let here = self.outlook[self.k as usize];
        let must_leave = self.delays_others(&here);
        let margin = if self.is_rash() { self.rules.rash_hysteresis } else { self.rules.hysteresis };
        let best = self.outlook.iter().filter(|at| at.k != self.k && !self.delays_others(at)).map(|at| {
            let gain = (at.tokens_per_second / here.tokens_per_second).ln();
            // To draft less costs nobody anything: no other lane's rounds become longer by it.
            let margin = if at.k < self.k && !self.is_rash() { 0.0 } else { margin };
            (gain - margin, gain, at.k)
        });
        let Some((surplus, gain, best)) = best.max_by(|a, b| a.0.total_cmp(&b.0)) else { return false };
        if !must_leave && surplus <= 0.0 {
            self.why = match () {
                () if gain <= 0.0 => Why::Best,
                () if self.is_rash() => Why::Settling,
                () => Why::WithinHysteresis,
            };
            return false;
        }
        let from = self.k;
        self.k = best;
        self.why = Why::Moving;
        self.speed = Speed::default();
        self.changes.push_back(Change { lane_round: self.lane_rounds, from, to: best, gain });
        if self.changes.len() > CHANGES_KEPT {
            self.changes.pop_front();
        }
        true
    }

    /// Whether others would wait for its rows longer than they may be made to.
    fn delays_others(&self, at: &Outlook) -> bool {
        at.others_delay > self.rules.others_delay_max
    }

    /// Whether the last move was not measured yet.
    fn is_rash(&self) -> bool {
        self.since_change().is_some_and(|since| since < 2 * self.rules.settling_lane_rounds)
    }

    /// The k of a probe, if one is due and paid for.
    fn due_probe(&mut self) -> Option<u32> {
        self.probe_credit = (self.probe_credit + self.rules.probe_share).min(PROBE_CREDIT_MAX);
        if self.lane_rounds - self.heard < self.rules.probe_spacing || self.max_k == 0 {
            return None;
        }
        // Above 0 nothing is heard of drafts that were chosen: whoever asks holds them back, and lets probes through.
        let probe = self.k.max(1);
        let (here, there) = (&self.outlook[self.k as usize], &self.outlook[probe as usize]);
        let slower = (there.draft_wait_us + there.verify_us) / (here.draft_wait_us + here.verify_us);
        let loss = (slower - there.expected_tokens / here.expected_tokens).max(0.0);
        if self.probe_credit < loss.min(PROBE_CREDIT_MAX) {
            return None;
        }
        self.probe_credit -= loss;
        self.probes += 1;
        self.heard = self.lane_rounds;
        Some(probe)
    }
}

/// How many of `leaves` pay beside a chain of `k` tokens, given the tokens that its round commits and its rows. Other lanes wait for no leaf.
fn size_of_tree(prices: &Prices<'_>, (k, tokens, rows_each): (u32, f64, f64), leaves: &[Leaf]) -> TreeSize {
    let chain = prices.round(k, rows_each);
    let forward_us = |price: &Price| price.forwards.mean_us(1.0);
    let worth = leaves.iter().filter(|leaf| leaf.position < k).map(|leaf| leaf.worth);
    tree_size(tokens, worth, |num_leaves| {
        let price = prices.round(k, rows_of((k, rows_each), num_leaves));
        let delays_others = prices.load.other_sequences > 0 && forward_us(&price) > forward_us(&chain);
        (!delays_others).then(|| price.round_us())
    })
}

/// Rows of a verification: those of a chain as far as it is proposed, `chain_rows` on average. A tree has all ids that it was asked for.
fn rows_of((k, chain_rows): (u32, f64), num_leaves: u32) -> f64 {
    if num_leaves == 0 { chain_rows } else { f64::from(1 + k + num_leaves) }
}
