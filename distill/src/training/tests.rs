//! Tests that the trained model equals the engine's, that its gradient is the slope of the loss, and that
//! training reduces the distance to the target.

use std::path::{Path, PathBuf};

use engine::{Engine, LoadOptions, SequenceRows, WeightFormat};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// Vocabulary size of all models here except the bundled ones.
const TINY_VOCAB: usize = 96;

/// No text here is longer.
const CONTEXT: usize = 64;

fn bundled(role: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").join(role)
}

/// The engine as the target.
struct Served(Engine);

impl Served {
    fn load(directory: &Path) -> Self {
        let engine = Engine::load(&LoadOptions::new(directory, WeightFormat::F32, 64 << 20));
        Self(engine.unwrap())
    }
}

impl Teacher for Served {
    type Error = DistillError;

    fn logits(&mut self, window: &Window) -> Result<Array2<f32>, DistillError> {
        let slot = self.0.open();
        let rows = SequenceRows { slot, token_ids: window.inputs(), num_logits: window.num_labels() };
        let logits = self.0.forward(&[rows])?;
        self.0.close(slot);
        let rows: Vec<f32> = (0..logits.rows()).flat_map(|row| logits.row(row).to_vec()).collect();
        Ok(Array2::from_shape_vec((logits.rows(), logits.vocab_size()), rows).unwrap())
    }
}

fn window(len: usize, first_label: usize, vocab: usize) -> Window {
    Window { ids: (0..len).map(|i| (4 + (i * 97) % (vocab - 4)) as u32).collect(), first_label }
}

/// Properties of a random model.
struct Form {
    /// Its family and other fields of config.json.
    config: Value,
    /// Whether q, k and v have biases.
    has_biases: bool,
    has_head_norms: bool,
}

impl Form {
    fn new(config: Value) -> Self {
        Self { config, has_biases: false, has_head_norms: false }
    }
}

/// Creates a checkpoint of random weights with two layers.
fn random_checkpoint(form: &Form) -> TempDir {
    let mut fields = json!({
        "vocab_size": TINY_VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": false,
        "eos_token_id": 0,
    });
    let both = fields.as_object_mut().unwrap();
    both.extend(form.config.as_object().unwrap().clone());
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![TINY_VOCAB, 24]),
        ("lm_head.weight".into(), vec![TINY_VOCAB, 24]),
        ("model.norm.weight".into(), vec![24]),
    ];
    for layer in 0..2 {
        let mut add = |part: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{part}"), shape.to_vec()));
        };
        for (part, shape) in
            [("q_proj", [32, 24]), ("k_proj", [16, 24]), ("v_proj", [16, 24]), ("o_proj", [24, 32])]
        {
            add(&format!("self_attn.{part}.weight"), &shape);
            if form.has_biases && part != "o_proj" {
                add(&format!("self_attn.{part}.bias"), &shape[..1]);
            }
        }
        for (part, shape) in [("gate_proj", [40, 24]), ("up_proj", [40, 24]), ("down_proj", [24, 40])] {
            add(&format!("mlp.{part}.weight"), &shape);
        }
        add("input_layernorm.weight", &[24]);
        add("post_attention_layernorm.weight", &[24]);
        if form.has_head_norms {
            add("self_attn.q_norm.weight", &[8]);
            add("self_attn.k_norm.weight", &[8]);
        }
    }
    let mut rng = StdRng::seed_from_u64(5);
    let stored = tensors.into_iter().map(|(name, shape)| {
        let middle = if name.contains("norm") { 1.0 } else { 0.0 };
        let bytes: Vec<u8> = (0..shape.iter().product())
            .flat_map(|_| (middle + rng.random_range(-0.4f32..0.4)).to_le_bytes())
            .collect();
        (name, shape, bytes)
    });
    let stored: Vec<_> = stored.collect();
    let views = stored
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
    write("model.safetensors", &safetensors::serialize(views, None).unwrap());
    write("config.json", fields.to_string().as_bytes());
    directory
}

fn forms() -> [Form; 4] {
    [
        Form::new(json!({ "architectures": ["LlamaForCausalLM"] })),
        Form::new(json!({ "architectures": ["MistralForCausalLM"], "sliding_window": null })),
        Form { has_biases: true, ..Form::new(json!({ "architectures": ["Qwen2ForCausalLM"] })) },
        Form { has_head_norms: true, ..Form::new(json!({ "architectures": ["Qwen3ForCausalLM"] })) },
    ]
}

fn largest_difference(draft: &DraftModel, served: &mut Served, window: &Window) -> f32 {
    let engines = served.logits(window).unwrap();
    let ours = draft.forward(window.inputs(), (window.num_labels(), engines.ncols())).logits;
    (engines - ours).fold(0.0, |most, difference| most.max(difference.abs()))
}

#[test]
fn logits_are_the_engines() {
    let (draft, mut served) =
        (DraftModel::read(&bundled("draft"), CONTEXT).unwrap(), Served::load(&bundled("draft")));
    let difference = largest_difference(&draft, &mut served, &window(40, 3, 4096));
    assert!(difference < 1e-3, "the bundled draft: {difference}");
    for form in forms() {
        let directory = random_checkpoint(&form);
        let draft = DraftModel::read(directory.path(), CONTEXT).unwrap();
        let mut served = Served::load(directory.path());
        let difference = largest_difference(&draft, &mut served, &window(40, 3, TINY_VOCAB));
        assert!(difference < 1e-4, "{}: {difference}", form.config);
    }
}

