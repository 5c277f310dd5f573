//! Models on several emulated devices: any number of ranks gives the bits of one rank, with the real threads
//! of the ranks, and a failed rank ends the others.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use cpu_kernels::NumbersMut;

use super::{Exchange, Ranks, SumPhases, load_on, on_device};
use crate::collective::RankBarrier;
use crate::cuda::emulator::{Emulator, FREE_BYTES};
use crate::cuda::numerics::Numerics;
use crate::cuda::test_model::{InBlocks, PANELS, WIDE_HEADS, changed_config};
use crate::cuda::whole_model::run;
use crate::weights::{TensorPart, TensorSource};
use crate::{Engine, EngineError, LoadOptions, WeightFormat};

/// A config.json in a temporary directory, with eight query heads.
fn config(kv_heads: u64, tied: bool) -> tempfile::TempDir {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_norms/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (field, value) in [
        ("num_attention_heads", 8),
        ("num_key_value_heads", kv_heads),
        ("head_dim", 16),
        ("intermediate_size", 288),
    ] {
        config[field] = value.into();
    }
    // Not a multiple of the number of ranks: their parts of the vocabulary have different widths.
    config["vocab_size"] = 111.into();
    config["tie_word_embeddings"] = tied.into();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn options(dir: &tempfile::TempDir, weights: WeightFormat) -> LoadOptions {
    LoadOptions::new(dir.path().join("config.json"), weights, 1 << 20)
}

fn engine(options: &LoadOptions, ranks: Ranks<Emulator>) -> Engine {
    Engine::random_by(options, 7, |source, model| load_on(ranks, options, source, model)).unwrap()
}

fn ranks(count: usize) -> Ranks<Emulator> {
    let barrier = Arc::new(RankBarrier::new(count, Duration::from_secs(100)));
    let member = |end| (Emulator::build(), Some(Box::new(end) as Box<dyn Exchange<Emulator>>));
    let members = on_device(count, &barrier).into_iter().map(member).collect();
    let (numerics, phases) = (Numerics::emulated(), SumPhases::BY_SIZE);
    Ranks { members, barrier, memory_utilization: None, numerics, phases }
}

fn check(kv_heads: u64, tied: bool, weights: WeightFormat, degrees: &[usize]) {
    let dir = config(kv_heads, tied);
    let options = options(&dir, weights);
    let mut whole = engine(&options, Ranks::alone(Emulator::build()));
    let expected = run(&mut whole).unwrap();
    for &count in degrees {
        // These rows are too short for two phases by size.
        for phases in [SumPhases::BY_SIZE, SumPhases::ALWAYS_TWO] {
            let mut engine = engine(&options, Ranks { phases, ..ranks(count) });
            assert_eq!(engine.info().numerics_id, whole.info().numerics_id);
            let found = run(&mut engine).unwrap();
            assert!(found == expected, "{count} ranks, {kv_heads} kv heads, {weights:?}: the bits differ");
        }
    }
}

#[test]
fn ranks_change_no_bit() {
    check(4, true, WeightFormat::Bf16, &[1, 2, 8]);
    check(2, false, WeightFormat::Fp8, &[2, 4]);
    check(2, false, WeightFormat::Int8, &[2, 4]);
}

#[test]
fn ranks_change_no_bit_of_products_of_panels() {
    for (weights, changes) in [(WeightFormat::Bf16, &[][..]), (WeightFormat::Int8, WIDE_HEADS)] {
        let (_dir, options) = changed_config(PANELS, changes);
        let options = LoadOptions { weights, ..options };
        let expected = run(&mut engine(&options, Ranks::alone(Emulator::build()))).unwrap();
        for count in [2, 4] {
            let found = run(&mut engine(&options, ranks(count))).unwrap();
            assert!(found == expected, "{weights:?}, {count} ranks: the bits differ");
        }
    }
}

/// FP8 with scales by block: ranks of 4 and 8 begin within a block of down_proj, whose slices have 96 columns.
#[test]
fn ranks_change_no_bit_of_scales_by_block() {
    let changes = [("intermediate_size", 768), ("num_key_value_heads", 8)];
    let (_dir, options) = changed_config(PANELS, &changes);
    let options = LoadOptions { weights: WeightFormat::Fp8, ..options };
    let run_on = |ranks: Ranks<Emulator>| {
        let load = |source: &dyn TensorSource, model| {
            load_on(ranks, &options, &InBlocks(source), InBlocks::model(model))
        };
        run(&mut Engine::random_by(&options, 7, load).unwrap()).unwrap()
    };
    let expected = run_on(Ranks::alone(Emulator::build()));
    for count in [2, 4, 8] {
        assert!(run_on(ranks(count)) == expected, "{count} ranks: the bits differ");
    }
}

#[test]
fn kv_is_shared_out_over_ranks() {
    let dir = config(4, true);
    let options = options(&dir, WeightFormat::Bf16);
    let info = engine(&options, ranks(2)).info().clone();
    assert_eq!(info.kv_blocks, (1 << 20) / (16 * info.kv_bytes_per_token));

    // Sized by device memory: 900 of 1024 MiB are free, 256 are slack, and a forward of this model needs
    // less than a fifth of the rest.
    let engine = engine(&options, Ranks { memory_utilization: Some(0.75), ..ranks(2) });
    let on_rank = 16 * info.kv_bytes_per_token / 2;
    let most = (768 - 124 - 256) * (1 << 20) / on_rank;
    let blocks = engine.info().kv_blocks;
    assert!(blocks < most && blocks > most * 8 / 10, "{blocks} of at most {most}");
}

/// Each GPU holds the whole embedding table, a single one only if it is not the vocabulary projection too.
#[test]
fn resident_bytes_count_the_table_of_every_rank() {
    // 111 entries of 32 bf16 numbers.
    let table = 111 * 32 * 2;
    for (tied, count, tables) in [(true, 1, 0), (true, 2, 2), (false, 1, 1), (false, 4, 4)] {
        let dir = config(4, tied);
        let info = engine(&options(&dir, WeightFormat::Bf16), ranks(count)).info().clone();
        assert_eq!(info.resident_bytes - info.weight_bytes, tables * table, "{tied}, {count} ranks");
    }
}

#[test]
fn a_kv_cache_without_room_is_refused_when_it_is_loaded() {
    let dir = config(4, true);
    let refused = |kv_memory_bytes, ranks: Ranks<Emulator>| {
        let options = LoadOptions { kv_memory_bytes, ..options(&dir, WeightFormat::Bf16) };
        let load = |source: &dyn TensorSource, model| load_on(ranks, &options, source, model);
        Engine::random_by(&options, 7, load).unwrap_err().to_string()
    };
    for (ranks, needed) in [(ranks(1), 1u64 << 40), (ranks(2), 1 << 39)] {
        let error = refused(1 << 40, ranks);
        assert!(error.starts_with("option kv_memory_bytes is 1099511627776: the gpu of rank 0 "), "{error}");
        let numbers = format!("{FREE_BYTES} bytes free beside the weights, and KV needs {needed} there");
        assert!(error.contains(&numbers) && error.ends_with("lower --kv-memory"), "{error}");
    }

    // Only the second rank has no room. Its last three allocations are the cache, the list of copies
    // and the angles of positions.
    let counted = ranks(2);
    let allocations = counted.members[1].0.allocations();
    drop(engine(&options(&dir, WeightFormat::Bf16), counted));
    let failing = ranks(2);
    let cache = allocations.load(Ordering::Relaxed) - 3;
    failing.members[1].0.failing_allocation().store(cache, Ordering::Relaxed);
    let error = refused(1 << 20, failing);
    assert!(error.contains("gpu of rank 1 has 0 bytes free") && error.contains("524288 there"), "{error}");
}

#[test]
fn a_rank_whose_kernels_fail_takes_the_model_down_by_name() {
    let dir = config(4, true);
    let options = options(&dir, WeightFormat::Bf16);
    let mut ranks = ranks(2);
    // Enough launches for loading and for part of a forward.
    ranks.members[1].0.fail_after(20);
    let mut engine = engine(&options, ranks);
    let error = run(&mut engine).unwrap_err();
    assert!(error.is_fatal(), "{error}");
    let said = error.to_string();
    assert!(said.contains("rank 1 is lost") && said.contains("the emulator was told to fail"), "{said}");
    assert_eq!(run(&mut engine).unwrap_err().to_string(), said, "lost for good");
}

/// A tensor source whose first reader waits for a second one.
struct ReadTogether<'a> {
    source: &'a dyn TensorSource,
    readers: Mutex<HashSet<ThreadId>>,
    came: Condvar,
}

