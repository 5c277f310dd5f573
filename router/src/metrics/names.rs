//! Names of the router's metrics. Nothing is counted here.

use service::metrics::{CounterName, GaugeName, HistogramName};

pub(super) const DRAFTS: CounterName =
    CounterName::new("vllm:spec_decode_num_drafts_total", "Verified drafts");
pub(super) const DRAFT_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens that were verified");
pub(super) const ACCEPTED_TOKENS: CounterName =
    CounterName::new("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens that were committed");
pub(super) const ACCEPTED_PER_POSITION: CounterName = CounterName::new(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Drafted tokens that were committed, by position in their draft",
);
pub(super) const REQUESTS_RUNNING: GaugeName =
    GaugeName::new("vllm:num_requests_running", "Requests that a lane has taken and not finished");
pub(super) const REQUESTS_WAITING: GaugeName = GaugeName::new(
    "vllm:num_requests_waiting",
    "Requests before their lane: waiting for a turn, or being tokenized",
);
pub(super) const PROMPT_TOKENS: CounterName =
    CounterName::new("vllm:prompt_tokens_total", "Prompt tokens of requests taken");
pub(super) const GENERATION_TOKENS: CounterName =
    CounterName::new("vllm:generation_tokens_total", "Output tokens");
pub(super) const REQUEST_SUCCESS: CounterName =
    CounterName::new("vllm:request_success_total", "Choices that ended, by how they ended");
pub(super) const TIME_TO_FIRST_TOKEN: HistogramName = HistogramName::new(
    "vllm:time_to_first_token_seconds",
    "From a request's arrival to the first token of a choice",
    &SHORT_SECONDS,
);
pub(super) const INTER_TOKEN_LATENCY: HistogramName = HistogramName::new(
    "vllm:inter_token_latency_seconds",
    "Between two spans of tokens of a choice",
    &SHORT_SECONDS,
);
pub(super) const TIME_PER_OUTPUT_TOKEN: HistogramName = HistogramName::new(
    "vllm:request_time_per_output_token_seconds",
    "Mean time per token of a choice after its first span",
    &SHORT_SECONDS,
);
pub(super) const END_TO_END: HistogramName = HistogramName::new(
    "vllm:e2e_request_latency_seconds",
    "From a request's arrival to its last token",
    &LONG_SECONDS,
);
pub(super) const QUEUE_TIME: HistogramName = HistogramName::new(
    "vllm:request_queue_time_seconds",
    "From a request's arrival to its turn",
    &LONG_SECONDS,
);
pub(super) const SLO: CounterName = CounterName::new(
    "outrider_slo_choices_total",
    "Finished choices of requests whose gateway named a latency to keep, by which one and whether it was kept",
);
pub(super) const REQUESTS: CounterName =
    CounterName::new("outrider_requests_total", "Requests by protocol and outcome");
pub(super) const IGNORED: CounterName = CounterName::new(
    "outrider_rounds_ignored_total",
    "Replies and waits of rounds that were dropped or given up, by reason",
);
pub(super) const LANE_K: GaugeName =
    GaugeName::new("outrider_lane_k", "How far a lane drafts now; 0 is not at all");
pub(super) const LANE_DRAFT_TOKENS: CounterName =
    CounterName::new("outrider_lane_draft_tokens_total", "Drafted tokens of a lane that were verified");
pub(super) const LANE_ACCEPTED_TOKENS: CounterName =
    CounterName::new("outrider_lane_accepted_tokens_total", "Drafted tokens of a lane that were committed");
pub(super) const LANE_OUTPUT_TOKENS: CounterName =
    CounterName::new("outrider_lane_output_tokens_total", "Tokens that were committed to a lane's sequences");
pub(super) const LOOKUP_DRAFTS: CounterName = CounterName::new(
    "outrider_lookup_drafts_total",
    "Drafts that were looked up at the router and verified, by source",
);
pub(super) const LOOKUP_DRAFT_TOKENS: CounterName =
    CounterName::new("outrider_lookup_draft_tokens_total", "Tokens of these drafts");
