//! Names of the router's metrics. Must not count anything.

use service::metrics::{CounterName, GaugeName, HistogramName};

use super::labels::*;

pub(super) const DRAFTS: CounterName =
    CounterName::new("vllm:spec_decode_num_drafts_total", "Verified drafts");
pub(super) const DRAFT_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_draft_tokens_total", "Verified draft tokens");
pub(super) const ACCEPTED_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens");
pub(super) const ACCEPTED_PER_POSITION: CounterName = CounterName::new(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Accepted draft tokens, by position in the draft",
)
.with_labels(&[POSITION]);
pub(super) const REQUESTS_RUNNING: GaugeName =
    GaugeName::new("vllm:num_requests_running", "Requests that have a target and are not finished");
pub(super) const REQUESTS_WAITING: GaugeName = GaugeName::new(
    "vllm:num_requests_waiting",
    "Requests waiting for admission, a tokenizer thread or a target",
);
pub(super) const PROMPT_TOKENS: CounterName =
    CounterName::new("vllm:prompt_tokens_total", "Prompt tokens of submitted requests");
pub(super) const GENERATION_TOKENS: CounterName =
    CounterName::new("vllm:generation_tokens_total", "Output tokens");
pub(super) const REQUEST_SUCCESS: CounterName =
    CounterName::new("vllm:request_success_total", "Finished choices, by finish reason")
        .with_labels(&[FINISHED_REASON]);
pub(super) const TIME_TO_FIRST_TOKEN: HistogramName = HistogramName::new(
    "vllm:time_to_first_token_seconds",
    "Time from the arrival of a request to the first token of a choice",
    &SHORT_SECONDS,
);
pub(super) const INTER_TOKEN_LATENCY: HistogramName = HistogramName::new(
    "vllm:inter_token_latency_seconds",
    "Time between two consecutive token spans of a choice",
    &SHORT_SECONDS,
);
pub(super) const TIME_PER_OUTPUT_TOKEN: HistogramName = HistogramName::new(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per output token of a choice, after its first span",
    &SHORT_SECONDS,
);
pub(super) const END_TO_END: HistogramName = HistogramName::new(
    "vllm:e2e_request_latency_seconds",
    "Time from the arrival of a request to its last token",
    &LONG_SECONDS,
);
pub(super) const QUEUE_TIME: HistogramName = HistogramName::new(
    "vllm:request_queue_time_seconds",
    "Time from the arrival of a request to its admission",
    &LONG_SECONDS,
);
pub(super) const SLO: CounterName = CounterName::new(
    "outrider_slo_choices_total",
    "Finished choices with a latency objective from a gateway, by objective and whether it was met",
)
.with_labels(&[SLO_NAME, MET]);
pub(super) const REQUESTS: CounterName =
    CounterName::new("outrider_requests_total", "Requests by protocol and outcome")
        .with_labels(&[PROTOCOL, REQUEST_OUTCOME]);
pub(super) const IGNORED: CounterName = CounterName::new(
    "outrider_rounds_ignored_total",
    "Dropped replies, expired draft waits and resent target steps, by reason",
)
.with_labels(&[ANOMALY_REASON]);
pub(super) const PROPOSALS_AHEAD: CounterName = CounterName::new(
    "outrider_proposals_ahead_used_total",
    "Rounds whose proposal had been drafted ahead and waited at the router, so that no draft worker was waited for",
);
pub(super) const ROUNDS: CounterName = CounterName::new(
    "outrider_rounds_total",
    "Verified rounds, by whether a draft was requested or looked up (`drafted`, also if it came too late) or why not",
)
.with_labels(&[DRAFT]);
pub(super) const LANE_K: GaugeName =
    GaugeName::new("outrider_lane_k", "Current draft length of a lane; 0: no drafting")
        .with_labels(&[TEMPERATURE]);
pub(super) const LANE_DRAFT_TOKENS: CounterName =
    CounterName::new("outrider_lane_draft_tokens_total", "Verified draft tokens of a lane")
        .with_labels(&[TEMPERATURE]);
pub(super) const LANE_ACCEPTED_TOKENS: CounterName =
    CounterName::new("outrider_lane_accepted_tokens_total", "Accepted draft tokens of a lane")
        .with_labels(&[TEMPERATURE]);
pub(super) const LANE_OUTPUT_TOKENS: CounterName =
    CounterName::new("outrider_lane_output_tokens_total", "Output tokens of a lane")
        .with_labels(&[TEMPERATURE]);
pub(super) const LOOKUP_DRAFTS: CounterName =
    CounterName::new("outrider_lookup_drafts_total", "Verified lookup drafts, by source")
        .with_labels(&[SOURCE]);
pub(super) const LOOKUP_DRAFT_TOKENS: CounterName =
    CounterName::new("outrider_lookup_draft_tokens_total", "Verified tokens of lookup drafts, by source")
        .with_labels(&[SOURCE]);
