//! Lays matrices out in panels, in parallel over them. Runs once, at load.

use half::bf16;

use super::{FloatMatrix, PANEL, PANEL_VECTORS, STEP, Slice};
use crate::EngineError;
use crate::cpu::Threads;
use crate::cpu::lanes::LANES;
use crate::cpu::lines::{Line, Lines, WEIGHTS};
use crate::cpu::threads::Shared;
use crate::k_slices::KSlices;
use crate::weights::{Matrix, MatrixData, MatrixFormat};

/// A number of a matrix, as it stands in a panel.
pub(super) trait Packed: Copy + Sync {
    /// Lines of a step.
    const STEP_LINES: usize;

    /// Puts a step of channel `channel` of a panel in its place; `second` is `None` past the end of a slice.
    fn put(step: &mut [Line], channel: usize, first: Self, second: Option<Self>);
}

impl Packed for bf16 {
    const STEP_LINES: usize = PANEL_VECTORS;

    fn put(step: &mut [Line], channel: usize, first: Self, second: Option<Self>) {
        let pair = u32::from(first.to_bits()) | second.map_or(0, |second| u32::from(second.to_bits()) << 16);
        put_lane(&mut step[channel / LANES], channel % LANES, pair);
    }
}

impl Packed for f32 {
    const STEP_LINES: usize = STEP * PANEL_VECTORS;

    fn put(step: &mut [Line], channel: usize, first: Self, second: Option<Self>) {
        put_lane(&mut step[channel / LANES], channel % LANES, first.to_bits());
        let second = second.unwrap_or(0.0);
        put_lane(&mut step[PANEL_VECTORS + channel / LANES], channel % LANES, second.to_bits());
    }
}

/// Kernels load lanes as the machine orders bytes.
fn put_lane(line: &mut Line, lane: usize, bits: u32) {
    line.0[4 * lane..4 * lane + 4].copy_from_slice(&bits.to_ne_bytes());
}

impl FloatMatrix {
    /// Packs matrices that stand one on the other, all in one format and with the columns that `slices` cover.
    pub(crate) fn pack(parts: &[Matrix], slices: &KSlices, threads: &Threads) -> Result<Self, EngineError> {
        let rows_of = |part: &Matrix| part.rows();
        let width = parts.iter().map(rows_of).sum();
        let slices = in_steps(slices);
        match parts.first().map(Matrix::data) {
            Some(MatrixData::Bf16(_)) => {
                let rows = rows(parts, |data| match data {
                    MatrixData::Bf16(numbers) => Some(numbers.as_slice()),
                    MatrixData::F32(_) => None,
                });
                pack(MatrixFormat::Bf16, &rows, (width, slices), threads)
            }
            _ => {
                let rows = rows(parts, |data| match data {
                    MatrixData::F32(numbers) => Some(numbers.as_slice()),
                    MatrixData::Bf16(_) => None,
                });
                pack(MatrixFormat::F32, &rows, (width, slices), threads)
            }
        }
    }
}

/// Where the K-slices lie in a panel.
fn in_steps(slices: &KSlices) -> Vec<Slice> {
    let mut start = 0;
    let slice = |k: &std::ops::Range<usize>| {
        let steps = start..start + k.len().div_ceil(STEP);
        start = steps.end;
        Slice { k: k.clone(), steps }
    };
    slices.ranges().iter().map(slice).collect()
}

/// The rows of all parts, one behind the other.
fn rows<'a, T>(parts: &'a [Matrix], numbers: impl Fn(&'a MatrixData) -> Option<&'a [T]>) -> Vec<&'a [T]> {
    let rows = |part: &'a Matrix| {
        let numbers = numbers(part.data()).expect("the matrices of a linear are loaded in one format");
        numbers.chunks_exact(part.columns())
    };
    parts.iter().flat_map(rows).collect()
}

fn pack<T: Packed>(
    format: MatrixFormat,
    rows: &[&[T]],
    (width, slices): (usize, Vec<Slice>),
    threads: &Threads,
) -> Result<FloatMatrix, EngineError> {
    let k = slices.last().map_or(0, |slice| slice.k.end);
    let steps = slices.last().map_or(0, |slice| slice.steps.end);
    let (panels, panel_lines) = (width.div_ceil(PANEL), steps * T::STEP_LINES);
    let mut lines = Lines::zeroed(panels * panel_lines, WEIGHTS)?;
    let shared = Shared::new(&mut lines);
    threads.for_ranges(panels, 1, width * k, |range| {
        for panel in range {
            // SAFETY: every panel is packed once.
            let lines = unsafe { shared.slice_mut(panel * panel_lines..(panel + 1) * panel_lines) };
            let channels = &rows[panel * PANEL..width.min((panel + 1) * PANEL)];
            for (channel, row) in channels.iter().enumerate() {
                pack_channel(lines, channel, row, &slices);
            }
        }
    });
    Ok(FloatMatrix { format, width, k, slices, lines })
}

fn pack_channel<T: Packed>(panel: &mut [Line], channel: usize, row: &[T], slices: &[Slice]) {
    for slice in slices {
        let lines = &mut panel[slice.steps.start * T::STEP_LINES..slice.steps.end * T::STEP_LINES];
        for (step, pair) in lines.chunks_exact_mut(T::STEP_LINES).zip(row[slice.k.clone()].chunks(STEP)) {
            T::put(step, channel, pair[0], pair.get(1).copied());
        }
    }
}
