//! How a worker computes its replies: with a model ([`crate::model::ModelExecutor`]) or without one.

use std::collections::VecDeque;

use engine::Engine;
use speculation::ReplyBody;
use speculation::cached_sequence::WorkerLimits;

use crate::Task;
use crate::grammars::GrammarStats;
use crate::task::Slot;

/// No task could continue because KV blocks are exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfKvBlocks;

/// Work done since start, and current KV usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExecutorStats {
    /// Number of forward passes.
    pub forwards: u64,
    /// Rows computed in them.
    pub rows: u64,
    /// Sum over all forwards of their number of sequences.
    pub sequences: u64,
    /// KV tokens attended to.
    pub kv_tokens: u64,
    /// KV blocks held by open sequences.
    pub kv_blocks_used: u64,
    /// Total KV blocks; 0 without KV.
    pub kv_blocks_total: u64,
    /// KV blocks held by no sequence, cached for prefix reuse.
    pub kv_blocks_cached: u64,
    /// Cached KV blocks that were evicted.
    pub kv_evictions: u64,
    /// Context ids looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Context ids whose KV was found there.
    pub prefix_hit_tokens: u64,
    /// Cost of grammar masks.
    pub grammars: GrammarStats,
}

/// Counters that an executor keeps in addition to its engine's, since start.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExecutorCounters {
    /// Sum over all forwards of their number of sequences.
    pub sequences: u64,
    /// Context ids looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Context ids whose KV was found there.
    pub prefix_hit_tokens: u64,
}

impl ExecutorStats {
    /// Stats of an executor that computes with an engine.
    pub fn of_engine(engine: &Engine, counts: ExecutorCounters, grammars: GrammarStats) -> Self {
        let stats = engine.stats();
        Self {
            forwards: stats.forwards,
            rows: stats.rows,
            sequences: counts.sequences,
            kv_tokens: stats.kv_tokens,
            kv_blocks_used: stats.referenced_blocks,
            kv_blocks_total: engine.info().kv_blocks,
            kv_blocks_cached: stats.cached_blocks,
            kv_evictions: stats.evicted_blocks,
            prefix_query_tokens: counts.prefix_query_tokens,
            prefix_hit_tokens: counts.prefix_hit_tokens,
            grammars,
        }
    }
}

/// Pins an engine's compute threads to `cores` (see [`Engine::pin_threads`]); `None` leaves them unpinned.
/// Called on the device thread.
pub fn pin_compute_threads(engine: &mut Engine, cores: Option<&[usize]>) {
    if let Some(cores) = cores
        && let Err(error) = engine.pin_threads(cores)
    {
        tracing::warn!(%error, "cannot pin the compute threads: they run unpinned");
    }
}

/// Computes replies. Owned by the device thread, which blocks while a call runs.
pub trait StepExecutor: Send + 'static {
    /// Called once on the device thread before any other call.
    fn begin(&mut self) {}

    /// Limits that steps are checked against.
    fn limits(&self) -> WorkerLimits;

    /// Opens a slot for the KV of a new sequence.
    fn open(&mut self) -> Slot;

    /// Opens a slot that shares the first `len` tokens of `slot`; `None` if the executor cannot fork, or if
    /// `slot` holds fewer tokens.
    fn fork(&mut self, _slot: Slot, _len: u32) -> Option<Slot> {
        None
    }

    /// Returns the reply to a task that needs no forward, because its work was computed ahead.
    fn resume(&mut self, _task: &mut Task) -> Option<ReplyBody> {
        None
    }

    /// Closes a slot and frees its KV.
    fn close(&mut self, slot: Slot);

    /// Drops KV from position `len` on.
    fn truncate(&mut self, slot: Slot, len: u32);

    /// Runs one forward over as many tasks as fit, oldest first. Finished tasks leave the queue and are
    /// returned with their replies; of the others, those that ran rows are marked ([`Task::has_run`]). At
    /// most `prompt_rows` context ids of prompts run. At least one task progresses, otherwise
    /// [`OutOfKvBlocks`] is returned.
    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, OutOfKvBlocks>;

    /// KV blocks of a sequence, shared ones included; 0 without KV.
    fn blocks_held(&self, slot: Slot) -> u64;

    /// Stats for the metrics.
    fn stats(&self) -> ExecutorStats;
}
