//! The draft as a trainable model: the families that the engine runs (Llama, Mistral, Qwen2, Qwen3), in f32,
//! one text at a time. It has the tensors that the engine would load, so biases and head norms are used if
//! they are among them. Sliding windows and scaled rope are not implemented, and `config` refuses them.
//! Callers must also compare its logits with the engine's before training: the trained model must be the same
//! as the served one.

use std::path::Path;

use engine::tensor_names::{EMBEDDING, FINAL_NORM, LM_HEAD};
use engine::{ModelSettings, ModelShape, TokenId};
use ndarray::{Array1, Array2, ArrayView1, Axis, Slice, concatenate};

use crate::adamw::Gradients;
use crate::attention::{AttentionGradients, Heads, Projections, Rope, attend, attend_backward};
use crate::config;
use crate::error::DistillError;
use crate::ops::{gated, gated_backward, linear, linear_backward, rms_norm, rms_norm_backward};
use crate::weights::Weights;

/// A trainable draft.
#[derive(Debug, Clone)]
pub struct DraftModel {
    shape: ModelShape,
    heads: Heads,
    eps: f32,
    rope_theta: f64,
    /// The trained weights.
    pub weights: Weights,
}

/// Intermediate results of one layer, for its backward pass.
struct LayerPass {
    input: Array2<f32>,
    normed: Array2<f32>,
    scales: Array1<f32>,
    /// Before head norms, if there are any; `head_scales` holds the scales of these norms.
    raw_q: Array2<f32>,
    raw_k: Array2<f32>,
    head_scales: Option<[Array1<f32>; 2]>,
    q: Array2<f32>,
    k: Array2<f32>,
    v: Array2<f32>,
    probabilities: Vec<Array2<f32>>,
    mixed: Array2<f32>,
    middle: Array2<f32>,
    middle_normed: Array2<f32>,
    middle_scales: Array1<f32>,
    gate: Array2<f32>,
    up: Array2<f32>,
    gated: Array2<f32>,
}

/// Intermediate results of a forward pass over a text.
pub struct Pass {
    ids: Vec<TokenId>,
    rope: Rope,
    layers: Vec<LayerPass>,
    /// The last rows, for which logits were requested.
    last: Array2<f32>,
    last_normed: Array2<f32>,
    last_scales: Array1<f32>,
    /// `[num_logits, vocab_size]`
    pub logits: Array2<f32>,
}

impl DraftModel {
    /// Reads a checkpoint directory, to run over texts of at most `context` tokens.
    ///
    /// # Errors
    /// A file cannot be read, or the model has a feature that is not implemented.
    pub fn read(directory: &Path, context: usize) -> Result<Self, DistillError> {
        let ModelSettings { shape, rms_norm_eps, rope_theta, tensors, .. } =
            config::read(directory, context)?;
        Ok(Self {
            heads: Heads {
                queries: shape.num_heads as usize,
                kv: shape.num_kv_heads as usize,
                dim: shape.head_dim as usize,
            },
            eps: rms_norm_eps,
            rope_theta,
            weights: Weights::read(directory, &tensors)?,
            shape,
        })
    }

    /// Maximum text length of the model.
    pub fn max_len(&self) -> usize {
        self.shape.max_len as usize
    }

    fn num_layers(&self) -> usize {
        self.shape.num_layers as usize
    }

    fn weight(&self, name: &str) -> &Array2<f32> {
        self.weights.find(name).expect("reading the checkpoint checked that every tensor exists")
    }

