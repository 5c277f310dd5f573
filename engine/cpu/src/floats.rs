//! Float matrices, packed at load into the order in which the kernels stream them: panels of 32 output
//! channels, one channel per lane, so that a sum runs along K in one lane and is never folded across lanes
//! (docs/contract.md C1). `pack` creates panels, `rows` packs activations, `mat_mul` multiplies one tile of
//! rows, `blocked` many; both use the inner loop of `steps`. The naive twin is `reference::Linear`.
//!
//! A panel is a sequence of steps; a step is two numbers along K of each of the panel's channels. In bf16 a
//! step is two cache lines, with a channel's pair in one 32-bit lane: the first number in the upper half,
//! which instructions for bf16 pairs process first. In f32 it is four lines, those of the first number before
//! those of the second. A K-slice of odd length is padded with a zero, so that every slice begins with a
//! step.

mod blocked;
mod mat_mul;
mod pack;
mod rows;
mod steps;

use std::ops::Range;

pub(super) use mat_mul::{FloatMatMul, with_rows};
pub(super) use rows::TiledRows;

use super::k_slices::NUM_SLICES;
use super::lines::{Line, Lines};
use super::simd::LANES;
use crate::matrix::MatrixFormat;

/// Output channels per panel.
pub(super) const PANEL: usize = 32;
/// Vectors that hold one number of each channel of a panel.
const PANEL_VECTORS: usize = 2;
/// Numbers along K per step.
pub(super) const STEP: usize = 2;

/// A K-slice, in columns of the matrix and in steps of a panel.
#[derive(Debug, Clone)]
struct Slice {
    k: Range<usize>,
    steps: Range<usize>,
}

/// `[width, k]`, packed.
#[derive(Debug)]
pub struct FloatMatrix {
    format: MatrixFormat,
    width: usize,
    k: usize,
    slices: Vec<Slice>,
    /// `[panel][step][line]`.
    lines: Lines,
}

impl FloatMatrix {
    /// Number of output channels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Length of an input row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that a product reads of it.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.lines) as u64
    }

    /// Writes the numbers of one output channel, widened to f32, to `out` `[k]`.
    pub(super) fn row(&self, channel: usize, out: &mut [f32]) {
        let lines: &[Line] = &self.lines;
        let (per_word, step_lines) = match self.format {
            MatrixFormat::Bf16 => (2, PANEL_VECTORS),
            MatrixFormat::F32 => (1, STEP * PANEL_VECTORS),
        };
        let lane = channel % LANES * size_of::<u32>();
        for slice in &self.slices {
            let first =
                (channel / PANEL * self.steps() + slice.steps.start) * step_lines + channel % PANEL / LANES;
            for (word, out) in out[slice.k.clone()].chunks_mut(per_word).enumerate() {
                let bytes = &lines[first + word * PANEL_VECTORS].0;
                let word =
                    u32::from_ne_bytes([bytes[lane], bytes[lane + 1], bytes[lane + 2], bytes[lane + 3]]);
                match out {
                    [x] if self.format == MatrixFormat::F32 => *x = f32::from_bits(word),
                    [first, second @ ..] => {
                        *first = f32::from_bits(word & 0xffff_0000);
                        second.iter_mut().for_each(|second| *second = f32::from_bits(word << 16));
                    }
                    [] => {}
                }
            }
        }
    }

    /// Whether a sum has several K-slices, which the tree joins.
    #[inline(always)]
    fn is_sliced(&self) -> bool {
        self.slices.len() == NUM_SLICES
    }

    /// Whether all K-slices have whole steps, so that columns are stored without gaps.
    pub(super) fn has_even_slices(&self) -> bool {
        self.slices.iter().all(|slice| slice.k.len().is_multiple_of(STEP))
    }

    /// Steps per panel.
    fn steps(&self) -> usize {
        self.slices.last().map_or(0, |slice| slice.steps.end)
    }
}
