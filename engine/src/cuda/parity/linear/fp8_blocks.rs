//! FP8 products with scales by block: compares every kernel with the bf16 kernel on each chain's widened weights,
//! whose sums are scaled and added one by one on the host.

use cpu_kernels::{KSlices, NUM_SLICES, reference, tree_sum};
use half::bf16;

use super::super::{Numbers, Parity, Scale, compare_equal};
use super::all_kernels::{bits, multiply_by_reference};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{BlockLayout, GemmFp8Blocks, Variant};

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let large = scale.pick(0, 4096);
    let mut parities = Vec::new();
    // Whole blocks; slices and a row that end within one; a slice of one chain.
    for (rows, n, slices) in [
        (300, 20 + large, KSlices::eighths(704, 32)),
        (33, 20, KSlices::whole(1280 + large)),
        (9, 140, KSlices::whole(160)),
        (5, 20, KSlices::eighths(1000, 8)),
    ] {
        parities.extend(kernels_agree(e, (rows, n), &slices, 51)?);
    }
    // Parts of ranks, some of which begin within a block.
    let slices = KSlices::eighths(1280, 64);
    for owned in [0..4, 2..4, 6..8, 3..4] {
        parities.extend(kernels_agree(e, (9, 40), &slices.owned(owned), 52)?);
    }
    Ok(parities)
}

/// A product and its operands.
pub(in crate::cuda::parity) struct BlockProduct {
    shape: ProductShape,
    pub(in crate::cuda::parity) layout: BlockLayout,
    pub(in crate::cuda::parity) x: Vec<bf16>,
    /// `[n, k]`: all FP8 codes except NaN.
    codes: Vec<u8>,
    /// `[n, blocks]`.
    scales: Vec<f32>,
    pub(in crate::cuda::parity) bias: Vec<f32>,
}

impl BlockProduct {
    /// `slices` are of columns of a whole row.
    pub(in crate::cuda::parity) fn new((rows, n): (usize, usize), slices: &KSlices, seed: u64) -> Self {
        let (k, mut numbers) = (slices.end() - slices.start(), Numbers(seed));
        let code = |bits: u64| if bits & 0x7f == 0x7f { 0x80 } else { bits as u8 };
        Self {
            shape: ProductShape { rows, n, k },
            layout: BlockLayout::new(slices),
            x: numbers.bf16s(rows * k, 1.0),
            codes: (0..n * k).map(|_| code(numbers.bits() >> 56)).collect(),
            scales: numbers.vec(n * slices.num_blocks(), 0.01),
            bias: numbers.vec(n, 1.0),
        }
    }

    /// Weights `[channels, row bytes]`, zeros in channels that do not exist.
    pub(in crate::cuda::parity) fn weights(&self, channels: usize) -> Vec<u8> {
        let row = self.layout.row();
        let mut weights = vec![0; channels * row.row_bytes()];
        let places = weights.chunks_exact_mut(row.row_bytes());
        self.codes.chunks_exact(self.shape.k).zip(places).for_each(|(codes, out)| row.pack(codes, out));
        weights
    }

    /// Scales `[chains, n]`.
    pub(in crate::cuda::parity) fn scales_of_chains(&self) -> Vec<f32> {
        self.layout.scales(&self.scales)
    }

    /// The bits of the product by a kernel of weights in rows.
    pub(in crate::cuda::parity) fn multiply<E: Executor>(
        &self,
        e: &mut E,
        variant: Variant,
    ) -> Result<Vec<u32>, CudaError> {
        let ProductShape { rows, n, .. } = self.shape;
        let x = Tensor::of(e, &self.x, "x")?;
        let weights = Tensor::of(e, &self.weights(n), "weights")?;
        let scales = Tensor::of(e, &self.scales_of_chains(), "scales")?;
        let bias = Tensor::of(e, &self.bias, "bias")?;
        let chains = Tensor::of(e, &self.layout.on_device(), "chains")?;
        let mut out = Tensor::of(e, &vec![f32::NAN; rows * n], "out")?;
        let (bias, layout) = (Some(&bias), (&chains, &self.layout));
        GemmFp8Blocks { x: &x, weights: &weights, scales: &scales, bias, layout, out: &mut out }
            .launch_variant(e, self.shape, Some(variant))?;
        bits(e, &out)
    }

    /// The same by the bf16 kernel, chain by chain.
    fn by_chains<E: Executor>(&self, e: &mut E) -> Result<Vec<u32>, CudaError> {
        let ProductShape { rows, n, k } = self.shape;
        let blocks = self.scales.len() / n;
        let zeros = Tensor::zeros(e, n, "no bias")?;
        let mut sums = vec![[0.0f32; NUM_SLICES]; rows * n];
        for chain in self.layout.chains().iter().filter(|chain| !chain.k.is_empty()) {
            let x: Vec<bf16> = self.x.chunks_exact(k).flat_map(|x| &x[chain.k.clone()]).copied().collect();
            let codes = self.codes.chunks_exact(k).flat_map(|codes| &codes[chain.k.clone()]);
            let weights: Vec<bf16> = codes.map(|&code| bf16::from_f32(reference::fp8_value(code))).collect();
            // All columns in one slice.
            let slices = KSlices::eighths(chain.k.len(), chain.k.len());
            let of_chain = multiply_by_reference(e, (&x, &weights), &slices, &zeros)?;
            for (i, (sums, bits)) in sums.iter_mut().zip(of_chain).enumerate() {
                let scale = self.scales[i % n * blocks + chain.block];
                sums[chain.slice] = f32::from_bits(bits).mul_add(scale, sums[chain.slice]);
            }
        }
        let finish = |(i, sums): (usize, [f32; NUM_SLICES])| (tree_sum(sums) + self.bias[i % n]).to_bits();
        Ok(sums.into_iter().enumerate().map(finish).collect())
    }
}

/// Compares every kernel with the twin.
fn kernels_agree<E: Executor>(
    e: &mut E,
    (rows, n): (usize, usize),
    slices: &KSlices,
    seed: u64,
) -> Result<Vec<Parity>, CudaError> {
    let product = BlockProduct::new((rows, n), slices, seed);
    let expected = product.by_chains(e)?;
    let mut parities = Vec::new();
    let few = |rows| [16, 8, 4, 2].map(|channels| Variant::Few { rows, channels });
    let tiled = [64, 80].map(|rows| Variant::Tiled { rows });
    for variant in few(8).into_iter().chain(few(32)).chain(tiled) {
        let columns = slices.start()..slices.end();
        let case = format!("fp8 by block {rows} x {n}, columns {columns:?} by {variant:?}");
        parities.push(compare_equal(case, &product.multiply(e, variant)?, &expected));
    }
    Ok(parities)
}
