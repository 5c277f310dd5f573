//! [`RequestRecord`]: resources and measurements of one request, from its arrival to the end of its response.
//! It travels inside the response: dropping it at any point returns the admission permit and counts how the
//! request ended. Code that answers a request with an error reports it with [`RequestRecord::failed`].

use http::{Extensions, HeaderMap, StatusCode};
use service::metrics::GaugeGuard;
use service::shutdown::GateGuard;
use speculation::FinishReason;
use tokio::time::Instant;
use tracing::Span;

use super::access_log::{AccessLine, Ending};
use super::gateway::Slo;
use super::key_limits::RunningRequest;
use super::{Caller, Usage, span};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::metrics::{ChoiceOutcome, ModelMetrics, Protocol, RouterMetrics};

/// A request in flight.
#[derive(Debug)]
pub struct RequestRecord {
    protocol: Protocol,
    span: Span,
    metrics: RouterMetrics,
    arrived_at: Instant,
    /// Set once the request is known to name an existing model.
    model: Option<ModelMetrics>,
    choices: Vec<ChoiceRecord>,
    slo: Slo,
    /// Its line in the access log, until that is written; `None` if there is none.
    access: Option<Box<AccessLine>>,
    resources: Resources,
    ended: bool,
}

/// Resources released when the request ends.
#[derive(Debug, Default)]
struct Resources {
    /// Counts the request as waiting, then as running.
    stage: Option<GaugeGuard>,
    /// Share of the router's limit on sequences.
    permit: Option<Permit>,
    /// Work that a drain waits for.
    work: Option<GateGuard>,
    /// The key's concurrent request; tokens are charged to it.
    key_slot: Option<RunningRequest>,
}

#[derive(Debug, Default, Clone)]
struct ChoiceRecord {
    first: Option<Instant>,
    last: Option<Instant>,
    /// Number of tokens after the first span.
    num_later_tokens: u64,
    ended: Option<FinishReason>,
}

impl RequestRecord {
    /// Starts the record of a request that has arrived; `span` is its span.
    pub fn new(protocol: Protocol, span: Span, metrics: &RouterMetrics) -> Self {
        Self {
            protocol,
            span,
            metrics: metrics.clone(),
            arrived_at: Instant::now(),
            model: None,
            choices: Vec::new(),
            slo: Slo::default(),
            access: None,
            resources: Resources::default(),
            ended: false,
        }
    }