impl TensorSource for ReadTogether<'_> {
    fn check(&self, part: &TensorPart) -> Result<(), EngineError> {
        let mut readers = self.readers.lock().unwrap();
        readers.insert(std::thread::current().id());
        self.came.notify_all();
        let alone = |readers: &mut HashSet<ThreadId>| readers.len() < 2;
        let (readers, waited) =
            self.came.wait_timeout_while(readers, Duration::from_secs(20), alone).unwrap();
        assert!(!waited.timed_out(), "{} rank reads, and the other waits for it", readers.len());
        self.source.check(part)
    }

    fn read(&self, part: &TensorPart, rows: Range<usize>, out: NumbersMut<'_>) -> Result<(), EngineError> {
        self.source.read(part, rows, out)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        self.source.vector(name, len)
    }
}

/// Weights that the host generates and both ranks read at the same time equal those that the devices
/// generate.
#[test]
fn ranks_read_side_by_side() {
    let dir = config(4, true);
    let options = options(&dir, WeightFormat::Int8);
    let mut made = engine(&options, ranks(2));
    let read = Engine::random_by(&options, 7, |source, model| {
        let source = ReadTogether { source, readers: Mutex::new(HashSet::new()), came: Condvar::new() };
        load_on(ranks(2), &options, &source, model)
    });
    assert!(run(&mut read.unwrap()).unwrap() == run(&mut made).unwrap(), "the bits differ");
}
