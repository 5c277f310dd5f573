//! FP8 products with scales by block of 128 columns: the layout of weights and scales, and checked launches of
//! `kernels/fp8_blocks.cu`.

use std::ops::Range;

use cpu_kernels::{Chain, KSlices, NUM_SLICES, SCALE_BLOCK};
use half::bf16;

use super::PANEL_COLUMNS;
use super::blocks::Variant;
use super::fp8::Fp8Layout;
use super::gemm::{ChosenKernel, GRAIN, KernelFamily, check_borders, check_product};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::FP8_BLOCKS;

const FAMILY: KernelFamily = KernelFamily {
    few: [[FP8_BLOCKS.kernel(0), FP8_BLOCKS.kernel(1)], [FP8_BLOCKS.kernel(2), FP8_BLOCKS.kernel(3)]],
    tiled: &[FP8_BLOCKS.kernel(4), FP8_BLOCKS.kernel(5)],
};

/// Layout of a row of FP8 weights on a device: chain by chain, each in whole blocks of 64 weights. A chain is a
/// K-slice's part in one block of scales.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockLayout {
    /// Borders of K between slices.
    slices: Vec<u32>,
    /// In order; each slice has at least one.
    chains: Vec<Chain>,
    /// The layout with chains in the place of slices.
    row: Fp8Layout,
    /// Blocks of scales of a row's columns.
    num_blocks: usize,
}

impl BlockLayout {
    /// Creates the layout for these slices of columns, which count from the start of a whole row.
    pub(crate) fn new(slices: &KSlices) -> Self {
        let slices = cut(slices);
        let chains = slices.chains_by_block();
        let row = Fp8Layout::new(&borders_of(chains.iter().map(|chain| &chain.k)));
        let num_blocks = slices.num_blocks();
        let slices = borders_of(slices.rebased().ranges().iter());
        Self { slices, row, chains, num_blocks }
    }

    /// Borders of K between slices.
    pub(crate) fn of_k(&self) -> &[u32] {
        &self.slices
    }

    /// Borders of K between chains.
    pub(crate) fn of_chains(&self) -> &[u32] {
        self.row.of_k()
    }

    /// The layout of a row, whose slices are the chains.
    pub(crate) fn row(&self) -> &Fp8Layout {
        &self.row
    }

    /// The chains, in order.
    pub(crate) fn chains(&self) -> &[Chain] {
        &self.chains
    }

    /// Number of chains: scales of a channel on the device.
    pub(crate) fn num_chains(&self) -> usize {
        self.chains.len()
    }

    /// What the kernels take as `chains`.
    pub(crate) fn on_device(&self) -> Vec<u32> {
        let first = |slice| self.chains.iter().take_while(|chain| chain.slice < slice).count() as u32;
        (0..=NUM_SLICES).map(first).chain(self.row.borders().iter().copied()).collect()
    }

    /// Arranges scales `[n, blocks]` as `[chains, n]`. Those of chains without columns are zeros.
    pub(crate) fn scales(&self, by_channel: &[f32]) -> Vec<f32> {
        let of_chain = |chain: &Chain| {
            let (block, is_empty) = (chain.block, chain.k.is_empty());
            let of_channel = move |scales: &[f32]| if is_empty { 0.0 } else { scales[block] };
            by_channel.chunks_exact(self.num_blocks).map(of_channel)
        };
        self.chains.iter().flat_map(of_chain).collect()
    }
}

/// Borders of ranges of K that follow each other from 0 on.
fn borders_of<'a>(ranges: impl Iterator<Item = &'a Range<usize>>) -> Vec<u32> {
    std::iter::once(0).chain(ranges.map(|range| range.end as u32)).collect()
}

/// The contract's slices, if it defines any, else eighths of K: of whole blocks of scales where each slice has at
/// least one, of whole panels where it has one of these.
fn cut(slices: &KSlices) -> KSlices {
    if slices.ranges().len() == NUM_SLICES {
        return slices.clone();
    }
    let k = slices.end();
    let fits = |unit: &usize| k.is_multiple_of(*unit) && k >= NUM_SLICES * unit;
    KSlices::eighths(k, [SCALE_BLOCK, PANEL_COLUMNS].into_iter().find(fits).unwrap_or(GRAIN))
}

