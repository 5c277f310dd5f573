//! One controller a lane: who of the router's sequences shares it, and what `speculation::draft_length` has to know of the
//! rest. It holds no sequence and decides no k itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use speculation::cost::WorkerCost;
use speculation::draft_length::{DraftLength, Explanation, LaneView, Load, RoundTimes};
use speculation::output_length::OutputLengths;

use crate::lane::LaneKey;
use crate::lane::policy::{LanePolicy, PolicyConfig};
use crate::lane::running::JoinedLane;
use crate::metrics::{LaneMetrics, RouterMetrics};

/// Lanes that are told apart; past it, what has a new task type shares the lane that has none. Task types come from clients.
pub const MAX_LANES: usize = 256;

/// Rounds that a lane's mean context remembers.
const CONTEXT_MEMORY: f64 = 64.0;

/// One lane, as `/debug/lanes` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneExplanation {
    /// Which model.
    pub model: String,
    /// What kind of text; empty for those of too many kinds to tell apart.
    pub task_type: String,
    /// How much chance there is in the draw.
    pub temperature: &'static str,
    /// Sequences in it now.
    pub sequences: u32,
    /// What the operator settled for it.
    pub policy: LanePolicy,
    /// Why its latest round drafted nothing, where the operator's policy wanted that.
    pub held_back: Option<&'static str>,
    /// Nine in ten of its outputs are no longer; nothing before a few ended.
    pub output_p90: Option<u32>,
    /// What its k rests on.
    #[serde(flatten)]
    pub choice: Explanation,
}

/// The workers of one sequence, as the choice of its k sees them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workers<'a> {
    pub(super) target: &'a WorkerCost,
    pub(super) draft: &'a WorkerCost,
    /// Targets that serve the model.
    pub(super) num_targets: u32,
    /// Sequences of this router at the target, and at the draft worker.
    pub(super) target_sequences: u32,
    pub(super) draft_sequences: u32,
}

/// How far a round drafts, and why not at all where policy says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) num_draft_tokens: u32,
    pub(super) held_back: Option<&'static str>,
}

/// The controllers of all lanes.
#[derive(Debug)]
pub(super) struct Controllers {
    policy: PolicyConfig,
    metrics: RouterMetrics,
    numbers: BTreeMap<LaneKey, u32>,
    /// By number.
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    key: Arc<LaneKey>,
    policy: LanePolicy,
    controller: DraftLength,
    outputs: OutputLengths,
    sequences: u32,
    /// What the lane's sequences hold, on average.
    context: f64,
    k: u32,
    held_back: Option<&'static str>,
    metrics: LaneMetrics,
}

impl Controllers {
    pub(super) fn new(policy: PolicyConfig, metrics: RouterMetrics) -> Self {
        Self { policy, metrics, numbers: BTreeMap::new(), lanes: Vec::new() }
    }

    /// Another sequence, and the lane that it is in from now on.
    pub(super) fn join(&mut self, mut key: LaneKey) -> JoinedLane {
        if self.lanes.len() >= MAX_LANES && !self.numbers.contains_key(&key) {
            key.task_type = String::new();
        }
        let number = match self.numbers.get(&key) {
            Some(number) => *number,
            None => self.open(key),
        };
        let lane = &mut self.lanes[number as usize];
        lane.sequences += 1;
        JoinedLane { number, key: Arc::clone(&lane.key) }
    }

    fn open(&mut self, key: LaneKey) -> u32 {
        let number = self.lanes.len() as u32;
        let policy = self.policy.lane(&key.task_type);
        self.lanes.push(Lane {
            key: Arc::new(key.clone()),
            controller: DraftLength::new(policy.max_k.min(self.policy.max_draft_tokens)),
            policy,
            outputs: OutputLengths::default(),
            sequences: 0,
            context: 0.0,
            k: 0,
            held_back: None,
            metrics: self.metrics.lane(&key),
        });
        self.numbers.insert(key, number);
        number
    }

    /// One sequence less. What the lane learned stays.
    pub(super) fn leave(&mut self, lane: &JoinedLane) {
        let lane = self.lane_mut(lane);
        lane.sequences = lane.sequences.saturating_sub(1);
    }

    /// k for the round that a sequence of the lane begins.
    pub(super) fn choose(&mut self, joined: &JoinedLane, workers: &Workers<'_>) -> Chosen {
        let choice = match self.lane_mut(joined).controller.choose_as_decided() {
            Some(choice) => choice,
            None => {
                let load = self.load(joined, workers);
                self.lane_mut(joined).controller.choose(load, workers.target, workers.draft)
            }
        };
        let lane = self.lane_mut(joined);
        let policy = &lane.policy;
        let is_crowded = policy.max_batch_for_speculation.is_some_and(|most| workers.target_sequences > most);
        // Probes go on, or nobody would learn that acceptance came back.
        let is_poor = !choice.is_probe
            && lane.controller.acceptance_rate().is_some_and(|rate| rate < policy.min_acceptance);
        lane.held_back = match () {
            () if is_crowded => Some("lane_max_batch"),
            () if is_poor => Some("lane_min_acceptance"),
            () => None,
        };
        let num_draft_tokens = if lane.held_back.is_some() { 0 } else { choice.num_draft_tokens };
        if !choice.is_probe {
            lane.k = num_draft_tokens;
            lane.metrics.k(lane.k);
        }
        Chosen { num_draft_tokens, held_back: lane.held_back }
    }

