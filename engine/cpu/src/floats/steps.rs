//! The inner loop of products with floats: so many steps of a few vectors of channels, for a tile of rows, in registers.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::sync::atomic::{Ordering, compiler_fence};

use half::bf16;

use super::{PANEL, STEP};
use crate::elementwise::{as_factor, round_to_bf16};
use crate::lanes::{Element, LANES, Lanes};
use crate::lines::{Fetch, Line};

/// Numbers of a row of activations that become words at a time.
pub(super) const DEALT: usize = 64;

/// How numbers stand in a panel, and how they are multiplied: word by word of a lane, with a word of each row's activations.
pub(super) trait PanelNumbers {
    /// Bytes of a step.
    const STEP_BYTES: usize;
    /// Words of a row's activations for a step.
    const WORDS: usize;
    /// Whether a window that many tiles of rows meet is widened to f32.
    const WIDENS: bool;

    /// Activations as words; those of `DEALT / STEP` steps come first.
    fn words(numbers: &[f32; DEALT]) -> [u32; DEALT];

    /// Fetches while the step that begins with line `line` is used.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize);

    /// What the `word`-th word of activations is multiplied with, of the channels of one vector.
    ///
    /// # Safety
    /// As for [`Lanes`]: a step lies at `step`, and it has the vector.
    unsafe fn load<V: Lanes>(step: *const u8, vector: usize, word: usize) -> V;

    /// `sum` and the products of one word.
    ///
    /// # Safety
    /// As for [`Lanes`].
    #[inline(always)]
    unsafe fn add<V: Lanes>(sum: V, weights: V, x: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.fma(weights, x) }
    }
}

impl PanelNumbers for f32 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<f32>();
    const WORDS: usize = STEP;
    const WIDENS: bool = false;

    #[inline(always)]
    fn words(numbers: &[f32; DEALT]) -> [u32; DEALT] {
        numbers.map(f32::to_bits)
    }

    #[inline(always)]
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch.fetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(step: *const u8, vector: usize, word: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(step.cast::<f32>().add(word * PANEL + vector * LANES)) }
    }
}

/// Widened as they are loaded.
impl PanelNumbers for bf16 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<bf16>();
    const WORDS: usize = STEP;
    const WIDENS: bool = true;

    #[inline(always)]
    fn words(numbers: &[f32; DEALT]) -> [u32; DEALT] {
        numbers.map(|x| as_factor(round_to_bf16(x)).widen().to_bits())
    }

    #[inline(always)]
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch.fetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(step: *const u8, vector: usize, word: usize) -> V {
        // SAFETY: the caller's promise.
        let pairs = unsafe { V::load_bf16_pairs(step.cast::<u32>().add(vector * LANES)) };
        if word == 0 { pairs.0 } else { pairs.1 }
    }
}

/// bf16 as it is, two numbers in a word, where that is one instruction.
pub(super) struct Pairs;

impl PanelNumbers for Pairs {
    const STEP_BYTES: usize = bf16::STEP_BYTES;
    const WORDS: usize = 1;
    const WIDENS: bool = false;

    #[inline(always)]
    fn words(numbers: &[f32; DEALT]) -> [u32; DEALT] {
        let numbers = bf16::words(numbers);
        let mut words = [0; DEALT];
        for (word, pair) in words.iter_mut().zip(numbers.as_chunks::<STEP>().0) {
            *word = pair[0] | pair[1] >> 16;
        }
        words
    }

    #[inline(always)]
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { bf16::fetch::<V>(fetch, line) };
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(step: *const u8, vector: usize, _: usize) -> V {
        // SAFETY: the caller's promise; a word of a lane is as long as an f32.
        unsafe { V::load(step.cast::<f32>().add(vector * LANES)) }
    }

    #[inline(always)]
    unsafe fn add<V: Lanes>(sum: V, weights: V, x: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { sum.fma_pairs(weights, x) }
    }
}

/// Steps of a panel, or of several that lie so many bytes apart.
pub(super) struct Steps {
    /// Where lines are counted from.
    pub(super) lines: *const u8,
    /// Bytes from there to the first of the steps.
    pub(super) start: usize,
    pub(super) count: usize,
    pub(super) apart: usize,
    /// Of a panel's vectors, where it is met vector by vector.
    pub(super) first_vector: usize,
}

impl Steps {
    /// Adds the products of these steps with the R rows at `x` to `sums`: M vectors, T of each panel.
    ///
    /// # Safety
    /// V's instructions are there, the steps are packed as W, and `x` is where they begin in a tile of R rows.
    #[inline(always)]
    pub(super) unsafe fn add<V: Lanes, W: PanelNumbers, const R: usize, const M: usize, const T: usize>(
        &self,
        mut sums: [[V; R]; M],
        mut x: *const u32,
        mut fetch: impl Fetch,
    ) -> [[V; R]; M] {
        let mut at = self.start;
        // SAFETY: the caller's promise.
        unsafe {
            for _ in 0..self.count {
                W::fetch::<V>(&mut fetch, at / size_of::<Line>());
                // One word after the other: fewer weights have to be held beside the sums. Where registers are few, the fence
                // keeps the compiler from loading for several at a time, for which it would put sums down to memory.
                for word in 0..W::WORDS {
                    if const { R > V::UNORDERED_ROWS } {
                        compiler_fence(Ordering::SeqCst);
                    }
                    let mut weights = [V::splat(0.0); M];
                    for m in 0..M {
                        let step = self.lines.add(at + m / T * self.apart);
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
