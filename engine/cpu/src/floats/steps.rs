//! The inner loop of products with floats: so many steps of a few vectors of channels, for a tile of rows, in registers.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices are the matrix notation, and the loops are unrolled"
)]

use std::sync::atomic::{Ordering, compiler_fence};

use half::bf16;

use super::{PANEL, STEP};
use crate::lanes::{LANES, Lanes};
use crate::lines::{Fetch, Line};

/// How numbers stand in a panel.
pub(super) trait PanelNumbers {
    /// Bytes of a step.
    const STEP_BYTES: usize;

    /// Fetches while the step that begins with line `line` is used.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize);

    /// The `number`-th of the two numbers of the channels of one vector.
    ///
    /// # Safety
    /// As for [`Lanes`]: a step lies at `step`, and it has the vector.
    unsafe fn load_number<V: Lanes>(step: *const u8, vector: usize, number: usize) -> V;
}

impl PanelNumbers for f32 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<f32>();

    #[inline(always)]
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch.fetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load_number<V: Lanes>(step: *const u8, vector: usize, number: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(step.cast::<f32>().add(number * PANEL + vector * LANES)) }
    }
}

impl PanelNumbers for bf16 {
    const STEP_BYTES: usize = STEP * PANEL * size_of::<bf16>();

    #[inline(always)]
    unsafe fn fetch<V: Lanes>(fetch: &mut impl Fetch, line: usize) {
        // SAFETY: the caller's promise.
        unsafe { fetch.fetch::<V, { Self::STEP_BYTES / size_of::<Line>() }>(line) };
    }

    #[inline(always)]
    unsafe fn load_number<V: Lanes>(step: *const u8, vector: usize, number: usize) -> V {
        // SAFETY: the caller's promise.
        let pairs = unsafe { V::load_bf16_pairs(step.add(vector * LANES * STEP * size_of::<bf16>()).cast()) };
        if number == 0 { pairs.0 } else { pairs.1 }
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
        mut x: *const f32,
        mut fetch: impl Fetch,
    ) -> [[V; R]; M] {
        let mut at = self.start;
        // SAFETY: the caller's promise.
        unsafe {
            for _ in 0..self.count {
                W::fetch::<V>(&mut fetch, at / size_of::<Line>());
                // One number after the other: fewer weights have to be held beside the sums. Where registers are few, the fence
                // keeps the compiler from loading for several at a time, for which it would put sums down to memory.
                for number in 0..STEP {
                    if const { R > V::UNORDERED_ROWS } {
                        compiler_fence(Ordering::SeqCst);
                    }
                    let mut weights = [V::splat(0.0); M];
                    for m in 0..M {
                        let step = self.lines.add(at + m / T * self.apart);
                        weights[m] = W::load_number::<V>(step, self.first_vector + m % T, number);
                    }
                    for r in 0..R {
                        let x = V::splat(*x.add(number * R + r));
                        for m in 0..M {
                            sums[m][r] = sums[m][r].fma(weights[m], x);
                        }
                    }
                }
                at += W::STEP_BYTES;
                x = x.add(STEP * R);
            }
        }
        sums
    }
}
