//! Metrics of a worker.

use std::sync::Arc;
use std::time::Duration;

use service::metrics::{Counter, CounterName, Family, Gauge, GaugeName, Histogram, HistogramName};
use service::metrics::{LabelValues, Metrics};

use crate::ahead::AheadStats;
use crate::executor::ExecutorStats;

const STEPS: CounterName = CounterName::new("outrider_worker_steps_total", "Steps received, by outcome")
    .with_labels(&[("outcome", LabelValues::Listed(|| StepOutcome::ALL.map(StepOutcome::as_str).to_vec()))]);
const FORWARDS: CounterName =
    CounterName::new("outrider_worker_forwards_total", "Forward passes of the model");
const FORWARD_SECONDS: HistogramName = HistogramName::new(
    "outrider_worker_forward_seconds",
    "Duration of forward passes, as reported to routers",
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0],
);
const ROWS: CounterName = CounterName::new("outrider_worker_rows_total", "Rows computed in forward passes");
const KV_BLOCKS_USED: GaugeName =
    GaugeName::new("outrider_worker_kv_blocks_used", "KV blocks in use by open sequences");
const KV_BLOCKS: GaugeName = GaugeName::new("outrider_worker_kv_blocks", "Total KV blocks");
const KV_BLOCKS_CACHED: GaugeName = GaugeName::new(
    "outrider_worker_kv_blocks_cached",
    "KV blocks that no sequence uses, cached for prefix reuse",
);
const KV_EVICTIONS: CounterName =
    CounterName::new("outrider_worker_kv_evictions_total", "Cached KV blocks that were evicted");
const PREFIX_QUERIES: CounterName = CounterName::new(
    "outrider_worker_prefix_query_tokens_total",
    "Context tokens looked up in the prefix cache",
);
const PREFIX_HITS: CounterName = CounterName::new(
    "outrider_worker_prefix_hit_tokens_total",
    "Context tokens whose KV was found in the prefix cache",
);
const GRAMMAR_ROWS: CounterName =
    CounterName::new("outrider_worker_grammar_rows_total", "Rows that grammar masks were computed for");
const GRAMMAR_MASK_US: CounterName = CounterName::new(
    "outrider_worker_grammar_mask_microseconds_total",
    "Time spent computing grammar masks, in parallel with forward passes",
);
const GRAMMAR_WAIT_US: CounterName = CounterName::new(
    "outrider_worker_grammar_wait_microseconds_total",
    "Time that finished forward passes waited for grammar masks",
);
const PREEMPTIONS: CounterName =
    CounterName::new("outrider_worker_preemptions_total", "Sequences preempted because KV blocks ran out");
const SEQUENCES: GaugeName = GaugeName::new("outrider_worker_sequences", "Open sequences");
const AHEAD_STEPS: CounterName = CounterName::new(
    "outrider_worker_draft_ahead_steps_total",
    "Requests for a proposal that was drafted ahead, by result: hit, miss (the verification had another outcome), too_early (no token was drafted yet)",
)
.with_labels(&[("result", LabelValues::Listed(|| vec!["hit", "miss", "too_early"]))]);
const AHEAD_GUESSES: CounterName = CounterName::new(
    "outrider_worker_draft_ahead_guesses_total",
    "Draft tokens that were ready when their proposal was requested; each saves a forward pass",
);
const AHEAD_ROWS: CounterName = CounterName::new(
    "outrider_worker_draft_ahead_rows_total",
    "Rows computed in forward passes for drafting ahead",
);
const REGISTERED: GaugeName = GaugeName::new(
    "outrider_worker_registered",
    "1 if discovery listed this worker at the last check, 0 while it is registering",
);
const BALLAST: GaugeName = GaugeName::new(
    "outrider_worker_ballast_parameters",
    "Parameters added to the model that change no token (--ballast); 0 except in demonstrations",
);
const STREAMS: GaugeName = GaugeName::new("outrider_worker_streams", "Connected routers");
const MALFORMED: CounterName = CounterName::new(
    "outrider_worker_malformed_steps_total",
    "Steps that violate a limit of the wire protocol",
);
const QUEUE_SECONDS: HistogramName = HistogramName::new(
    "outrider_worker_queue_seconds",
    "Time from a step's arrival until its first forward begins",
    &[0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0],
);

/// Outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// It ran.
    Run,
    /// Its step sequence number or epoch was outdated.
    Stale,
    /// It did not match the cached state.
    NeedContext,
    /// It was malformed or impossible to run.
    Refused,
    /// Counted beside `run`: its forward failed, or no token could be drawn from its rows.
    Failed,
    /// Newer steps of its sequence displaced it from the queue.
    Overrun,
    /// Not an outcome of a step: KV of an idle sequence was evicted.
    Evicted,
    /// It was preempted because KV blocks ran out.
    Preempted,
    /// A reply frame was dropped because the router read too slowly.
    ReplyDropped,
}

impl StepOutcome {
    /// All variants.
    const ALL: [Self; 9] = [
        Self::Run,
        Self::Stale,
        Self::NeedContext,
        Self::Refused,
        Self::Failed,
        Self::Overrun,
        Self::Evicted,
        Self::Preempted,
        Self::ReplyDropped,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Stale => "stale",
            Self::NeedContext => "need_context",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Overrun => "overrun",
            Self::Evicted => "evicted",
            Self::Preempted => "preempted",
            Self::ReplyDropped => "reply_dropped",
        }
    }
}