pub(super) const LOOKUP_ACCEPTED_TOKENS: CounterName =
    CounterName::new("outrider_lookup_accepted_tokens_total", "Tokens of these drafts that were committed");
pub(super) const SHADOW_DRAFTS: CounterName = CounterName::new(
    "outrider_shadow_drafts_total",
    "Proposals of a draft on trial that were compared with what targets committed (of=shadow), and drafts that served at the same places (of=serving)",
);
pub(super) const SHADOW_JUDGED: CounterName = CounterName::new(
    "outrider_shadow_judged_tokens_total",
    "Drafted tokens of these that the comparison reached, by position",
);
pub(super) const SHADOW_ACCEPTED: CounterName = CounterName::new(
    "outrider_shadow_accepted_tokens_total",
    "Drafted tokens of these that equal what was committed, by position",
);
pub(super) const SHADOW_DROPPED: CounterName = CounterName::new(
    "outrider_shadow_dropped_total",
    "Sequences whose draft on trial was given up, by reason",
);
pub(super) const REQUEST_LOG: CounterName = CounterName::new(
    "outrider_request_log_choices_total",
    "Finished choices for the log of requests: written, left_out (its queue was full) or failed (the file could not be written)",
);
pub(super) const DRAFT_OUTAGES: CounterName = CounterName::new(
    "outrider_draft_outages_total",
    "How often a draft worker was put out because it did not answer",
);
pub(super) const TARGET_OUTAGES: CounterName = CounterName::new(
    "outrider_target_outages_total",
    "How often a target fell silent while it owed answers, or failed so often that it was avoided",
);
pub(super) const WAITING_FOR_TARGET: GaugeName =
    GaugeName::new("outrider_sequences_waiting_for_target", "Sequences that wait for a target with room");
pub(super) const TARGET_WAIT: HistogramName = HistogramName::new(
    "outrider_target_wait_seconds",
    "How long sequences waited for a target with room, by range of priority",
    &LONG_SECONDS,
);
pub(super) const CREDIT_BLOCKS: GaugeName = GaugeName::new(
    "outrider_pool_credit_blocks",
    "KV blocks that this router may reserve at a worker, by that worker's word",
);
pub(super) const RESERVED_BLOCKS: GaugeName =
    GaugeName::new("outrider_pool_reserved_blocks", "KV blocks that this router has reserved at a worker");
pub(super) const WANTED_TARGETS: GaugeName = GaugeName::new(
    "outrider_wanted_target_workers",
    "Target workers that this router's sequences want, with their fraction: add up all routers, then round up",
);
pub(super) const WANTED_DRAFTS: GaugeName = GaugeName::new(
    "outrider_wanted_draft_workers",
    "Draft workers that this router's sequences want; 0 where drafting does not pay",
);
pub(super) const KV_CACHE_USAGE: GaugeName = GaugeName::new(
    "vllm:kv_cache_usage_perc",
    "KV blocks that this router has reserved at a model's targets, of those that it may reserve there; 0 to 1",
);
pub(super) const HEADROOM: GaugeName = GaugeName::new(
    "outrider:goodput_headroom_tokens_per_second",
    "Tokens a second that a model's targets could commit beyond what they do, at the acceptance and the step times seen lately",
);
pub(super) const CACHE_CONFIG: GaugeName = GaugeName::new(
    "vllm:cache_config_info",
    "KV blocks of a model's targets, all together, and tokens in one block; the value is 1",
);
pub(super) const LORA_REQUESTS: GaugeName = GaugeName::new(
    "vllm:lora_requests_info",
    "No adapters are served; the value is when this router started",
);
pub(super) const TOKENIZE_QUEUE: GaugeName =
    GaugeName::new("outrider_tokenize_queue_jobs", "Prompts that wait for a tokenizer thread");

const SHORT_SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0,
];
const LONG_SECONDS: [f64; 16] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];
