//! FP8 products: packing of weights for `kernels/fp8.cu`, and checked launches. Sums are those of `gemm`.

use cpu_kernels::NUM_SLICES;
use half::bf16;

use super::blocks::Variant;
use super::gemm::{ChosenKernel, GRAIN, KernelFamily, check_borders, check_product};
use crate::cuda::CudaError;
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::FP8;

/// Weights per block of a row: two steps of K. A slice is a whole number of blocks.
const BLOCK: usize = 64;
/// Weights per step, and per lane and step.
const STEP: usize = 32;
const OF_LANE: usize = 8;
/// Weights per word.
const OF_WORD: usize = 4;
/// Number of slice borders.
const BORDERS: usize = NUM_SLICES + 1;

const FAMILY: KernelFamily = KernelFamily {
    few: [[FP8.kernel(0), FP8.kernel(1)], [FP8.kernel(2), FP8.kernel(3)]],
    tiled: &[FP8.kernel(4), FP8.kernel(5), FP8.kernel(6)],
};

/// Bits of each code in its half of a word, for the first two and for the last two numbers of the word.
const FIRST: [u16; 256] = places(false);
const LAST: [u16; 256] = places(true);

const fn places(is_last: bool) -> [u16; 256] {
    let mut places = [0; 256];
    let mut code = 0;
    while code < 256 {
        let (sign, rest) = (code >> 7, code & 127);
        let bits =
            if is_last { sign << 11 | (rest >> 4) << 12 | (rest & 15) } else { sign << 15 | rest << 4 };
        places[code] = bits as u16;
        code += 1;
    }
    places
}

/// Layout of a row of FP8 weights on a device: slice by slice, each in whole blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fp8Layout {
    /// Borders of K, then byte offsets in a row.
    borders: Vec<u32>,
}

impl Fp8Layout {
    /// Creates the layout for slices with these borders of K.
    pub(crate) fn new(of_k: &[u32]) -> Self {
        let mut borders = of_k.to_vec();
        let mut at = 0;
        borders.push(at);
        for slice in of_k.windows(2) {
            at += (slice[1] - slice[0]).next_multiple_of(BLOCK as u32);
            borders.push(at);
        }
        Self { borders }
    }

    /// All borders, as the kernels take them.
    pub(crate) fn borders(&self) -> &[u32] {
        &self.borders
    }

    /// The borders of K.
    pub(crate) fn of_k(&self) -> &[u32] {
        &self.borders[..self.borders.len() / 2]
    }

    /// Size of a row in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.borders.last().map_or(0, |&end| end as usize)
    }

    /// Packs a row of `k` codes.
    pub(crate) fn pack(&self, codes: &[u8], out: &mut [u8]) {
        let (of_k, of_row) = self.borders.split_at(self.borders.len() / 2);
        let slices = of_k.windows(2).zip(of_row.windows(2));
        for (of_k, of_row) in slices {
            let codes = &codes[of_k[0] as usize..of_k[1] as usize];
            let out = &mut out[of_row[0] as usize..of_row[1] as usize];
            for (codes, out) in codes.chunks(BLOCK).zip(out.chunks_exact_mut(BLOCK)) {
                pack_block(codes, out);
            }
        }
    }
}

/// Packs a block; missing numbers of a slice's last block become zeros.
fn pack_block(codes: &[u8], out: &mut [u8]) {
    let mut whole = [0; BLOCK];
    whole[..codes.len()].copy_from_slice(codes);
    for (word, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        // A lane has two words of one step, then two of the next.
        let (lane, step, in_step) = (word / 4, word / 2 % 2, word % 2);
        let at = step * STEP + lane * OF_LANE + in_step * OF_WORD;
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| usize::from(whole[at + i]));
        let (low, high) = (FIRST[a] | LAST[c], FIRST[b] | LAST[d]);
        *out = (u32::from(low) | u32::from(high) << 16).to_le_bytes();
    }
}

