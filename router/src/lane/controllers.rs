//! One controller a lane: who of the router's sequences shares it, and what `speculation::draft_length` has to know of the
//! rest. It holds no sequence and decides no k itself.

use std::collections::BTreeMap;

use serde::Serialize;
use service::metrics::Gauge;
use speculation::cost::WorkerCost;
use speculation::draft_length::{Choice, DraftLength, Explanation, Load, Pace, RoundTimes};

use crate::lane::LaneKey;
use crate::metrics::RouterMetrics;

/// Lanes that are told apart; past it, what has a new task type shares the lane that has none. Task types come from clients.
pub const MAX_LANES: usize = 256;

/// Rounds that a lane's mean context remembers.
const CONTEXT_MEMORY: f64 = 64.0;

/// One lane, as `/debug/lanes` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneExplanation {
    /// Which model.
    pub model: String,
    /// What kind of text; empty where nobody said.
    pub task_type: String,
    /// How much chance there is in the draw.
    pub temperature: &'static str,
    /// Sequences in it now.
    pub sequences: u32,
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
    /// Sequences at the draft worker.
    pub(super) draft_sequences: u32,
}

/// The controllers of all lanes.
#[derive(Debug)]
pub(super) struct Controllers {
    max_k: u32,
    metrics: RouterMetrics,
    lanes: BTreeMap<LaneKey, Lane>,
}

#[derive(Debug)]
struct Lane {
    controller: DraftLength,
    sequences: u32,
    /// What the lane's sequences hold, on average.
    context: f64,
    k: u32,
    gauge: Gauge,
}

impl Controllers {
    pub(super) fn new(max_k: u32, metrics: RouterMetrics) -> Self {
        Self { max_k, metrics, lanes: BTreeMap::new() }
    }

    /// Another sequence; its lane's key from now on.
    pub(super) fn join(&mut self, mut key: LaneKey) -> LaneKey {
        if self.lanes.len() >= MAX_LANES && !self.lanes.contains_key(&key) {
            key.task_type = String::new();
        }
        let lane = self.lanes.entry(key.clone()).or_insert_with(|| Lane {
            controller: DraftLength::new(self.max_k),
            sequences: 0,
            context: 0.0,
            k: 0,
            gauge: self.metrics.lane_k(&key),
        });
        lane.sequences += 1;
        key
    }

    /// One sequence less. What the lane learned stays.
    pub(super) fn leave(&mut self, key: &LaneKey) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.sequences = lane.sequences.saturating_sub(1);
        }
    }

    /// k for the round that a sequence of the lane begins.
    pub(super) fn choose(&mut self, key: &LaneKey, workers: &Workers<'_>) -> Choice {
        let targets = workers.num_targets.max(1);
        let (other_rows, others) = self.others(key);
        let Some(lane) = self.lanes.get_mut(key) else {
            return Choice { num_draft_tokens: 0, is_probe: false };
        };
        let load = Load {
            sequences: lane.sequences.div_ceil(targets).max(1),
            other_rows: other_rows / targets,
            draft_sequences: workers.draft_sequences,
            context: lane.context,
            others: Pace { tokens_per_second: others.tokens_per_second / f64::from(targets), ..others },
        };
        let choice = lane.controller.choose(load, workers.target, workers.draft);
        if !choice.is_probe {
            lane.k = choice.num_draft_tokens;
            lane.gauge.set(lane.k.into());
        }
        choice
    }

    /// The rows that the model's other lanes bring to a round of theirs, and how fast these are.
    fn others(&self, key: &LaneKey) -> (u32, Pace) {
        let (mut rows, mut sequences, mut sum) = (0, 0, Pace::default());
        for (other, lane) in &self.lanes {
            if other.model == key.model && other != key && lane.sequences > 0 {
                let pace = lane.controller.pace(lane.sequences);
                rows += lane.sequences * (lane.k + 1);
                sequences += lane.sequences;
                sum.tokens_per_second += pace.tokens_per_second;
                sum.round_us += f64::from(lane.sequences) * pace.round_us;
            }
        }
        let mean_round_us = sum.round_us / f64::from(sequences.max(1));
        (rows, Pace { round_us: mean_round_us, ..sum })
    }

    /// A draft worker was asked for `asked` tokens and proposed `supplied` in time.
    pub(super) fn observe_proposal(&mut self, key: &LaneKey, asked: u32, supplied: u32) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.controller.observe_proposal(asked, supplied);
        }
    }

    /// A verification of one of the lane's sequences, which is `len` long now.
    pub(super) fn observe_verdict(&mut self, key: &LaneKey, (judged, accepted): (u32, u32), len: usize) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.controller.observe_verdict(judged, accepted);
            lane.context += (len as f64 - lane.context) / CONTEXT_MEMORY;
        }
    }

    /// A round that was nothing but drafting and verifying.
    pub(super) fn observe_round(&mut self, key: &LaneKey, round: &RoundTimes, workers: &Workers<'_>) {
        if let Some(lane) = self.lanes.get_mut(key) {
            lane.controller.observe_round(round, workers.target, workers.draft);
        }
    }

    pub(super) fn explain(&self) -> Vec<LaneExplanation> {
        let explained = |(key, lane): (&LaneKey, &Lane)| LaneExplanation {
            model: key.model.clone(),
            task_type: key.task_type.clone(),
            temperature: key.temperature.as_str(),
            sequences: lane.sequences,
            choice: lane.controller.explain(),
        };
        self.lanes.iter().map(explained).collect()
    }
}

#[cfg(test)]
mod tests {
    use service::metrics::Metrics;
    use speculation::cost::{StepTimePoint, StepTimes};

    use super::*;
    use crate::lane::TemperatureBand;

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

    #[test]
    fn each_lane_learns_for_itself_and_is_explained() {
        let mut controllers = Controllers::new(8, RouterMetrics::register(&Metrics::new()));
        let (good, bad) = (controllers.join(key("code")), controllers.join(key("chat")));
        let (target, draft) = (flat(20_000), flat(1_000));
        let workers = Workers { target: &target, draft: &draft, num_targets: 1, draft_sequences: 2 };
        for _ in 0..200 {
            for (lane, accepted) in [(&good, 8), (&bad, 0)] {
                let k = controllers.choose(lane, &workers).num_draft_tokens;
                controllers.observe_verdict(lane, (k, accepted.min(k)), 100);
            }
        }
        let explained = controllers.explain();
        let k_of =
            |task: &str| explained.iter().find(|lane| lane.task_type == task).map(|lane| lane.choice.k);
        assert_eq!(k_of("code"), Some(8));
        assert_eq!(k_of("chat"), Some(0));
        assert!((explained[0].choice.load.unwrap().context - 96.0).abs() < 5.0);
    }

    #[test]
    fn clients_cannot_make_lanes_without_end() {
        let mut controllers = Controllers::new(8, RouterMetrics::register(&Metrics::new()));
        for task in 0..2 * MAX_LANES {
            let lane = controllers.join(key(&format!("task-{task}")));
            controllers.leave(&lane);
        }
        assert_eq!(controllers.explain().len(), MAX_LANES + 1);
        assert_eq!(controllers.join(key("one-more")).task_type, "");
        assert_eq!(controllers.join(key("task-3")).task_type, "task-3");
    }
}
