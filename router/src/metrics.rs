//! The router's metric names, and [`RouterMetrics`], the handles to count with. Names that begin with `vllm:` are
//! vLLM's, so that its dashboards and `vllm bench serve` work against a router; the others are ours.

use std::sync::Arc;
use std::time::Duration;

use service::metrics::{
    Counter, CounterName, EncodeLabelSet, Family, Gauge, GaugeName, Histogram, HistogramFamily,
    HistogramName, Metrics,
};
use speculation::FinishReason;
use speculation::sequence::Ignored;
use speculation::step::MAX_DRAFT_TOKENS;

use crate::error::RouterError;
use crate::lane::LaneKey;

const DRAFTS: CounterName = CounterName::new("vllm:spec_decode_num_drafts_total", "Verified drafts");
const DRAFT_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens that were verified");
const ACCEPTED_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens that were committed");
const ACCEPTED_PER_POSITION: CounterName = CounterName::new(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Drafted tokens that were committed, by position in their draft",
);
const REQUESTS_RUNNING: GaugeName =
    GaugeName::new("vllm:num_requests_running", "Requests that a lane has taken and not finished");
const REQUESTS_WAITING: GaugeName = GaugeName::new(
    "vllm:num_requests_waiting",
    "Requests before their lane: waiting for a turn, or being tokenized",
);
const PROMPT_TOKENS: CounterName =
    CounterName::new("vllm:prompt_tokens_total", "Prompt tokens of requests taken");
const GENERATION_TOKENS: CounterName = CounterName::new("vllm:generation_tokens_total", "Output tokens");
const REQUEST_SUCCESS: CounterName =
    CounterName::new("vllm:request_success_total", "Choices that ended, by how they ended");
const TIME_TO_FIRST_TOKEN: HistogramName = HistogramName::new(
    "vllm:time_to_first_token_seconds",
    "From a request's arrival to the first token of a choice",
    &SHORT_SECONDS,
);
const INTER_TOKEN_LATENCY: HistogramName = HistogramName::new(
    "vllm:inter_token_latency_seconds",
    "Between two spans of tokens of a choice",
    &SHORT_SECONDS,
);
const TIME_PER_OUTPUT_TOKEN: HistogramName = HistogramName::new(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per token of a choice after its first span",
    &SHORT_SECONDS,
);
const END_TO_END: HistogramName = HistogramName::new(
    "vllm:e2e_request_latency_seconds",
    "From a request's arrival to its last token",
    &LONG_SECONDS,
);
const QUEUE_TIME: HistogramName = HistogramName::new(
    "vllm:request_queue_time_seconds",
    "From a request's arrival to its turn",
    &LONG_SECONDS,
);
const REQUESTS: CounterName = CounterName::new("outrider_requests_total", "Requests by door and outcome");
const IGNORED: CounterName = CounterName::new(
    "outrider_rounds_ignored_total",
    "Replies and waits of rounds that were dropped or given up, by reason",
);
const LANE_K: GaugeName = GaugeName::new("outrider_lane_k", "How far a lane drafts now; 0 is not at all");
const LANE_DRAFT_TOKENS: CounterName =
    CounterName::new("outrider_lane_draft_tokens_total", "Drafted tokens of a lane that were verified");
const LANE_ACCEPTED_TOKENS: CounterName =
    CounterName::new("outrider_lane_accepted_tokens_total", "Drafted tokens of a lane that were committed");
const DRAFT_OUTAGES: CounterName = CounterName::new(
    "outrider_draft_outages_total",
    "How often a draft worker was put out because it did not answer",
);
const WAITING_FOR_TARGET: GaugeName =
    GaugeName::new("outrider_sequences_waiting_for_target", "Sequences that wait for a target with room");
const TARGET_WAIT: HistogramName = HistogramName::new(
    "outrider_target_wait_seconds",
    "How long sequences waited for a target with room, by range of priority",
    &LONG_SECONDS,
);
const TOKENIZE_QUEUE: GaugeName =
    GaugeName::new("outrider_tokenize_queue_jobs", "Prompts that wait for a tokenizer thread");

const SHORT_SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
];
const LONG_SECONDS: [f64; 16] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Ranges of priorities that are told apart: the last one of each, and its name.
const PRIORITY_RANGES: [(u8, &str); 4] = [(0, "0"), (7, "1-7"), (63, "8-63"), (u8::MAX, "64-255")];

