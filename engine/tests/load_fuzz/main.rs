//! Corrupted checkpoints: mutated safetensors headers, indices and configurations are loaded or refused,
//! without a panic and with a bounded amount of memory. A checkpoint that loads must also run.
//!
//! `PROPTEST_CASES=20000 cargo nextest run -p outrider-engine --test load_fuzz` runs more cases.
#![expect(clippy::unwrap_used, reason = "the lint sees tests, but not what tests call")]

mod memory;
mod mutation;

use std::path::{Path, PathBuf};

use engine::{Engine, LoadOptions, SequenceRows, WeightFormat};
use mutation::{Mutation, mutate};
use proptest::prelude::*;
use tempfile::TempDir;

/// More than enough memory to read files of 100 kB, mutated ones included.
const MAX_BYTES: usize = 16 << 20;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

/// A copy of a golden checkpoint with one file changed.
fn damaged(case: &str, file: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in std::fs::read_dir(golden(case)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join(file);
    std::fs::write(&path, change(std::fs::read(&path).unwrap())).unwrap();
    dir
}

/// Loads a checkpoint and, if that works, runs a few rows. An error's message must be one short line.
fn load_and_run(dir: &Path, weights: WeightFormat) -> Result<(), TestCaseError> {
    let before = memory::begin();
    let options = LoadOptions::new(dir, weights, 4 << 20);
    match Engine::load(&options) {
        Ok(mut engine) => {
            let len = engine.info().max_model_len.min(20);
            let vocab_size = engine.info().vocab_size;
            let ids: Vec<u32> = (0..len).map(|id| id % vocab_size).collect();
            let slot = engine.open();
            let logits = engine.forward(&[SequenceRows { slot, token_ids: &ids, num_logits: 1 }]).unwrap();
            prop_assert_eq!(logits.row(0).len(), vocab_size as usize);
        }
        Err(error) => {
            let message = error.to_string();
            prop_assert!(!message.contains('\n') && message.len() < 2_000, "{}", message);
        }
    }
    let peak = memory::peak_since(before);
    prop_assert!(peak < MAX_BYTES, "{peak} bytes were allocated");
    Ok(())
}

/// Mutates the JSON header of a safetensors file. Writes the header's true length unless `length` is given.
fn mutate_header(file: &[u8], mutations: &[Mutation], length: Option<u64>) -> Vec<u8> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = mutate(file[8..8 + len].to_vec(), mutations);
    let declared_len = length.unwrap_or(header.len() as u64);
    [&declared_len.to_le_bytes()[..], &header, &file[8 + len..]].concat()
}

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    prop::collection::vec(mutation::any(), 1..4)
}

proptest! {
    #[test]
    fn a_header_that_lies(mutations in mutations(), length in prop::option::weighted(0.1, any::<u64>())) {
        let change = |file: Vec<u8>| mutate_header(&file, &mutations, length);
        let dir = damaged("llama_tied", "model.safetensors", change);
        load_and_run(dir.path(), WeightFormat::AsStored)?;
    }

    #[test]
    fn a_file_that_is_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = damaged("llama_tied", "model.safetensors", |_| bytes);
        load_and_run(dir.path(), WeightFormat::AsStored)?;
    }

    #[test]
    fn an_index_that_lies(mutations in mutations()) {
        let change = |file: Vec<u8>| mutate(file, &mutations);
        let dir = damaged("mistral_window", "model.safetensors.index.json", change);
        load_and_run(dir.path(), WeightFormat::Int8)?;
    }

    #[test]
    fn a_configuration_that_lies(
        mutations in mutations(),
        case in prop::sample::select(vec![
            "llama_tied", "llama_rope_yarn_new", "llama_rope_llama3_old", "mistral_window", "qwen2_window_layers",
            "qwen3_window_types",
        ]),
    ) {
        let dir = damaged(case, "config.json", |file| mutate(file, &mutations));
        load_and_run(dir.path(), WeightFormat::Int4)?;
    }
}
