//! The engine handle that workers own: has a model, manages the KV of its sequences, runs forwards. A batch
//! is checked and its KV reserved here, all or nothing, so that code below cannot fail on bad input.
//! `loading` creates engines.

mod loading;

use std::cell::Cell;
use std::collections::HashSet;
use std::marker::PhantomData;
use std::sync::Arc;

use cpu_kernels::{BLOCK_SIZE, KvSlot, StageTimes, TokenCopy};
use speculation::SequenceSpec;
use speculation::acceptance::has_independent_rows;

use crate::block_manager::{BlockManager, PrefixMatch, blocks_for};
use crate::draws::{DrawPlan, DrawRequest, ForwardOutput, RankOutput};
use crate::forward_batch::{ReservedRows, TreePart};
use crate::options::{EngineInfo, EngineStats, SequenceRows, SlotId, TreeRows};
use crate::rank::Runner;
use crate::{EngineError, Logits, TokenId};

/// A loaded model and its KV cache. Used by one thread at a time: `Send`, not `Sync`.
pub struct Engine {
    info: EngineInfo,
    runner: Box<dyn Runner>,
    /// Whether the device can sample rows itself.
    draws: bool,
    blocks: BlockManager,
    stats: EngineStats,
    not_sync: PhantomData<Cell<()>>,
}

/// Returns the cores that the calling thread may run on, in the system's order. Fails if the system does not
/// report them.
pub fn allowed_cores() -> Result<Vec<usize>, EngineError> {
    Ok(cpu_kernels::allowed_cores()?)
}

