//! Input out of range is rejected by name, and a rejected batch changes nothing.

use crate::support::{feed, golden_dir, load};
use engine::{Engine, EngineError, LoadOptions, SequenceRows, SlotId, TokenId, WeightFormat};

const IDS: [TokenId; 200] = [7; 200];

fn options() -> LoadOptions {
    LoadOptions::new(golden_dir().join("llama_tied"), WeightFormat::F32, 1 << 20)
}

fn rows(slot: SlotId, count: usize) -> SequenceRows<'static> {
    SequenceRows { slot, token_ids: &IDS[..count], num_logits: 1 }
}

/// Two layers, two kv heads of 8, sixteen tokens, keys and values in f32.
const BLOCK_BYTES: u64 = 2 * 2 * 8 * 16 * 2 * 4;

fn engine_with_blocks(blocks: u64) -> Engine {
    Engine::load(&LoadOptions { kv_memory_bytes: blocks * BLOCK_BYTES + 5, ..options() }).unwrap()
}

#[test]
fn a_batch_that_does_not_fit_changes_nothing() {
    let mut engine = engine_with_blocks(4);
    assert_eq!((engine.info().kv_blocks, engine.info().max_model_len), (4, 64));
    let (a, b) = (engine.open(), engine.open());
    feed(&mut engine, a, &IDS[..17], 1);
    let before = (engine.len(a), engine.free_blocks(), engine.stats());
    assert_eq!(before.1, 2);
    assert_eq!(engine.blocks_needed(a, 15), 0);
    assert_eq!(engine.blocks_needed(a, 16), 1);
    assert_eq!(engine.blocks_needed(b, 33), 3);

    // Each sequence would fit alone.
    let error = engine.forward(&[rows(a, 16), rows(b, 20)]).unwrap_err();
    assert!(matches!(error, EngineError::OutOfKv { needed: 3, free: 2 }), "{error}");
    assert_eq!((engine.len(a), engine.free_blocks(), engine.stats()), before);

    engine.truncate(a, 16);
    assert_eq!(engine.free_blocks(), 3);
    engine.forward(&[rows(a, 16), rows(b, 20)]).unwrap();
    assert_eq!(engine.free_blocks(), 0);
    assert_eq!(engine.stats().referenced_blocks, 4);
    engine.close(a);
    engine.close(b);
    assert_eq!(engine.free_blocks(), 4);
}

#[test]
fn an_invalid_batch_is_rejected() {
    let mut engine = engine_with_blocks(100);
    let slot = engine.open();
    let gone = engine.open();
    engine.close(gone);
    let check = |engine: &mut Engine, batch: &[SequenceRows<'_>], words: &str| {
        let error = engine.forward(batch).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!((engine.len(slot), engine.stats().forwards), (0, 0));
    };
    check(&mut engine, &[rows(gone, 1)], "is not open");
    check(&mut engine, &[rows(slot, 1), rows(slot, 1)], "twice");
    check(&mut engine, &[SequenceRows { slot, token_ids: &[], num_logits: 0 }], "no token ids");
    check(&mut engine, &[SequenceRows { slot, token_ids: &[1], num_logits: 2 }], "2 rows of logits for 1");
    check(
        &mut engine,
        &[SequenceRows { slot, token_ids: &[1, 112], num_logits: 0 }],
        "token id 112 is not below",
    );
    let long = vec![1; 257];
    check(
        &mut engine,
        &[SequenceRows { slot, token_ids: &long, num_logits: 1 }],
        "257 tokens exceeds the maximum model length",
    );
    assert_eq!(engine.forward(&[]).unwrap().rows(), 0);
    assert_eq!(engine.stats().forwards, 0);
}

#[test]
fn options_out_of_range_are_named() {
    let check = |options: LoadOptions, words: &[&str]| {
        let error = Engine::load(&options).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    check(LoadOptions { threads: 0, ..options() }, &["threads", "0", "1 to 1024"]);
    check(LoadOptions { kv_memory_bytes: 100, ..options() }, &["kv_memory_bytes", "100", "4096"]);
    check(LoadOptions { max_model_len: Some(257), ..options() }, &["max_model_len", "257", "1 to 256"]);
    check(LoadOptions { max_model_len: Some(0), ..options() }, &["max_model_len", "expected 1 to 256"]);
}

#[test]
fn kv_memory_is_allocated_on_demand() {
    // Half a terabyte, which no test machine has: the limit itself costs nothing.
    let engine = Engine::load(&LoadOptions { kv_memory_bytes: 1 << 39, ..options() }).unwrap();
    assert_eq!(engine.info().kv_blocks, (1 << 39) / BLOCK_BYTES);
}

#[test]
fn an_engine_can_move_to_another_thread() {
    let mut engine = engine_with_blocks(4);
    let rows = std::thread::spawn(move || {
        let slot = engine.open();
        feed(&mut engine, slot, &IDS[..3], 2).len()
    });
    assert_eq!(rows.join().unwrap(), 2);
}

#[test]
fn counters_count() {
    let mut engine = engine_with_blocks(100);
    let (a, b) = (engine.open(), engine.open());
    feed(&mut engine, a, &IDS[..10], 0);
    engine.forward(&[rows(a, 2), rows(b, 3)]).unwrap();
    let stats = engine.stats();
    assert_eq!(
        (stats.forwards, stats.rows, stats.kv_tokens, stats.referenced_blocks),
        (2, 15, 10 + 12 + 3, 2)
    );
}

#[test]
fn facts_about_the_model() {
    let info = |case: &str, format| load(&golden_dir().join(case), format, 1).info().clone();
    let tied = info("llama_tied", WeightFormat::F32);
    assert_eq!((tied.model_id.as_str(), tied.vocab_size, tied.kv_block_size), ("llama_tied", 112, 16));
    // 112*32 embedding, 2 layers of (32*32*2 + 16*32*2 attention, 72*32*3 ffn, 2*32 norms), 32 final norm.
    assert_eq!(tied.num_parameters, 112 * 32 + 2 * (32 * 32 * 2 + 16 * 32 * 2 + 72 * 32 * 3 + 64) + 32);
    // Bits depend on the format, not on the threads; "as stored" of f32 is f32.
    assert_ne!(tied.numerics_id, info("llama_tied", WeightFormat::Bf16).numerics_id);
    assert_eq!(tied.numerics_id, info("llama_tied", WeightFormat::AsStored).numerics_id);
    let threads = load(&golden_dir().join("llama_tied"), WeightFormat::F32, 2).info().numerics_id.clone();
    assert_eq!(tied.numerics_id, threads);
    // f16 is widened, bf16 kept.
    let id = |case, format| info(case, format).numerics_id;
    assert_eq!(id("mistral_window", WeightFormat::AsStored), id("mistral_window", WeightFormat::F32));
    assert_eq!(id("qwen3_norms", WeightFormat::AsStored), id("qwen3_norms", WeightFormat::Bf16));
}
