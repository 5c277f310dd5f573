//! The span of one request, from arrival to last token, with the attributes of the GenAI semantic
//! conventions; further attributes are under `outrider.*`. All other spans of the request, on this host and
//! on workers, are its children.

use speculation::{AcceptanceMode, FinishReason};
use tracing::field::Empty;
use tracing::{Span, info_span};

use super::gateway::GatewayHeaders;
use super::{Caller, CheckedRequest, Operation, Usage};
use crate::error::RouterError;
use crate::metrics::Protocol;

/// Opens the span of a new request.
pub fn open(protocol: Protocol, operation: Operation) -> Span {
    info_span!(
        "request",
        otel.kind = "server",
        otel.status_code = Empty,
        error.r#type = Empty,
        outrider.protocol = protocol.as_str(),
        outrider.caller = Empty,
        outrider.task_type = Empty,
        outrider.priority = Empty,
        outrider.client_request_id = Empty,
        outrider.fairness_id = Empty,
        outrider.objective = Empty,
        outrider.spec.acceptance = Empty,
        outrider.spec.rounds = Empty,
        outrider.spec.draft_tokens = Empty,
        outrider.spec.accepted_tokens = Empty,
        outrider.spec.disabled_reason = Empty,
        gen_ai.operation.name = operation.as_str(),
        gen_ai.provider.name = "outrider",
        gen_ai.request.model = Empty,
        gen_ai.request.max_tokens = Empty,
        gen_ai.request.temperature = Empty,
        gen_ai.request.top_p = Empty,
        gen_ai.request.seed = Empty,
        gen_ai.request.choice.count = Empty,
        gen_ai.conversation.id = Empty,
        gen_ai.response.id = Empty,
        gen_ai.response.model = Empty,
        gen_ai.response.finish_reasons = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
    )
}

/// Records the router's id of the request, so that every log line of the request has it.
pub fn record_id(span: &Span, request_id: &str) {
    span.record("gen_ai.response.id", request_id);
}

/// Records the client's request id and session id.
pub fn record_identity(span: &Span, request_id: Option<&str>, session_id: Option<&str>) {
    if let Some(request_id) = request_id {
        span.record("outrider.client_request_id", request_id);
    }
    if let Some(session_id) = session_id {
        span.record("gen_ai.conversation.id", session_id);
    }
}

/// Records the gateway's headers.
pub fn record_gateway(span: &Span, headers: &GatewayHeaders) {
    if let Some(id) = &headers.fairness_id {
        span.record("outrider.fairness_id", id.as_str());
    }
    if let Some(objective) = &headers.objective {
        span.record("outrider.objective", objective.as_str());
    }
}

/// Records the parameters of a checked request.
pub fn record_request(span: &Span, caller: &Caller, request: &CheckedRequest) {
    if let Some(name) = &caller.name {
        span.record("outrider.caller", name.as_str());
    }
    span.record("gen_ai.request.model", request.entry.id.as_str());
    if let Some(max_tokens) = request.max_tokens {
        span.record("gen_ai.request.max_tokens", max_tokens);
    }
    span.record("gen_ai.request.temperature", f64::from(request.sampling.temperature));
    span.record("gen_ai.request.top_p", f64::from(request.sampling.top_p));
    span.record("gen_ai.request.seed", request.seed as i64);
    span.record("gen_ai.request.choice.count", request.num_choices);
    span.record("gen_ai.response.model", request.entry.model.as_str());
    span.record("outrider.priority", request.priority);
}

/// Records the lane of a prompt; of several prompts the last one is kept.
pub fn record_lane(span: &Span, task_type: &str, acceptance: AcceptanceMode) {
    span.record("outrider.task_type", task_type);
    span.record("outrider.spec.acceptance", acceptance.as_str());
}

/// Records the usage and finish reasons of the request.
pub fn record_usage(span: &Span, usage: &Usage, finish_reasons: &[FinishReason]) {
    span.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
    span.record("gen_ai.usage.output_tokens", usage.completion_tokens);
    span.record("outrider.spec.rounds", usage.speculation.rounds);
    span.record("outrider.spec.draft_tokens", usage.speculation.draft_tokens);
    span.record("outrider.spec.accepted_tokens", usage.speculation.accepted_tokens);
    if let Some(reason) = usage.speculation.disabled_reason {
        span.record("outrider.spec.disabled_reason", reason);
    }
    let reasons: Vec<&str> = finish_reasons.iter().map(|reason| reason.as_str()).collect();
    span.record("gen_ai.response.finish_reasons", reasons.join(","));
}

/// Records why the request was refused or failed.
pub fn record_error(span: &Span, error: &RouterError) {
    span.record("error.type", error.mapping().label);
    if error.mapping().status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}