pub(super) const LOOKUP_ACCEPTED_TOKENS: CounterName =
    CounterName::new("outrider_lookup_accepted_tokens_total", "Accepted tokens of lookup drafts, by source")
        .with_labels(&[SOURCE]);
pub(super) const SHADOW_DRAFTS: CounterName = CounterName::new(
    "outrider_shadow_drafts_total",
    "Shadow drafts compared with committed tokens (of=shadow), and serving drafts at the same positions (of=serving)",
)
.with_labels(&[OF]);
pub(super) const SHADOW_JUDGED: CounterName = CounterName::new(
    "outrider_shadow_judged_tokens_total",
    "Compared tokens of shadow and serving drafts, by position",
)
.with_labels(&[OF, POSITION]);
pub(super) const SHADOW_ACCEPTED: CounterName = CounterName::new(
    "outrider_shadow_accepted_tokens_total",
    "Compared tokens that equal the committed token, by position",
)
.with_labels(&[OF, POSITION]);
pub(super) const SHADOW_DROPPED: CounterName =
    CounterName::new("outrider_shadow_dropped_total", "Sequences whose shadow draft was dropped, by reason")
        .with_labels(&[SHADOW_DROPPED_REASON]);
pub(super) const REQUEST_LOG: CounterName = CounterName::new(
    "outrider_request_log_choices_total",
    "Finished choices for the request log, by outcome: written, left_out (queue full) or failed (write error)",
)
.with_labels(&[REQUEST_LOG_OUTCOME]);
pub(super) const DRAFT_OUTAGES: CounterName =
    CounterName::new("outrider_draft_outages_total", "Draft workers that became silent");
pub(super) const TARGET_OUTAGES: CounterName = CounterName::new(
    "outrider_target_outages_total",
    "Targets that became silent, or whose circuit breaker opened",
);
pub(super) const WAITING_FOR_TARGET: GaugeName =
    GaugeName::new("outrider_sequences_waiting_for_target", "Sequences waiting for a target with capacity");
pub(super) const TARGET_WAIT: HistogramName = HistogramName::new(
    "outrider_target_wait_seconds",
    "Time that sequences waited for a target with capacity, by priority range",
    &LONG_SECONDS,
)
.with_labels(&[PRIORITY]);
pub(super) const DISCOVERY_WATCHED: GaugeName = GaugeName::new(
    "outrider_discovery_watched",
    "1 while this router sees changes of the list of workers, 0 until it was first read and after a fault",
);
pub(super) const CREDIT_BLOCKS: GaugeName =
    GaugeName::new("outrider_pool_credit_blocks", "KV blocks that a worker grants to this router")
        .with_labels(&[ROLE, ADDRESS]);
pub(super) const RESERVED_BLOCKS: GaugeName =
    GaugeName::new("outrider_pool_reserved_blocks", "KV blocks that this router has reserved at a worker")
        .with_labels(&[ROLE, ADDRESS]);
pub(super) const WORKER_USABLE: GaugeName = GaugeName::new(
    "outrider_worker_usable",
    "1 if this router uses a connected worker, 0 while it avoids it: silent, failing, or a draft worker that fits no connected target",
)
.with_labels(&[ROLE, ADDRESS]);
pub(super) const WANTED_TARGETS: GaugeName = GaugeName::new(
    "outrider_wanted_target_workers",
    "Target workers needed for this router's sequences, fractional: sum over all routers, then round up",
);
pub(super) const WANTED_DRAFTS: GaugeName = GaugeName::new(
    "outrider_wanted_draft_workers",
    "Draft workers needed for this router's sequences, fractional; 0 if drafting does not pay",
);
pub(super) const KV_CACHE_USAGE: GaugeName = GaugeName::new(
    "vllm:kv_cache_usage_perc",
    "Share of the KV blocks granted at a model's targets that this router has reserved, 0 to 1",
);
pub(super) const HEADROOM: GaugeName = GaugeName::new(
    "outrider:goodput_headroom_tokens_per_second",
    "Additional tokens per second that a model's targets could commit, at the recent acceptance and step times",
);
pub(super) const CACHE_CONFIG: GaugeName = GaugeName::new(
    "vllm:cache_config_info",
    "Total KV blocks of a model's targets and tokens per block, in labels; the value is 1",
)
.with_labels(&[BLOCK_SIZE, NUM_BLOCKS]);
pub(super) const LORA_REQUESTS: GaugeName = GaugeName::new(
    "vllm:lora_requests_info",
    "LoRA adapters, always none; the value is the start time of this router, Unix seconds",
);
pub(super) const TOKENIZE_QUEUE: GaugeName =
    GaugeName::new("outrider_tokenize_queue_jobs", "Prompts and grammars waiting for a thread");

const SHORT_SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
];
const LONG_SECONDS: [f64; 16] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];
