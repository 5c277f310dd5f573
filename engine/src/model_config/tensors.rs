//! Names and shapes of the tensors that a configuration implies, as transformers saves them.

use super::ModelConfig;

/// The table of input embeddings.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The vocabulary's projection, unless it is tied to the embeddings.
pub const LM_HEAD: &str = "lm_head.weight";
/// The norm behind the last layer.
pub const FINAL_NORM: &str = "model.norm.weight";

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
    /// All tensors with their shapes: a matrix is `[outputs, inputs]`.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let projections = self.projections().into_iter().map(|(name, shape)| (name, shape.to_vec()));
        projections.chain(self.other_tensors()).collect()
    }

    /// The layers' projections with their shapes, `[outputs, inputs]`.
    pub(crate) fn projections(&self) -> Vec<(String, [usize; 2])> {
        let of_layer = |layer| {
            PROJECTIONS
                .iter()
                .zip(self.projection_shapes())
                .map(move |(module, shape)| (in_layer(layer, module, "weight"), shape))
        };
        (0..self.num_layers).flat_map(of_layer).collect()
    }

    /// All other tensors with their shapes: tables, norms and biases.
    pub(crate) fn other_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, head_dim) = (self.hidden_size, self.head_dim);
        let table = vec![self.vocab_size, hidden];
        let mut tensors = vec![(EMBEDDING.to_owned(), table.clone()), (FINAL_NORM.to_owned(), vec![hidden])];
        if !self.tie_word_embeddings {
            tensors.push((LM_HEAD.to_owned(), table));
        }
        let has_bias = |module: &str| match module.trim_start_matches("self_attn.") {
            "q_proj" | "k_proj" | "v_proj" => self.biases.qkv,
            "o_proj" => self.biases.o,
            _ => self.biases.mlp,
        };
        let norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)];
        let head_norms = [("self_attn.q_norm", head_dim), ("self_attn.k_norm", head_dim)];
        for layer in 0..self.num_layers {
            for (module, [outputs, _]) in PROJECTIONS.iter().zip(self.projection_shapes()) {
                if has_bias(module) {
                    tensors.push((in_layer(layer, module, "bias"), vec![outputs]));
                }
            }
            let norms = norms.iter().chain(head_norms.iter().filter(|_| self.qk_norm));
            tensors.extend(norms.map(|(module, width)| (in_layer(layer, module, "weight"), vec![*width])));
        }
        tensors
    }

    /// `[outputs, inputs]` of each of [`PROJECTIONS`].
    fn projection_shapes(&self) -> [[usize; 2]; 7] {
        let (hidden, ffn, q, kv) =
            (self.hidden_size, self.intermediate_size, self.q_width(), self.kv_width());
        [[q, hidden], [kv, hidden], [kv, hidden], [hidden, q], [ffn, hidden], [ffn, hidden], [hidden, ffn]]
    }
}

fn in_layer(layer: usize, module: &str, end: &str) -> String {
    format!("model.layers.{layer}.{module}.{end}")
}
