//! The handle that workers hold: loads a model, keeps its sequences' KV, runs forwards. A batch is checked
//! and its KV reserved here, whole or not at all; below this file nothing can fail any more. How an engine comes to be: `loading`.

mod loading;

use std::cell::Cell;
use std::collections::HashSet;
use std::marker::PhantomData;

use cpu_kernels::{BLOCK_SIZE, KvSlot, StageTimes, TokenCopy};
use speculation::SequenceSpec;
use speculation::acceptance::is_drawn_apart;

use crate::block_manager::{BlockManager, Shared};
use crate::draws::{DrawPlan, DrawRequest, Outcome};
use crate::forward_batch::{ReservedRows, TreePart};
use crate::options::{EngineInfo, EngineStats, SequenceRows, SlotId, TreeRows};
use crate::rank::Runner;
use crate::{EngineError, Logits, TokenId};

/// A loaded model and its KV. One thread uses it at a time: `Send`, not `Sync`.
pub struct Engine {
    info: EngineInfo,
    runner: Box<dyn Runner>,
    /// Whether rows can be drawn where their logits are.
    draws: bool,
    /// Whether rows of a token tree can be run.
    trees: bool,
    blocks: BlockManager,
    stats: EngineStats,
    not_sync: PhantomData<Cell<()>>,
}

/// Cores that the calling thread may run on, in the system's order. Fails where the system does not say.
pub fn allowed_cores() -> Result<Vec<usize>, EngineError> {
    Ok(cpu_kernels::allowed_cores()?)
}

