//! One decoder layer of the oracle, over all positions of a text at once.

use cpu_kernels::{KSlices, reference};

use super::{OracleMatrix, Tensors};
use crate::EngineError;
use crate::model_config::ModelConfig;

/// A projection: `[columns, k]` and its bias.
#[derive(Debug)]
struct Projection {
    weights: OracleMatrix,
    bias: Option<Vec<f32>>,
    slices: KSlices,
}

#[derive(Debug)]
pub(super) struct OracleLayer {
    index: usize,
    input_norm: Vec<f32>,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    qk_norms: Option<(Vec<f32>, Vec<f32>)>,
    post_attention_norm: Vec<f32>,
    gate: Projection,
    up: Projection,
    down: Projection,
}

/// Name and shape of a projection.
struct Shape<'a> {
    module: &'a str,
    columns: usize,
    bias: bool,
    slices: KSlices,
}

impl OracleLayer {
    pub(super) fn load(tensors: &Tensors, index: usize) -> Result<Self, EngineError> {
        let config = &tensors.config;
        let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
        let (q, kv, biases) =
            (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.biases);
        let vector = |part: &str, len| {
            tensors.checkpoint.numbers(&format!("model.layers.{index}.{part}.weight"), &[len])
        };
        let input = |module, columns, bias| {
            Projection::load(tensors, index, Shape { module, columns, bias, slices: KSlices::whole(hidden) })
        };
        let output = |module, bias, k, unit| {
            Projection::load(
                tensors,
                index,
                Shape { module, columns: hidden, bias, slices: KSlices::eighths(k, unit) },
            )
        };
        let qk_norms = match config.qk_norm {
            true => Some((
                vector("self_attn.q_norm", config.head_dim)?,
                vector("self_attn.k_norm", config.head_dim)?,
            )),
            false => None,
        };
        Ok(Self {
            index,
            input_norm: vector("input_layernorm", hidden)?,
            q: input("self_attn.q_proj", q, biases.qkv)?,
            k: input("self_attn.k_proj", kv, biases.qkv)?,
            v: input("self_attn.v_proj", kv, biases.qkv)?,
            o: output("self_attn.o_proj", biases.o, q, config.head_dim)?,
            qk_norms,
            post_attention_norm: vector("post_attention_layernorm", hidden)?,
            gate: input("mlp.gate_proj", ffn, biases.mlp)?,
            up: input("mlp.up_proj", ffn, biases.mlp)?,
            down: output("mlp.down_proj", biases.mlp, ffn, 32)?,
        })
    }

    /// Runs the residual stream `[positions, hidden]` through this layer.
    pub(super) fn forward(&self, tensors: &Tensors, hidden: &[f32]) -> Vec<f32> {
        let config = &tensors.config;
        let normed = norm_rows(hidden, &self.input_norm, config);
        let attended = self.attend(tensors, &normed);
        let hidden = add(hidden, &self.o.apply(&attended));

        let normed = norm_rows(&hidden, &self.post_attention_norm, config);
        let (gate, up) = (self.gate.apply(&normed), self.up.apply(&normed));
        add(&hidden, &self.down.apply(&reference::silu_mul(&gate, &up)))
    }

    fn attend(&self, tensors: &Tensors, normed: &[f32]) -> Vec<f32> {
        let config = &tensors.config;
        let (q_norm, k_norm) = match &self.qk_norms {
            Some((q, k)) => (Some(q.as_slice()), Some(k.as_slice())),
            None => (None, None),
        };
        let queries = norm_and_rope(split(self.q.apply(normed), config.num_heads, config), q_norm, config);
        let keys = norm_and_rope(split(self.k.apply(normed), config.num_kv_heads, config), k_norm, config);
        let values = split(self.v.apply(normed), config.num_kv_heads, config);
        // Attention reads keys and values in the format in which they are stored.
        let stored = |heads: Heads| -> Heads {
            heads.into_iter().map(|head| head.into_iter().map(|x| tensors.stored(x)).collect()).collect()
        };
        let (keys, values) = (stored(keys), stored(values));

        let group = config.num_heads / config.num_kv_heads;
        let window = config.windows[self.index];
        let attend = &|position: usize, head: usize| {
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let (keys, values) = (&keys[head / group], &values[head / group]);
            reference::attention(&queries[head][position], keys, values, first..position + 1)
        };
        let positions = 0..normed.len() / config.hidden_size;
        positions
            .flat_map(|position| (0..config.num_heads).flat_map(move |head| attend(position, head)))
            .collect()
    }
}

impl Projection {
    fn load(tensors: &Tensors, layer: usize, shape: Shape<'_>) -> Result<Self, EngineError> {
        let name = |part: &str| format!("model.layers.{layer}.{}.{part}", shape.module);
        let k = shape.slices.ranges().last().map_or(0, |slice| slice.end);
        let weights = tensors.matrix(tensors.formats.linear, &name("weight"), [shape.columns, k])?;
        let bias = match shape.bias {
            true => Some(tensors.checkpoint.numbers(&name("bias"), &[shape.columns])?),
            false => None,
        };
        Ok(Self { weights, bias, slices: shape.slices })
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        self.weights.multiply(x.to_vec(), &self.slices, self.bias.as_deref())
    }
}

/// `[head][position][head_dim]`.
type Heads = Vec<Vec<Vec<f32>>>;

/// `[position][head][head_dim]`, flat -> by head.
fn split(flat: Vec<f32>, num_heads: usize, config: &ModelConfig) -> Heads {
    let row = num_heads * config.head_dim;
    let head = |h: usize, row: &[f32]| row[h * config.head_dim..(h + 1) * config.head_dim].to_vec();
    (0..num_heads).map(|h| flat.chunks_exact(row).map(|row| head(h, row)).collect()).collect()
}

/// Applies the norm, if there is one, then rope.
fn norm_and_rope(heads: Heads, norm: Option<&[f32]>, config: &ModelConfig) -> Heads {
    let half = config.head_dim / 2;
    let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
    let mut transform = |position: usize, head: Vec<f32>| {
        let mut head = match norm {
            Some(weight) => reference::rms_norm(&head, weight, config.rms_norm_eps),
            None => head,
        };
        config.rope.angles(position as u32, &mut cos, &mut sin);
        reference::rotate(&mut head, &cos, &sin);
        head
    };
    heads
        .into_iter()
        .map(|head| head.into_iter().enumerate().map(|(p, x)| transform(p, x)).collect())
        .collect()
}

fn norm_rows(hidden: &[f32], weight: &[f32], config: &ModelConfig) -> Vec<f32> {
    hidden
        .chunks_exact(weight.len())
        .flat_map(|row| reference::rms_norm(row, weight, config.rms_norm_eps))
        .collect()
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}
