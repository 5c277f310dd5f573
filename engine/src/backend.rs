//! What a device must be able to do for `llama`, each operation with its shapes. Results obey
//! docs/contract.md part C: a row of any output depends on that row of the inputs alone (attention: on its
//! sequence), bit for bit. Row-major throughout.

use crate::TokenId;
use crate::cpu::{FloatMatrix, PackedMatrix};
use crate::forward_batch::ForwardBatch;
use crate::kv_cache::KvCache;
use crate::rope::Rope;
use crate::weights::Matrix;

/// What inputs are multiplied with.
#[derive(Debug)]
pub(crate) enum LinearWeights {
    Floats(FloatMatrix),
    Packed(PackedMatrix),
}

/// Matrices that share their input, as one `[width, k]`.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weights: LinearWeights,
    /// `[sum of out_i]`.
    pub(crate) bias: Option<Vec<f32>>,
}

impl Linear {
    /// Length of an input row.
    pub(crate) fn k(&self) -> usize {
        match &self.weights {
            LinearWeights::Floats(matrix) => matrix.k(),
            LinearWeights::Packed(matrix) => matrix.k(),
        }
    }

    /// Length of an output row.
    pub(crate) fn width(&self) -> usize {
        match &self.weights {
            LinearWeights::Floats(matrix) => matrix.width(),
            LinearWeights::Packed(matrix) => matrix.width(),
        }
    }

    /// Bytes that a product reads, without the activations.
    pub(crate) fn bytes(&self) -> u64 {
        let weights = match &self.weights {
            LinearWeights::Floats(matrix) => matrix.bytes(),
            LinearWeights::Packed(matrix) => matrix.bytes(),
        };
        weights + self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()) as u64)
    }
}

/// A root mean square norm.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    /// `[width]`.
    pub(crate) weight: Vec<f32>,
    pub(crate) eps: f32,
}

/// How the heads lie in a row of `[q heads | k heads | v heads]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadLayout {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl HeadLayout {
    /// Numbers in all query heads of a row.
    pub(crate) fn q_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Numbers in all key, or all value, heads of a row.
    pub(crate) fn kv_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Numbers in a row.
    pub(crate) fn row_width(self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}

/// One layer's attention over a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionStep<'a> {
    pub(crate) layout: HeadLayout,
    pub(crate) layer: usize,
    /// Attend to the last so many positions only.
    pub(crate) window: Option<u32>,
    pub(crate) batch: &'a ForwardBatch<'a>,
    /// `[rows, layout.row_width()]`, queries and keys already turned.
    pub(crate) qkv: &'a [f32],
}

/// The operations of a forward.
pub(crate) trait Backend {
    /// Rows of `table` `[vocab, hidden]` -> `out` `[rows, hidden]`.
    fn embed(&self, table: &Matrix, token_ids: &[TokenId], out: &mut [f32]);

    /// `hidden += delta`, both `[rows, hidden]`.
    fn add(&self, hidden: &mut [f32], delta: &[f32]);

    /// `x` `[rows, width]` -> `out` `[rows, width]`.
    fn rms_norm(&self, norm: &Norm, x: &[f32], out: &mut [f32]);

    /// Normalises every query and key head of `qkv` `[rows, layout.row_width()]` by itself.
    fn norm_heads(&self, layout: HeadLayout, norms: (&Norm, &Norm), qkv: &mut [f32]);

    /// Turns the query and key heads of `qkv` by the angles `[rows, head_dim / 2]` of each row's position.
    fn rotate(&self, layout: HeadLayout, angles: &Angles, qkv: &mut [f32]);

    /// `x` `[rows, k]` -> `out` `[rows, width]`. May round `x` in place to what the weights take.
    fn linear(&self, linear: &Linear, x: &mut [f32], out: &mut [f32]);

    /// Stores the pass's keys and values where its slot mapping says.
    fn write_kv(&self, kv: &mut KvCache, step: &AttentionStep<'_>);

    /// The pass's queries over the KV blocks of their sequences -> `out` `[rows, layout.q_width()]`.
    fn attention(&self, kv: &KvCache, step: &AttentionStep<'_>, out: &mut [f32]);

    /// `gate_up` `[rows, 2 * width]` -> `out` `[rows, width]`: silu(gate) * up.
    fn silu_mul(&self, gate_up: &[f32], width: usize, out: &mut [f32]);
}

/// Cosines and sines of the rows' positions.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    /// `[rows, half]`.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) half: usize,
}

impl Angles {
    /// Works them out once for all layers.
    pub(crate) fn set(&mut self, rope: &Rope, positions: &[u32]) {
        self.half = rope.half_dim();
        self.cos.resize(positions.len() * self.half, 0.0);
        self.sin.resize(positions.len() * self.half, 0.0);
        let rows = self.cos.chunks_exact_mut(self.half).zip(self.sin.chunks_exact_mut(self.half));
        for (&position, (cos, sin)) in positions.iter().zip(rows) {
            rope.angles(position, cos, sin);
        }
    }
}