impl Engine {
    /// What was loaded.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SlotId {
        self.blocks.open()
    }

    /// Opens a sequence that begins with the first `len` tokens of another one, whose KV both hold. `None` where the other slot
    /// is not open or holds fewer. What either of them appends is its own: a block that both hold is copied before one writes it.
    pub fn fork(&mut self, slot: SlotId, len: u32) -> Option<SlotId> {
        self.blocks.fork(slot, len)
    }

    /// Forgets a sequence and frees its KV. A slot that is not open is ignored.
    pub fn close(&mut self, slot: SlotId) {
        self.blocks.close(slot);
    }

    /// Forgets what lies at and past `len`. A slot that is not open, or holds no more than that, is left
    /// alone.
    pub fn truncate(&mut self, slot: SlotId, len: u32) {
        self.blocks.truncate(slot, len);
    }

    /// KV tokens held; 0 for a slot that is not open.
    pub fn len(&self, slot: SlotId) -> u32 {
        self.blocks.len(slot).unwrap_or(0)
    }

    /// KV blocks that appending `new_tokens` would take from the free ones.
    pub fn blocks_needed(&self, slot: SlotId, new_tokens: u32) -> u64 {
        self.blocks.blocks_needed(slot, new_tokens)
    }

    /// Lengthens a sequence that holds the first of `ids` by what equal sequences have computed, and lets others
    /// have what it computes from now on: KV of whole blocks, under the hash of all ids before them and the isolation key
    /// (docs/contract.md A). One id at least is left to compute. `wait` says that another open sequence, which asked
    /// before, is about to compute what comes next: ask again after the next forward, or go on alone. A sequence that
    /// never asks shares nothing.
    pub fn share(&mut self, slot: SlotId, isolation_key: u64, ids: &[TokenId]) -> Shared {
        self.blocks.share(slot, isolation_key, ids)
    }

    /// KV blocks in a sequence's table, shared ones included.
    pub fn blocks_held(&self, slot: SlotId) -> u64 {
        self.blocks.block_table(slot).len() as u64
    }

    /// KV blocks that nobody holds, kept prefixes included.
    pub fn free_blocks(&self) -> u64 {
        self.blocks.free_blocks()
    }

    /// Counters since start.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            referenced_blocks: self.blocks.referenced_blocks(),
            cached_blocks: self.blocks.cached_blocks(),
            evicted_blocks: self.blocks.evicted_blocks(),
            ..self.stats
        }
    }

    /// What forwards spent their time on since start: on one CPU rank; elsewhere nobody keeps time.
    pub fn stage_times(&self) -> StageTimes {
        self.runner.stage_times()
    }

    /// Threads of this process that compute, whoever calls [`Engine::forward`] or each rank's own included.
    pub fn num_threads(&self) -> usize {
        self.runner.num_threads()
    }

    /// Keeps each computing thread on one of `cores` (see [`allowed_cores`]), rank by rank. Without ranks the calling thread is
    /// the first of them: call it on the thread that forwards are called on. Costs a third of the speed and more where anything
    /// else wants those cores (docs/adr/0019-own-thread-pool.md). Fails where the cores are fewer than the threads, and where
    /// the system refuses.
    pub fn pin_threads(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        self.runner.pin(cores)
    }

    /// Appends KV for every row and returns the logits asked for, in batch order. On an error nothing has
    /// changed.
    pub fn forward(&mut self, batch: &[SequenceRows<'_>]) -> Result<Logits, EngineError> {
        self.forward_and_draw(batch, &[]).map(|outcome| outcome.logits)
    }

    /// Whether rows of such a sequence can be drawn where their logits are.
    pub fn draws(&self, spec: &SequenceSpec) -> bool {
        self.draws && is_drawn_apart(spec)
    }

    /// Whether rows of token trees can be run here.
    pub fn takes_trees(&self) -> bool {
        self.trees
    }

    /// The same, but for sequences with a request what is drawn from their rows: `requests` is empty, or has an entry for
    /// each sequence of the batch. Ask only for what [`Engine::draws`].
    pub fn forward_and_draw(
        &mut self,
        batch: &[SequenceRows<'_>],
        requests: &[Option<DrawRequest<'_>>],
    ) -> Result<Outcome, EngineError> {
        self.forward_with_trees(batch, requests, &[])
    }

    /// The same, where the last ids of some sequences are token trees, at most one a sequence and only where the engine
    /// [`Engine::takes_trees`]. Say with [`Engine::keep_path`] what is left of a tree, or cut the sequence; until then, calls bring nothing
    /// but further rows of it.
    pub fn forward_with_trees(
        &mut self,
        batch: &[SequenceRows<'_>],
        requests: &[Option<DrawRequest<'_>>],
        trees: &[TreeRows<'_>],
    ) -> Result<Outcome, EngineError> {
        self.check(batch)?;
        let trees = self.check_trees(batch, trees)?;
        let parents: Vec<&[u32]> = trees.iter().map(|tree| tree.parents).collect();
        let plan = DrawPlan::new(batch, (requests, &parents), self.info.vocab_size)?;
        if !self.draws && !plan.is_empty() {
            return Err(EngineError::BadBatch("this device does not draw".to_owned()));
        }
        self.reserve(batch, &trees)?;

        let with_trees = batch.iter().zip(&trees);
        let reserved: Vec<ReservedRows<'_>> =
            with_trees.map(|(rows, tree)| reserved(&self.blocks, rows, *tree)).collect();
        let outputs = self.runner.forward(&reserved, &plan)?;
        let logits = Logits::new(outputs.logits, self.info.vocab_size as usize);
        batch.iter().for_each(|rows| self.blocks.publish(rows.slot));
        self.count(batch);
        Ok(Outcome { logits, drawn: outputs.drawn, scores: outputs.scores })
    }

    /// Everything that can be wrong with a batch but its KV.
    fn check(&self, batch: &[SequenceRows<'_>]) -> Result<(), EngineError> {
        let mut seen = HashSet::new();
        for rows in batch {
            let len = self.blocks.len(rows.slot).ok_or(EngineError::UnknownSlot(rows.slot))?;
            if !seen.insert(rows.slot) {
                return Err(EngineError::BadBatch(format!("slot {:?} is in it twice", rows.slot)));
            }
            if rows.token_ids.is_empty() {
                return Err(EngineError::BadBatch(format!("slot {:?} has no token ids", rows.slot)));
            }
            if rows.num_logits > rows.token_ids.len() {
                let (logits, tokens) = (rows.num_logits, rows.token_ids.len());
                let reason =
                    format!("slot {:?} wants {logits} rows of logits for {tokens} token ids", rows.slot);
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

    /// Each sequence's tree, if it has one.
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
            if !self.trees {
                return bad("this device takes none, send a chain");
            }
            let Some(rows) = batch.get(tree.sequence) else { return bad("there is no such sequence") };
            let part = TreePart { num_stored: tree.num_stored, parents: tree.parents };
            if part.parents.len() <= part.num_stored || !parts[tree.sequence].parents.is_empty() {
                return bad(&format!("one with ids is expected, slot {:?}", rows.slot));
            }
            let num_linear = rows.token_ids.len().checked_sub(part.num_new());
            let num_before = num_linear.map(|linear| self.len(rows.slot) as usize + linear);
            if num_before.is_none_or(|before| before <= part.num_stored) {
                return bad("it needs a row before it");
            }
            if part.num_stored > 0 && num_linear != Some(0) {
                return bad("ids that are not of it come before its first rows");
            }
            if !stands_in_order(part) {
                return bad("ids stand behind their parents, those of one call in order of depth");
            }
            parts[tree.sequence] = part;
        }
        Ok(parts)
    }

    /// What is left of the tree that a sequence's latest rows are, once it is judged: the rows of one path, from its first on, which
    /// become the sequence's at `start`, where the tree began. `path` numbers them in the tree; `ids` are theirs. Their KV is what a chain
    /// of these ids would have left, bit for bit.
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
            let reason = format!("rows {path:?} behind {start} are no path of slot {slot:?}, {end} long");
            return Err(EngineError::BadBatch(reason));
        }
        // A row moves towards the front, past none that still has to move.
        let moves = path.iter().enumerate().filter(|(i, row)| *i != **row);
        let copies: Vec<TokenCopy> =
            moves.map(|(i, &row)| TokenCopy { from: at(first + row), to: at(first + i) }).collect();
        if !copies.is_empty() {
            self.runner.copy_tokens(&copies)?;
        }
        self.blocks.keep(slot, start, ids);
        Ok(())
    }

    /// Takes KV blocks for all rows, or none.
    fn reserve(&mut self, batch: &[SequenceRows<'_>], trees: &[TreePart<'_>]) -> Result<(), EngineError> {
        let needed =
            batch.iter().map(|rows| self.blocks.blocks_needed(rows.slot, rows.token_ids.len() as u32)).sum();
        self.runner.grow_kv(self.blocks.high_water_mark_after(needed)?)?;
        for (rows, tree) in batch.iter().zip(trees) {
            let linear = &rows.token_ids[..rows.token_ids.len() - tree.num_new()];
            let of_linear = self.blocks.append(rows.slot, linear);
            let of_tree = self.blocks.append_tree(rows.slot, tree.num_new() as u32);
            for copy in of_linear.into_iter().chain(of_tree) {
                self.runner.copy_block(copy.from, copy.to)?;
            }
        }
        Ok(())
    }

    fn count(&mut self, batch: &[SequenceRows<'_>]) {
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

/// Whether each row stands behind its parent, and the rows of the call in order of depth: attention relies on positions that do not fall.
fn stands_in_order(tree: TreePart<'_>) -> bool {
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

/// A sequence's part of a call, once [`Engine::reserve`] has lengthened it.
fn reserved<'a>(blocks: &'a BlockManager, rows: &SequenceRows<'a>, tree: TreePart<'a>) -> ReservedRows<'a> {
    let len = blocks.len(rows.slot).expect("check has found every slot open");
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
