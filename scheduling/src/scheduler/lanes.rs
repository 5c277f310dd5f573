//! Lanes: groups of requests with similar drafts (same model, task type and temperature band) that share a
//! policy and one choice of draft length. Holds no sequences.

mod explanation;

use std::collections::BTreeMap;
use std::sync::Arc;

use speculation::SamplingParams;
use speculation::lookup::CheckedPrediction;
use speculation::sequence::FEED_LAG;
use speculation::tree::DraftOutcome;

pub use self::explanation::{LaneExplanation, LookupExplanation};
use super::disabled_reason::DisabledReason;
use super::policy::{DraftTokens, LanePolicy, PolicyConfig};
use crate::cost::WorkerCost;
use crate::draft_length::{DraftLength, JointChoice, LaneView, Load, LookupLength, Pace, Rules};
use crate::headroom::MeanRound;
use crate::lookup_rates::{LookupRates, LookupSource};
use crate::output_length::OutputLengths;
use crate::smoothing::{EWMA_WINDOW, toward};

/// Number of lanes from which on a new lane replaces the idle one that was joined least recently. Clients
/// choose task types, so while all have sequences, new task types without a policy share the lane with an
/// empty task type.
pub const MAX_LANES: usize = 256;

/// Number of lanes, those with the most sequences, that represent a model's mix when its pools are sized.
const MIXED_LANES: usize = 4;

/// Identifies a lane: its index. A lane that replaces an idle one gets its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);

/// Key that separates lanes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneKey {
    /// The model.
    pub model: String,
    /// Kind of text; may be empty beyond [`MAX_LANES`].
    pub task_type: String,
    /// Temperature band.
    pub temperature: TemperatureBand,
}

/// Temperature ranges that separate lanes, because acceptance falls with temperature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TemperatureBand {
    /// Argmax.
    Greedy,
    /// Below 0.5.
    Low,
    /// Below 0.9.
    Medium,
    /// 0.9 and above.
    High,
}

impl TemperatureBand {
    /// Name used in metrics and explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }

    /// Returns the band of a request.
    pub fn of(sampling: &SamplingParams) -> Self {
        match sampling.temperature {
            _ if sampling.is_greedy() => Self::Greedy,
            t if t < 0.5 => Self::Low,
            t if t < 0.9 => Self::Medium,
            _ => Self::High,
        }
    }
}

/// Number of sequences at one worker, by lane.
pub(super) type LaneLoads = BTreeMap<LaneId, u32>;

/// A sequence's workers, as needed to choose its draft length.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaneWorkers<'a> {
    pub(super) target: &'a WorkerCost,
    pub(super) draft: &'a WorkerCost,
    /// This scheduler's sequences at the target.
    pub(super) target_sequences: u32,
    /// This scheduler's sequences at the draft worker.
    pub(super) draft_sequences: u32,
    /// Whether both workers take turns on the same CPU cores.
    pub(super) shares_cores: bool,
    /// Maximum tokens of a tree that the target verifies.
    pub(super) max_tree_tokens: u32,
}

/// Draft length chosen for one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneChoice {
    pub(super) num_draft_tokens: u32,
    /// Maximum tokens of a tree; the draft is a chain unless this exceeds `num_draft_tokens`.
    pub(super) num_tree_tokens: u32,
    /// Why the operator's policy set it to 0, if it did.
    pub(super) held_back: Option<DisabledReason>,
    /// Whether this round is a probe of another draft length than the lane's.
    pub(super) is_probe: bool,
}

impl LaneChoice {
    /// A draft length fixed by a request or the operator.
    pub(super) fn fixed(k: u32) -> Self {
        Self { num_draft_tokens: k, num_tree_tokens: 0, held_back: None, is_probe: false }
    }
}

/// Lengths of a sequence, in ids.
#[derive(Debug, Clone, Copy)]
pub(super) struct SequenceLengths {
    pub(super) now: u32,
    pub(super) prompt: u32,
    pub(super) max: u32,
}

/// All lanes.
#[derive(Debug)]
pub(super) struct Lanes {
    policy: PolicyConfig,
    rules: Rules,
    ids: BTreeMap<LaneKey, LaneId>,
    /// Indexed by lane id.
    lanes: Vec<Lane>,
    /// Number of sequences that joined a lane.
    num_joined: u64,
}

