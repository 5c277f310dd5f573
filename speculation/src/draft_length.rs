//! How far a lane drafts: the k in 0..=max that promises the most committed tokens per second at the present load. Last link of the
//! choice of k ([`crate::survival`], [`crate::cost`], this). The router's lanes and the simulator drive this same code;
//! it reads no clock and draws no randomness.
//!
//! For each k: the tokens that a round is expected to commit (survival), over the time that it is expected to take: the wait for the
//! draft, its queue and wire included, then the verification, with all rows that share the target's forward. Both times are
//! the workers' tables times what rounds of that k took lately beyond them ([`crate::cost::Residuals`]), so that whatever no
//! table knows, steps that run into each other above all, is in the price once it was seen. That drafting hides behind verifying
//! is believed as far as rounds show it (`price.rs`).
//!
//! k = 0 is a choice like the others. What a lane does not do it does not learn about, so now and then it takes one round at another k: a
//! probe, paid for out of a fixed share of the lane's time. All its sequences probe, for what such a round takes is to be learned, too; but
//! where k = 0 and drafts come from several workers only a few, for these would come back in parts.

mod explanation;
mod load;
mod price;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

pub use explanation::{Change, Explanation, Outlook, Why};
pub use load::{LaneView, Load, Pace};
use price::{Overlap, Price};

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
pub const HYSTERESIS: f64 = 0.01;

/// So much more where the move takes back one that is fewer than [`REVERSAL_LANE_ROUNDS`] old.
pub const REVERSAL_HYSTERESIS: f64 = 0.04;

/// See [`REVERSAL_HYSTERESIS`].
pub const REVERSAL_LANE_ROUNDS: u64 = 24;

/// After a move to k = 0 it takes so many lane rounds until sequences that drafted have joined those that did not: until then
/// rounds are not measured, and k stays for as long again.
pub const SETTLING_OFF_LANE_ROUNDS: u64 = 3;

/// A lane that was turned off again within [`REVERSAL_LANE_ROUNDS`] of being turned on stays off for so many lane rounds, the next
/// time for twice as many, and so on up to a limit, unless on promises [`BACKOFF_HYSTERESIS`] more.
pub const BACKOFF_LANE_ROUNDS: (u64, u64) = (32, 2_048);

/// See [`BACKOFF_LANE_ROUNDS`].
pub const BACKOFF_HYSTERESIS: f64 = 0.25;

/// The share of a lane's time that probes may cost, by their predicted loss.
pub const PROBE_SHARE: f64 = 0.015;

/// Lane rounds between probes at least, while k = 0 and else.
pub const PROBE_SPACING_OFF: u64 = 12;
/// See [`PROBE_SPACING_OFF`].
pub const PROBE_SPACING_ON: u64 = 48;

/// A probe is taken to cost this part of a round at least, however little it seems to.
const PROBE_LOSS_MIN: f64 = 0.1;

/// While k = 0 one in so many sequences probes, where their drafts come from several workers.
const PROBING_ONE_IN: u32 = 16;

/// What it costs, in rounds, until a sequence that probed is together with the plain ones again.
const REJOINING_LOSS: f64 = 1.0;

/// What was not spent on probes is kept up to so many rounds.
const PROBE_CREDIT_MAX: f64 = 4.0;

/// What a round's time at one k says of its neighbour's.
const K_REACH: f64 = 0.2;

/// Lane rounds that the predicted time of a round with a draft is worth. Little, for where a table is wrong between two of its rows, only
/// the few probes of another k can set it right.
const DRAFTED_TRUST: f64 = 1.0;

/// The same without a draft: these are measured for as long as k = 0 lasts, and a single bad one, after a stall or in the middle of a
/// change, must not speak against them.
const PLAIN_TRUST: f64 = 6.0;

/// After a move to another k > 0 so many lane rounds are not measured: sequences that began before it are in the way of the others.
const SETTLING_ON_LANE_ROUNDS: u64 = 2;

/// Each lane round, what was measured counts for so much less.
const KEEP_PER_LANE_ROUND: f64 = 1.0 - 1.0 / 64.0;

