//! Packs matrices into panels, in parallel over panels, directly from their storage. Runs once, at load.

use std::ops::Range;

use half::bf16;

use super::{FloatMatrix, PANEL, PANEL_VECTORS, STEP, Slice};
use crate::KernelError;
use crate::Threads;
use crate::elementwise::as_factor;
use crate::k_slices::KSlices;
use crate::lines::{Line, Lines};
use crate::matrix::{MatrixFormat, NumbersMut, RowBlocks};
use crate::threads::SharedSliceMut;
use crate::transpose::{LINE_WORDS, transpose};

impl FloatMatrix {
    /// Packs rows whose columns are exactly those that `slices` cover.
    pub fn pack(
        format: MatrixFormat,
        rows: &dyn RowBlocks,
        slices: &KSlices,
        threads: &Threads,
    ) -> Result<Self, KernelError> {
        match format {
            MatrixFormat::F32 => pack::<f32>(format, rows, slice_steps(slices), threads),
            MatrixFormat::Bf16 => pack::<bf16>(format, rows, slice_steps(slices), threads),
        }
    }
}

/// Positions of the K-slices in a panel.
fn slice_steps(slices: &KSlices) -> Vec<Slice> {
    let mut start = 0;
    let slice = |k: &Range<usize>| {
        let steps = start..start + k.len().div_ceil(STEP);
        start = steps.end;
        Slice { k: k.clone(), steps }
    };
    slices.ranges().iter().map(slice).collect()
}

/// An element of a matrix as it is read. In a panel, 32-bit words of neighbouring channels are adjacent; a
/// word holds two bf16 or one f32.
trait StoredElement: bytemuck::Pod + Send + Sync {
    fn as_numbers_mut(numbers: &mut [Self]) -> NumbersMut<'_>;

    /// Converts words from row order to their form in a panel.
    fn to_panel_words(words: &mut [u32; LINE_WORDS]);
}

impl StoredElement for bf16 {
    fn as_numbers_mut(numbers: &mut [Self]) -> NumbersMut<'_> {
        NumbersMut::Bf16(numbers)
    }

    fn to_panel_words(words: &mut [u32; LINE_WORDS]) {
        for x in bytemuck::cast_slice_mut::<u32, bf16>(words) {
            *x = as_factor(*x);
        }
        // In memory the first of a pair is in the lower half.
        *words = words.map(|pair| pair.rotate_left(16));
    }
}

impl StoredElement for f32 {
    fn as_numbers_mut(numbers: &mut [Self]) -> NumbersMut<'_> {
        NumbersMut::F32(numbers)
    }

    fn to_panel_words(_: &mut [u32; LINE_WORDS]) {}
}

fn pack<T: StoredElement>(
    format: MatrixFormat,
    rows: &dyn RowBlocks,
    slices: Vec<Slice>,
    threads: &Threads,
) -> Result<FloatMatrix, KernelError> {
    let (width, k) = (rows.rows(), slices.last().map_or(0, |slice| slice.k.end));
    assert_eq!(rows.columns(), k, "the slices must cover all columns of the rows");
    let steps = slices.last().map_or(0, |slice| slice.steps.end);
    let (panels, panel_lines) = (width.div_ceil(PANEL), steps * step_lines::<T>());
    let mut lines = Lines::of_matrix(panels * panel_lines)?;
    let shared = SharedSliceMut::new(&mut lines);
    threads.try_for_ranges(panels, |range| {
        // One panel at a time, so that its numbers are still in a cache when they are packed.
        let mut numbers: Vec<T> = bytemuck::zeroed_vec(PANEL.min(width) * k);
        for panel in range {
            let channels = panel * PANEL..width.min((panel + 1) * PANEL);
            let numbers = &mut numbers[..channels.len() * k];
            rows.read(channels, T::as_numbers_mut(numbers))?;
            // SAFETY: every panel is packed once.
            let lines = unsafe { shared.slice_mut(panel * panel_lines..(panel + 1) * panel_lines) };
            pack_panel(lines, numbers, k, &slices);
        }
        Ok(())
    })?;
    Ok(FloatMatrix { format, width, k, slices, lines })
}

/// Cache lines per step.
fn step_lines<T>() -> usize {
    STEP * size_of::<T>() / size_of::<u32>() * PANEL_VECTORS
}

/// Packs channels `[channels, k]`. Missing channels of the last panel and the padding of slices of odd length
/// stay zero.
fn pack_panel<T: StoredElement>(panel: &mut [Line], numbers: &[T], k: usize, slices: &[Slice]) {
    let per_line = size_of::<Line>() / size_of::<T>();
    for slice in slices {
        let lines = &mut panel[slice.steps.start * step_lines::<T>()..slice.steps.end * step_lines::<T>()];
        for (block, lines) in lines.chunks_mut(LINE_WORDS * PANEL_VECTORS).enumerate() {
            let mut words = [[0u32; LINE_WORDS]; PANEL];
            for (words, row) in words.iter_mut().zip(numbers.chunks_exact(k)) {
                let row = &row[slice.k.clone()][block * per_line..];
                let row = &row[..row.len().min(per_line)];
                bytemuck::cast_slice_mut(words)[..row.len()].copy_from_slice(row);
                T::to_panel_words(words);
            }
            transpose(&words, lines);
        }
    }
}