/// Handles to a worker's metrics; clones share the same metrics.
#[derive(Debug, Clone)]
pub struct WorkerMetrics {
    steps: Family<Vec<(&'static str, String)>, Counter>,
    forwards: Counter,
    rows: Counter,
    forward_seconds: Histogram,
    kv_blocks_used: Gauge,
    kv_blocks_total: Gauge,
    kv_blocks_cached: Gauge,
    kv_evictions: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    grammar_rows: Counter,
    grammar_mask_us: Counter,
    grammar_wait_us: Counter,
    ahead_steps: Family<Vec<(&'static str, String)>, Counter>,
    ahead_guesses: Counter,
    ahead_rows: Counter,
    preemptions: Counter,
    sequences: Gauge,
    queue_seconds: Histogram,
    /// 1 while discovery lists this worker.
    pub registered: Gauge,
    /// Ballast parameters in the model.
    pub ballast_parameters: Gauge,
    /// Connected routers.
    pub streams: Gauge,
    /// Malformed steps.
    pub malformed: Counter,
    counted: Arc<std::sync::Mutex<ExecutorStats>>,
    counted_ahead: Arc<std::sync::Mutex<AheadStats>>,
}

impl WorkerMetrics {
    /// Registers all metrics.
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            steps: metrics.counter_family(&STEPS),
            forwards: metrics.counter(&FORWARDS),
            rows: metrics.counter(&ROWS),
            forward_seconds: metrics.histogram(&FORWARD_SECONDS),
            kv_blocks_used: metrics.gauge(&KV_BLOCKS_USED),
            kv_blocks_total: metrics.gauge(&KV_BLOCKS),
            kv_blocks_cached: metrics.gauge(&KV_BLOCKS_CACHED),
            kv_evictions: metrics.counter(&KV_EVICTIONS),
            prefix_queries: metrics.counter(&PREFIX_QUERIES),
            prefix_hits: metrics.counter(&PREFIX_HITS),
            grammar_rows: metrics.counter(&GRAMMAR_ROWS),
            grammar_mask_us: metrics.counter(&GRAMMAR_MASK_US),
            grammar_wait_us: metrics.counter(&GRAMMAR_WAIT_US),
            ahead_steps: metrics.counter_family(&AHEAD_STEPS),
            ahead_guesses: metrics.counter(&AHEAD_GUESSES),
            ahead_rows: metrics.counter(&AHEAD_ROWS),
            preemptions: metrics.counter(&PREEMPTIONS),
            sequences: metrics.gauge(&SEQUENCES),
            queue_seconds: metrics.histogram(&QUEUE_SECONDS),
            registered: metrics.gauge(&REGISTERED),
            ballast_parameters: metrics.gauge(&BALLAST),
            streams: metrics.gauge(&STREAMS),
            malformed: metrics.counter(&MALFORMED),
            counted: Arc::default(),
            counted_ahead: Arc::default(),
        }
    }

    /// Counts one step.
    pub fn count(&self, outcome: StepOutcome) {
        if outcome == StepOutcome::Preempted {
            self.preemptions.inc();
        }
        self.steps.get_or_create(&vec![("outcome", outcome.as_str().to_owned())]).inc();
    }

    /// Records how long a step waited for its first forward.
    pub fn queued(&self, time: Duration) {
        self.queue_seconds.observe(time.as_secs_f64());
    }

    /// Records the duration of a forward.
    pub fn forward(&self, time: Duration) {
        self.forward_seconds.observe(time.as_secs_f64());
    }

    /// Adds the counts of drafting ahead since the last call.
    pub fn observe_ahead(&self, stats: AheadStats) {
        let mut counted = self.counted_ahead.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *counted == stats {
            return;
        }
        for (result, number) in [
            ("hit", stats.hits - counted.hits),
            ("miss", stats.misses - counted.misses),
            ("too_early", stats.too_early - counted.too_early),
        ] {
            self.ahead_steps.get_or_create(&vec![("result", result.to_owned())]).inc_by(number);
        }
        self.ahead_guesses.inc_by(stats.guesses - counted.guesses);
        self.ahead_rows.inc_by(stats.rows - counted.rows);
        *counted = stats;
    }

    /// Adds the executor's counts since the last call and sets the gauges.
    pub fn observe(&self, stats: ExecutorStats, num_sequences: usize) {
        let mut counted = self.counted.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.forwards.inc_by(stats.forwards - counted.forwards);
        self.rows.inc_by(stats.rows - counted.rows);
        self.kv_evictions.inc_by(stats.kv_evictions - counted.kv_evictions);
        self.prefix_queries.inc_by(stats.prefix_query_tokens - counted.prefix_query_tokens);
        self.prefix_hits.inc_by(stats.prefix_hit_tokens - counted.prefix_hit_tokens);
        self.grammar_rows.inc_by(stats.grammars.rows - counted.grammars.rows);
        self.grammar_mask_us.inc_by(stats.grammars.mask_us - counted.grammars.mask_us);
        self.grammar_wait_us.inc_by(stats.grammars.wait_us - counted.grammars.wait_us);
        *counted = stats;
        self.kv_blocks_total.set(stats.kv_blocks_total as i64);
        self.kv_blocks_cached.set(stats.kv_blocks_cached as i64);
        self.kv_blocks_used.set(stats.kv_blocks_used as i64);
        self.sequences.set(num_sequences as i64);
    }
}
