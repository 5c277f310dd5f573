//! The router's metrics: their names (`names`) with the values of their labels (`labels`), the sets of labels
//! (`label_sets`), [`RouterMetrics`] to look them up, and handles to update them. Names that begin with
//! `vllm:` are vLLM's, so that its dashboards and `vllm bench serve` work with a router; the others are
//! Outrider's.

mod handles;
mod kv_pools;
mod label_sets;
mod labels;
mod names;
mod shadows;

use std::sync::Arc;
use std::time::Duration;

use scheduling::lookup_rates::LookupSource;
use scheduling::scheduler::lanes::LaneKey;
use service::metrics::{Counter, Family, Gauge, HistogramFamily, Metrics, RateGauge, TracedHistogramFamily};
use service::unix_time::since_unix_epoch;
use speculation::sequence::Anomaly;
use speculation::{FinishReason, Role};

pub use self::handles::{LaneMetrics, ModelMetrics, RequestLogMetrics, WorkerMetrics};
use self::handles::{RoundCounters, VerifiedDraftCounters};
use self::kv_pools::CacheConfigLabels;
pub use self::kv_pools::KvPools;
use self::label_sets::*;
use self::names::*;
pub use self::shadows::ShadowMetrics;
use self::shadows::{DroppedLabels, ShadowLabels, ShadowPositionLabels};
use crate::error::RouterError;

/// The errors that alerts count: those that the service failed, and wrong keys.
fn alerted() -> [RouterError; 5] {
    let reason = String::new;
    [
        RouterError::Unavailable { reason: reason() },
        RouterError::Refused { reason: reason() },
        RouterError::Quarantined { reason: reason() },
        RouterError::Internal(reason()),
        RouterError::Unauthenticated(""),
    ]
}

/// The protocol of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP APIs.
    Http,
    /// gRPC.
    Grpc,
}

impl Protocol {
    /// Name in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// How a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceOutcome {
    /// Normally.
    Finished(FinishReason),
    /// The client disconnected.
    Aborted,
    /// With an error.
    Failed,
}

impl ChoiceOutcome {
    /// All variants.
    const ALL: [Self; 4] = [
        Self::Finished(FinishReason::Stop),
        Self::Finished(FinishReason::Length),
        Self::Aborted,
        Self::Failed,
    ];

    /// vLLM's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished(reason) => reason.as_str(),
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
    time_to_first_token: TracedHistogramFamily<ModelLabels>,
    inter_token_latency: HistogramFamily<ModelLabels>,
    time_per_output_token: HistogramFamily<ModelLabels>,
    end_to_end: TracedHistogramFamily<ModelLabels>,
    queue_time: HistogramFamily<ModelLabels>,
    slo: Family<SloLabels, Counter>,
    requests: Family<RequestLabels, Counter>,
    ignored: Family<AnomalyLabels, Counter>,
    proposals_ahead: Counter,
    rounds: Family<RoundLabels, Counter>,
    lane_k: Family<LaneLabels, Gauge>,
    lane_draft_tokens: Family<LaneLabels, Counter>,
    lane_accepted_tokens: Family<LaneLabels, Counter>,
    lane_output_tokens: Family<LaneLabels, Counter>,
    lookup_drafts: Family<LookupLabels, Counter>,
    lookup_draft_tokens: Family<LookupLabels, Counter>,
    lookup_accepted_tokens: Family<LookupLabels, Counter>,
    shadow_drafts: Family<ShadowLabels, Counter>,
    shadow_judged: Family<ShadowPositionLabels, Counter>,
    shadow_accepted: Family<ShadowPositionLabels, Counter>,
    shadow_dropped: Family<DroppedLabels, Counter>,
    request_log: Family<RequestLogLabels, Counter>,
    draft_outages: Counter,
    target_outages: Counter,
    waiting_for_target: Gauge,
    target_wait: HistogramFamily<PriorityLabels>,
    tokenize_queue: Gauge,
    discovery_watched: Gauge,
    credit_blocks: Family<WorkerLabels, Gauge>,
    reserved_blocks: Family<WorkerLabels, Gauge>,
    worker_usable: Family<WorkerLabels, Gauge>,
    wanted_targets: Family<ModelLabels, RateGauge>,
    wanted_drafts: Family<ModelLabels, RateGauge>,
    kv_cache_usage: Family<ModelLabels, RateGauge>,
    headroom: Family<ModelLabels, Gauge>,
    cache_config: Family<CacheConfigLabels, Gauge>,
}

