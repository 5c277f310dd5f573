//! int8 and int4 matrices, quantized at load and packed into the order in which the kernels stream them
//! (docs/contract.md C1): panels of sixteen output channels, one channel per lane, so that no sum is ever
//! folded across lanes. `layout` determines the order along K, `pack` creates panels, `rows` quantizes
//! activations, `dots` is the integer arithmetic (in registers: `x86`, `neon`), and `mat_mul` multiplies,
//! with the inner loops of `piece_sums`. The naive twin is `reference::quantized`.

mod dots;
mod layout;
mod mat_mul;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod piece_sums;
mod rows;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

pub(super) use dots::{DotKernel, Dots, PortableDots};
use half::bf16;
use layout::KLayout;
pub(super) use mat_mul::PackedMatMul;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::NeonDots;
pub(super) use rows::QuantizedRows;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Dots, Vnni256Dots, VnniDots};

use super::lines::Lines;
use crate::matrix::QuantizedFormat;

/// Output channels per panel.
pub(super) const PANEL: usize = 16;

/// `[width, k]`, quantized. Stored numbers are shifted to be unsigned, since the instructions take one
/// unsigned operand; the shift is corrected with the sums of the activations.
#[derive(Debug)]
pub struct PackedMatrix {
    width: usize,
    layout: KLayout,
    /// `[panel][line]`: byte 4 c + j of a line is channel c at the line's j-th k. In int4 its low half is
    /// that, and its high half is k + 4.
    lines: Lines,
    scales: Scales,
}

/// Scales of the stored codes.
#[derive(Debug, Clone)]
enum Scales {
    /// int8: `[panel][PANEL]`.
    Channel(Vec<f32>),
    /// int4: `[panel][piece of K][PANEL]`.
    Group(Vec<bf16>),
}

impl PackedMatrix {
    /// Number of K-slices that are not empty.
    pub(super) fn num_slices(&self) -> usize {
        self.layout.slices().iter().filter(|pieces| !pieces.is_empty()).count()
    }

    /// Columns of each K-slice.
    pub(super) fn slice_columns(&self) -> Vec<Range<usize>> {
        self.layout.slices().iter().map(|pieces| self.layout.columns(pieces)).collect()
    }

    /// Number of output channels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Length of an input row.
    pub fn k(&self) -> usize {
        self.layout.k()
    }

    /// Bytes that a product reads of it.
    pub fn bytes(&self) -> u64 {
        let scales = match &self.scales {
            Scales::Channel(scales) => size_of_val(scales.as_slice()),
            Scales::Group(scales) => size_of_val(scales.as_slice()),
        };
        (size_of_val(&*self.lines) + scales) as u64
    }

    /// Shifts K by `start`, the start of the first slice: input rows then hold only the columns of the
    /// slices.
    pub fn rebase(&mut self, start: usize) {
        self.layout.rebase(start);
    }

    /// Removes the channel scales, for the caller to apply after the all-reduce (docs/contract.md C1: they
    /// come after the tree). int4 has none.
    pub fn take_channel_scales(&mut self) -> Option<Vec<f32>> {
        let Scales::Channel(scales) = &mut self.scales else { return None };
        let ones = vec![1.0; scales.len()];
        let mut scales = std::mem::replace(scales, ones);
        scales.truncate(self.width);
        Some(scales)
    }

    fn panels(&self) -> usize {
        self.width.div_ceil(PANEL)
    }

    /// Cache lines per panel.
    fn panel_lines(&self) -> usize {
        self.layout.padded() / k_per_line(self.layout.format())
    }
}

/// Numbers of one channel in a line: four bytes, or eight nibbles.
fn k_per_line(format: QuantizedFormat) -> usize {
    match format {
        QuantizedFormat::Int8 => 4,
        QuantizedFormat::Int4 => 8,
    }
}

/// Offset of a stored number from the number that it represents.
fn shift(format: QuantizedFormat) -> i32 {
    match format {
        QuantizedFormat::Int8 => 128,
        QuantizedFormat::Int4 => 8,
    }
}
