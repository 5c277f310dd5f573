//! How a worker comes by its answers: by a model ([`crate::model::ModelMethod`]), or without one.

use std::collections::VecDeque;

use engine::Engine;
use speculation::ReplyBody;
use speculation::cached_sequence::Limits;

use crate::Task;
use crate::grammars::GrammarStats;
use crate::task::Slot;

/// The tasks could not go on: KV blocks are wanting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeedRoom;

/// Work done since start, and KV in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MethodStats {
    /// Forward passes.
    pub forwards: u64,
    /// Rows computed in them.
    pub rows: u64,
    /// Sequences in them, each counted once a forward.
    pub sequences: u64,
    /// KV tokens attended to.
    pub kv_tokens: u64,
    /// KV blocks that open sequences hold now.
    pub kv_blocks_used: u64,
    /// KV blocks there are; 0 without KV.
    pub kv_blocks_total: u64,
    /// KV blocks that no sequence holds, kept for equal prefixes.
    pub kv_blocks_cached: u64,
    /// Kept KV blocks that were reused for something else.
    pub kv_evictions: u64,
    /// Context ids that were looked for among published prefixes.
    pub prefix_query_tokens: u64,
    /// Context ids whose KV was found there.
    pub prefix_hit_tokens: u64,
    /// What grammars' masks have cost.
    pub grammars: GrammarStats,
}

/// What a method with an engine counts beside it, since start.
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkCounts {
    /// Sequences of all forwards, each counted once a forward.
    pub sequences: u64,
    /// Context ids that were looked for among published prefixes.
    pub prefix_query_tokens: u64,
    /// Context ids whose KV was found there.
    pub prefix_hit_tokens: u64,
}

impl MethodStats {
    /// Of a method that computes with an engine.
    pub fn of_engine(engine: &Engine, counts: WorkCounts, grammars: GrammarStats) -> Self {
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

/// Owned by the device thread, which calls nothing else while it runs.
pub trait Method: Send + 'static {
    /// Called on the device thread before all else.
    fn begin(&mut self) {}

    /// What steps may ask for.
    fn limits(&self) -> Limits;

    /// A place for the KV of a new sequence.
    fn open(&mut self) -> Slot;

    /// A place that begins with the first `len` tokens of another one; `None` where this method cannot do that, or holds fewer.
    fn fork(&mut self, _slot: Slot, _len: u32) -> Option<Slot> {
        None
    }

    /// What a task leads to that needs no forward any more, because what it asks for was computed before it came.
    fn resume(&mut self, _task: &mut Task) -> Option<ReplyBody> {
        None
    }

    /// Frees it.
    fn close(&mut self, slot: Slot);

    /// Forgets KV from `len` on.
    fn truncate(&mut self, slot: Slot, len: u32);

    /// Takes as many tasks as fit one forward further, oldest first; those that are done leave the queue with
    /// their answers. At most `prompt_rows` context ids of prompts run. At least one task goes on, or [`NeedRoom`]
    /// says why none does.
    fn advance(
        &mut self,
        tasks: &mut VecDeque<Task>,
        prompt_rows: u32,
    ) -> Result<Vec<(Task, ReplyBody)>, NeedRoom>;

    /// KV blocks of a sequence, those included that it shares with others; 0 without KV.
    fn blocks_held(&self, slot: Slot) -> u64;

    /// For the metrics.
    fn stats(&self) -> MethodStats;
}
