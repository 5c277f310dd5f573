//! Quantizes a matrix row by row, in parallel over panels, and lays it out. It runs once, at load; the twin of
//! the rounding is in `reference::quantized`.

use half::bf16;

use super::layout::{GROUP, KLayout};
use super::{PANEL, PackedMatrix, Scales, k_per_line, shift};
use crate::EngineError;
use crate::cpu::Threads;
use crate::cpu::lines::{Line, Lines, WEIGHTS};
use crate::k_slices::KSlices;
use crate::weights::QuantizedFormat;

/// A longer sum of products of int8 might not fit 32 bits.
const MAX_SUM: usize = 131_072;

/// Numbers smaller than this count as zero: the inverse of their scale might be infinite.
pub(super) const SMALLEST: f32 = 1e-30;

/// One panel's lines and scales.
struct Panel {
    lines: Vec<Line>,
    channel_scales: Vec<f32>,
    group_scales: Vec<bf16>,
}

impl PackedMatrix {
    /// Quantizes a matrix of `width` rows, each as long as the K-slices, which `row` reads.
    pub(crate) fn pack(
        format: QuantizedFormat,
        slices: &KSlices,
        (width, row): (usize, &(dyn Fn(usize) -> Vec<f32> + Sync)),
        threads: &Threads,
    ) -> Result<Self, EngineError> {
        let layout = KLayout::new(format, slices);
        if let Some(piece) = layout.pieces().iter().find(|piece| piece.len > MAX_SUM) {
            return Err(EngineError::BadOption {
                option: "weights",
                value: piece.k.len() as u64,
                reason: format!(
                    "a sum of so many int8 products may not fit 32 bits, expected {MAX_SUM} at most; take int4 or bf16"
                ),
            });
        }
        let panels: Vec<usize> = (0..width.div_ceil(PANEL)).collect();
        let packed = threads.map(&panels, |panel| {
            let channels = panel * PANEL..width.min((panel + 1) * PANEL);
            pack_panel(&layout, channels.map(row))
        });
        let panel_lines = layout.padded() / k_per_line(format);
        let mut lines = Lines::zeroed(packed.len() * panel_lines, WEIGHTS)?;
        for (to, panel) in lines.chunks_exact_mut(panel_lines.max(1)).zip(&packed) {
            to.copy_from_slice(&panel.lines);
        }
        let scales = match format {
            QuantizedFormat::Int8 => {
                Scales::Channel(packed.iter().flat_map(|panel| &panel.channel_scales).copied().collect())
            }
            QuantizedFormat::Int4 => {
                Scales::Group(packed.iter().flat_map(|panel| &panel.group_scales).copied().collect())
            }
        };
        Ok(Self { width, layout, lines, scales })
    }
}

fn pack_panel(layout: &KLayout, channels: impl Iterator<Item = Vec<f32>>) -> Panel {
    let format = layout.format();
    let zero = match format {
        QuantizedFormat::Int8 => 0x80,
        QuantizedFormat::Int4 => 0x88,
    };
    let mut panel = Panel {
        lines: vec![Line([zero; 64]); layout.padded() / k_per_line(format)],
        channel_scales: vec![0.0; PANEL],
        group_scales: vec![bf16::ZERO; layout.pieces().len() * PANEL],
    };
    for (channel, numbers) in channels.enumerate() {
        match format {
            QuantizedFormat::Int8 => panel.fill_int8(layout, channel, &numbers),
            QuantizedFormat::Int4 => panel.fill_int4(layout, channel, &numbers),
        }
    }
    panel
}

impl Panel {
    fn fill_int8(&mut self, layout: &KLayout, channel: usize, numbers: &[f32]) {
        let (scale, inverse) = int8_scale(numbers);
        self.channel_scales[channel] = scale;
        for piece in layout.pieces() {
            for (i, &x) in numbers[piece.k.clone()].iter().enumerate() {
                let at = piece.start + i;
                let step = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i32;
                self.lines[at / 4].0[4 * channel + at % 4] = (step + shift(QuantizedFormat::Int8)) as u8;
            }
        }
    }

    fn fill_int4(&mut self, layout: &KLayout, channel: usize, numbers: &[f32]) {
        for (index, piece) in layout.pieces().iter().enumerate() {
            // A part of a group has the whole group's scale: how K is sliced does not change a weight.
            let group = piece.k.start / GROUP * GROUP;
            let scale = int4_scale(&numbers[group..numbers.len().min(group + GROUP)]);
            self.group_scales[index * PANEL + channel] = scale;
            let inverse = if scale == bf16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
            for (i, &x) in numbers[piece.k.clone()].iter().enumerate() {
                let at = piece.start + i;
                // A NaN becomes 0 here; its scale is a NaN already.
                let step = (x * inverse).round_ties_even().clamp(-8.0, 7.0) as i32;
                let half = (step + shift(QuantizedFormat::Int4)) as u8;
                let byte = &mut self.lines[at / 8].0[4 * channel + at % 4];
                *byte = if at % 8 < 4 { *byte & 0xf0 | half } else { *byte & 0x0f | half << 4 };
            }
        }
    }
}

/// The scale that makes the largest number 127, and its inverse. NaN where a number is not finite: the result
/// must show it.
#[inline(always)]
pub(super) fn int8_scale(numbers: &[f32]) -> (f32, f32) {
    // Without their signs, numbers are ordered as their bits are, and what is not finite is above all others.
    let mut largest = 0;
    for x in numbers {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    }
}

/// The scale that makes the number farthest from zero -8, whatever its sign: sixteen steps are used, not
/// fifteen.
fn int4_scale(group: &[f32]) -> bf16 {
    let mut farthest = 0.0f32;
    for &x in group {
        if !x.is_finite() {
            return bf16::NAN;
        }
        if x.abs() > farthest.abs() {
            farthest = x;
        }
    }
    if farthest.abs() < SMALLEST { bf16::ZERO } else { bf16::from_f32(farthest / -8.0) }
}