/// Rounds that the measured speed remembers, and changes that are kept to explain.
const SPEED_MEMORY: f64 = 32.0;
const CHANGES_KEPT: usize = 16;

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
}

/// The controller of one lane.
#[derive(Debug, Clone)]
pub struct DraftLength {
    max_k: u32,
    k: u32,
    survival: Survival,
    supply: Survival,
    /// By k; index 0 is not used.
    draft_residuals: Residuals,
    verify_residuals: Residuals,
    /// Of rounds without a draft. They do not run into each other as drafted ones do: neither speaks for the other.
    plain_residual: Residuals,
    /// How far drafting hides behind verifying.
    overlap: Overlap,
    outlook: Vec<Outlook>,
    load: Option<Load>,
    probe: Option<u32>,
    /// Sequences that begin this lane round with the probe's k; the others with the lane's.
    left_to_probe: u32,
    probe_credit: f64,
    probes: u64,
    last_probe: u64,
    lane_rounds: u64,
    /// Sequences that still begin in this lane round.
    left_in_round: u32,
    changes: VecDeque<Change>,
    /// In which lane round drafting was last turned on, and how long off lasts.
    turned_on: u64,
    backoff: u64,
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

impl DraftLength {
    /// A fresh lane; its first round moves off k = 0 already, if the prior says so.
    pub fn new(max_k: u32) -> Self {
        let max_k = max_k.min(MAX_DRAFT_TOKENS as u32);
        let residuals = Residuals::new(max_k as usize + 1, K_REACH, DRAFTED_TRUST);
        Self {
            max_k,
            k: 0,
            survival: Survival::new(PRIOR_ACCEPTANCE),
            supply: Survival::new(PRIOR_SUPPLY),
            draft_residuals: residuals.clone(),
            verify_residuals: residuals,
            plain_residual: Residuals::new(1, 0.0, PLAIN_TRUST),
            overlap: Overlap::default(),
            outlook: Vec::new(),
            load: None,
            probe: None,
            left_to_probe: 0,
            // A fresh lane knows nothing: it may ask soon.
            probe_credit: PROBE_CREDIT_MAX / 4.0,
            probes: 0,
            last_probe: 0,
            lane_rounds: 0,
            left_in_round: 0,
            changes: VecDeque::new(),
            turned_on: 0,
            backoff: 0,
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
        self.choose_as_decided().expect("a lane round has at least one sequence")
    }

    /// k for another sequence of the lane round under way; nothing where all had their turn, and [`Self::choose`] is to decide.
    pub fn choose_as_decided(&mut self) -> Option<Choice> {
        self.left_in_round = self.left_in_round.checked_sub(1)?;
        Some(match self.probe {
            Some(k) if self.left_to_probe > 0 => {
                self.left_to_probe -= 1;
                Choice { num_draft_tokens: k, is_probe: true }
            }
            _ => Choice { num_draft_tokens: self.k, is_probe: false },
        })
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
        let settling = if k == 0 { SETTLING_OFF_LANE_ROUNDS } else { SETTLING_ON_LANE_ROUNDS };
        let settled = k == self.k && self.since_change().is_none_or(|since| since >= settling);
        if settled {
            let (tokens, micros) = (f64::from(round.committed), draft_wait + verify);
            for (sum, new) in [
                (&mut self.speed.rounds, 1.0),
                (&mut self.speed.tokens, tokens),
                (&mut self.speed.micros, micros),
            ] {
                *sum = *sum * (1.0 - 1.0 / SPEED_MEMORY) + new;
            }
        }
        // A probe of all tells what rounds of its k take; one of a few, beside plain ones, does not.
        let of_few = load_is_spread(self.load) && self.k == 0;
        let is_probe_of_all = self.probe == Some(k) && !of_few;
        let Some(load) = self.load.filter(|_| (settled || is_probe_of_all) && k <= self.max_k) else {
            return;
        };
        let rows_each = 1.0 + self.supply.survival(k).iter().sum::<f64>();
        let weight = 1.0 / f64::from(self.sequences());
        let price = Price::of(k, rows_each, &load, (target, draft));
        if k > 0 {
            self.overlap.observe(&price, draft_wait + verify, weight);
        }
        let (table_draft_us, table_verify_us) = price.at(self.overlap);
        if k == 0 {
            return self.plain_residual.observe(0, (draft_wait + verify, table_verify_us), weight);
        }
        self.verify_residuals.observe(k as usize, (verify, table_verify_us), weight);
        self.draft_residuals.observe(k as usize, (draft_wait, table_draft_us), weight);
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
        let is_known = self.survival.evidence() >= ACCEPTANCE_EVIDENCE;
        self.survival.rates(1).first().copied().filter(|_| is_known)
    }

    /// Everything that the next choice rests on.
    pub fn explain(&self) -> Explanation {
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
            measured_tokens_per_second: self.pace(self.sequences()).tokens_per_second,
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
        self.load.map_or(1, |load| load.sequences.max(1))
    }

    fn begin_lane_round(&mut self, target: &WorkerCost, draft: &WorkerCost) {
        let Some(load) = self.load else { return };
        self.lane_rounds += 1;
        self.probe = None;
        self.draft_residuals.age(KEEP_PER_LANE_ROUND);
        self.verify_residuals.age(KEEP_PER_LANE_ROUND);
        self.plain_residual.age(KEEP_PER_LANE_ROUND);
        self.outlook = self.look_ahead(&load, target, draft);
        if !self.step_towards_best() {
            self.probe = self.due_probe(&load);
        }
    }

    /// What each k promises.
    fn look_ahead(&self, load: &Load, target: &WorkerCost, draft: &WorkerCost) -> Vec<Outlook> {
        let survival = self.survival.survival(self.max_k);
        let supply = self.supply.survival(self.max_k);
        let sequences = f64::from(load.sequences.max(1));
        let (mut expected_tokens, mut rows_each) = (1.0, 1.0);
        // What is in the way of this lane's rounds now, prompts above all, would be in the way of others as well.
        let usual = match self.k {
            0 => self.plain_residual.factor(0),
            k => self.verify_residuals.factor(k as usize),
        };
        let mut outlook = Vec::with_capacity(self.max_k as usize + 1);
        for k in 0..=self.max_k {
            if k > 0 {
                let (survived, supplied) = (survival[k as usize - 1], supply[k as usize - 1]);
                expected_tokens += supplied * survived;
                rows_each += supplied;
            }
            let price = Price::of(k, rows_each, load, (target, draft));
            let (table_draft_us, table_verify_us) = price.at(self.overlap);
            let draft_wait_us = table_draft_us * self.draft_residuals.factor(k as usize);
            let verify_us = table_verify_us
                * match k {
                    0 => self.plain_residual.factor_beside(0, usual),
                    _ => self.verify_residuals.factor_beside(k as usize, usual),
                };
            let round_us = draft_wait_us + verify_us;
            outlook.push(Outlook {
                k,
                expected_tokens,
                table_draft_us,
                table_verify_us,
                draft_wait_us,
                verify_us,
                tokens_per_second: sequences * expected_tokens * 1e6 / round_us.max(1.0),
                others_tokens_per_second: 0.0,
            });
        }
        // The other lanes' rounds wait for this lane's rows, too: what they lose by more of them is in the price.
        let now_us = outlook[self.k as usize].table_verify_us;
        let Pace { tokens_per_second, round_us } = load.others;
        for at in outlook.iter_mut().filter(|_| round_us > 0.0) {
            let slowed_us = (round_us + at.table_verify_us - now_us).max(round_us / 8.0);
            at.others_tokens_per_second = tokens_per_second * round_us / slowed_us;
        }
        outlook
    }

    /// Moves k towards the best one, if that is worth it.
    fn step_towards_best(&mut self) -> bool {
        let here = self.outlook[self.k as usize];
        let best = self.outlook.iter().max_by(|a, b| a.worth().total_cmp(&b.worth()));
        let Some(best) = best.copied() else { return false };
        let takes_back = self.changes.back().is_some_and(|last| {
            (last.to > last.from) != (best.k > self.k)
                && self.lane_rounds - last.lane_round < REVERSAL_LANE_ROUNDS
        });
        let margin = match () {
            () if self.k == 0 && self.since_change().is_some_and(|since| since < self.backoff) => {
                BACKOFF_HYSTERESIS
            }
            () if takes_back => REVERSAL_HYSTERESIS,
            () => HYSTERESIS,
        };
        let gain = (best.worth() - here.worth()) / here.tokens_per_second;
        if self.k == 0 && self.since_change().is_some_and(|since| since < 2 * SETTLING_OFF_LANE_ROUNDS) {
            self.why = Why::Settling;
            return false;
        }
        if best.k == self.k || gain <= margin {
            self.why = if best.k == self.k { Why::Best } else { Why::WithinHysteresis };
            return false;
        }
        let from = self.k;
        self.k = if best.k > from {
            best.k.min(from + MAX_MOVE)
        } else {
            best.k.max(from.saturating_sub(MAX_MOVE))
        };
        match (from, self.k) {
            (0, _) => self.turned_on = self.lane_rounds,
            (_, 0) if self.lane_rounds - self.turned_on < REVERSAL_LANE_ROUNDS => {
                self.backoff = (2 * self.backoff).clamp(BACKOFF_LANE_ROUNDS.0, BACKOFF_LANE_ROUNDS.1);
            }
            (_, 0) => self.backoff = 0,
            _ => {}
        }
        self.why = Why::Moving;
        self.speed = Speed::default();
        self.changes.push_back(Change { lane_round: self.lane_rounds, from, to: self.k, best: best.k, gain });
        if self.changes.len() > CHANGES_KEPT {
            self.changes.pop_front();
        }
        true
    }

    /// The k of a probe, if one is due and paid for: off, whether drafting pays by now; else further and shorter in turns.
    fn due_probe(&mut self, load: &Load) -> Option<u32> {
        self.probe_credit = (self.probe_credit + PROBE_SHARE).min(PROBE_CREDIT_MAX);
        let spacing = if self.k == 0 { PROBE_SPACING_OFF } else { PROBE_SPACING_ON };
        if self.lane_rounds - self.last_probe < spacing {
            return None;
        }
        let probe = match self.probes % 4 {
            // Where few sequences share the price of it, the shortest draft has to do.
            _ if self.k == 0 && load.sequences < PROBING_ONE_IN => 1.min(self.max_k),
            _ if self.k == 0 => MAX_MOVE.min(self.max_k),
            0 => (self.k + MAX_MOVE).min(self.max_k),
            1 => self.k - 1,
            2 => (self.k + 1).min(self.max_k),
            _ => self.k.saturating_sub(MAX_MOVE),
        };
        // One round without a draft between rounds with one tells nothing of how many of them would be.
        if probe == self.k || probe == 0 {
            self.probes += 1;
            return None;
        }
        let (here, there) = (&self.outlook[self.k as usize], &self.outlook[probe as usize]);
        let slower = (there.draft_wait_us + there.verify_us) / (here.draft_wait_us + here.verify_us);
        let of_each = (slower - there.expected_tokens / here.expected_tokens).max(PROBE_LOSS_MIN);
        let sequences = load.sequences.max(1);
        // Sequences whose drafts come from several workers leave plain rounds together and come back in parts.
        let (probing, loss) = match self.k {
            0 if load_is_spread(self.load) => {
                let probing = sequences.div_ceil(PROBING_ONE_IN);
                (probing, (of_each + REJOINING_LOSS) * f64::from(probing) / f64::from(sequences))
            }
            _ => (sequences, of_each),
        };
        if self.probe_credit < loss.min(PROBE_CREDIT_MAX) {
            return None;
        }
        self.probe_credit -= loss;
        self.left_to_probe = probing;
        self.probes += 1;
        self.last_probe = self.lane_rounds;
        Some(probe)
    }
}

/// Whether the drafts of a lane's sequences come from several workers.
fn load_is_spread(load: Option<Load>) -> bool {
    load.is_some_and(|load| load.draft_sequences < load.sequences)
}