    /// What shares the workers with a lane: the model's lanes, as `speculation` weighs them.
    fn load(&self, joined: &JoinedLane, workers: &Workers<'_>) -> Load {
        let same_model = |(_, lane): &(usize, &Lane)| lane.key.model == joined.key.model;
        let (numbers, views): (Vec<usize>, Vec<LaneView>) = self
            .lanes
            .iter()
            .enumerate()
            .filter(same_model)
            .map(|(number, lane)| {
                let pace = lane.controller.pace(lane.sequences);
                (number, LaneView { sequences: lane.sequences, k: lane.k, context: lane.context, pace })
            })
            .unzip();
        let own = numbers.binary_search(&(joined.number as usize)).expect("a lane is of its own model");
        Load::of(&views, own, (workers.num_targets.max(1), workers.draft_sequences))
    }

    /// A draft worker was asked for `asked` tokens and proposed `supplied` in time.
    pub(super) fn observe_proposal(&mut self, lane: &JoinedLane, asked: u32, supplied: u32) {
        self.lane_mut(lane).controller.observe_proposal(asked, supplied);
    }

    /// A draft worker was fed committed tokens, and would have drawn them or not: see `DraftLength::observe_agreement`.
    pub(super) fn observe_agreement(&mut self, lane: &JoinedLane, positions: Range<u32>, accepted: u32) {
        self.lane_mut(lane).controller.observe_agreement(positions, accepted);
    }

    /// A verification of one of the lane's sequences, which is `len` long now.
    pub(super) fn observe_verdict(&mut self, lane: &JoinedLane, (judged, accepted): (u32, u32), len: u32) {
        let lane = self.lane_mut(lane);
        lane.metrics.verified(judged, accepted);
        lane.controller.observe_verdict(judged, accepted);
        let before = if lane.context > 0.0 { lane.context } else { f64::from(len) };
        lane.context = before + (f64::from(len) - before) / CONTEXT_MEMORY;
    }

    /// A round that was nothing but drafting and verifying.
    pub(super) fn observe_round(&mut self, lane: &JoinedLane, round: &RoundTimes, workers: &Workers<'_>) {
        self.lane_mut(lane).controller.observe_round(round, workers.target, workers.draft);
    }

    /// An output of the lane is complete.
    pub(super) fn observe_output(&mut self, lane: &JoinedLane, tokens: u32) {
        self.lane_mut(lane).outputs.observe(tokens);
    }

    /// Ids that a sequence of the lane is counted on to add to its `len`, drafted ones included.
    pub(super) fn expected_ids(
        &self,
        joined: &JoinedLane,
        (len, prompt_len, max_len): (u32, u32, u32),
    ) -> u32 {
        let lane = &self.lanes[joined.number as usize];
        let usual = lane.outputs.p90().map_or(max_len, |p90| prompt_len.saturating_add(p90).min(max_len));
        usual.max(len) + lane.policy.max_k
    }

    /// The lane's share of turns.
    pub(super) fn weight(&self, joined: &JoinedLane) -> f64 {
        self.lanes[joined.number as usize].policy.weight
    }

    pub(super) fn explain(&self) -> Vec<LaneExplanation> {
        let explained = |(key, number): (&LaneKey, &u32)| {
            let lane = &self.lanes[*number as usize];
            LaneExplanation {
                model: key.model.clone(),
                task_type: key.task_type.clone(),
                temperature: key.temperature.as_str(),
                sequences: lane.sequences,
                policy: lane.policy,
                held_back: lane.held_back,
                output_p90: lane.outputs.p90(),
                choice: lane.controller.explain(),
            }
        };
        self.numbers.iter().map(explained).collect()
    }

    /// Lanes are never taken away, so that who joined one finds it.
    fn lane_mut(&mut self, joined: &JoinedLane) -> &mut Lane {
        &mut self.lanes[joined.number as usize]
    }
}

#[cfg(test)]
mod tests {
    use service::metrics::Metrics;
    use speculation::cost::{StepTimePoint, StepTimes};

    use super::*;
    use crate::lane::TemperatureBand;
    use crate::lane::policy::DraftTokens;

    fn key(task_type: &str) -> LaneKey {
        LaneKey {
            model: "m".to_owned(),
            task_type: task_type.to_owned(),
            temperature: TemperatureBand::Greedy,
        }
    }

