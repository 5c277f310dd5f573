//! Lookup drafts. A sequence's sources follow what it commits. If a lookup draft promises more tokens per
//! second than the round that was chosen, the round verifies the lookup draft and asks no draft worker.
//! Sources depend on token ids only, so they survive the loss of workers.

use std::sync::Arc;

use speculation::lookup::{CheckedPrediction, LookupMatch, PredictedText, PredictionCursor, SuffixIndex};
use speculation::step::MAX_DRAFT_TOKENS;
use speculation::{Role, TokenId};

use super::active::ActiveSequence;
use super::state::SchedulerState;
use crate::lookup_rates::{LookupRates, LookupSource, reach_probabilities};

/// The lookup sources of one sequence.
#[derive(Debug)]
pub(super) struct Lookups {
    prediction: Option<PredictionCursor>,
    /// Built at the first output; nothing is looked up before.
    suffix: Option<SuffixIndex>,
    /// Indexed by source.
    rates: [LookupRates; LookupSource::ALL.len()],
}

/// A lookup draft for one round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LookupDraft {
    pub(super) source: LookupSource,
    pub(super) token_ids: Vec<TokenId>,
}

impl Lookups {
    pub(super) fn new(prediction: Option<Arc<PredictedText>>, prompt_len: u32) -> Self {
        let prediction = prediction.map(|text| PredictionCursor::new(text, prompt_len as usize));
        let rates = LookupSource::ALL.map(|_| LookupRates::of_sequence());
        Self { prediction, suffix: None, rates }
    }

    /// Number of predicted tokens that appeared in the output, and number of those that have not yet.
    pub(super) fn num_predicted(&self) -> (u32, u32) {
        self.prediction.as_ref().map_or((0, 0), PredictionCursor::num_appeared)
    }

    /// Advances the sources over the committed ids and reports what each had predicted for them.
    fn read_committed(&mut self, ids: &[TokenId], mut report: impl FnMut(LookupSource, CheckedPrediction)) {
        let Self { prediction, suffix, rates } = self;
        let mut record = |source: LookupSource, checked: CheckedPrediction| {
            rates[source as usize].observe(checked);
            report(source, checked);
        };
        if let Some(prediction) = prediction {
            prediction.read_committed(ids, |checked| record(LookupSource::Prediction, checked));
        }
        if let Some(suffix) = suffix {
            suffix.read_committed(ids, |checked| record(LookupSource::Suffix, checked));
        }
    }

    fn find(&self, source: LookupSource, ids: &[TokenId], max_tokens: usize) -> Option<LookupMatch> {
        match source {
            LookupSource::Prediction => self.prediction.as_ref()?.find(max_tokens),
            LookupSource::Suffix => self.suffix.as_ref()?.find(ids, max_tokens),
        }
    }
}

impl SchedulerState {
    /// Updates the lookup sources after a commit.
    pub(super) fn follow_lookups(&mut self, active: &mut ActiveSequence) {
        let ids = active.sequence.ids();
        if active.lookups.suffix.is_none() && self.uses_suffix_drafts(active) {
            active.lookups.suffix = Some(SuffixIndex::new(ids));
        }
        let (lane, lanes) = (active.lane.id, &mut self.lanes);
        active.lookups.read_committed(ids, |source, checked| lanes.on_prediction(lane, source, checked));
    }

    fn uses_suffix_drafts(&self, active: &ActiveSequence) -> bool {
        let policy = self.lanes.policy();
        let pinned = || policy.pinned_draft_tokens(&active.lane.key.task_type, &active.speculation);
        policy.suffix_drafts && pinned() != Some(0)
    }

    /// Returns the lookup draft of at most `max_tokens` that promises most, if one promises more than the
    /// round without it, which asks a draft worker for the lane's k if `asks_worker`. The lane's limit on
    /// sequences at a target holds for lookup drafts too: their rows take time as well.
    pub(super) fn choose_lookup(
        &self,
        active: &ActiveSequence,
        asks_worker: bool,
        max_tokens: u32,
    ) -> Option<LookupDraft> {
        let target = active.worker_in(&self.workers, Role::Target)?;
        let (lane, ids) = (active.lane.id, active.sequence.ids());
        if self.lanes.is_crowded(lane, target.load) {
            return None;
        }
        let max_tokens = (max_tokens as usize).min(MAX_DRAFT_TOKENS);
        let drafts = LookupSource::ALL.into_iter().filter_map(|source| {
            let mut found = active.lookups.find(source, ids, max_tokens)?;
            let rates = (self.lanes.lookup_rates(lane, source), &active.lookups.rates[source as usize]);
            let reached = reach_probabilities(source, rates, (found.match_len, found.token_ids.len()));
            let target = (&target.cost, &target.lane_loads);
            let length = self.lanes.choose_lookup(lane, &reached, target, asks_worker)?;
            found.token_ids.truncate(length.num_draft_tokens as usize);
            Some((length.tokens_per_second, LookupDraft { source, token_ids: found.token_ids }))
        });
        drafts.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.source.cmp(&a.1.source))).map(|(_, draft)| draft)
    }
}

#[cfg(test)]
mod tests;
