//! A row's logits depend only on its sequence (docs/contract.md C). Independent of the rest of the batch, the
//! split of the text into forwards, rollbacks and the location of its KV, the bits are those of the oracle,
//! which has no cache, no batch and no threads. Everything is compared by `==`.

use std::path::Path;

use crate::support::{Random, demo_dir, feed, golden_cases, golden_dir, load};
use engine::{Engine, Oracle, SequenceRows, SlotId, TokenId, WeightFormat};

const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Int8, WeightFormat::Int4];

/// A text and the oracle's logits at each of its positions.
struct ReferenceText {
    ids: Vec<TokenId>,
    logits: Vec<Vec<f32>>,
}

impl ReferenceText {
    fn texts(dir: &Path, format: WeightFormat, lens: &[usize]) -> Vec<ReferenceText> {
        let oracle = Oracle::load(dir, format).unwrap();
        let vocab = load(dir, format, 1).info().vocab_size;
        let mut random = Random::new(9);
        let mut text =
            |len: usize| (0..len).map(|_| random.below(vocab as usize) as TokenId).collect::<Vec<_>>();
        let reference =
            |ids: Vec<TokenId>| ReferenceText { logits: oracle.logits_at_every_position(&ids), ids };
        lens.iter().map(|&len| reference(text(len))).collect()
    }
}

fn assert_same(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        let differ = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(id) = differ {
            panic!("{what}: row {row}, id {id}: {} instead of {}", found[id], expected[id]);
        }
    }
}

/// Runs a text in chunks of the given sizes, repeated cyclically.
fn logits_in_chunks(engine: &mut Engine, ids: &[TokenId], sizes: &[usize]) -> Vec<Vec<f32>> {
    let slot = engine.open();
    let mut sizes = sizes.iter().cycle();
    let mut logits = Vec::new();
    while logits.len() < ids.len() {
        let end = ids.len().min(logits.len() + sizes.next().unwrap());
        let chunk = &ids[logits.len()..end];
        logits.extend(feed(engine, slot, chunk, chunk.len()));
    }
    engine.close(slot);
    logits
}

#[test]
fn any_split_into_forwards_gives_the_same_bits() {
    for case in golden_cases() {
        for format in FORMATS {
            let dir = golden_dir().join(&case);
            let text = &ReferenceText::texts(&dir, format, &[83])[0];
            let mut engine = load(&dir, format, 1);
            for sizes in [&[83][..], &[1], &[2, 5, 1, 16, 3], &[15, 1, 1]] {
                let found = logits_in_chunks(&mut engine, &text.ids, sizes);
                assert_same(&found, &text.logits, &format!("{case} {format:?} cut by {sizes:?}"));
            }
        }
    }
}

#[test]
fn the_oracle_agrees_with_itself_on_prefixes() {
    let dir = golden_dir().join("qwen3_window_types");
    let text = &ReferenceText::texts(&dir, WeightFormat::Bf16, &[40])[0];
    let oracle = Oracle::load(&dir, WeightFormat::Bf16).unwrap();
    for len in [1, 16, 17, 40] {
        assert_eq!(oracle.logits(&text.ids[..len]), text.logits[len - 1]);
    }
}

/// A sequence in progress.
struct Running<'a> {
    text: &'a ReferenceText,
    slot: SlotId,
}

/// Runs sequences through random batches: any subset, any number of rows, with truncations and restarts in
/// between.
fn drive(engine: &mut Engine, texts: &[ReferenceText], seed: u64, rounds: usize) {
    let mut random = Random::new(seed);
    let mut below = |n: usize| random.below(n);
    let mut running: Vec<Running<'_>> =
        texts.iter().map(|text| Running { text, slot: engine.open() }).collect();
    for round in 0..rounds {
        let mut plan = Vec::new();
        for (i, sequence) in running.iter_mut().enumerate() {
            match below(8) {
                0 => engine.truncate(sequence.slot, below(sequence.text.ids.len()) as u32),
                1 if below(3) == 0 => {
                    engine.close(sequence.slot);
                    sequence.slot = engine.open();
                }
                2 => continue,
                _ => {}
            }
            let held = engine.len(sequence.slot) as usize;
            let most = 1 + below(24);
            let rows = (1 + below(most)).min(sequence.text.ids.len() - held);
            if rows > 0 {
                plan.push((i, held..held + rows, below(rows + 1)));
            }
        }
        let batch: Vec<SequenceRows<'_>> = plan
            .iter()
            .map(|(i, rows, num_logits)| SequenceRows {
                slot: running[*i].slot,
                token_ids: &running[*i].text.ids[rows.clone()],
                num_logits: *num_logits,
            })
            .collect();
        let logits = engine.forward(&batch).unwrap();
        let found: Vec<Vec<f32>> = (0..logits.rows()).map(|i| logits.row(i).to_vec()).collect();
        let expected: Vec<Vec<f32>> = plan
            .iter()
            .flat_map(|(i, rows, num_logits)| {
                running[*i].text.logits[rows.end - num_logits..rows.end].to_vec()
            })
            .collect();
        assert_same(&found, &expected, &format!("seed {seed}, round {round}"));
    }
    running.iter().for_each(|sequence| engine.close(sequence.slot));
    assert_eq!(engine.stats().referenced_blocks, 0);
}

