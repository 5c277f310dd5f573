//! The handle that workers hold: loads a model, keeps its sequences' KV, runs forwards. A batch is checked
//! and its KV reserved here, whole or not at all; below this file nothing can fail any more.

use std::cell::Cell;
use std::collections::HashSet;
use std::marker::PhantomData;
use std::path::Path;

use crate::block_manager::{BLOCK_SIZE, BlockManager};
use crate::cpu::{Cpu, KERNEL_CLASS};
use crate::forward_batch::{ForwardBatch, MAX_ROWS_PER_PASS, ReservedRows};
use crate::kv_cache::{KvCache, KvShape};
use crate::llama::{Llama, Workspace};
use crate::model_config::fields::read_file;
use crate::model_config::{CONFIG_FILE, ModelConfig};
use crate::numerics_id::NumericsParts;
use crate::options::{EngineInfo, EngineStats, LoadOptions, SequenceRows, SlotId};
use crate::weights::{Checkpoint, Formats, MatrixFormat, RandomTensors};
use crate::{EngineError, Logits};

/// More threads than this is a slip of the keyboard.
const MAX_THREADS: usize = 1024;

/// A loaded model and its KV. One thread uses it at a time: `Send`, not `Sync`.
pub struct Engine {
    info: EngineInfo,
    model: Llama,
    cpu: Cpu,
    kv: KvCache,
    blocks: BlockManager,
    workspace: Workspace,
    stats: EngineStats,
    not_sync: PhantomData<Cell<()>>,
}

impl Engine {
    /// Loads a checkpoint. Weights stored in the wanted format are used where the file is mapped, others are
    /// converted or quantized; the file is read once in full for [`EngineInfo::numerics_id`].
    pub fn load(options: &LoadOptions) -> Result<Engine, EngineError> {
        let cpu = new_cpu(options)?;
        let config = ModelConfig::load(&options.model_dir)?;
        let config_bytes = read_file(&options.model_dir.join(CONFIG_FILE))?;
        let checkpoint = Checkpoint::open(&options.model_dir)?;
        let formats = Formats::resolve(options.weights, checkpoint.stored_format());
        let model = Llama::load(&checkpoint, config, formats, cpu.threads())?;
        let digest = checkpoint.digest(cpu.threads());
        Self::around(options, (model, formats), cpu, (&config_bytes, digest))
    }

