//! Writes a checkpoint with random bf16 weights, a tenth as many as in the bundled draft, for tests that run
//! kernels on the host. Heads of 16 numbers are the smallest for which there are kernels. Two query heads
//! share a key-value head, so four ranks replicate it, and no number of ranks divides the nine blocks of
//! feed-forward columns.

use std::path::Path;

use half::bf16;
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::support::{Random, Tensors, write_tensors};

const VOCAB: usize = 300;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const INTERMEDIATE: usize = 288;

/// Writes a model of this many layers to an existing directory. Models of different depths share the table,
/// the vocabulary's projection and their first layers, so a short one guesses some ids of a deep one.
pub(crate) fn write_small_model(dir: &Path, num_layers: usize) {
    let mut random = Random::new(20);
    // Uniform numbers, at most `size` from `middle`.
    let mut tensor = |name: String, shape: &[usize], (middle, size): (f32, f32)| {
        let number = || middle + size * (random.below(1 << 16) as f32 / (1 << 15) as f32 - 1.0);
        let len: usize = shape.iter().product();
        let numbers: Vec<bf16> = std::iter::repeat_with(number).take(len).map(bf16::from_f32).collect();
        let bytes: Vec<u8> = bytemuck::cast_slice(&numbers).to_vec();
        (name, Dtype::BF16, shape.to_vec(), bytes)
    };
    let (norms, matrices) = ((1.0, 0.5), (0.0, 0.2));
    let mut tensors: Tensors = vec![
        tensor("model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN], (0.0, 1.0)),
        tensor("lm_head.weight".to_owned(), &[VOCAB, HIDDEN], (0.0, 0.7)),
        tensor("model.norm.weight".to_owned(), &[HIDDEN], norms),
    ];
    for layer in 0..num_layers {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.push(tensor(format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN], norms));
        }
        for (matrix, outputs, inputs) in [
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ] {
            let name = format!("model.layers.{layer}.{matrix}.weight");
            tensors.push(tensor(name, &[outputs, inputs], matrices));
        }
    }
    write_tensors(dir, &tensors);
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": false,
        "vocab_size": VOCAB,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
