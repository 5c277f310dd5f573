//! The inner loop of the float GEMM: some steps of a few vectors of channels with a tile of rows, accumulated
//! in registers.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::sync::atomic::{Ordering, compiler_fence};

use half::bf16;

use super::{PANEL, STEP};
use crate::elementwise::{as_factor, round_to_bf16};
use crate::lines::{Line, Prefetch};
use crate::simd::{Element, F32x16, LANES};

/// Activations of a row that are converted to words at a time.
pub(super) const PACK_CHUNK: usize = 64;

/// Format of a panel's numbers and their multiplication: a word per lane with a word of each row's
/// activations.
pub(super) trait PanelFormat {
    /// Bytes per step.
    const STEP_BYTES: usize;
    /// Words of a row's activations per step.
    const WORDS: usize;
    /// Whether a K block that many row tiles use is widened to f32.
    const WIDENS: bool;

    /// Converts activations to words. The first `PACK_CHUNK / STEP * WORDS` words are valid.
    fn words(numbers: &[f32; PACK_CHUNK]) -> [u32; PACK_CHUNK];

    /// Prefetches while the step that begins with line `line` is used.
    ///
    /// # Safety
    /// As for [`F32x16`].
    unsafe fn prefetch<V: F32x16>(prefetch: &mut impl Prefetch, line: usize);

    /// Loads the weights for the `word`-th word of activations, for the channels of one vector.
    ///
    /// # Safety
    /// As for [`F32x16`]: a step lies at `step`, and it has the vector.
    unsafe fn load<V: F32x16>(step: *const u8, vector: usize, word: usize) -> V;

    /// Adds the products of one word to `sum`.
    ///
    /// # Safety
    /// As for [`F32x16`].
    #[inline(always)]
    unsafe fn add<V: F32x16>(sum: V, weights: V, x: V) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { sum.fma(weights, x) }
    }
}

impl PanelFormat for f32 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<f32>();
    const WORDS: usize = STEP;
    const WIDENS: bool = false;

    #[inline(always)]
    fn words(numbers: &[f32; PACK_CHUNK]) -> [u32; PACK_CHUNK] {
        numbers.map(f32::to_bits)
    }

    #[inline(always)]
    unsafe fn prefetch<V: F32x16>(prefetch: &mut impl Prefetch, line: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { prefetch.prefetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load<V: F32x16>(step: *const u8, vector: usize, word: usize) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { V::load(step.cast::<f32>().add(word * PANEL + vector * LANES)) }
    }
}

/// Widened when loaded.
impl PanelFormat for bf16 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<bf16>();
    const WORDS: usize = STEP;
    const WIDENS: bool = true;

    #[inline(always)]
    fn words(numbers: &[f32; PACK_CHUNK]) -> [u32; PACK_CHUNK] {
        numbers.map(|x| as_factor(round_to_bf16(x)).widen().to_bits())
    }

    #[inline(always)]
    unsafe fn prefetch<V: F32x16>(prefetch: &mut impl Prefetch, line: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { prefetch.prefetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load<V: F32x16>(step: *const u8, vector: usize, word: usize) -> V {
        // SAFETY: guaranteed by the caller.
        let pairs = unsafe { V::load_bf16_pairs(step.cast::<u32>().add(vector * LANES)) };
        if word == 0 { pairs.0 } else { pairs.1 }
    }
}

/// Unconverted bf16, two numbers per word, for CPUs that multiply pairs with one instruction.
pub(super) struct Pairs;

impl PanelFormat for Pairs {
    const STEP_BYTES: usize = bf16::STEP_BYTES;
    const WORDS: usize = 1;
    const WIDENS: bool = false;

    #[inline(always)]
    fn words(numbers: &[f32; PACK_CHUNK]) -> [u32; PACK_CHUNK] {
        let numbers = bf16::words(numbers);
        let mut words = [0; PACK_CHUNK];
        for (word, pair) in words.iter_mut().zip(numbers.as_chunks::<STEP>().0) {
            *word = pair[0] | pair[1] >> 16;
        }
        words
    }

    #[inline(always)]
    unsafe fn prefetch<V: F32x16>(prefetch: &mut impl Prefetch, line: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { bf16::prefetch::<V>(prefetch, line) };
    }

    #[inline(always)]
    unsafe fn load<V: F32x16>(step: *const u8, vector: usize, _: usize) -> V {
        // SAFETY: guaranteed by the caller; a word is as large as an f32.
        unsafe { V::load(step.cast::<f32>().add(vector * LANES)) }
    }

    #[inline(always)]
    unsafe fn add<V: F32x16>(sum: V, weights: V, x: V) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { sum.fma_pairs(weights, x) }
    }
}

/// Steps of one panel, or of several panels that lie `stride` bytes from each other.
pub(super) struct Steps {
    /// Address that lines are counted from.
    pub(super) lines: *const u8,
    /// Bytes from there to the first step.
    pub(super) start: usize,
    pub(super) count: usize,
    pub(super) stride: usize,
    /// First vector of the panel to multiply, if not all are multiplied at once.
    pub(super) first_vector: usize,
}

impl Steps {
    /// Adds the products of these steps with the R rows at `x` to `sums`: M vectors, T of each panel.
    ///
    /// # Safety
    /// The CPU supports V's instructions; the steps are packed as W, and `x` points to their start in a tile
    /// of R rows.
    #[inline(always)]
    pub(super) unsafe fn add<V: F32x16, W: PanelFormat, const R: usize, const M: usize, const T: usize>(
        &self,
        mut sums: [[V; R]; M],
        mut x: *const u32,
        mut prefetch: impl Prefetch,
    ) -> [[V; R]; M] {
        let mut at = self.start;
        // SAFETY: guaranteed by the caller.
        unsafe {
            for _ in 0..self.count {
                W::prefetch::<V>(&mut prefetch, at / size_of::<Line>());
                // Word by word, so that fewer weights are live beside the accumulators. If registers are
                // scarce, the fence stops the compiler from loading several words at a time, which would
                // spill accumulators to memory.
                for word in 0..W::WORDS {
                    if const { R > V::REORDERED_LOAD_ROWS } {
                        compiler_fence(Ordering::SeqCst);
                    }
                    let mut weights = [V::splat(0.0); M];
                    for m in 0..M {
                        let step = self.lines.add(at + m / T * self.stride);
                        weights[m] = W::load::<V>(step, self.first_vector + m % T, word);
                    }
                    for r in 0..R {
                        let x = V::splat(f32::from_bits(*x.add(word * R + r)));
                        for m in 0..M {
                            sums[m][r] = W::add(sums[m][r], weights[m], x);
                        }
                    }
                }
                at += W::STEP_BYTES;
                x = x.add(W::WORDS * R);
            }
        }
        sums
    }
}