/// vLLM numbers its engines; to a client the router is one.
const ENGINE: &str = "0";

/// The labels that vLLM gives every series.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ModelLabels {
    model_name: String,
    engine: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PositionLabels {
    model_name: String,
    engine: &'static str,
    position: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    engine: &'static str,
    finished_reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    door: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PriorityLabels {
    priority: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabels {
    model: String,
    task_type: String,
    temperature: &'static str,
}

/// Which way a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// HTTP, in OpenAI's shapes.
    Http,
    /// gRPC.
    Grpc,
}

impl Door {
    /// The word used in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// How a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// By itself.
    Finished(FinishReason),
    /// The client went away.
    Aborted,
    /// With an error.
    Failed,
}

impl Ending {
    /// vLLM's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished(FinishReason::Stop) => "stop",
            Self::Finished(FinishReason::Length) => "length",
            Self::Aborted => "abort",
            Self::Failed => "error",
        }
    }
}

/// The router's metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct RouterMetrics {
    families: Arc<Families>,
}

#[derive(Debug)]
struct Families {
    drafts: Family<ModelLabels, Counter>,
    draft_tokens: Family<ModelLabels, Counter>,
    accepted_tokens: Family<ModelLabels, Counter>,
    accepted_per_position: Family<PositionLabels, Counter>,
    running: Family<ModelLabels, Gauge>,
    waiting: Family<ModelLabels, Gauge>,
    prompt_tokens: Family<ModelLabels, Counter>,
    generation_tokens: Family<ModelLabels, Counter>,
    success: Family<FinishLabels, Counter>,
    time_to_first_token: HistogramFamily<ModelLabels>,
    inter_token_latency: HistogramFamily<ModelLabels>,
    time_per_output_token: HistogramFamily<ModelLabels>,
    end_to_end: HistogramFamily<ModelLabels>,
    queue_time: HistogramFamily<ModelLabels>,
    requests: Family<OutcomeLabels, Counter>,
    ignored: Family<ReasonLabels, Counter>,
    lane_k: Family<LaneLabels, Gauge>,
    lane_draft_tokens: Family<LaneLabels, Counter>,
    lane_accepted_tokens: Family<LaneLabels, Counter>,
    draft_outages: Counter,
    waiting_for_target: Gauge,
    target_wait: HistogramFamily<PriorityLabels>,
    tokenize_queue: Gauge,
}

impl RouterMetrics {
    /// Registers everything; once a process.
    pub fn register(metrics: &Metrics) -> Self {
        let families = Families {
            drafts: metrics.counter_family(&DRAFTS),
            draft_tokens: metrics.counter_family(&DRAFT_TOKENS),
            accepted_tokens: metrics.counter_family(&ACCEPTED_TOKENS),
            accepted_per_position: metrics.counter_family(&ACCEPTED_PER_POSITION),
            running: metrics.gauge_family(&REQUESTS_RUNNING),
            waiting: metrics.gauge_family(&REQUESTS_WAITING),
            prompt_tokens: metrics.counter_family(&PROMPT_TOKENS),
            generation_tokens: metrics.counter_family(&GENERATION_TOKENS),
            success: metrics.counter_family(&REQUEST_SUCCESS),
            time_to_first_token: metrics.histogram_family(&TIME_TO_FIRST_TOKEN),
            inter_token_latency: metrics.histogram_family(&INTER_TOKEN_LATENCY),
            time_per_output_token: metrics.histogram_family(&TIME_PER_OUTPUT_TOKEN),
            end_to_end: metrics.histogram_family(&END_TO_END),
            queue_time: metrics.histogram_family(&QUEUE_TIME),
            requests: metrics.counter_family(&REQUESTS),
            ignored: metrics.counter_family(&IGNORED),
            lane_k: metrics.gauge_family(&LANE_K),
            lane_draft_tokens: metrics.counter_family(&LANE_DRAFT_TOKENS),
            lane_accepted_tokens: metrics.counter_family(&LANE_ACCEPTED_TOKENS),
            draft_outages: metrics.counter(&DRAFT_OUTAGES),
            waiting_for_target: metrics.gauge(&WAITING_FOR_TARGET),
            target_wait: metrics.histogram_family(&TARGET_WAIT),
            tokenize_queue: metrics.gauge(&TOKENIZE_QUEUE),
        };
        Self { families: Arc::new(families) }
    }