#[test]
fn any_batch_gives_the_same_bits() {
    for case in
        ["llama_wide_heads", "mistral_window", "qwen2_window_layers", "qwen3_norms", "llama_rope_yarn_new"]
    {
        for format in FORMATS {
            let dir = golden_dir().join(case);
            let texts = ReferenceText::texts(&dir, format, &[70, 3, 41, 16, 55, 18]);
            let mut engine = load(&dir, format, 1);
            for seed in 0..4 {
                drive(&mut engine, &texts, seed, 40);
            }
        }
    }
}

/// The bundled target is large enough for work to be split between threads.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (role, format) in [
        ("target", WeightFormat::Bf16),
        ("draft", WeightFormat::F32),
        ("target", WeightFormat::Int8),
        ("target", WeightFormat::Int4),
    ] {
        let dir = demo_dir(role);
        let texts = ReferenceText::texts(&dir, format, &[60, 44, 9]);
        for threads in [1, 2, 3] {
            let mut engine = load(&dir, format, threads);
            let found = logits_in_chunks(&mut engine, &texts[0].ids, &[60]);
            assert_same(&found, &texts[0].logits, &format!("{role}, {threads} threads"));
            drive(&mut engine, &texts, threads as u64, 12);
        }
    }
}

/// A header of odd length puts every number at an odd address, so that no number could be used in place.
#[test]
fn any_alignment_in_the_file_gives_the_same_bits() {
    for (case, format) in [("llama_tied", WeightFormat::F32), ("mistral_full", WeightFormat::Bf16)] {
        let dir = golden_dir().join(case);
        let text = &ReferenceText::texts(&dir, format, &[20])[0];
        let copy = tempfile::TempDir::new().unwrap();
        std::fs::copy(dir.join("config.json"), copy.path().join("config.json")).unwrap();
        let mut bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        bytes.insert(8 + header_len as usize, b' ');
        bytes[..8].copy_from_slice(&(header_len + 1).to_le_bytes());
        std::fs::write(copy.path().join("model.safetensors"), bytes).unwrap();
        let found = logits_in_chunks(&mut load(copy.path(), format, 1), &text.ids, &[20]);
        assert_same(&found, &text.logits, case);
    }
}

/// More rows than one pass holds.
#[test]
fn a_call_of_several_passes_gives_the_same_bits() {
    let dir = demo_dir("draft");
    let text = &ReferenceText::texts(&dir, WeightFormat::Bf16, &[700])[0];
    let mut engine = load(&dir, WeightFormat::Bf16, 1);
    let (a, b) = (engine.open(), engine.open());
    let rows = |slot, num_logits| SequenceRows { slot, token_ids: &text.ids, num_logits };
    let logits = engine.forward(&[rows(a, 1), rows(b, 300)]).unwrap();
    let found: Vec<Vec<f32>> = (0..logits.rows()).map(|i| logits.row(i).to_vec()).collect();
    let expected = [&text.logits[699..], &text.logits[400..]].concat();
    assert_same(&found, &expected, "1400 rows");
}

/// FNV-1a over the bits of every logit of a text.
fn fingerprint(logits: &[Vec<f32>]) -> u64 {
    let bytes = logits.iter().flatten().flat_map(|x| x.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Equal `numerics_id` promises equal bits, also on other machines and in later versions. To change these
/// numbers deliberately, raise `KERNEL_CLASS` in `cpu` or `CONTRACT_VERSION` in `numerics_id` too.
#[test]
fn fingerprints_of_this_kernel_class_are_pinned() {
    let bits_of = |case: &str, format| {
        let ids: Vec<TokenId> = (0..60).map(|i| i * 29 % 112).collect();
        let found = logits_in_chunks(&mut load(&golden_dir().join(case), format, 1), &ids, &[60]);
        format!("{case} {:#018x}", fingerprint(&found))
    };
    let found = [
        bits_of("llama_rope_yarn_new", WeightFormat::F32),
        bits_of("mistral_window", WeightFormat::Bf16),
        bits_of("qwen3_norms", WeightFormat::Bf16),
        bits_of("mistral_window", WeightFormat::Fp8),
        bits_of("qwen3_norms", WeightFormat::Int8),
        bits_of("mistral_window", WeightFormat::Int4),
    ];
    let pinned = [
        "llama_rope_yarn_new 0xce2bbcedddc40c96",
        "mistral_window 0x5c5aa72ad832c2c7",
        "qwen3_norms 0x1b5057df0df439e0",
        "mistral_window 0x97038d1b0e9b9d7c",
        "qwen3_norms 0x992905753d48c811",
        "mistral_window 0x105733e477c8fe03",
    ];
    assert_eq!(found, pinned);
}