    fn vector(&self, name: &str) -> ArrayView1<'_, f32> {
        self.weight(name).row(0)
    }

    fn head(&self) -> &'static str {
        if self.shape.tied { EMBEDDING } else { LM_HEAD }
    }

    /// Runs over a text; computes logits after its last `num_logits` ids, for the first `vocab_size` tokens.
    pub fn forward(&self, ids: &[TokenId], (num_logits, vocab_size): (usize, usize)) -> Pass {
        let places: Vec<usize> = ids.iter().map(|id| *id as usize).collect();
        let mut hidden = self.weight(EMBEDDING).select(Axis(0), &places);
        let rope = Rope::new(ids.len(), self.heads.dim, self.rope_theta);
        let mut layers = Vec::with_capacity(self.num_layers());
        for layer in 0..self.num_layers() {
            let (pass, output) = self.layer_forward(layer, hidden, &rope);
            layers.push(pass);
            hidden = output;
        }
        let last = hidden.slice_axis(Axis(0), Slice::from(ids.len() - num_logits..)).to_owned();
        let (last_normed, last_scales) = rms_norm(&last, self.vector(FINAL_NORM), self.eps);
        let logits =
            last_normed.dot(&self.weight(self.head()).slice_axis(Axis(0), Slice::from(..vocab_size)).t());
        Pass { ids: ids.to_vec(), rope, layers, last, last_normed, last_scales, logits }
    }

    fn layer_forward(&self, layer: usize, input: Array2<f32>, rope: &Rope) -> (LayerPass, Array2<f32>) {
        let norm = |x: &Array2<f32>, part| rms_norm(x, self.vector(&name(layer, part)), self.eps);
        let project = |x: &Array2<f32>, part| {
            linear(x, self.weight(&name(layer, part)), self.weights.find(&bias_name(layer, part)))
        };
        let (normed, scales) = norm(&input, "input_layernorm");
        let raw_q = project(&normed, "self_attn.q_proj");
        let raw_k = project(&normed, "self_attn.k_proj");
        let v = project(&normed, "self_attn.v_proj");
        let (mut q, q_scales) = self.head_norm(&raw_q, &name(layer, "self_attn.q_norm"));
        let (mut k, k_scales) = self.head_norm(&raw_k, &name(layer, "self_attn.k_norm"));
        rope.turn(&mut q);
        rope.turn(&mut k);
        let (mixed, probabilities) = attend(self.heads, Projections { q: &q, k: &k, v: &v });
        let middle = &input + &project(&mixed, "self_attn.o_proj");
        let (middle_normed, middle_scales) = norm(&middle, "post_attention_layernorm");
        let gate = project(&middle_normed, "mlp.gate_proj");
        let up = project(&middle_normed, "mlp.up_proj");
        let gated = gated(&gate, &up);
        let output = &middle + &project(&gated, "mlp.down_proj");
        let head_scales = q_scales.zip(k_scales).map(|(q, k)| [q, k]);
        let pass = LayerPass {
            input,
            normed,
            scales,
            raw_q,
            raw_k,
            head_scales,
            q,
            k,
            v,
            probabilities,
            mixed,
            middle,
            middle_normed,
            middle_scales,
            gate,
            up,
            gated,
        };
        (pass, output)
    }

    /// Normalizes each head of each row, if the model has such norms.
    fn head_norm(&self, x: &Array2<f32>, name: &str) -> (Array2<f32>, Option<Array1<f32>>) {
        if self.weights.find(name).is_none() {
            return (x.clone(), None);
        }
        let (normed, scales) = rms_norm(&self.by_head(x), self.vector(name), self.eps);
        (with_shape(normed, x), Some(scales))
    }

    /// Reshapes to one row per head of each row.
    fn by_head(&self, x: &Array2<f32>) -> Array2<f32> {
        let rows = x.len() / self.heads.dim;
        x.to_shape((rows, self.heads.dim)).expect("rows are whole heads").to_owned()
    }

    /// Gradient of the loss with respect to every weight, given its gradient with respect to the logits of a
    /// pass.
    pub fn backward(&self, pass: &Pass, d_logits: &Array2<f32>) -> Gradients {
        let mut gradients = Gradients::new();
        let head = self.weight(self.head()).slice_axis(Axis(0), Slice::from(..d_logits.ncols()));
        let d_normed = d_logits.dot(&head);
        let d_head = padded(d_logits.t().dot(&pass.last_normed), self.shape.vocab_size as usize);
        add(&mut gradients, self.head(), d_head);
        let (d_norm, d_last) =
            rms_norm_backward(&pass.last, self.vector(FINAL_NORM), &pass.last_scales, &d_normed);
        add(&mut gradients, FINAL_NORM, d_norm);
        let mut d_hidden = Array2::zeros((pass.ids.len(), d_last.ncols()));
        let last = Slice::from(pass.ids.len() - d_last.nrows()..);
        d_hidden.slice_axis_mut(Axis(0), last).assign(&d_last);
        for (layer, layer_pass) in pass.layers.iter().enumerate().rev() {
            d_hidden = self.layer_backward((layer, layer_pass), &pass.rope, d_hidden, &mut gradients);
        }
        let mut d_embeddings = Array2::zeros(self.weight(EMBEDDING).raw_dim());
        for (row, &id) in pass.ids.iter().enumerate() {
            let mut d_embedding = d_embeddings.row_mut(id as usize);
            d_embedding += &d_hidden.row(row);
        }
        add(&mut gradients, EMBEDDING, d_embeddings);
        gradients
    }

    fn layer_backward(
        &self,
        (layer, pass): (usize, &LayerPass),
        rope: &Rope,
        d_output: Array2<f32>,
        gradients: &mut Gradients,
    ) -> Array2<f32> {
        let mut back = LayerBackward { model: self, layer, gradients };
        let d_gated = back.linear("mlp.down_proj", &pass.gated, &d_output);
        let (d_gate, d_up) = gated_backward(&pass.gate, &pass.up, &d_gated);
        let d_normed = back.linear("mlp.gate_proj", &pass.middle_normed, &d_gate)
            + back.linear("mlp.up_proj", &pass.middle_normed, &d_up);
        let d_middle =
            d_output + back.norm("post_attention_layernorm", &pass.middle, &pass.middle_scales, &d_normed);

        let d_mixed = back.linear("self_attn.o_proj", &pass.mixed, &d_middle);
        let projections = Projections { q: &pass.q, k: &pass.k, v: &pass.v };
        let AttentionGradients { mut q, mut k, v } =
            attend_backward(self.heads, projections, &pass.probabilities, &d_mixed);
        rope.rotate_back(&mut q);
        rope.rotate_back(&mut k);
        if let Some([q_scales, k_scales]) = &pass.head_scales {
            q = back.head_norm("self_attn.q_norm", &pass.raw_q, q_scales, &q);
            k = back.head_norm("self_attn.k_norm", &pass.raw_k, k_scales, &k);
        }
        let d_normed = back.linear("self_attn.q_proj", &pass.normed, &q)
            + back.linear("self_attn.k_proj", &pass.normed, &k)
            + back.linear("self_attn.v_proj", &pass.normed, &v);
        d_middle + back.norm("input_layernorm", &pass.input, &pass.scales, &d_normed)
    }
}

