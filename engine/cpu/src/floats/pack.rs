//! Packs matrices into panels, in parallel over panels, directly from their storage. Runs once, at load.

use half::bf16;

use super::{FloatMatrix, PANEL, PANEL_VECTORS, PackedChain, STEP};
use crate::KernelError;
use crate::Threads;
use crate::elementwise::as_factor;
use crate::k_slices::{Chain, KSlices};
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
        let chains = positions(slices.chains());
        match format {
            MatrixFormat::F32 => pack::<f32>(format, rows, chains, threads),
            MatrixFormat::Bf16 => pack::<bf16>(format, rows, chains, threads),
        }
    }

    /// Packs rows as bf16 whose sums are scaled by block (docs/contract.md C1). Their columns are those that
    /// `slices` cover, which count from the start of a whole row. `scales` is called after all rows were read
    /// and returns `[rows, slices.num_blocks()]`.
    pub fn pack_by_block(
        rows: &dyn RowBlocks,
        slices: &KSlices,
        threads: &Threads,
        scales: impl FnOnce() -> Vec<f32>,
    ) -> Result<Self, KernelError> {
        let mut packed =
            pack::<bf16>(MatrixFormat::Bf16, rows, positions(slices.chains_by_block()), threads)?;
        packed.block_scales = Some(packed.scales_of_chains(&scales(), slices.num_blocks()));
        Ok(packed)
    }

    /// Arranges scales `[width, per_channel]` as [`FloatMatrix::block_scales`]. Channels past the last one and
    /// chains without columns have the scale 0.
    fn scales_of_chains(&self, scales: &[f32], per_channel: usize) -> Vec<f32> {
        assert_eq!(scales.len(), self.width * per_channel, "every channel has a scale for each block");
        let mut arranged = vec![0.0; self.width.div_ceil(PANEL) * self.chains.len() * PANEL];
        for (i, out) in arranged.chunks_exact_mut(PANEL).enumerate() {
            let (panel, chain) = (i / self.chains.len(), &self.chains[i % self.chains.len()].of);
            let channels = panel * PANEL..self.width.min((panel + 1) * PANEL);
            for (channel, out) in channels.zip(out).filter(|_| !chain.k.is_empty()) {
                *out = scales[channel * per_channel + chain.block];
            }
        }
        arranged
    }
}

/// Positions of chains in a panel.
fn positions(chains: Vec<Chain>) -> Vec<PackedChain> {
    let mut start = 0;
    let place = |of: Chain| {
        let steps = start..start + of.k.len().div_ceil(STEP);
        start = steps.end;
        PackedChain { of, steps }
    };
    chains.into_iter().map(place).collect()
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
    chains: Vec<PackedChain>,
    threads: &Threads,
) -> Result<FloatMatrix, KernelError> {
    let (width, k) = (rows.rows(), chains.last().map_or(0, |chain| chain.of.k.end));
    assert_eq!(rows.columns(), k, "the chains must cover all columns of the rows");
    let steps = chains.last().map_or(0, |chain| chain.steps.end);
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
            pack_panel(lines, numbers, k, &chains);
        }
        Ok(())
    })?;
    Ok(FloatMatrix { format, width, k, chains, lines, block_scales: None })
}

/// Cache lines per step.
fn step_lines<T>() -> usize {
    STEP * size_of::<T>() / size_of::<u32>() * PANEL_VECTORS
}

/// Packs channels `[channels, k]`. Missing channels of the last panel and the padding of chains of odd length
/// stay zero.
fn pack_panel<T: StoredElement>(panel: &mut [Line], numbers: &[T], k: usize, chains: &[PackedChain]) {
    let per_line = size_of::<Line>() / size_of::<T>();
    for PackedChain { of, steps } in chains {
        let lines = &mut panel[steps.start * step_lines::<T>()..steps.end * step_lines::<T>()];
        for (block, lines) in lines.chunks_mut(LINE_WORDS * PANEL_VECTORS).enumerate() {
            let mut words = [[0u32; LINE_WORDS]; PANEL];
            for (words, row) in words.iter_mut().zip(numbers.chunks_exact(k)) {
                let row = &row[of.k.clone()][block * per_line..];
                let row = &row[..row.len().min(per_line)];
                bytemuck::cast_slice_mut(words)[..row.len()].copy_from_slice(row);
                T::to_panel_words(words);
            }
            transpose(&words, lines);
        }
    }
}