#[test]
fn a_model_that_is_computed_otherwise_shows_in_its_logits() {
    let plain = random_checkpoint(&Form::new(json!({ "architectures": ["LlamaForCausalLM"] })));
    // The same weights.
    let scaled = random_checkpoint(&Form::new(json!({
        "architectures": ["LlamaForCausalLM"], "rope_scaling": { "rope_type": "linear", "factor": 4.0 },
    })));
    let draft = DraftModel::read(plain.path(), CONTEXT).unwrap();
    let difference = largest_difference(&draft, &mut Served::load(scaled.path()), &window(40, 3, TINY_VOCAB));
    assert!(difference > 0.05, "{difference}");
    let refused = DraftModel::read(scaled.path(), CONTEXT).unwrap_err().to_string();
    assert!(refused.contains("rope_scaling has the type \"linear\""), "{refused}");
}

/// Along each weight's gradient the loss rises by the gradient's norm.
#[test]
fn the_gradient_is_the_slope_of_the_loss() {
    let tied = Form::new(json!({ "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true }));
    for form in forms().into_iter().chain([tied]) {
        let (directory, config) = (random_checkpoint(&form), &form.config);
        let mut draft = DraftModel::read(directory.path(), CONTEXT).unwrap();
        // The vocabulary is smaller than the table, as with a padded table.
        let window = window(24, 8, 90);
        let target_logits =
            Array2::from_shape_fn((16, 90), |(row, id)| ((row * 31 + id * 17) % 23) as f32 / 8.0);
        let loss = |draft: &DraftModel| gradient(draft, &window, target_logits.clone()).1.weighted();
        let (gradients, _) = gradient(&draft, &window, target_logits.clone());
        let names: Vec<String> = draft.weights.names().map(str::to_owned).collect();
        for name in &names {
            let gradient = &gradients[name];
            let length = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
            assert!(length > 0.0, "{config}: {name} does nothing");
            let step = (2e-3 / length) as f32;
            let mut moved = |by: f32| {
                let before = draft.weights.clone();
                let (_, tensor) = draft.weights.iter_mut().find(|(known, _)| known == name).unwrap();
                tensor.numbers.scaled_add(by, gradient);
                let loss = loss(&draft);
                draft.weights = before;
                loss
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step) * length);
            assert!(
                (slope - length).abs() < 0.03 * length,
                "{config}, {name}: the loss rises by {slope}, the gradient says {length}"
            );
        }
    }
}

/// Some trainers store a projection to the vocabulary beside tied embeddings. After a training the two would
/// differ, and the engine would refuse the new draft.
#[test]
fn what_the_engine_does_not_use_is_left_out() {
    let tied = Form {
        has_biases: true,
        has_head_norms: true,
        ..Form::new(json!({ "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true }))
    };
    let directory = random_checkpoint(&tied);
    let mut draft = DraftModel::read(directory.path(), CONTEXT).unwrap();
    let unused = |name: &str| name == "lm_head.weight" || name.ends_with("bias") || name.contains("q_norm");
    assert_eq!(draft.weights.names().find(|name| unused(name)), None);
    draft.weights.iter_mut().for_each(|(_, tensor)| tensor.numbers *= 0.9_f32);
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    draft.weights.write(&out).unwrap();
    let difference = largest_difference(&draft, &mut Served::load(&out), &window(40, 3, TINY_VOCAB));
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let draft = DraftModel::read(&bundled("draft"), CONTEXT).unwrap();
    let mut target = Served::load(&bundled("target"));
    let windows = [window(24, 8, 4096), window(20, 4, 4096), window(9, 1, 4096)];
    let mut with = |threads: usize| {
        let target_logits = windows.iter().map(|window| (window, target.logits(window).unwrap())).collect();
        gradients(&draft, target_logits, &thread_pool(NonZeroUsize::new(threads).unwrap()).unwrap())
    };
    let (one, two) = (with(1), with(2));
    assert_eq!(one, two);
}

#[test]
fn steps_bring_the_draft_nearer_and_a_rate_without_bounds_is_noticed() {
    let mut draft = DraftModel::read(&bundled("draft"), CONTEXT).unwrap();
    let mut target = Served::load(&bundled("target"));
    let windows = [window(24, 8, 4096), window(20, 4, 4096)];
    let before = evaluate(&draft, &mut target, &windows).unwrap();
    let plan = TrainingOptions { steps: 6, batch: 2, peak_rate: 1e-3, seed: 1, threads: NonZeroUsize::MIN };
    let mut said = Vec::new();
    train(&mut draft, &mut target, &windows, (&plan, &mut |step| said.push(step.steps))).unwrap();
    let after = evaluate(&draft, &mut target, &windows).unwrap();
    assert!(after.kl < before.kl, "{before:?} {after:?}");
    assert_eq!(said, [1, 2, 3, 4, 5, 6]);

    let wild = TrainingOptions { peak_rate: 1e30, ..plan };
    let error = train(&mut draft, &mut target, &windows, (&wild, &mut |_| ())).unwrap_err().to_string();
    assert!(error.contains("is not a number: lower --learning-rate"), "{error}");
}
