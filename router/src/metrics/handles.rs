//! Metric handles that are looked up once and kept, for frequent updates or for the lifetime of an object.
//! Must never decide anything.

use std::sync::Arc;

use service::metrics::{Counter, Gauge, GaugeGuard, Histogram, HistogramFamily};
use speculation::step::MAX_DRAFT_TOKENS;
use tracing::Span;

use super::label_sets::{
    ENGINE, FinishLabels, HAD_DRAFT, ModelLabels, PositionLabels, RoundLabels, SloLabels, WorkerLabels,
};
use super::{ChoiceOutcome, Families};

/// Counters of the request log.
#[derive(Debug, Clone)]
pub struct RequestLogMetrics {
    /// Choices written to the file.
    pub written: Counter,
    /// Choices dropped because the queue was full.
    pub left_out: Counter,
    /// Choices that could not be written.
    pub failed: Counter,
}

/// Handles of one lane.
#[derive(Debug)]
pub struct LaneMetrics {
    pub(super) k: Gauge,
    pub(super) draft_tokens: Counter,
    pub(super) accepted_tokens: Counter,
    pub(super) output_tokens: Counter,
    pub(super) model_drafts: VerifiedDraftCounters,
    pub(super) rounds: RoundCounters,
}

impl LaneMetrics {
    /// Sets the lane's current k.
    pub fn set_k(&self, k: u32) {
        self.k.set(k.into());
    }

    /// Counts tokens committed to one of its sequences.
    pub fn count_output_tokens(&self, num_tokens: usize) {
        self.output_tokens.inc_by(num_tokens as u64);
    }

    /// Counts one verified round, with the reason for which no draft was requested or looked up for it; `None`:
    /// one was, even if it came too late.
    pub fn count_round(&mut self, disabled_reason: Option<&'static str>) {
        self.rounds.count(disabled_reason.unwrap_or(HAD_DRAFT));
    }

    /// Counts one verified draft of `num_draft_tokens`, of which the first `num_accepted` were committed. A
    /// step without a draft is not counted.
    pub fn count_verified_draft(&mut self, num_draft_tokens: u32, num_accepted: u32) {
        self.draft_tokens.inc_by(num_draft_tokens.into());
        self.accepted_tokens.inc_by(num_accepted.into());
        self.model_drafts.observe(num_draft_tokens, num_accepted);
    }
}

/// Counters of one model's rounds, looked up once because there is a round for every token or two.
#[derive(Debug)]
pub(super) struct RoundCounters {
    families: Arc<Families>,
    model: String,
    /// By the label `draft`, as far as there were such rounds.
    known: Vec<(&'static str, Counter)>,
}

impl RoundCounters {
    pub(super) fn new(families: Arc<Families>, model: &str) -> Self {
        Self { families, model: model.to_owned(), known: Vec::new() }
    }

    fn count(&mut self, draft: &'static str) {
        if let Some((_, counter)) = self.known.iter().find(|(known, _)| *known == draft) {
            counter.inc();
            return;
        }
        let labels = RoundLabels { model: self.model.clone(), draft };
        let counter = self.families.rounds.get_or_create(&labels).clone();
        counter.inc();
        self.known.push((draft, counter));
    }
}

/// Counters of one model's verified drafts, looked up once because they are updated for every token.
#[derive(Debug)]
pub(super) struct VerifiedDraftCounters {
    pub(super) families: Arc<Families>,
    pub(super) model_name: String,
    pub(super) drafts: Counter,
    pub(super) draft_tokens: Counter,
    pub(super) accepted_tokens: Counter,
    /// By position, as far as drafts were accepted so far.
    pub(super) accepted_per_position: Vec<Counter>,
}

impl VerifiedDraftCounters {
    fn observe(&mut self, num_draft_tokens: u32, num_accepted: u32) {
        if num_draft_tokens == 0 {
            return;
        }
        self.drafts.inc();
        self.draft_tokens.inc_by(num_draft_tokens.into());
        self.accepted_tokens.inc_by(num_accepted.into());
        let num_accepted = num_accepted.min(MAX_DRAFT_TOKENS as u32);
        for position in self.accepted_per_position.len() as u32..num_accepted {
            let labels = PositionLabels { model_name: self.model_name.clone(), engine: ENGINE, position };
            self.accepted_per_position
                .push(self.families.accepted_per_position.get_or_create(&labels).clone());
        }
        for position in &self.accepted_per_position[..num_accepted as usize] {
            position.inc();
        }
    }
}

/// Handles of one model; those updated for every token are looked up once.
#[derive(Debug, Clone)]
pub struct ModelMetrics {
    pub(super) families: Arc<Families>,
    pub(super) labels: ModelLabels,
    pub(super) generation_tokens: Counter,
    pub(super) inter_token_latency: Histogram,
}

impl ModelMetrics {
    /// Counts a request as waiting until dropped.
    pub fn waiting(&self) -> GaugeGuard {
        GaugeGuard::new(self.families.waiting.get_or_create(&self.labels).clone())
    }