    /// The handles of one model.
    pub fn model(&self, model: &str) -> ModelMetrics {
        let labels = ModelLabels { model_name: model.to_owned(), engine: ENGINE };
        ModelMetrics {
            generation_tokens: self.families.generation_tokens.get_or_create(&labels).clone(),
            inter_token_latency: self.families.inter_token_latency.get_or_create(&labels).clone(),
            families: Arc::clone(&self.families),
            labels,
        }
    }

    /// The counters of one model's verified drafts.
    fn verifications(&self, model: &str) -> Verifications {
        let labels = ModelLabels { model_name: model.to_owned(), engine: ENGINE };
        Verifications {
            drafts: self.families.drafts.get_or_create(&labels).clone(),
            draft_tokens: self.families.draft_tokens.get_or_create(&labels).clone(),
            accepted_tokens: self.families.accepted_tokens.get_or_create(&labels).clone(),
            accepted_per_position: Vec::new(),
            families: Arc::clone(&self.families),
            model_name: labels.model_name,
        }
    }

    /// Something of a round was dropped or given up.
    pub fn ignored(&self, why: Ignored) {
        let reason = match why {
            Ignored::StaleReply => "stale_reply",
            Ignored::UnusableProposal => "unusable_proposal",
            Ignored::MalformedReply => "malformed_reply",
            Ignored::LateDraft => "late_draft",
            Ignored::TargetResend => "target_resend",
        };
        self.families.ignored.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// A draft worker was put out.
    pub fn draft_outage(&self) {
        self.families.draft_outages.inc();
    }

    /// So many sequences wait for a target with room.
    pub fn waiting_for_target(&self, count: usize) {
        self.families.waiting_for_target.set(count as i64);
    }

    /// A sequence got its target after so long.
    pub fn waited_for_target(&self, priority: u8, waited: Duration) {
        let range = PRIORITY_RANGES.iter().find(|(last, _)| priority <= *last);
        let labels = PriorityLabels { priority: range.map_or("64-255", |(_, name)| name) };
        self.families.target_wait.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// A request was refused or failed.
    pub fn request_failed(&self, door: Door, error: &RouterError) {
        self.count(door, error.meaning().label);
    }

    /// A request was answered in full.
    pub fn request_answered(&self, door: Door) {
        self.count(door, "ok");
    }

    /// The handles of one lane. There are at most [`crate::lane::controllers::MAX_LANES`] and a few of them.
    pub fn lane(&self, lane: &LaneKey) -> LaneMetrics {
        let labels = LaneLabels {
            model: lane.model.clone(),
            task_type: lane.task_type.clone(),
            temperature: lane.temperature.as_str(),
        };
        LaneMetrics {
            k: self.families.lane_k.get_or_create(&labels).clone(),
            draft_tokens: self.families.lane_draft_tokens.get_or_create(&labels).clone(),
            accepted_tokens: self.families.lane_accepted_tokens.get_or_create(&labels).clone(),
            of_model: self.verifications(&lane.model),
        }
    }

    /// How many prompts wait for a tokenizer thread.
    pub fn tokenize_queue(&self) -> Gauge {
        self.families.tokenize_queue.clone()
    }

    fn count(&self, door: Door, outcome: &'static str) {
        self.families.requests.get_or_create(&OutcomeLabels { door: door.as_str(), outcome }).inc();
    }
}

/// The handles of one lane.
#[derive(Debug)]
pub struct LaneMetrics {
    k: Gauge,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    of_model: Verifications,
}

impl LaneMetrics {
    /// How far the lane drafts from now on.
    pub fn k(&self, k: u32) {
        self.k.set(k.into());
    }

    /// One verified draft of `num_draft_tokens`, of which the first `num_accepted` were committed. A step without a
    /// draft counts nothing.
    pub fn verified(&mut self, num_draft_tokens: u32, num_accepted: u32) {
        self.draft_tokens.inc_by(num_draft_tokens.into());
        self.accepted_tokens.inc_by(num_accepted.into());
        self.of_model.observe(num_draft_tokens, num_accepted);
    }
}

/// Counts the verified drafts of one model. What is counted for every token is looked up once.
#[derive(Debug)]
struct Verifications {
    families: Arc<Families>,
    model_name: String,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    /// As far as drafts were accepted so far.
    accepted_per_position: Vec<Counter>,
}

impl Verifications {
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

/// The handles of one model. What is counted for every token is looked up once.
#[derive(Debug, Clone)]
pub struct ModelMetrics {
    families: Arc<Families>,
    labels: ModelLabels,
    generation_tokens: Counter,
    inter_token_latency: Histogram,
}

impl ModelMetrics {
    /// Counts a request as waiting until dropped.
    pub fn waiting(&self) -> GaugeHold {
        GaugeHold::new(self.families.waiting.get_or_create(&self.labels).clone())
    }

    /// Counts a request as running until dropped.
    pub fn running(&self) -> GaugeHold {
        GaugeHold::new(self.families.running.get_or_create(&self.labels).clone())
    }

    /// Prompt tokens of a request that a lane took.
    pub fn prompt_tokens(&self, count: u64) {
        self.families.prompt_tokens.get_or_create(&self.labels).inc_by(count);
    }

    /// Output tokens.
    pub fn generation_tokens(&self, count: u64) {
        self.generation_tokens.inc_by(count);
    }

    /// A choice ended.
    pub fn choice_ended(&self, ending: Ending) {
        let labels = FinishLabels {
            model_name: self.labels.model_name.clone(),
            engine: ENGINE,
            finished_reason: ending.as_str(),
        };
        self.families.success.get_or_create(&labels).inc();
    }

    /// See the metric of this name.
    pub fn time_to_first_token(&self, seconds: f64) {
        observe(&self.families.time_to_first_token, &self.labels, seconds);
    }

    /// See the metric of this name.
    pub fn inter_token_latency(&self, seconds: f64) {
        self.inter_token_latency.observe(seconds);
    }

    /// See the metric of this name.
    pub fn time_per_output_token(&self, seconds: f64) {
        observe(&self.families.time_per_output_token, &self.labels, seconds);
    }

    /// See the metric of this name.
    pub fn end_to_end(&self, seconds: f64) {
        observe(&self.families.end_to_end, &self.labels, seconds);
    }

    /// See the metric of this name.
    pub fn queue_time(&self, seconds: f64) {
        observe(&self.families.queue_time, &self.labels, seconds);
    }
}

fn observe(family: &HistogramFamily<ModelLabels>, labels: &ModelLabels, seconds: f64) {
    let histogram: Histogram = family.get_or_create(labels).clone();
    histogram.observe(seconds);
}

/// Holds a gauge up by one until dropped.
#[derive(Debug)]
pub struct GaugeHold(Gauge);

impl GaugeHold {
    /// One more.
    pub fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeHold {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use service::metrics::Exposition;

    use super::*;
    use crate::lane::TemperatureBand;

    #[test]
    fn verifications_are_counted_under_vllms_names() {
        let page = Metrics::new();
        let metrics = RouterMetrics::register(&page);
        let key = |task_type: &str| LaneKey {
            model: "demo".to_owned(),
            task_type: task_type.to_owned(),
            temperature: TemperatureBand::Greedy,
        };
        let (mut code, mut chat) = (metrics.lane(&key("code")), metrics.lane(&key("chat")));
        code.verified(4, 2);
        chat.verified(4, 0);
        chat.verified(0, 0);
        let text = page.encode(Exposition::Prometheus);
        for line in [
            r#"vllm:spec_decode_num_drafts_total{model_name="demo",engine="0"} 2"#,
            r#"vllm:spec_decode_num_draft_tokens_total{model_name="demo",engine="0"} 8"#,
            r#"vllm:spec_decode_num_accepted_tokens_total{model_name="demo",engine="0"} 2"#,
            r#"vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="0",position="1"} 1"#,
            r#"outrider_lane_accepted_tokens_total{model="demo",task_type="code",temperature="greedy"} 2"#,
            r#"outrider_lane_draft_tokens_total{model="demo",task_type="chat",temperature="greedy"} 4"#,
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing from\n{text}");
        }
        assert!(!text.contains(r#"position="2""#));
    }
}
