//! Matrices of int8 and int4, quantized while loading and packed into the order in which the kernels stream
//! them (docs/contract.md C1): panels of sixteen output channels, one channel to a lane, so that no sum is ever
//! folded across lanes. `layout` says which k goes where, `pack` makes the panels, `rows` quantizes
//! activations, `dots` is the arithmetic of integers (in registers: `x86`, `neon`), `mat_mul` multiplies, with the inner
//! loops of `piece_sums`. The twin is `reference::quantized`.

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

pub(super) use dots::{DotKernel, Dots, PortableDots};
use half::bf16;
use layout::KLayout;
pub(super) use mat_mul::PackedMatMul;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::NeonDots;
pub(super) use rows::QuantizedRows;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Dots, NarrowVnniDots, VnniDots};

use super::lines::Lines;
use crate::matrix::QuantizedFormat;

/// Output channels in a panel.
pub(super) const PANEL: usize = 16;

/// `[width, k]`, quantized. Stored numbers are shifted to be unsigned, as the instructions want one operand;
/// the shift is taken back through the sums of the activations.
#[derive(Debug)]
pub struct PackedMatrix {
    width: usize,
    layout: KLayout,
    /// `[panel][line]`: byte 4 c + j of a line is channel c at the line's j-th k; in int4 the low half is that
    /// and the high half k + 4.
    lines: Lines,
    scales: Scales,
}

/// What a stored step is worth.
#[derive(Debug, Clone)]
enum Scales {
    /// int8: `[panel][PANEL]`.
    Channel(Vec<f32>),
    /// int4: `[panel][piece of K][PANEL]`.
    Group(Vec<bf16>),
}

impl PackedMatrix {
    /// Output channels.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Length of an input row.
    pub fn k(&self) -> usize {
        self.layout.k()
    }

    /// What a product reads of it.
    pub fn bytes(&self) -> u64 {
        let scales = match &self.scales {
            Scales::Channel(scales) => size_of_val(scales.as_slice()),
            Scales::Group(scales) => size_of_val(scales.as_slice()),
        };
        (size_of_val(&*self.lines) + scales) as u64
    }

    /// Counts K from `start` on, behind which all slices lie: input rows hold only those columns.
    pub fn move_to_zero(&mut self, start: usize) {
        self.layout.move_to_zero(start);
    }

    /// Leaves the channels' scales to whoever adds up the ranks' parts (docs/contract.md C1: they come after the
    /// tree); int4 has none.
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

    /// Lines of one panel.
    fn panel_lines(&self) -> usize {
        self.layout.padded() / k_per_line(self.layout.format())
    }
}

/// Numbers of one channel in a line: four bytes, or eight half bytes.
fn k_per_line(format: QuantizedFormat) -> usize {
    match format {
        QuantizedFormat::Int8 => 4,
        QuantizedFormat::Int4 => 8,
    }
}

/// What a stored number is above the number it stands for.
fn shift(format: QuantizedFormat) -> i32 {
    match format {
        QuantizedFormat::Int8 => 128,
        QuantizedFormat::Int4 => 8,
    }
}