    /// Counts a request as running until dropped.
    pub fn running(&self) -> GaugeGuard {
        GaugeGuard::new(self.families.running.get_or_create(&self.labels).clone())
    }

    /// Counts the prompt tokens of a request that was submitted.
    pub fn prompt_tokens(&self, count: u64) {
        self.families.prompt_tokens.get_or_create(&self.labels).inc_by(count);
    }

    /// Counts output tokens.
    pub fn generation_tokens(&self, count: u64) {
        self.generation_tokens.inc_by(count);
    }

    /// Counts the end of a choice.
    pub fn choice_ended(&self, outcome: ChoiceOutcome) {
        self.families.success.get_or_create(&FinishLabels::new(&self.labels, outcome)).inc();
    }

    /// Counts whether a choice met its request's latency objective.
    pub fn count_slo(&self, slo: &'static str, is_met: bool) {
        let met = if is_met { "true" } else { "false" };
        let labels = SloLabels { model_name: self.labels.model_name.clone(), engine: ENGINE, slo, met };
        self.families.slo.get_or_create(&labels).inc();
    }

    /// Observes the metric of this name.
    pub fn time_to_first_token(&self, seconds: f64, request: &Span) {
        self.families.time_to_first_token.get_or_create(&self.labels).observe(seconds, request);
    }

    /// Observes the metric of this name.
    pub fn inter_token_latency(&self, seconds: f64) {
        self.inter_token_latency.observe(seconds);
    }

    /// Observes the metric of this name.
    pub fn time_per_output_token(&self, seconds: f64) {
        observe(&self.families.time_per_output_token, &self.labels, seconds);
    }

    /// Observes the metric of this name.
    pub fn end_to_end(&self, seconds: f64, request: &Span) {
        self.families.end_to_end.get_or_create(&self.labels).observe(seconds, request);
    }

    /// Observes the metric of this name.
    pub fn queue_time(&self, seconds: f64) {
        observe(&self.families.queue_time, &self.labels, seconds);
    }
}

fn observe(family: &HistogramFamily<ModelLabels>, labels: &ModelLabels, seconds: f64) {
    let histogram: Histogram = family.get_or_create(labels).clone();
    histogram.observe(seconds);
}

/// Handles of one worker; its series are removed on drop.
#[derive(Debug)]
pub struct WorkerMetrics {
    pub(super) families: Arc<Families>,
    pub(super) labels: WorkerLabels,
    pub(super) credits: Gauge,
    pub(super) reserved: Gauge,
    pub(super) usable: Gauge,
}

impl WorkerMetrics {
    /// Sets the number of KV blocks that the router may reserve there, and of those it has reserved.
    pub fn set_blocks(&self, credits: u64, reserved: u64) {
        self.credits.set(i64::try_from(credits).unwrap_or(i64::MAX));
        self.reserved.set(i64::try_from(reserved).unwrap_or(i64::MAX));
    }

    /// Sets whether the router uses it.
    pub fn set_usable(&self, is_usable: bool) {
        self.usable.set(i64::from(is_usable));
    }
}

impl Drop for WorkerMetrics {
    fn drop(&mut self) {
        self.families.credit_blocks.remove(&self.labels);
        self.families.reserved_blocks.remove(&self.labels);
        self.families.worker_usable.remove(&self.labels);
    }
}