/// `x` times `weights`, the sum of each chain multiplied by its scale.
#[derive(Debug)]
pub(crate) struct GemmFp8Blocks<'a, M> {
    /// `[rows, k]`.
    pub(crate) x: &'a Tensor<M, bf16>,
    /// `[n, row bytes]`, packed by [`BlockLayout::row`].
    pub(crate) weights: &'a Tensor<M, u8>,
    /// `[chains, n]`.
    pub(crate) scales: &'a Tensor<M, f32>,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
    /// [`BlockLayout::on_device`], and the layout.
    pub(crate) layout: (&'a Tensor<M, u32>, &'a BlockLayout),
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> GemmFp8Blocks<'_, M> {
    pub(crate) fn launch<E>(self, executor: &mut E, shape: ProductShape) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.launch_variant(executor, shape, None)
    }

    /// Launches a given kernel, for tests.
    pub(crate) fn launch_variant<E>(
        self,
        executor: &mut E,
        shape: ProductShape,
        forced: Option<Variant>,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        let ProductShape { rows, n, k } = shape;
        let (chains, layout) = self.layout;
        let chosen = ChosenKernel::new(&FAMILY, (rows, n), layout.of_k(), forced)?;
        let kernel = chosen.kernel;
        check_borders(kernel.name, layout.of_k(), (k, GRAIN))?;
        check_chains(kernel.name, (chains, layout), GRAIN)?;
        check_len(kernel.name, "x", self.x.len(), rows * k)?;
        check_len(kernel.name, "scales", self.scales.len(), layout.num_chains() * n)?;
        check_len(kernel.name, "weights", self.weights.len(), n * layout.row().row_bytes())?;
        check_product(kernel.name, shape, chains, self.bias, self.out)?;
        let params = Params::default().read(self.x).read(self.weights).read(self.scales);
        let params = params.read_if(self.bias).read(chains).write(self.out);
        let params = chosen.params(params.u32(rows).u32(n).u32(k));
        // SAFETY: these are the kernel's parameters; the checks ensure that every element is in bounds.
        unsafe { executor.launch(kernel, chosen.grid, &mut { params }) }
    }
}

/// Returns an error unless the device has the borders of all chains, and these are multiples of `grain`.
pub(super) fn check_chains<M: DeviceMemory>(
    kernel: &'static str,
    (on_device, layout): (&Tensor<M, u32>, &BlockLayout),
    grain: usize,
) -> Result<(), CudaError> {
    let len = NUM_SLICES + 1 + layout.row().borders().len();
    check_len(kernel, "chains", on_device.len(), len)?;
    let are_whole = layout.of_chains().iter().all(|border| border.is_multiple_of(grain as u32));
    check(
        kernel,
        ("chains", layout.num_chains()),
        are_whole,
        format_args!("borders that are multiples of {grain}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_parts_of_slices_in_blocks_of_scales() {
        // K-slices of 64 and 96 columns; the second half, which begins within a block.
        let half = BlockLayout::new(&KSlices::eighths(704, 32).owned(4..8));
        assert_eq!(half.of_k(), [0, 0, 0, 0, 0, 64, 160, 256, 352]);
        assert_eq!(half.of_chains(), [0, 0, 0, 0, 0, 32, 64, 160, 256, 288, 352]);
        assert_eq!((half.num_chains(), half.num_blocks), (10, 4));
        let on_device = half.on_device();
        assert_eq!(on_device[..9], [0, 1, 2, 3, 4, 6, 7, 8, 10]);
        assert_eq!(&on_device[9..20], half.of_chains());
        assert_eq!(on_device[20..], [0, 0, 0, 0, 0, 64, 128, 256, 384, 448, 512]);
        // Blocks 2, 3, 4 and 5 of the whole row: columns 352 to 384, 384 to 512, 512 to 640, 640 to 704.
        let scales = half.scales(&[2.0, 3.0, 4.0, 5.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(scales[..8], [0.0; 8]);
        assert_eq!(scales[8..], [2.0, 20.0, 3.0, 30.0, 3.0, 30.0, 4.0, 40.0, 4.0, 40.0, 5.0, 50.0]);
    }

    #[test]
    fn slices_without_a_rule_are_whole_blocks_of_scales_where_they_can_be() {
        let of = |k| BlockLayout::new(&KSlices::whole(k));
        assert_eq!(of(2560).of_k(), [0, 256, 640, 896, 1280, 1536, 1920, 2176, 2560]);
        assert!(of(2560).of_chains().iter().all(|border| border % 128 == 0));
        assert_eq!(of(640).of_k()[..4], [0, 64, 128, 192]);
        assert_eq!(of(160).of_k(), [0, 16, 40, 56, 80, 96, 120, 136, 160]);
        assert_eq!(of(160).num_chains(), 9);
    }
}
