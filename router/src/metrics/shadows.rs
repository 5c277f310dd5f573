//! Metrics that compare shadow drafts with the serving drafts. Must never decide anything.

use std::collections::HashMap;
use std::sync::Arc;

use scheduling::scheduler::events::ShadowScored;
use scheduling::scheduler::shadows::ShadowEnd;
use service::metrics::{Counter, EncodeLabelSet};

use super::Families;

/// `of` is `shadow`, or `serving` for the draft that served at the same positions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ShadowLabels {
    draft: String,
    task_type: String,
    of: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ShadowPositionLabels {
    draft: String,
    task_type: String,
    of: &'static str,
    position: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct DroppedLabels {
    draft: String,
    reason: &'static str,
}

/// Counters of one value of `of` for a shadow draft and task type.
#[derive(Debug)]
struct DraftCounters {
    drafts: Counter,
    judged: Vec<Counter>,
    accepted: Vec<Counter>,
}

/// Counters of all shadow drafts, looked up once.
#[derive(Debug)]
pub struct ShadowMetrics {
    families: Arc<Families>,
    counters: HashMap<Key, DraftCounters>,
}

/// Draft, task type and `of`.
type Key = (Arc<str>, String, &'static str);

fn positions() -> std::ops::Range<u32> {
    0..speculation::sequence::SHADOW_TOKENS
}

fn position_labels((draft, task_type, of): &Key, position: u32) -> ShadowPositionLabels {
    ShadowPositionLabels { draft: draft.to_string(), task_type: task_type.clone(), of, position }
}

impl ShadowMetrics {
    pub(super) fn new(families: Arc<Families>) -> Self {
        Self { families, counters: HashMap::new() }
    }

    /// Counts a compared proposal.
    pub fn count_scored(&mut self, scored: &ShadowScored) {
        let drafts = [("shadow", Some(scored.shadow)), ("serving", scored.serving)];
        for (of, judged) in drafts {
            let Some((judged, accepted)) = judged else { continue };
            let key = (Arc::clone(&scored.draft), scored.lane.task_type.clone(), of);
            let families = &self.families;
            let counters =
                self.counters.entry(key).or_insert_with_key(|key| DraftCounters::new(families, key));
            counters.drafts.inc();
            counters.judged.iter().take(judged as usize).for_each(|counter| {
                counter.inc();
            });
            counters.accepted.iter().take(accepted as usize).for_each(|counter| {
                counter.inc();
            });
        }
    }

    /// Removes the series of a task type without lanes, so that their number stays limited: clients name
    /// task types.
    pub fn remove_task_type(&mut self, task_type: &str) {
        let families = &self.families;
        self.counters.retain(|key, _| {
            let (draft, of_type, of) = key;
            let is_kept = of_type != task_type;
            if !is_kept {
                for position in positions() {
                    let labels = position_labels(key, position);
                    families.shadow_judged.remove(&labels);
                    families.shadow_accepted.remove(&labels);
                }
                let (draft, task_type) = (draft.to_string(), of_type.clone());
                families.shadow_drafts.remove(&ShadowLabels { draft, task_type, of });
            }
            is_kept
        });
    }

    /// Counts a shadow draft that was dropped for one sequence.
    pub fn count_dropped(&self, draft: &str, reason: ShadowEnd) {
        let labels = DroppedLabels { draft: draft.to_owned(), reason: reason.as_str() };
        self.families.shadow_dropped.get_or_create(&labels).inc();
    }
}

impl DraftCounters {
    fn new(families: &Families, key: &Key) -> Self {
        let at = |position| position_labels(key, position);
        let judged = positions().map(|position| families.shadow_judged.get_or_create(&at(position)).clone());
        let accepted =
            positions().map(|position| families.shadow_accepted.get_or_create(&at(position)).clone());
        let (judged, accepted) = (judged.collect(), accepted.collect());
        let (draft, task_type, of) = key;
        let labels = ShadowLabels { draft: draft.to_string(), task_type: task_type.clone(), of };
        Self { drafts: families.shadow_drafts.get_or_create(&labels).clone(), judged, accepted }
    }
}
