//! Explanation of lanes, as plain data for operators and tests. It decides nothing.

use serde::Serialize;

use super::{Lane, LaneId, LaneKey, Lanes};
use crate::draft_length::Explanation;
use crate::lookup_rates::LookupSource;
use crate::scheduler::disabled_reason::DisabledReason;
use crate::scheduler::policy::LanePolicy;

/// One lane in the report of `/debug/lanes`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneExplanation {
    /// The model.
    pub model: String,
    /// Kind of text; may be empty beyond [`MAX_LANES`](super::MAX_LANES).
    pub task_type: String,
    /// Temperature band.
    pub temperature: &'static str,
    /// Current number of sequences.
    pub sequences: u32,
    /// Sequences of these that have a target, and are not waiting for one.
    pub running: u32,
    /// The operator's policy for the lane.
    pub policy: LanePolicy,
    /// Why the operator's policy prevented the latest round from drafting.
    pub held_back: Option<&'static str>,
    /// 90th percentile of output lengths; absent until a few outputs ended.
    pub output_p90: Option<u32>,
    /// Evidence about the lane's lookup sources.
    pub lookup: Vec<LookupExplanation>,
    /// Reasons for its draft length.
    #[serde(flatten)]
    pub choice: Explanation,
}

/// How often a lookup source predicted a lane's latest committed tokens correctly, whether it drafted them or
/// not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LookupExplanation {
    /// The source.
    pub source: LookupSource,
    /// Decayed number of tokens for which it had a prediction.
    pub expected: f64,
    /// How many of these predictions were correct.
    pub right: f64,
}

impl Lanes {
    pub(in crate::scheduler) fn explain(&self) -> Vec<LaneExplanation> {
        let explained = |(key, id): (&LaneKey, &LaneId)| {
            let lane = self.lane(*id);
            LaneExplanation {
                model: key.model.clone(),
                task_type: key.task_type.clone(),
                temperature: key.temperature.as_str(),
                sequences: lane.sequences,
                running: lane.running,
                policy: lane.policy,
                held_back: lane.held_back.map(DisabledReason::as_str),
                output_p90: lane.outputs.p90(),
                lookup: lane.explain_lookup(),
                choice: lane.draft_length.explain(),
            }
        };
        self.ids.iter().map(explained).collect()
    }
}

impl Lane {
    fn explain_lookup(&self) -> Vec<LookupExplanation> {
        let explained = |source: LookupSource| {
            let (expected, right) = self.lookup_rates[source as usize].evidence();
            LookupExplanation { source, expected, right }
        };
        LookupSource::ALL.into_iter().map(explained).collect()
    }
}
