//! Float matrices, packed at load into the order in which the kernels stream them: panels of 32 output
//! channels, one channel per lane, so that a sum runs along K in one lane and is never folded across lanes
//! (docs/contract.md C1). `pack` creates panels, `rows` packs activations, `mat_mul` multiplies one tile of
//! rows, `blocked` many; both use the inner loop of `steps`. The naive twin is `reference::Linear`.
//!
//! A panel is a sequence of steps; a step is two numbers along K of each of the panel's channels. In bf16 a
//! step is two cache lines, with a channel's pair in one 32-bit lane: the first number in the upper half,
//! which instructions for bf16 pairs process first. In f32 it is four lines, those of the first number before
//! those of the second. A chain of odd length is padded with a zero, so that every chain begins with a step. A
//! chain is a K-slice or, with scales by block, its part in a block.

mod blocked;
mod mat_mul;
mod pack;
mod rows;
mod steps;

use std::ops::Range;

pub(super) use mat_mul::{FloatMatMul, with_rows};
pub(super) use rows::TiledRows;

use super::k_slices::{Chain, NUM_SLICES};
use super::lines::{Line, Lines};
use super::simd::LANES;
use crate::matrix::MatrixFormat;

/// Output channels per panel.
pub(super) const PANEL: usize = 32;
/// Vectors that hold one number of each channel of a panel.
const PANEL_VECTORS: usize = 2;
/// Numbers along K per step.
pub(super) const STEP: usize = 2;

/// A chain, and its steps in a panel.
#[derive(Debug, Clone)]
struct PackedChain {
    of: Chain,
    steps: Range<usize>,
}

/// `[width, k]`, packed.
#[derive(Debug)]
pub struct FloatMatrix {
    format: MatrixFormat,
    width: usize,
    k: usize,
    chains: Vec<PackedChain>,
    /// `[panel][step][line]`.
    lines: Lines,
    /// `[panel][chain][channel of the panel]`: factors of the sums of chains, which are added in their order.
    block_scales: Option<Vec<f32>>,
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
        let scales = self.block_scales.as_ref().map_or(0, |scales| size_of_val(scales.as_slice()));
        (size_of_val(&*self.lines) + scales) as u64
    }

    /// Writes the numbers of one output channel, widened to f32, to `out` `[k]`.
    pub(super) fn row(&self, channel: usize, out: &mut [f32]) {
        let lines: &[Line] = &self.lines;
        let (per_word, step_lines) = match self.format {
            MatrixFormat::Bf16 => (2, PANEL_VECTORS),
            MatrixFormat::F32 => (1, STEP * PANEL_VECTORS),
        };
        let lane = channel % LANES * size_of::<u32>();
        for PackedChain { of, steps } in &self.chains {
            let first = (channel / PANEL * self.steps() + steps.start) * step_lines + channel % PANEL / LANES;
            for (word, out) in out[of.k.clone()].chunks_mut(per_word).enumerate() {
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
        self.chains.last().is_some_and(|chain| chain.of.slice + 1 == NUM_SLICES)
    }

    /// Whether all chains have whole steps, so that columns are stored without gaps.
    pub(super) fn has_even_chains(&self) -> bool {
        self.chains.iter().all(|chain| chain.of.k.len().is_multiple_of(STEP))
    }

    /// Scales of a chain for the channels of a panel, if scales are by block.
    #[inline(always)]
    fn chain_scales(&self, panel: usize, chain: usize) -> Option<&[f32]> {
        let scales = self.block_scales.as_ref()?;
        Some(&scales[(panel * self.chains.len() + chain) * PANEL..][..PANEL])
    }

    /// Steps per panel.
    fn steps(&self) -> usize {
        self.chains.last().map_or(0, |chain| chain.steps.end)
    }
}
