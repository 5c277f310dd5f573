//! Names of the tensors that a configuration implies, as transformers saves them.

use super::ModelConfig;

/// The table of input embeddings.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The vocabulary's projection, unless it is tied to the embeddings.
pub(crate) const LM_HEAD: &str = "lm_head.weight";
/// The norm behind the last layer.
pub(crate) const FINAL_NORM: &str = "model.norm.weight";

const PROJECTIONS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

impl ModelConfig {
    /// The layers' projections with their shapes, `[outputs, inputs]`.
    pub(crate) fn projections(&self) -> Vec<(String, [usize; 2])> {
        let (hidden, ffn, q, kv) =
            (self.hidden_size, self.intermediate_size, self.q_width(), self.kv_width());
        let shapes = [
            [q, hidden],
            [kv, hidden],
            [kv, hidden],
            [hidden, q],
            [ffn, hidden],
            [ffn, hidden],
            [hidden, ffn],
        ];
        let of_layer = |layer| {
            PROJECTIONS
                .iter()
                .zip(shapes)
                .map(move |(module, shape)| (in_layer(layer, module, "weight"), shape))
        };
        (0..self.num_layers).flat_map(of_layer).collect()
    }

    /// All other tensors: tables, norms and biases.
    pub(crate) fn other_tensors(&self) -> Vec<String> {
        let mut names = vec![EMBEDDING.to_owned(), FINAL_NORM.to_owned()];
        if !self.tie_word_embeddings {
            names.push(LM_HEAD.to_owned());
        }
        let has_bias = |module: &str| match module.trim_start_matches("self_attn.") {
            "q_proj" | "k_proj" | "v_proj" => self.biases.qkv,
            "o_proj" => self.biases.o,
            _ => self.biases.mlp,
        };
        for layer in 0..self.num_layers {
            let biased = PROJECTIONS.iter().filter(|module| has_bias(module));
            names.extend(biased.map(|module| in_layer(layer, module, "bias")));
            let head_norms = ["self_attn.q_norm", "self_attn.k_norm"];
            let norms = ["input_layernorm", "post_attention_layernorm"];
            let norms = norms.iter().chain(head_norms.iter().filter(|_| self.qk_norm));
            names.extend(norms.map(|module| in_layer(layer, module, "weight")));
        }
        names
    }
}

fn in_layer(layer: usize, module: &str, end: &str) -> String {
    format!("model.layers.{layer}.{module}.{end}")
}
