//! How far a lane drafts: the k in 0..=max that promises the most committed tokens per second at the present load. Last link of the
//! choice of k ([`crate::survival`], [`crate::cost`], this). The router's lanes and the simulator drive this same code;
//! it reads no clock and draws no randomness.
//!
//! For each k: the tokens that a round is expected to commit (survival), over the time that it is expected to take: the wait for the
//! draft, its queue and wire included, then the verification, with all rows that share the target's forward. Both times are
//! the workers' tables times what rounds of that k took lately beyond them ([`crate::cost::Residuals`]), so that whatever no
//! table knows, steps that run into each other above all, is in the price once it was seen.
//!
//! k = 0 is a choice like the others. What a lane does not do it does not learn about, so now and then all its sequences take one
//! round at another k: a probe, paid for out of a fixed share of the lane's time.

mod explanation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

pub use explanation::{Change, Explanation, Outlook, Why};

use crate::cost::{Residuals, WorkerCost, micros};
use crate::step::MAX_DRAFT_TOKENS;
use crate::survival::Survival;

/// The acceptance rate that a fresh lane is believed to have.
pub const PRIOR_ACCEPTANCE: f64 = 0.6;

/// A draft worker is believed to propose as much as it is asked for.
const PRIOR_SUPPLY: f64 = 0.98;

/// k moves by this much a round at most.
pub const MAX_MOVE: u32 = 2;

/// Another k must promise this much more to be moved to.
pub const HYSTERESIS: f64 = 0.02;

/// So much more where the move takes back one that is fewer than [`REVERSAL_LANE_ROUNDS`] old.
pub const REVERSAL_HYSTERESIS: f64 = 0.05;

/// See [`REVERSAL_HYSTERESIS`].
pub const REVERSAL_LANE_ROUNDS: u64 = 24;

/// The share of a lane's time that probes may cost, by their predicted loss.
pub const PROBE_SHARE: f64 = 0.01;

/// Lane rounds between probes at least, while k = 0 and else.
pub const PROBE_SPACING_OFF: u64 = 12;
/// See [`PROBE_SPACING_OFF`].
pub const PROBE_SPACING_ON: u64 = 48;

/// A probe is taken to cost this part of a round at least, however little it seems to.
const PROBE_LOSS_MIN: f64 = 0.1;

/// What was not spent on probes is kept up to so many rounds.
const PROBE_CREDIT_MAX: f64 = 4.0;

/// What a round's time at one k says of its neighbour's.
const K_REACH: f64 = 0.4;

/// Each lane round, what was measured counts for so much less.
const KEEP_PER_LANE_ROUND: f64 = 1.0 - 1.0 / 256.0;

/// No wait for a draft is shorter, whatever the tables say.
const DRAFT_WAIT_MIN_MICROS: f64 = 50.0;

/// Rounds that the measured speed remembers, and changes that are kept to explain.
const SPEED_MEMORY: f64 = 32.0;
const CHANGES_KEPT: usize = 16;

/// What shares the workers with a lane now.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Load {
    /// The lane's sequences at one target.
    pub sequences: u32,
    /// Rows that other lanes bring to that target's forward.
    pub other_rows: u32,
    /// Sequences of all lanes at one draft worker.
    pub draft_sequences: u32,
    /// Tokens that a sequence holds, on average.
    pub context: f64,
}

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
}

/// The controller of one lane.
#[derive(Debug, Clone)]
pub struct DraftLength {
    max_k: u32,
    k: u32,
    survival: Survival,
    supply: Survival,
    draft_residuals: Residuals,
    verify_residuals: Residuals,
    outlook: Vec<Outlook>,
    load: Option<Load>,
    probe: Option<u32>,
    probe_credit: f64,
    probes: u64,
    last_probe: u64,
    lane_rounds: u64,
    /// Sequences that still begin in this lane round.
    left_in_round: u32,
    changes: VecDeque<Change>,
    why: Why,
    speed: Speed,
}

#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    tokens: f64,
    micros: f64,
}