impl RouterMetrics {
    /// Registers all metrics; call once per process.
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
            time_to_first_token: metrics.traced_histogram_family(&TIME_TO_FIRST_TOKEN),
            inter_token_latency: metrics.histogram_family(&INTER_TOKEN_LATENCY),
            time_per_output_token: metrics.histogram_family(&TIME_PER_OUTPUT_TOKEN),
            end_to_end: metrics.traced_histogram_family(&END_TO_END),
            queue_time: metrics.histogram_family(&QUEUE_TIME),
            slo: metrics.counter_family(&SLO),
            requests: metrics.counter_family(&REQUESTS),
            ignored: metrics.counter_family(&IGNORED),
            proposals_ahead: metrics.counter(&PROPOSALS_AHEAD),
            rounds: metrics.counter_family(&ROUNDS),
            lane_k: metrics.gauge_family(&LANE_K),
            lane_draft_tokens: metrics.counter_family(&LANE_DRAFT_TOKENS),
            lane_accepted_tokens: metrics.counter_family(&LANE_ACCEPTED_TOKENS),
            lane_output_tokens: metrics.counter_family(&LANE_OUTPUT_TOKENS),
            lookup_drafts: metrics.counter_family(&LOOKUP_DRAFTS),
            lookup_draft_tokens: metrics.counter_family(&LOOKUP_DRAFT_TOKENS),
            lookup_accepted_tokens: metrics.counter_family(&LOOKUP_ACCEPTED_TOKENS),
            shadow_drafts: metrics.counter_family(&SHADOW_DRAFTS),
            shadow_judged: metrics.counter_family(&SHADOW_JUDGED),
            shadow_accepted: metrics.counter_family(&SHADOW_ACCEPTED),
            shadow_dropped: metrics.counter_family(&SHADOW_DROPPED),
            request_log: metrics.counter_family(&REQUEST_LOG),
            draft_outages: metrics.counter(&DRAFT_OUTAGES),
            target_outages: metrics.counter(&TARGET_OUTAGES),
            waiting_for_target: metrics.gauge(&WAITING_FOR_TARGET),
            target_wait: metrics.histogram_family(&TARGET_WAIT),
            tokenize_queue: metrics.gauge(&TOKENIZE_QUEUE),
            discovery_watched: metrics.gauge(&DISCOVERY_WATCHED),
            credit_blocks: metrics.gauge_family(&CREDIT_BLOCKS),
            reserved_blocks: metrics.gauge_family(&RESERVED_BLOCKS),
            worker_usable: metrics.gauge_family(&WORKER_USABLE),
            wanted_targets: metrics.rate_gauge_family(&WANTED_TARGETS),
            wanted_drafts: metrics.rate_gauge_family(&WANTED_DRAFTS),
            kv_cache_usage: metrics.rate_gauge_family(&KV_CACHE_USAGE),
            headroom: metrics.gauge_family(&HEADROOM),
            cache_config: metrics.gauge_family(&CACHE_CONFIG),
        };
        let since = since_unix_epoch().as_secs() as i64;
        metrics.gauge_family(&LORA_REQUESTS).get_or_create(&NO_LORA).set(since);
        // A rate misses the first increment of a new series, so create the series that alerts use at the
        // start.
        for anomaly in ANOMALIES {
            drop(families.ignored.get_or_create(&AnomalyLabels::of(anomaly)));
        }
        for protocol in [Protocol::Http, Protocol::Grpc].map(Protocol::as_str) {
            for outcome in alerted().map(|error| error.mapping().label) {
                drop(families.requests.get_or_create(&RequestLabels { protocol, outcome }));
            }
        }
        Self { families: Arc::new(families) }
    }

    /// Returns the handles of one model.
    pub fn model(&self, model: &str) -> ModelMetrics {
        let labels = ModelLabels::of(model);
        ModelMetrics {
            generation_tokens: self.families.generation_tokens.get_or_create(&labels).clone(),
            inter_token_latency: self.families.inter_token_latency.get_or_create(&labels).clone(),
            families: Arc::clone(&self.families),
            labels,
        }
    }

    /// Returns the counters of one model's verified drafts.
    fn verified_drafts(&self, model: &str) -> VerifiedDraftCounters {
        let labels = ModelLabels::of(model);
        VerifiedDraftCounters {
            drafts: self.families.drafts.get_or_create(&labels).clone(),
            draft_tokens: self.families.draft_tokens.get_or_create(&labels).clone(),
            accepted_tokens: self.families.accepted_tokens.get_or_create(&labels).clone(),
            accepted_per_position: Vec::new(),
            families: Arc::clone(&self.families),
            model_name: labels.model_name,
        }
    }

    /// Counts a part of a round that was dropped or given up.
    pub fn count_anomaly(&self, anomaly: Anomaly) {
        self.families.ignored.get_or_create(&AnomalyLabels::of(anomaly)).inc();
    }

    /// Counts a round that used a proposal drafted ahead.
    pub fn count_proposal_ahead(&self) {
        self.families.proposals_ahead.inc();
    }

    /// Counts a verified lookup draft.
    pub fn count_lookup_draft(&self, source: LookupSource, num_draft_tokens: u32, num_accepted: u32) {
        let labels = LookupLabels { source: source.as_str() };
        self.families.lookup_drafts.get_or_create(&labels).inc();
        self.families.lookup_draft_tokens.get_or_create(&labels).inc_by(num_draft_tokens.into());
        self.families.lookup_accepted_tokens.get_or_create(&labels).inc_by(num_accepted.into());
    }

    /// Counts a draft worker that became silent.
    pub fn count_draft_outage(&self) {
        self.families.draft_outages.inc();
    }

    /// Counts a target that stopped answering or whose circuit breaker opened.
    pub fn count_target_outage(&self) {
        self.families.target_outages.inc();
    }

    /// Sets the wanted number of workers in each pool of a model.
    pub fn set_wanted_workers(&self, model: &str, targets: f64, drafts: f64) {
        let labels = ModelLabels::of(model);
        self.families.wanted_targets.get_or_create(&labels).set(targets);
        self.families.wanted_drafts.get_or_create(&labels).set(drafts);
    }

    /// Sets the number of sequences waiting for a target with capacity.
    pub fn set_waiting_for_target(&self, count: usize) {
        self.families.waiting_for_target.set(count as i64);
    }

    /// Observes how long a sequence waited for its target.
    pub fn observe_target_wait(&self, priority: u8, waited: Duration) {
        let range = PRIORITY_RANGES.iter().find(|(last, _)| priority <= *last);
        let labels = PriorityLabels { priority: range.map_or("64-255", |(_, name)| name) };
        self.families.target_wait.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// Counts a request that was refused or failed.
    pub fn request_failed(&self, protocol: Protocol, error: &RouterError) {
        self.count_request(protocol, error.mapping().label);
    }

    /// Counts a completely answered request.
    pub fn request_answered(&self, protocol: Protocol) {
        self.count_request(protocol, "ok");
    }

    /// Returns the handles of one lane. At most [`scheduling::scheduler::lanes::MAX_LANES`] lanes exist, plus
    /// one per model and temperature band.
    pub fn lane(&self, lane: &LaneKey) -> LaneMetrics {
        let labels = LaneLabels::of(lane);
        LaneMetrics {
            k: self.families.lane_k.get_or_create(&labels).clone(),
            draft_tokens: self.families.lane_draft_tokens.get_or_create(&labels).clone(),
            accepted_tokens: self.families.lane_accepted_tokens.get_or_create(&labels).clone(),
            output_tokens: self.families.lane_output_tokens.get_or_create(&labels).clone(),
            model_drafts: self.verified_drafts(&lane.model),
            rounds: RoundCounters::new(Arc::clone(&self.families), &lane.model),
        }
    }

    /// Removes the series of a lane that was replaced, so that their number stays limited.
    pub fn remove_lane(&self, lane: &LaneKey) {
        let labels = LaneLabels::of(lane);
        self.families.lane_k.remove(&labels);
        self.families.lane_draft_tokens.remove(&labels);
        self.families.lane_accepted_tokens.remove(&labels);
        self.families.lane_output_tokens.remove(&labels);
    }

    /// Returns the handles of one worker while it is connected.
    pub fn worker(&self, role: Role, address: &str) -> WorkerMetrics {
        let labels = WorkerLabels { role: role.as_str(), address: address.to_owned() };
        WorkerMetrics {
            credits: self.families.credit_blocks.get_or_create(&labels).clone(),
            reserved: self.families.reserved_blocks.get_or_create(&labels).clone(),
            usable: self.families.worker_usable.get_or_create(&labels).clone(),
            families: Arc::clone(&self.families),
            labels,
        }
    }

    /// Returns the counters of shadow drafts.
    pub fn shadows(&self) -> ShadowMetrics {
        ShadowMetrics::new(Arc::clone(&self.families))
    }

    /// Returns the KV metrics over all targets.
    pub fn kv_pools(&self) -> KvPools {
        KvPools::new(Arc::clone(&self.families))
    }

    /// Returns the counters of the request log.
    pub fn request_log(&self) -> RequestLogMetrics {
        let of = |outcome| self.families.request_log.get_or_create(&RequestLogLabels { outcome }).clone();
        RequestLogMetrics { written: of("written"), left_out: of("left_out"), failed: of("failed") }
    }

    /// Returns the gauge of prompts waiting for a tokenizer thread.
    pub fn tokenize_queue(&self) -> Gauge {
        self.families.tokenize_queue.clone()
    }

    /// Returns the gauge of whether discovery is watched.
    pub fn discovery_watched(&self) -> Gauge {
        self.families.discovery_watched.clone()
    }

    fn count_request(&self, protocol: Protocol, outcome: &'static str) {
        self.families.requests.get_or_create(&RequestLabels { protocol: protocol.as_str(), outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use scheduling::scheduler::lanes::TemperatureBand;
    use service::metrics::Exposition;

    use super::*;

    #[test]
    fn verified_drafts_are_counted_under_the_names_of_vllm() {
        let page = Metrics::new();
        let metrics = RouterMetrics::register(&page);
        let key = |task_type: &str| LaneKey {
            model: "demo".to_owned(),
            task_type: task_type.to_owned(),
            temperature: TemperatureBand::Greedy,
        };
        let (mut code, mut chat) = (metrics.lane(&key("code")), metrics.lane(&key("chat")));
        code.count_verified_draft(4, 2);
        code.count_output_tokens(3);
        code.count_round(None);
        code.count_round(Some("no_draft_worker"));
        chat.count_round(Some("no_draft_worker"));
        chat.count_verified_draft(4, 0);
        chat.count_verified_draft(0, 0);
        let text = page.encode(Exposition::Prometheus);
        for line in [
            r#"vllm:spec_decode_num_drafts_total{model_name="demo",engine="0"} 2"#,
            r#"vllm:spec_decode_num_draft_tokens_total{model_name="demo",engine="0"} 8"#,
            r#"vllm:spec_decode_num_accepted_tokens_total{model_name="demo",engine="0"} 2"#,
            r#"vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",engine="0",position="1"} 1"#,
            r#"outrider_lane_accepted_tokens_total{model="demo",task_type="code",temperature="greedy"} 2"#,
            r#"outrider_lane_output_tokens_total{model="demo",task_type="code",temperature="greedy"} 3"#,
            r#"outrider_lane_draft_tokens_total{model="demo",task_type="chat",temperature="greedy"} 4"#,
            r#"outrider_rounds_total{model="demo",draft="drafted"} 1"#,
            r#"outrider_rounds_total{model="demo",draft="no_draft_worker"} 2"#,
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing from\n{text}");
        }
        assert!(!text.contains(r#"position="2""#));
    }
}