/// `x` times `weights`, each sum multiplied by its channel's scale.
#[derive(Debug)]
pub(crate) struct GemmFp8<'a, M> {
    /// `[rows, k]`.
    pub(crate) x: &'a Tensor<M, bf16>,
    /// `[n, row bytes]`, packed by [`Fp8Layout::pack`].
    pub(crate) weights: &'a Tensor<M, u8>,
    /// `[n]`; `None` for a rank's partial sum, which is scaled after the sum over ranks.
    pub(crate) channel_scales: Option<&'a Tensor<M, f32>>,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor<M, f32>>,
    /// [`Fp8Layout::borders`] on the device, and the layout.
    pub(crate) layout: (&'a Tensor<M, u32>, &'a Fp8Layout),
    /// `[rows, n]`.
    pub(crate) out: &'a mut Tensor<M, f32>,
}

impl<M: DeviceMemory> GemmFp8<'_, M> {
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
        let (borders, layout) = self.layout;
        let chosen = ChosenKernel::new(&FAMILY, (rows, n), layout.of_k(), forced)?;
        let kernel = chosen.kernel;
        check_borders(kernel.name, layout.of_k(), (k, GRAIN))?;
        check_len(kernel.name, "x", self.x.len(), rows * k)?;
        check_len(kernel.name, "channel_scales", self.channel_scales.map_or(n, Tensor::len), n)?;
        check_len(kernel.name, "weights", self.weights.len(), n * layout.row_bytes())?;
        check_product(kernel.name, shape, borders, self.bias, self.out)?;
        check(kernel.name, ("borders", borders.len()), borders.len() >= 2 * BORDERS, "eighteen")?;
        let params = Params::default().read(self.x).read(self.weights).read_if(self.channel_scales);
        let params = params.read_if(self.bias).read(borders).write(self.out);
        let params = chosen.params(params.u32(rows).u32(n).u32(k));
        // SAFETY: these are the kernel's parameters; the checks ensure that every element is in bounds.
        unsafe { executor.launch(kernel, chosen.grid, &mut { params }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits that the kernel extracts from a word, before it multiplies.
    fn widened(word: u32, number: usize) -> u32 {
        let both = match number {
            0 | 1 => word & 0x87f0_87f0,
            _ => word << 4 & 0x80f0_80f0 | word >> 4 & 0x0700_0700,
        };
        both >> (16 * (number % 2)) & 0xffff
    }

    #[test]
    fn every_code_comes_back_from_every_place_of_a_word() {
        for code in 0..=255u8 {
            for (number, others) in [(0, 0xff), (1, 0x00), (2, 0xff), (3, 0x5a)] {
                let mut codes = [others; BLOCK];
                codes[number] = code;
                let mut out = [0; BLOCK];
                pack_block(&codes, &mut out);
                let word = u32::from_le_bytes([out[0], out[1], out[2], out[3]]);
                let expected = u32::from(code & 0x80) << 8 | u32::from(code & 0x7f) << 4;
                assert_eq!(widened(word, number), expected, "{code:#04x}, number {number}");
            }
        }
    }

    #[test]
    fn a_slice_is_whole_blocks() {
        let layout = Fp8Layout::new(&[0, 8, 72, 72, 200, 200, 200, 200, 208]);
        assert_eq!(layout.borders()[BORDERS..], [0, 64, 128, 128, 256, 256, 256, 256, 320]);
        assert_eq!((layout.row_bytes(), layout.of_k().len()), (320, 9));
        let codes: Vec<u8> = (0..208).map(|i| 1 + (i % 125) as u8).collect();
        let mut out = vec![0xff; 320];
        layout.pack(&codes, &mut out);
        // The first number of each word; padding is zero.
        let first = |byte: usize| widened(u32::from_le_bytes([0, 1, 2, 3].map(|i| out[byte + i])), 0) >> 4;
        let code = |k: usize| u32::from(codes[k]);
        assert_eq!([first(0), first(4), first(8), first(16)], [code(0), code(4), 0, 0]);
        assert_eq!([first(64), first(72), first(80), first(128)], [code(8), code(40), code(16), code(72)]);
        assert_eq!([first(256), first(260), first(264)], [code(200), code(204), 0]);
    }
}