impl DraftLength {
    /// A fresh lane; its first round moves off k = 0 already, if the prior says so.
    pub fn new(max_k: u32) -> Self {
        let max_k = max_k.min(MAX_DRAFT_TOKENS as u32);
        let residuals = Residuals::new(max_k as usize + 1, K_REACH);
        Self {
            max_k,
            k: 0,
            survival: Survival::new(PRIOR_ACCEPTANCE),
            supply: Survival::new(PRIOR_SUPPLY),
            draft_residuals: residuals.clone(),
            verify_residuals: residuals,
            outlook: Vec::new(),
            load: None,
            probe: None,
            probe_credit: 0.0,
            probes: 0,
            last_probe: 0,
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
            self.left_in_round = load.sequences.max(1);
            self.load = Some(load);
            self.begin_lane_round(target, draft);
        }
        self.left_in_round -= 1;
        Choice { num_draft_tokens: self.probe.unwrap_or(self.k), is_probe: self.probe.is_some() }
    }

    /// A draft worker was asked for `asked` tokens and proposed `supplied` in time.
    pub fn observe_proposal(&mut self, asked: u32, supplied: u32) {
        self.supply.observe(asked, supplied.min(asked), self.sequences());
    }

    /// A verification judged `judged` drafted tokens and accepted the first `accepted`.
    pub fn observe_verdict(&mut self, judged: u32, accepted: u32) {
        if judged > 0 {
            self.survival.observe(judged, accepted.min(judged), self.sequences());
        }
    }

    /// A round is over. Only for rounds that were nothing but drafting and verifying; `target` and `draft` are their workers.
    pub fn observe_round(&mut self, round: &RoundTimes, target: &WorkerCost, draft: &WorkerCost) {
        let k = round.num_draft_tokens;
        let (draft_wait, verify) = (micros(round.draft_wait), micros(round.verify));
        let settled = k == self.k && self.changes.back().is_none_or(|change| change.lane_round < self.lane_rounds);
        if settled {
            self.speed.tokens += (f64::from(round.committed) - self.speed.tokens) / SPEED_MEMORY;
            self.speed.micros += (draft_wait + verify - self.speed.micros) / SPEED_MEMORY;
        }
        let Some(load) = self.load.filter(|_| (settled || self.probe == Some(k)) && k <= self.max_k) else { return };
        let rows_each = 1.0 + self.supply.survival(k).iter().sum::<f64>();
        let weight = 1.0 / f64::from(self.sequences());
        if k > 0 {
            let table = table_draft_us(k, &load, draft);
            self.draft_residuals.observe(k as usize, (draft_wait, table), weight);
        }
        let table = table_verify_us(rows_each, &load, target);
        self.verify_residuals.observe(k as usize, (verify, table), weight);
    }

    /// Everything that the next choice rests on.
    pub fn explain(&self) -> Explanation {
        let measured = if self.speed.micros > 0.0 { self.speed.tokens * 1e6 / self.speed.micros } else { 0.0 };
        Explanation {
            k: self.k,
            max_k: self.max_k,
            why: self.why,
            load: self.load,
            acceptance: self.survival.rates(self.max_k),
            survival: self.survival.survival(self.max_k),
            supply: self.supply.survival(self.max_k),
            judged: self.survival.evidence(),
            outlook: self.outlook.clone(),
            measured_tokens_per_second: measured * f64::from(self.sequences()),
            lane_rounds: self.lane_rounds,
            probes: self.probes,
            changes: self.changes.iter().copied().collect(),
        }
    }

    fn sequences(&self) -> u32 {
        self.load.map_or(1, |load| load.sequences.max(1))
    }

    fn begin_lane_round(&mut self, target: &WorkerCost, draft: &WorkerCost) {
        let Some(load) = self.load else { return };
        self.lane_rounds += 1;
        self.probe = None;
        self.draft_residuals.age(KEEP_PER_LANE_ROUND);
        self.verify_residuals.age(KEEP_PER_LANE_ROUND);
        self.outlook = self.look_ahead(&load, target, draft);
        if !self.step_towards_best() {
            self.probe = self.due_probe();
        }
    }