    fn flat(micros: u64) -> WorkerCost {
        WorkerCost::new(StepTimes::new(&[1, 64].map(|rows| StepTimePoint { rows, kv_tokens: 0, micros })))
    }

    fn policy(lanes: &[(&str, LanePolicy)]) -> PolicyConfig {
        let lanes = lanes.iter().map(|(task, policy)| ((*task).to_owned(), *policy)).collect();
        PolicyConfig { draft_tokens: DraftTokens::Auto, max_draft_tokens: 8, lanes }
    }

    fn controllers(policy: PolicyConfig) -> Controllers {
        Controllers::new(policy, RouterMetrics::register(&Metrics::new()))
    }

    fn workers<'a>(target: &'a WorkerCost, draft: &'a WorkerCost) -> Workers<'a> {
        Workers { target, draft, num_targets: 1, target_sequences: 2, draft_sequences: 2 }
    }

    /// Rounds in which so many first guesses of a draft are accepted, in turns.
    fn run(
        controllers: &mut Controllers,
        lane: &JoinedLane,
        workers: &Workers<'_>,
        accepted: &[u32],
    ) -> Vec<Chosen> {
        let round = |i: usize| {
            let chosen = controllers.choose(lane, workers);
            let (k, accepted) = (chosen.num_draft_tokens, accepted[i % accepted.len()]);
            controllers.observe_verdict(lane, (k, accepted.min(k)), 100);
            chosen
        };
        (0..200).map(round).collect()
    }

    #[test]
    fn each_lane_learns_for_itself_and_is_explained() {
        let mut controllers = controllers(policy(&[]));
        let (good, bad) = (controllers.join(key("code")), controllers.join(key("chat")));
        let (target, draft) = (flat(20_000), flat(1_000));
        for (lane, accepted) in [(&good, [8]), (&bad, [0])] {
            run(&mut controllers, lane, &workers(&target, &draft), &accepted);
        }
        let explained = controllers.explain();
        let k_of =
            |task: &str| explained.iter().find(|lane| lane.task_type == task).map(|lane| lane.choice.k);
        assert_eq!(k_of("code"), Some(8));
        assert_eq!(k_of("chat"), Some(0));
        assert!((explained[0].choice.load.unwrap().context - 96.0).abs() < 5.0);
    }

    #[test]
    fn policy_holds_a_lane_back_but_for_probes() {
        let all = policy(&[]).lane("");
        let (target, draft) = (flat(20_000), flat(1_000));
        let poor = LanePolicy { min_acceptance: 0.9, ..all };
        let crowded = LanePolicy { max_batch_for_speculation: Some(1), ..all };
        let short = LanePolicy { max_k: 2, ..all };
        let mut controllers = controllers(policy(&[("poor", poor), ("crowded", crowded), ("short", short)]));
        let workers = workers(&target, &draft);
        for (task, least, most, reason) in [
            ("poor", 8, 80, Some("lane_min_acceptance")),
            ("crowded", 0, 0, Some("lane_max_batch")),
            ("short", 190, 200, None),
        ] {
            let lane = controllers.join(key(task));
            let chosen = run(&mut controllers, &lane, &workers, &[8, 8, 8, 8, 0]);
            let drafted = chosen.iter().filter(|chosen| chosen.num_draft_tokens > 0).count();
            assert!((least..=most).contains(&drafted), "{task}: {drafted} of 200 rounds drafted");
            assert_eq!(chosen.iter().rev().find_map(|chosen| chosen.held_back), reason, "{task}");
            assert!(chosen.iter().all(|chosen| task != "short" || chosen.num_draft_tokens <= 2));
        }
    }

    #[test]
    fn admission_counts_on_what_outputs_of_the_lane_use() {
        let mut controllers = controllers(policy(&[]));
        let lane = controllers.join(key("code"));
        assert_eq!(controllers.expected_ids(&lane, (10, 10, 1_000)), 1_008, "nothing known: all it may have");
        (0..50).for_each(|_| controllers.observe_output(&lane, 30));
        assert_eq!(controllers.expected_ids(&lane, (10, 10, 1_000)), 48);
        assert_eq!(controllers.expected_ids(&lane, (70, 10, 1_000)), 78, "it has more already");
        assert_eq!(controllers.expected_ids(&lane, (10, 10, 20)), 28, "it may have no more");
    }

    #[test]
    fn clients_cannot_make_lanes_without_end() {
        let mut controllers = controllers(policy(&[]));
        for task in 0..2 * MAX_LANES {
            let lane = controllers.join(key(&format!("task-{task}")));
            controllers.leave(&lane);
        }
        assert_eq!(controllers.explain().len(), MAX_LANES + 1);
        assert_eq!(controllers.join(key("one-more")).key.task_type, "");
        assert_eq!(controllers.join(key("task-3")).key.task_type, "task-3");
    }
}