impl Engine {
    /// Facts about the loaded engine.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Runs this process's ranks.
    pub(crate) fn runner_mut(&mut self) -> &mut dyn Runner {
        self.runner.as_mut()
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SlotId {
        self.blocks.open()
    }

    /// Opens a sequence of `len` tokens without running them, to measure forwards behind a long context: its
    /// KV is whatever its blocks contain, so the logits of its rows are meaningless. No other sequence ever
    /// finds this KV. Fails if there are not enough free blocks, or `len` exceeds the longest sequence.
    pub fn open_unwritten(&mut self, len: u32) -> Result<SlotId, EngineError> {
        let max = self.info.max_model_len;
        if len > max {
            return Err(EngineError::TooLong { len: len.into(), max });
        }
        self.runner.grow_kv(self.blocks.high_water_mark_after(blocks_for(len) as u64)?)?;
        Ok(self.blocks.open_unwritten(len))
    }

    /// Opens a sequence that starts with the first `len` tokens of another sequence and shares their KV.
    /// Returns `None` if that slot is not open or has fewer tokens. Later appends to either sequence do not
    /// affect the other: a shared block is copied before it is written.
    pub fn fork(&mut self, slot: SlotId, len: u32) -> Option<SlotId> {
        self.blocks.fork(slot, len)
    }

    /// Closes a sequence and frees its KV. A slot that is not open is ignored.
    pub fn close(&mut self, slot: SlotId) {
        self.blocks.close(slot);
    }

    /// Drops the tokens at position `len` and after. Does nothing for a slot that is not open or has at most
    /// `len` tokens.
    pub fn truncate(&mut self, slot: SlotId, len: u32) {
        self.blocks.truncate(slot, len);
    }

    /// Number of tokens in the sequence's KV; 0 for a slot that is not open.
    pub fn len(&self, slot: SlotId) -> u32 {
        self.blocks.len(slot).unwrap_or(0)
    }

    /// Number of free KV blocks that appending `new_tokens` would take.
    pub fn blocks_needed(&self, slot: SlotId, new_tokens: u32) -> u64 {
        self.blocks.blocks_needed(slot, new_tokens)
    }

    /// Extends a sequence that has the first of `ids` with cached KV of the same prefix, and publishes what
    /// it computes from now on: KV of whole blocks, under the hash of all ids before them and the isolation
    /// key (docs/contract.md A). At least one id is left to compute. `wait` means that another open sequence,
    /// which called this first, is about to compute the next block: call again after the next forward, or
    /// compute it here too. A sequence for which this is never called shares nothing.
    pub fn share_prefix(&mut self, slot: SlotId, isolation_key: u64, ids: &[TokenId]) -> PrefixMatch {
        self.blocks.share_prefix(slot, isolation_key, ids)
    }

    /// Number of KV blocks in a sequence's block table, shared ones included.
    pub fn blocks_held(&self, slot: SlotId) -> u64 {
        self.blocks.block_table(slot).len() as u64
    }

    /// Number of KV blocks that no sequence references, cached prefixes included.
    pub fn free_blocks(&self) -> u64 {
        self.blocks.free_blocks()
    }

    /// Counters since start, and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            referenced_blocks: self.blocks.referenced_blocks(),
            cached_blocks: self.blocks.cached_blocks(),
            evicted_blocks: self.blocks.evicted_blocks(),
            ..self.stats
        }
    }

    /// Time per stage of all forwards since start. Only measured with one CPU rank; zeros elsewhere.
    pub fn stage_times(&self) -> StageTimes {
        self.runner.stage_times()
    }

    /// Number of compute threads in this process: the thread that calls [`Engine::forward`], or the ranks'
    /// threads, included.
    pub fn num_threads(&self) -> usize {
        self.runner.num_threads()
    }

    /// Pins each compute thread to one of `cores` (see [`allowed_cores`]), rank by rank. With a single rank
    /// the calling thread is the first of them: call this on the thread that will call forward. Costs a third
    /// of the speed or more if other processes need those cores (docs/adr/0019-own-thread-pool.md). Fails if
    /// there are fewer cores than threads, or if the system call fails.
    pub fn pin_threads(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        self.runner.pin(cores)
    }

    /// Appends KV for every row and returns the requested logits in batch order. After an error all sequences
    /// are as before, and the call may be repeated.
    pub fn forward(&mut self, batch: &[SequenceRows<'_>]) -> Result<Logits, EngineError> {
        self.forward_and_draw(batch, &[]).map(|output| output.logits)
    }

    /// Whether the device can sample rows of such a sequence itself.
    pub fn draws(&self, spec: &SequenceSpec) -> bool {
        self.draws && has_independent_rows(spec)
    }

    /// Like [`Engine::forward`], but samples the rows of sequences with a request. `requests` is empty, or
    /// has one entry per sequence of the batch. Only valid for sequences that [`Engine::draws`] accepts.
    pub fn forward_and_draw(
        &mut self,
        batch: &[SequenceRows<'_>],
        requests: &[Option<DrawRequest<'_>>],
    ) -> Result<ForwardOutput, EngineError> {
        self.forward_with_trees(batch, requests, &[])
    }

    /// Like [`Engine::forward_and_draw`], where the last ids of some sequences are token trees, at most one
    /// per sequence. Afterwards call [`Engine::keep_path`] or truncate the sequence; until then calls may
    /// only add rows to the tree.
    pub fn forward_with_trees(
        &mut self,
        batch: &[SequenceRows<'_>],
        requests: &[Option<DrawRequest<'_>>],
        trees: &[TreeRows<'_>],
    ) -> Result<ForwardOutput, EngineError> {
        self.check(batch)?;
        let trees = self.check_trees(batch, trees)?;
        let parents: Vec<&[u32]> = trees.iter().map(|tree| tree.parents).collect();
        let plan = Arc::new(DrawPlan::new(batch, (requests, &parents), self.info.vocab_size)?);
        if !self.draws && !plan.is_empty() {
            return Err(EngineError::BadBatch("this device does not support draws".to_owned()));
        }
        let before: Vec<u32> = batch.iter().map(|rows| self.len(rows.slot)).collect();
        let ran = self.reserve(batch, &trees).and_then(|()| self.run(batch, &trees, &plan));
        if ran.is_err() {
            batch.iter().zip(before).for_each(|(rows, len)| self.blocks.truncate(rows.slot, len));
        }
        let RankOutput { logits, drawn, scores, candidates } = ran?;
        let logits = Logits::new(logits, self.info.vocab_size as usize);
        batch.iter().for_each(|rows| self.blocks.publish(rows.slot));
        self.record_stats(batch);
        Ok(ForwardOutput { logits, drawn, scores, candidates })
    }

    /// Checks everything in a batch except KV capacity.
    fn check(&self, batch: &[SequenceRows<'_>]) -> Result<(), EngineError> {
        let mut seen = HashSet::new();
        for rows in batch {
            let len = self.blocks.len(rows.slot).ok_or(EngineError::UnknownSlot(rows.slot))?;
            if !seen.insert(rows.slot) {
                return Err(EngineError::BadBatch(format!("slot {:?} appears twice", rows.slot)));
            }
            if rows.token_ids.is_empty() {
                return Err(EngineError::BadBatch(format!("slot {:?} has no token ids", rows.slot)));
            }
            if rows.num_logits > rows.token_ids.len() {
                let (logits, tokens) = (rows.num_logits, rows.token_ids.len());
                let reason =
                    format!("slot {:?} requests {logits} rows of logits for {tokens} token ids", rows.slot);
                return Err(EngineError::BadBatch(reason));
            }
            let len = u64::from(len) + rows.token_ids.len() as u64;
            if len > u64::from(self.info.max_model_len) {
                return Err(EngineError::TooLong { len, max: self.info.max_model_len });
            }
            let vocab_size = self.info.vocab_size;
            if let Some(&token_id) = rows.token_ids.iter().find(|&&id| id >= vocab_size) {
                return Err(EngineError::UnknownToken { token_id, vocab_size });
            }
        }
        Ok(())
    }

    /// Returns each sequence's part of a tree, empty for sequences without one.
    fn check_trees<'a>(
        &self,
        batch: &[SequenceRows<'_>],
        trees: &[TreeRows<'a>],
    ) -> Result<Vec<TreePart<'a>>, EngineError> {
        let mut parts = vec![TreePart::default(); batch.len()];
        for tree in trees {
            let bad = |what: &str| {
                Err(EngineError::BadBatch(format!("the token tree of sequence {}: {what}", tree.sequence)))
            };
            let Some(rows) = batch.get(tree.sequence) else { return bad("no such sequence in the batch") };
            let part = TreePart { num_stored: tree.num_stored, parents: tree.parents };
            if part.parents.len() <= part.num_stored || !parts[tree.sequence].parents.is_empty() {
                return bad(&format!("expected one tree with new ids per sequence, slot {:?}", rows.slot));
            }
            let num_linear = rows.token_ids.len().checked_sub(part.num_new());
            let num_before = num_linear.map(|linear| self.len(rows.slot) as usize + linear);
            if num_before.is_none_or(|before| before <= part.num_stored) {
                return bad("expected a token before the tree");
            }
            if part.num_stored > 0 && num_linear != Some(0) {
                return bad("later calls may only add rows of the tree");
            }
            if !is_in_depth_order(part) {
                return bad("parents must come before children, and rows of one call in order of depth");
            }
            parts[tree.sequence] = part;
        }
        Ok(parts)
    }

    /// Keeps one path of the token tree formed by a sequence's latest rows, after verification, and drops its
    /// other rows. The path starts at the root, and its rows move to `start`, where the tree began. `path`
    /// holds row numbers in the tree, `ids` their ids. The KV is then equal, bit for bit, to that of a chain
    /// of these ids.
    pub fn keep_path(
        &mut self,
        slot: SlotId,
        start: u32,
        (path, ids): (&[usize], &[TokenId]),
    ) -> Result<(), EngineError> {
        let table = self.blocks.block_table(slot);
        let at = |position: usize| KvSlot {
            block: table[position / BLOCK_SIZE],
            offset: (position % BLOCK_SIZE) as u32,
        };
        let first = start as usize;
        let end = self.len(slot) as usize;
        if path.len() != ids.len()
            || path.iter().enumerate().any(|(i, &row)| row < i || first + row >= end)
            || path.windows(2).any(|pair| pair[1] <= pair[0])
        {
            let reason =
                format!("rows {path:?} from {start} on are not a path of slot {slot:?} of {end} tokens");
            return Err(EngineError::BadBatch(reason));
        }
        // Copies go from front to back: a destination is never a row that is still to be moved.
        let moves = path.iter().enumerate().filter(|(i, row)| *i != **row);
        let copies: Vec<TokenCopy> =
            moves.map(|(i, &row)| TokenCopy { from: at(first + row), to: at(first + i) }).collect();
        if !copies.is_empty() {
            self.runner.copy_tokens(&copies)?;
        }
        self.blocks.keep_path(slot, start, ids);
        Ok(())
    }

    /// Runs a batch whose KV is reserved.
    fn run(
        &mut self,
        batch: &[SequenceRows<'_>],
        trees: &[TreePart<'_>],
        plan: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError> {
        let with_trees = batch.iter().zip(trees);
        let reserved: Vec<ReservedRows<'_>> =
            with_trees.map(|(rows, tree)| reserved(&self.blocks, rows, *tree)).collect();
        self.runner.forward(&reserved, plan)
    }

    /// Reserves KV blocks for all rows. After an error some sequences may be longer than before; the first
    /// tokens of all sequences still have their KV.
    fn reserve(&mut self, batch: &[SequenceRows<'_>], trees: &[TreePart<'_>]) -> Result<(), EngineError> {
        let needed =
            batch.iter().map(|rows| self.blocks.blocks_needed(rows.slot, rows.token_ids.len() as u32)).sum();
        self.runner.grow_kv(self.blocks.high_water_mark_after(needed)?)?;
        for (rows, tree) in batch.iter().zip(trees) {
            let linear = &rows.token_ids[..rows.token_ids.len() - tree.num_new()];
            let of_linear = self.blocks.append(rows.slot, linear);
            let of_tree = self.blocks.append_rows(rows.slot, tree.num_new() as u32);
            for copy in of_linear.into_iter().chain(of_tree) {
                let copied = self.runner.copy_block(copy.from, copy.to);
                copied.inspect_err(|_| self.blocks.undo_copy(rows.slot, copy))?;
            }
        }
        Ok(())
    }

    fn record_stats(&mut self, batch: &[SequenceRows<'_>]) {
        if batch.is_empty() {
            return;
        }
        self.stats.forwards += 1;
        for rows in batch {
            self.stats.rows += rows.token_ids.len() as u64;
            self.stats.kv_tokens += u64::from(self.len(rows.slot));
        }
    }
}

/// Whether each row comes after its parent and the call's rows are in order of depth. Attention requires
/// non-decreasing positions.
fn is_in_depth_order(tree: TreePart<'_>) -> bool {
    let mut depths: Vec<u32> = Vec::with_capacity(tree.parents.len());
    for &parent in tree.parents {
        let depth = match (parent as usize).checked_sub(1) {
            None => Some(0),
            Some(parent) => depths.get(parent).map(|depth| depth + 1),
        };
        let Some(depth) = depth else { return false };
        depths.push(depth);
    }
    depths[tree.num_stored..].is_sorted()
}

/// A sequence's part of a call, after [`Engine::reserve`] has extended it.
fn reserved<'a>(blocks: &'a BlockManager, rows: &SequenceRows<'a>, tree: TreePart<'a>) -> ReservedRows<'a> {
    let len = blocks.len(rows.slot).expect("check verified that every slot is open");
    ReservedRows {
        token_ids: rows.token_ids,
        start: len - rows.token_ids.len() as u32,
        block_table: blocks.block_table(rows.slot),
        num_logits: rows.num_logits,
        tree,
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("info", &self.info)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