#[derive(Debug)]
struct Lane {
    key: Arc<LaneKey>,
    policy: LanePolicy,
    draft_length: DraftLength,
    /// Indexed by source.
    lookup_rates: [LookupRates; LookupSource::ALL.len()],
    outputs: OutputLengths,
    /// Number of sequences, including those that wait for a target.
    sequences: u32,
    /// Value of [`Lanes::num_joined`] when a sequence last joined it.
    joined_at: u64,
    /// Sequences of these that have a target.
    running: u32,
    /// Running sequences whose requests refuse drafts.
    refusing: u32,
    /// Mean length of the lane's sequences.
    context_len: f64,
    k: u32,
    held_back: Option<DisabledReason>,
}

/// The lane that a sequence joined.
#[derive(Debug, Clone)]
pub(super) struct LaneRef {
    pub(super) id: LaneId,
    pub(super) key: Arc<LaneKey>,
}

impl Lanes {
    pub(super) fn new(policy: PolicyConfig, rules: Rules) -> Self {
        Self { policy, rules, ids: BTreeMap::new(), lanes: Vec::new(), num_joined: 0 }
    }

    pub(super) fn policy(&self) -> &PolicyConfig {
        &self.policy
    }

    /// Adds a sequence to the lane of `key`. Returns the lane, and whether it is new.
    pub(super) fn join(&mut self, key: LaneKey) -> (LaneRef, bool) {
        let known = self.ids.get(&key).map(|id| (*id, false));
        let (id, is_new) = known.unwrap_or_else(|| self.open(key));
        self.num_joined += 1;
        let joined_at = self.num_joined;
        let lane = self.lane_mut(id);
        lane.sequences += 1;
        lane.joined_at = joined_at;
        (LaneRef { id, key: Arc::clone(&lane.key) }, is_new)
    }

    /// Returns the lane of a new key, and whether it is new; see [`MAX_LANES`].
    fn open(&mut self, mut key: LaneKey) -> (LaneId, bool) {
        let mut index = self.lanes.len();
        if self.lanes.len() >= MAX_LANES {
            let idle = self.lanes.iter().enumerate().filter(|(_, lane)| lane.sequences == 0);
            if let Some((idle, lane)) = idle.min_by_key(|(_, lane)| lane.joined_at) {
                self.ids.remove(&*lane.key);
                index = idle;
            } else if !self.policy.lanes.contains_key(&key.task_type) {
                key.task_type = String::new();
                if let Some(shared) = self.ids.get(&key) {
                    return (*shared, false);
                }
            }
        }
        let lane = self.new_lane(&key);
        match self.lanes.get_mut(index) {
            Some(idle) => *idle = lane,
            None => self.lanes.push(lane),
        }
        let id = LaneId(index as u32);
        self.ids.insert(key, id);
        (id, true)
    }

    fn new_lane(&self, key: &LaneKey) -> Lane {
        let max_k = self.policy.lane(&key.task_type).max_k;
        Lane {
            key: Arc::new(key.clone()),
            draft_length: DraftLength::with_rules(max_k, self.rules),
            policy: self.policy.lane(&key.task_type),
            lookup_rates: LookupSource::ALL.map(|_| LookupRates::of_lane()),
            outputs: OutputLengths::default(),
            sequences: 0,
            joined_at: 0,
            running: 0,
            refusing: 0,
            context_len: 0.0,
            k: 0,
            // Such a lane never chooses a draft length, so this remains.
            held_back: (max_k == 0).then_some(DisabledReason::Policy),
        }
    }

    /// Removes a sequence. The lane keeps what it learned while it is not replaced.
    pub(super) fn leave(&mut self, id: LaneId) {
        let lane = self.lane_mut(id);
        lane.sequences = lane.sequences.saturating_sub(1);
    }

    /// Records that one of the lane's sequences, which may refuse drafts, got a target.
    pub(super) fn began_running(&mut self, id: LaneId, refuses_drafts: bool) {
        let lane = self.lane_mut(id);
        lane.running += 1;
        lane.refusing += u32::from(refuses_drafts);
    }

    /// Records that one of the lane's sequences lost its target.
    pub(super) fn stopped_running(&mut self, id: LaneId, refuses_drafts: bool) {
        let lane = self.lane_mut(id);
        lane.running = lane.running.saturating_sub(1);
        lane.refusing = lane.refusing.saturating_sub(u32::from(refuses_drafts));
    }