    /// What each k promises.
    fn look_ahead(&self, load: &Load, target: &WorkerCost, draft: &WorkerCost) -> Vec<Outlook> {
        let survival = self.survival.survival(self.max_k);
        let supply = self.supply.survival(self.max_k);
        let sequences = f64::from(load.sequences.max(1));
        let (mut expected_tokens, mut rows_each) = (1.0, 1.0);
        let mut outlook = Vec::with_capacity(self.max_k as usize + 1);
        for k in 0..=self.max_k {
            if k > 0 {
                let (survived, supplied) = (survival[k as usize - 1], supply[k as usize - 1]);
                expected_tokens += supplied * survived;
                rows_each += supplied;
            }
            let table_draft_us = table_draft_us(k, load, draft);
            let table_verify_us = table_verify_us(rows_each, load, target);
            let draft_wait_us = table_draft_us * self.draft_residuals.factor(k as usize);
            let verify_us = table_verify_us * self.verify_residuals.factor(k as usize);
            let round_us = draft_wait_us + verify_us;
            outlook.push(Outlook {
                k,
                expected_tokens,
                table_draft_us,
                table_verify_us,
                draft_wait_us,
                verify_us,
                tokens_per_second: sequences * expected_tokens * 1e6 / round_us.max(1.0),
            });
        }
        outlook
    }

    /// Moves k towards the best one, if that is worth it.
    fn step_towards_best(&mut self) -> bool {
        let here = self.outlook[self.k as usize].tokens_per_second;
        let best = self.outlook.iter().max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
        let Some(best) = best.copied() else { return false };
        let takes_back = self.changes.back().is_some_and(|last| {
            (last.to > last.from) != (best.k > self.k) && self.lane_rounds - last.lane_round < REVERSAL_LANE_ROUNDS
        });
        let margin = if takes_back { REVERSAL_HYSTERESIS } else { HYSTERESIS };
        if best.k == self.k || best.tokens_per_second <= here * (1.0 + margin) {
            self.why = if best.k == self.k { Why::Best } else { Why::WithinHysteresis };
            return false;
        }
        let from = self.k;
        self.k = if best.k > from { best.k.min(from + MAX_MOVE) } else { best.k.max(from.saturating_sub(MAX_MOVE)) };
        self.why = Why::Moving;
        self.speed = Speed::default();
        let gain = best.tokens_per_second / here - 1.0;
        self.changes.push_back(Change { lane_round: self.lane_rounds, from, to: self.k, best: best.k, gain });
        if self.changes.len() > CHANGES_KEPT {
            self.changes.pop_front();
        }
        true
    }

    /// The k of a probe, if one is due and paid for: off, whether drafting pays by now; else further, shorter and not at
    /// all in turns.
    fn due_probe(&mut self) -> Option<u32> {
        self.probe_credit = (self.probe_credit + PROBE_SHARE).min(PROBE_CREDIT_MAX);
        let spacing = if self.k == 0 { PROBE_SPACING_OFF } else { PROBE_SPACING_ON };
        if self.lane_rounds - self.last_probe < spacing {
            return None;
        }
        let probe = match self.probes % 3 {
            _ if self.k == 0 => MAX_MOVE.min(self.max_k),
            0 => (self.k + MAX_MOVE).min(self.max_k),
            1 => self.k - 1,
            _ => 0,
        };
        if probe == self.k {
            self.probes += 1;
            return None;
        }
        let (here, there) = (&self.outlook[self.k as usize], &self.outlook[probe as usize]);
        let slower = (there.draft_wait_us + there.verify_us) / (here.draft_wait_us + here.verify_us);
        let loss = (slower - there.expected_tokens / here.expected_tokens).max(PROBE_LOSS_MIN);
        if self.probe_credit < loss.min(PROBE_CREDIT_MAX) {
            return None;
        }
        self.probe_credit -= loss;
        self.probes += 1;
        self.last_probe = self.lane_rounds;
        Some(probe)
    }
}

/// The wait for a draft of `k`, by table and wire: a forward a token, shared by all that draft.
fn table_draft_us(k: u32, load: &Load, draft: &WorkerCost) -> f64 {
    if k == 0 {
        return 0.0;
    }
    let step = draft.step_micros(f64::from(load.draft_sequences.max(1)), load.context);
    (draft.wire_micros() + f64::from(k) * step).max(DRAFT_WAIT_MIN_MICROS)
}

/// A verification by table and wire, where each sequence of the lane brings `rows_each`.
fn table_verify_us(rows_each: f64, load: &Load, target: &WorkerCost) -> f64 {
    let rows = f64::from(load.sequences.max(1)) * rows_each + f64::from(load.other_rows);
    target.wire_micros() + target.step_micros(rows, load.context)
}