    /// A model of random weights that only its configuration is needed for: `options.model_dir` is the path of
    /// a config.json. The same seed makes the same model in every format; "as stored" is bf16. For measuring
    /// speed; its text is noise.
    pub fn random(options: &LoadOptions, seed: u64) -> Result<Engine, EngineError> {
        let cpu = new_cpu(options)?;
        let config = ModelConfig::read(&options.model_dir)?;
        let config_bytes = read_file(&options.model_dir)?;
        let source = RandomTensors { seed, threads: cpu.threads() };
        let formats = Formats::resolve(options.weights, MatrixFormat::Bf16);
        let model = Llama::load(&source, config, formats, cpu.threads())?;
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&seed.to_le_bytes());
        Self::around(options, (model, formats), cpu, (&config_bytes, digest))
    }

    /// Gives a loaded model its KV and its name. `identity` is config.json and what stands for the weights.
    fn around(
        options: &LoadOptions,
        (model, formats): (Llama, Formats),
        cpu: Cpu,
        (config_bytes, checkpoint): (&[u8], [u8; 32]),
    ) -> Result<Engine, EngineError> {
        let kv = new_kv_cache(&model.config, formats.kv());
        let blocks = new_block_manager(&kv, options.kv_memory_bytes)?;
        let numerics = NumericsParts {
            config: config_bytes,
            checkpoint,
            weight_format: formats.as_str(),
            kv_format: kv.format(),
            kernel_class: KERNEL_CLASS,
            device_class: "cpu",
        };
        let info = EngineInfo {
            model_id: model_id(&model.config, &options.model_dir),
            vocab_size: model.config.vocab_size as u32,
            max_model_len: max_model_len(options, &model.config, &blocks)?,
            eos_token_ids: model.config.eos_token_ids.clone(),
            numerics_id: numerics.id(),
            kv_blocks: blocks.total_blocks(),
            kv_block_size: BLOCK_SIZE as u32,
            num_parameters: model.num_parameters(),
            weight_bytes: model.weight_bytes(),
            kv_bytes_per_token: kv.block_bytes() / BLOCK_SIZE as u64,
        };
        tracing::info!(
            model_id = info.model_id,
            parameters = info.num_parameters,
            weights = formats.as_str(),
            weight_bytes = info.weight_bytes,
            max_model_len = info.max_model_len,
            kv_blocks = info.kv_blocks,
            numerics_id = info.numerics_id,
            "model loaded"
        );
        let (workspace, stats) = (Workspace::default(), EngineStats::default());
        Ok(Engine { info, model, cpu, kv, blocks, workspace, stats, not_sync: PhantomData })
    }

    /// What was loaded.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SlotId {
        self.blocks.open()
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

    /// KV blocks that nobody holds.
    pub fn free_blocks(&self) -> u64 {
        self.blocks.free_blocks()
    }

    /// Counters since start.
    pub fn stats(&self) -> EngineStats {
        EngineStats { referenced_blocks: self.blocks.referenced_blocks(), ..self.stats }
    }

    /// Appends KV for every row and returns the logits asked for, in batch order. On an error nothing has
    /// changed.
    pub fn forward(&mut self, batch: &[SequenceRows<'_>]) -> Result<Logits, EngineError> {
        self.check(batch)?;
        self.reserve(batch)?;

        let reserved: Vec<ReservedRows<'_>> = batch.iter().map(|rows| reserved(&self.blocks, rows)).collect();
        let passes = ForwardBatch::passes(&reserved, MAX_ROWS_PER_PASS);
        let vocab_size = self.model.config.vocab_size;
        let mut logits = Logits::zeroed(batch.iter().map(|rows| rows.num_logits).sum(), vocab_size);
        let (model, cpu, kv, workspace) = (&self.model, &self.cpu, &mut self.kv, &mut self.workspace);
        let rows: usize = passes.iter().map(ForwardBatch::num_rows).sum();
        cpu.enter(rows * self.info.num_parameters as usize, || {
            let mut done = 0;
            for pass in passes.iter().filter(|pass| pass.num_rows() > 0) {
                let rows = done..done + pass.logit_rows.len();
                done = rows.end;
                model.forward(cpu, kv, pass, (workspace, logits.rows_mut(rows)));
            }
        });
        self.count(batch);
        Ok(logits)
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

    /// Takes KV blocks for all rows, or none.
    fn reserve(&mut self, batch: &[SequenceRows<'_>]) -> Result<(), EngineError> {
        let needed =
            batch.iter().map(|rows| self.blocks.blocks_needed(rows.slot, rows.token_ids.len() as u32)).sum();
        self.kv.grow_to(self.blocks.high_water_mark_after(needed)?)?;
        for rows in batch {
            self.blocks.append(rows.slot, rows.token_ids.len() as u32);
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

/// A sequence's part of a call, once [`Engine::reserve`] has lengthened it.
fn reserved<'a>(blocks: &'a BlockManager, rows: &SequenceRows<'a>) -> ReservedRows<'a> {
    let len = blocks.len(rows.slot).expect("check has found every slot open");
    ReservedRows {
        token_ids: rows.token_ids,
        start: len - rows.token_ids.len() as u32,
        block_table: blocks.block_table(rows.slot),
        num_logits: rows.num_logits,
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

fn new_cpu(options: &LoadOptions) -> Result<Cpu, EngineError> {
    if options.threads == 0 || options.threads > MAX_THREADS {
        let reason = format!("expected 1 to {MAX_THREADS}");
        return Err(EngineError::BadOption { option: "threads", value: options.threads as u64, reason });
    }
    Cpu::new(options.threads)
}

fn new_kv_cache(config: &ModelConfig, format: MatrixFormat) -> KvCache {
    let shape = KvShape {
        num_layers: config.num_layers,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
    };
    match format {
        MatrixFormat::F32 => KvCache::new_f32(shape),
        MatrixFormat::Bf16 => KvCache::new_bf16(shape),
    }
}

fn new_block_manager(kv: &KvCache, kv_memory_bytes: u64) -> Result<BlockManager, EngineError> {
    let blocks = kv_memory_bytes / kv.block_bytes();
    if blocks == 0 {
        let reason = format!("less than one block of {BLOCK_SIZE} tokens, {} bytes", kv.block_bytes());
        return Err(EngineError::BadOption { option: "kv_memory_bytes", value: kv_memory_bytes, reason });
    }
    Ok(BlockManager::new(u32::try_from(blocks).unwrap_or(u32::MAX)))
}

fn max_model_len(
    options: &LoadOptions,
    config: &ModelConfig,
    blocks: &BlockManager,
) -> Result<u32, EngineError> {
    let kv_tokens = blocks.total_blocks() * BLOCK_SIZE as u64;
    let most = config.max_len.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
    match options.max_model_len {
        None => Ok(most),
        Some(len) if (1..=most).contains(&len) => Ok(len),
        Some(len) => {
            let reason = format!(
                "expected 1 to {most} (the model takes {}, kv_memory_bytes {kv_tokens})",
                config.max_len
            );
            Err(EngineError::BadOption { option: "max_model_len", value: u64::from(len), reason })
        }
    }
}

/// A configuration may hold the path it was trained at, which names nothing.
fn model_id(config: &ModelConfig, model_dir: &Path) -> String {
    let is_name = |name: &&String| !name.is_empty() && !name.starts_with(['/', '.', '~']);
    config.name.as_ref().filter(is_name).cloned().unwrap_or_else(|| {
        let absolute = std::path::absolute(model_dir).unwrap_or_else(|_| model_dir.to_owned());
        absolute.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    })
}