/// Backward pass of one layer's parts, by name: adds to the gradients of weights and returns the gradient of
/// the input.
struct LayerBackward<'a> {
    model: &'a DraftModel,
    layer: usize,
    gradients: &'a mut Gradients,
}

impl LayerBackward<'_> {
    fn linear(&mut self, part: &str, x: &Array2<f32>, d_y: &Array2<f32>) -> Array2<f32> {
        let weight = name(self.layer, part);
        let (d_weight, d_bias, d_x) = linear_backward(x, self.model.weight(&weight), d_y);
        add(self.gradients, &weight, d_weight);
        let bias = bias_name(self.layer, part);
        if self.model.weights.find(&bias).is_some() {
            add(self.gradients, &bias, d_bias);
        }
        d_x
    }

    fn norm(&mut self, part: &str, x: &Array2<f32>, scales: &Array1<f32>, d_y: &Array2<f32>) -> Array2<f32> {
        let weight = name(self.layer, part);
        let (d_weight, d_x) = rms_norm_backward(x, self.model.vector(&weight), scales, d_y);
        add(self.gradients, &weight, d_weight);
        d_x
    }

    fn head_norm(
        &mut self,
        part: &str,
        x: &Array2<f32>,
        scales: &Array1<f32>,
        d_y: &Array2<f32>,
    ) -> Array2<f32> {
        let d_x = self.norm(part, &self.model.by_head(x), scales, &self.model.by_head(d_y));
        with_shape(d_x, x)
    }
}

fn name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

fn bias_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.bias")
}

fn with_shape(x: Array2<f32>, like: &Array2<f32>) -> Array2<f32> {
    x.into_shape_with_order(like.raw_dim()).expect("the same numbers in rows of another width")
}

/// Appends rows of zeros for tokens that the tokenizer does not know.
fn padded(rows: Array2<f32>, num_rows: usize) -> Array2<f32> {
    let missing = Array2::zeros((num_rows - rows.nrows(), rows.ncols()));
    concatenate(Axis(0), &[rows.view(), missing.view()]).expect("rows of one width")
}

fn add(gradients: &mut Gradients, name: &str, more: Array2<f32>) {
    match gradients.get_mut(name) {
        Some(sum) => *sum += &more,
        None => drop(gradients.insert(name.to_owned(), more)),
    }
}