    /// Chooses the draft length of the next round of one of the lane's sequences, of which the draft worker
    /// lacks `draft_lag` ids. `target_loads` returns the sequences at the lane's target, or at the one that has
    /// most of its sequences; it is called once per lane round.
    pub(super) fn choose<'a>(
        &mut self,
        id: LaneId,
        workers: &LaneWorkers<'_>,
        target_loads: impl FnOnce() -> Option<&'a LaneLoads>,
        draft_lag: u32,
    ) -> LaneChoice {
        let running = self.lane_mut(id).running;
        let choice = match self.lane_mut(id).draft_length.next_in_lane_round(running) {
            Some(choice) => choice,
            None => {
                let supports_trees =
                    workers.max_tree_tokens > 0 && self.policy.tree_tokens == DraftTokens::Auto;
                let load = self.load(id, target_loads(), workers.draft_sequences);
                let load = Load { supports_trees, draft_lag, shares_cores: workers.shares_cores, ..load };
                self.lane_mut(id).draft_length.choose(load, workers.target, workers.draft)
            }
        };
        let is_crowded = self.is_crowded(id, workers.target_sequences);
        let lane = self.lane_mut(id);
        // Probes continue; otherwise a rise in acceptance would go unnoticed.
        let is_poor = !choice.is_probe
            && lane.draft_length.acceptance_rate().is_some_and(|rate| rate < lane.policy.min_acceptance);
        lane.held_back = match () {
            () if is_crowded => Some(DisabledReason::LaneMaxBatch),
            () if is_poor => Some(DisabledReason::LaneMinAcceptance),
            () => None,
        };
        // A probe feeds no prompts.
        let is_unfed_probe = choice.is_probe && draft_lag > FEED_LAG;
        let drafts = lane.held_back.is_none() && !is_unfed_probe;
        let num_draft_tokens = if drafts { choice.num_draft_tokens } else { 0 };
        if !choice.is_probe {
            lane.k = num_draft_tokens;
        }
        // A probe measures its k alone, so it drafts no tree.
        let leaves =
            if choice.is_probe || num_draft_tokens == 0 { 0 } else { lane.draft_length.num_leaves() };
        let num_tree_tokens = (num_draft_tokens + leaves).min(workers.max_tree_tokens);
        LaneChoice { num_draft_tokens, num_tree_tokens, held_back: lane.held_back, is_probe: choice.is_probe }
    }

    /// Whether a target has more sequences than the lane's policy allows for drafts of any kind.
    pub(super) fn is_crowded(&self, id: LaneId, target_sequences: u32) -> bool {
        let policy = &self.lane(id).policy;
        policy.max_batch_for_speculation.is_some_and(|most| target_sequences > most)
    }

    /// Load that a lane shares its workers with: the lanes of its model that have sequences at its target.
    fn load(&self, id: LaneId, target_loads: Option<&LaneLoads>, draft_sequences: u32) -> Load {
        let own = self.lane(id);
        let same_model = |(_, lane): &(usize, &Lane)| lane.key.model == own.key.model;
        let (ids, views): (Vec<usize>, Vec<LaneView>) = self
            .lanes
            .iter()
            .enumerate()
            .filter(same_model)
            .map(|(index, lane)| {
                // Other lanes must not delay a lane that may not draft, or whose requests refuse drafts.
                let joint = match lane.held_back {
                    None if lane.refusing == 0 => lane.draft_length.joint(),
                    _ => JointChoice::NO_JOINT_DRAFTING,
                };
                let k = if lane.refusing < lane.running { lane.k } else { 0 };
                let num_leaves = if k > 0 { lane.draft_length.num_leaves() } else { 0 };
                let at_target = target_loads.and_then(|loads| loads.get(&LaneId(index as u32)));
                let view = LaneView {
                    sequences: at_target.copied().unwrap_or(0),
                    k,
                    num_leaves,
                    context: lane.context_len,
                    round_us: lane.draft_length.pace(1).round_us,
                    joint,
                };
                (index, view)
            })
            .unzip();
        let index = ids.binary_search(&(id.0 as usize)).expect("the lane is among the lanes of its model");
        Load { lane_sequences: own.running.max(1), ..Load::of(&views, index, draft_sequences) }
    }

    /// Records the outcome of a lookup source's prediction for a committed token.
    pub(super) fn on_prediction(&mut self, id: LaneId, source: LookupSource, checked: CheckedPrediction) {
        self.lane_mut(id).lookup_rates[source as usize].observe(checked);
    }

    pub(super) fn lookup_rates(&self, id: LaneId, source: LookupSource) -> &LookupRates {
        &self.lane(id).lookup_rates[source as usize]
    }

    /// Chooses how many tokens of a lookup draft are worth verifying; see `DraftLength::choose_lookup`.
    /// `target` is the cost of the sequence's target, and the sequences there.
    pub(super) fn choose_lookup(
        &self,
        id: LaneId,
        reached: &[f64],
        (target, target_loads): (&WorkerCost, &LaneLoads),
        asks_worker: bool,
    ) -> Option<LookupLength> {
        let lane = self.lane(id);
        if reached.first().is_none_or(|first| *first < lane.policy.min_acceptance) {
            return None;
        }
        let load = self.load(id, Some(target_loads), 0);
        lane.draft_length.choose_lookup(reached, (&load, target), asks_worker)
    }

    /// The controller of the lane's draft length.
    pub(super) fn draft_length_mut(&mut self, id: LaneId) -> &mut DraftLength {
        &mut self.lane_mut(id).draft_length
    }

    /// Records the verification of one of the lane's sequences, whose length is now `len` ids.
    pub(super) fn on_verified(&mut self, id: LaneId, judged: &DraftOutcome, len: u32) {
        let lane = self.lane_mut(id);
        lane.draft_length.observe_verification(judged.num_positions, judged.num_first);
        lane.draft_length.observe_siblings(judged);
        if lane.context_len == 0.0 {
            lane.context_len = f64::from(len);
        }
        toward(&mut lane.context_len, f64::from(len), EWMA_WINDOW);
    }

    /// Records the length of a complete output.
    pub(super) fn on_output(&mut self, id: LaneId, tokens: u32) {
        self.lane_mut(id).outputs.observe(tokens);
    }

    /// Expected final length of a sequence of the lane, including drafted ids.
    pub(super) fn expected_len(&self, id: LaneId, lengths: SequenceLengths) -> u32 {
        let lane = self.lane(id);
        let SequenceLengths { now, prompt, max } = lengths;
        let usual = lane.outputs.p90().map_or(max, |p90| prompt.saturating_add(p90).min(max));
        usual.max(now).saturating_add(lane.policy.max_k)
    }

    /// Models of all lanes; may repeat.
    pub(super) fn models(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(|key| key.model.as_str())
    }

    /// Number of sequences of a model, including waiting ones.
    pub(super) fn sequences_of(&self, model: &str) -> u32 {
        self.of_model(model).map(|lane| lane.sequences).sum()
    }

    /// Whether the operator allows drafts for any of a model's sequences.
    pub(super) fn may_draft(&self, model: &str) -> bool {
        self.of_model(model).any(|lane| lane.sequences > 0 && self.policy.lane(&lane.key.task_type).max_k > 0)
    }

    /// Predicts the tokens per second that one target would commit under a load of sequences and draft
    /// workers, for the mix of the busiest lanes; see [`DraftLength::predict_throughput`].
    pub(super) fn predict_throughput(
        &self,
        model: &str,
        load: (f64, f64),
        (target, draft): (&WorkerCost, &WorkerCost),
    ) -> f64 {
        let mut lanes: Vec<&Lane> = self.of_model(model).filter(|lane| lane.sequences > 0).collect();
        lanes.sort_by_key(|lane| std::cmp::Reverse(lane.sequences));
        lanes.truncate(MIXED_LANES);
        let all: u32 = lanes.iter().map(|lane| lane.sequences).sum();
        let of_lane = |lane: &&Lane| {
            let throughput = lane.draft_length.predict_throughput(load, lane.context_len, (target, draft));
            f64::from(lane.sequences) / f64::from(all) * throughput
        };
        lanes.iter().map(of_lane).sum()
    }

    fn of_model<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a Lane> {
        self.lanes.iter().filter(move |lane| lane.key.model == model)
    }

    /// Mean round of the lane; `None` before its first round.
    pub(super) fn mean_round(&self, id: LaneId) -> Option<MeanRound> {
        let lane = self.lanes.get(id.0 as usize)?;
        let Pace { tokens_per_second, round_us } = lane.draft_length.pace(1);
        (round_us > 0.0).then(|| MeanRound {
            tokens: tokens_per_second * round_us / 1e6,
            rows: f64::from(lane.k + 1),
            micros: round_us,
            context: lane.context_len,
        })
    }

    /// Weight of the lane in the queue for targets.
    pub(super) fn weight(&self, id: LaneId) -> f64 {
        self.lane(id).policy.weight
    }

    fn lane(&self, id: LaneId) -> &Lane {
        &self.lanes[id.0 as usize]
    }

    fn lane_mut(&mut self, id: LaneId) -> &mut Lane {
        &mut self.lanes[id.0 as usize]
    }
}

#[cfg(test)]
mod tests;