    /// Writes a line about the request when it ends, if `enabled`.
    pub fn with_access_line(
        mut self,
        enabled: bool,
        request_id: &str,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> Self {
        self.access = enabled.then(|| Box::new(AccessLine::new(request_id, headers, extensions)));
        self
    }

    /// Notes who sent the request.
    pub fn sent_by(&mut self, caller: &Caller) {
        if let Some(access) = &mut self.access {
            access.key.clone_from(&caller.name);
        }
    }

    /// Notes the model, as the client named it.
    pub fn for_model(&mut self, model: &str) {
        if let Some(access) = &mut self.access {
            access.model = Some(model.to_owned());
        }
    }

    /// The request's span.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Sets the latency objectives of the request.
    pub fn set_slo(&mut self, slo: Slo) {
        self.slo = slo;
    }

    /// Takes the slot that the key's limits granted; tokens are charged to it.
    pub fn set_key_slot(&mut self, key_slot: RunningRequest) {
        self.resources.key_slot = Some(key_slot);
    }

    /// Counts the request as waiting: it passed the checks.
    pub fn waiting(&mut self, model: &str) {
        let model = self.metrics.model(model);
        self.resources.stage = Some(model.waiting());
        self.model = Some(model);
    }

    /// Makes a drain wait for the request.
    pub fn in_flight(&mut self, work: GateGuard) {
        self.resources.work = Some(work);
    }

    /// Stores the admission permit and records the queue time.
    pub fn admitted(&mut self, permit: Permit) {
        self.resources.permit = Some(permit);
        self.measure(|model, record| model.queue_time(record.arrived_at.elapsed().as_secs_f64()));
    }

    /// Counts the request as running: its sequences were submitted.
    pub fn running(&mut self, num_choices: usize, prompt_tokens: u64) {
        self.choices = vec![ChoiceRecord::default(); num_choices];
        self.resources.stage = self.model.as_ref().map(ModelMetrics::running);
        self.charge(prompt_tokens);
        if let Some(access) = &mut self.access {
            access.prompt_tokens = Some(prompt_tokens);
        }
        self.measure(|model, _| model.prompt_tokens(prompt_tokens));
    }

    /// Records a span of `num_tokens` of one choice, received at `now`.
    pub fn tokens(&mut self, choice: usize, num_tokens: u64, now: Instant) {
        self.charge(num_tokens);
        if let Some(access) = &mut self.access {
            access.output_tokens += num_tokens;
        }
        let record = &mut self.choices[choice];
        let previous = record.last.replace(now);
        if previous.is_some() {
            record.num_later_tokens += num_tokens;
        } else {
            record.first = Some(now);
        }
        self.measure(|model, record| {
            model.generation_tokens(num_tokens);
            match previous {
                None => model.time_to_first_token((now - record.arrived_at).as_secs_f64(), &record.span),
                Some(previous) => model.inter_token_latency((now - previous).as_secs_f64()),
            }
        });
    }

    /// Records that a choice is complete.
    pub fn choice_finished(&mut self, choice: usize, reason: FinishReason) {
        let record = &mut self.choices[choice];
        record.ended = Some(reason);
        let per_token = match (record.first, record.last, record.num_later_tokens) {
            (Some(first), Some(last), later @ 1..) => Some((last - first).as_secs_f64() / later as f64),
            _ => None,
        };
        let first = record.first;
        self.measure(|model, record| {
            model.choice_ended(ChoiceOutcome::Finished(reason));
            if let Some(seconds) = per_token {
                model.time_per_output_token(seconds);
            }
            if let (Some(limit), Some(first)) = (record.slo.ttft, first) {
                model.count_slo("ttft", first - record.arrived_at <= limit);
            }
            if let (Some(limit), Some(seconds)) = (record.slo.tpot, per_token) {
                model.count_slo("tpot", seconds <= limit.as_secs_f64());
            }
        });
    }

    /// Records that every choice is complete.
    pub fn answered(&mut self, usage: &Usage) {
        let reasons: Vec<FinishReason> = self.choices.iter().filter_map(|choice| choice.ended).collect();
        span::record_usage(&self.span, usage, &reasons);
        self.metrics.request_answered(self.protocol);
        self.measure(|model, record| {
            model.end_to_end(record.arrived_at.elapsed().as_secs_f64(), &record.span)
        });
        self.write_access_line((StatusCode::OK, "ok"), Some(usage));
        self.release();
    }

    /// Records that the request was refused or failed. Only the first error counts.
    pub fn failed(&mut self, error: &RouterError) {
        if self.ended {
            return;
        }
        span::record_error(&self.span, error);
        self.metrics.request_failed(self.protocol, error);
        let ending = match error {
            RouterError::ClientGone | RouterError::SlowClient | RouterError::DeadlineExceeded { .. } => {
                ChoiceOutcome::Aborted
            }
            _ => ChoiceOutcome::Failed,
        };
        self.measure(|model, record| {
            let unfinished = record.choices.iter().filter(|choice| choice.ended.is_none());
            unfinished.for_each(|_| model.choice_ended(ending));
        });
        let mapping = error.mapping();
        let is_client_deadline = matches!(error, RouterError::DeadlineExceeded { .. });
        match mapping.status.is_server_error() {
            true if mapping.retryable || is_client_deadline => {
                tracing::warn!(parent: &self.span, %error, code = mapping.label, "a request was not completed");
            }
            true => tracing::error!(parent: &self.span, %error, code = mapping.label, "a request failed"),
            false => {}
        }
        self.write_access_line((mapping.status, mapping.label), None);
        self.release();
    }

    fn write_access_line(&mut self, (status, outcome): (StatusCode, &'static str), usage: Option<&Usage>) {
        let Some(access) = self.access.take() else { return };
        let first = self.choices.iter().filter_map(|choice| choice.first).min();
        access.write(&Ending {
            protocol: self.protocol,
            status,
            outcome,
            ttft: first.map(|first| first - self.arrived_at),
            duration: self.arrived_at.elapsed(),
            usage,
        });
    }

    fn charge(&self, num_tokens: u64) {
        if let Some(key_slot) = &self.resources.key_slot {
            key_slot.charge(num_tokens);
        }
    }

    fn measure(&self, observe: impl FnOnce(&ModelMetrics, &Self)) {
        if let Some(model) = &self.model {
            observe(model, self);
        }
    }

    fn release(&mut self) {
        self.ended = true;
        self.resources = Resources::default();
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.failed(&RouterError::Internal("the request's handler panicked".into()));
        } else {
            self.failed(&RouterError::ClientGone);
        }
    }
}
