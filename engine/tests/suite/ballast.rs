//! A model with ballast gives exactly the logits of the model without it: every family, every weight format,
//! one rank and several, the bundled pair.

use std::path::Path;

use engine::{Engine, LoadOptions, TokenId, WeightFormat};

use crate::support::{demo_dir, feed, golden_cases, golden_dir};

const FORMATS: [WeightFormat; 6] = [
    WeightFormat::AsStored,
    WeightFormat::F32,
    WeightFormat::Bf16,
    WeightFormat::Fp8,
    WeightFormat::Int8,
    WeightFormat::Int4,
];

fn options(model_dir: &Path, weights: WeightFormat, tensor_parallel: usize) -> LoadOptions {
    LoadOptions { tensor_parallel, ..LoadOptions::new(model_dir, weights, 64 << 20) }
}

/// Logits of a prompt, and of the ids that follow it one by one.
fn logits(engine: &mut Engine) -> Vec<Vec<f32>> {
    let vocab = engine.info().vocab_size;
    let ids: Vec<TokenId> = (0..24).map(|i| (i * 29 + 3) % vocab).collect();
    let slot = engine.open();
    let mut rows = feed(engine, slot, &ids[..17], 17);
    for id in &ids[17..] {
        rows.extend(feed(engine, slot, &[*id], 1));
    }
    rows
}

fn check(model: &Path, parameters: u64, ranks: usize) {
    for format in FORMATS {
        let options = options(model, format, ranks);
        let Ok(mut plain) = Engine::load(&options) else {
            assert!(ranks > 1, "only the number of ranks may be unsupported");
            continue;
        };
        let mut enlarged = Engine::load(&LoadOptions { ballast: parameters, ..options }).unwrap();
        let (plain_info, enlarged_info) = (plain.info().clone(), enlarged.info().clone());
        assert!(enlarged_info.ballast_parameters > 0 && plain_info.ballast_parameters == 0);
        assert_eq!(
            enlarged_info.num_parameters,
            plain_info.num_parameters + enlarged_info.ballast_parameters
        );
        assert!(enlarged_info.weight_bytes > plain_info.weight_bytes);
        assert_ne!(enlarged_info.numerics_id, plain_info.numerics_id, "ballast changes the id");
        assert_eq!(
            (enlarged_info.vocab_size, enlarged_info.model_id),
            (plain_info.vocab_size, plain_info.model_id)
        );
        let (expected, found) = (logits(&mut plain), logits(&mut enlarged));
        assert!(expected.iter().flatten().all(|logit| logit.is_finite()));
        assert!(found == expected, "{} as {format:?} on {ranks} ranks", model.display());
    }
}

#[test]
fn every_family_keeps_its_logits() {
    for case in golden_cases() {
        // A wider feed-forward only, and more layers too.
        for parameters in [1, 400_000] {
            check(&golden_dir().join(&case), parameters, 1);
        }
    }
}

#[test]
fn random_weights_take_no_ballast() {
    let config = golden_dir().join("qwen3_norms/config.json");
    let options = LoadOptions { ballast: 1, ..LoadOptions::new(config, WeightFormat::F32, 1 << 20) };
    let error = Engine::random(&options, 1).unwrap_err().to_string();
    assert!(error.contains("ballast is 1: expected 0"), "{error}");
}

#[test]
fn the_bundled_pair_keeps_its_logits() {
    check(&demo_dir("target"), 20_000_000, 1);
    check(&demo_dir("draft"), 2_000_000, 1);
}

#[test]
fn sharded_models_keep_their_logits() {
    for ranks in [2, 4] {
        check(&demo_dir("target"), 9_000_000, ranks);
    }
}
