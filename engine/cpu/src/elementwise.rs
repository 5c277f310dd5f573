//! Kernels that process rows element by element, and the norm, whose only sum is a dot product. Plain loops,
//! compiled for each instruction set; each has a naive twin in [`super::reference`].

use half::bf16;

use super::dispatch::Kernel;
use super::exp::exp;
use super::simd::{Element, F32x16, LANES};

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row of `weight.len()`.
pub(super) struct RmsNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    pub(super) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            // SAFETY: this function's contract guarantees V's instructions.
            let scale = unsafe { rms_scale::<V>(x, self.eps) };
            for ((out, &x), &weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = x * scale * weight;
            }
        }
    }
}

/// RMS norm in place, on consecutive heads.
pub(super) struct RmsNormInPlace<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
}

impl Kernel for RmsNormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            // SAFETY: this function's contract guarantees V's instructions.
            let scale = unsafe { rms_scale::<V>(x, self.eps) };
            for (x, &weight) in x.iter_mut().zip(self.weight) {
                *x = *x * scale * weight;
            }
        }
    }
}

/// # Safety
/// The CPU supports V's instructions.
#[inline(always)]
unsafe fn rms_scale<V: F32x16>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: guaranteed by the caller.
    let sum = unsafe { dot::<V>(x, x) };
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// The dot product of two rows: element k into lane k mod 16, then the fold.
///
/// # Safety
/// The CPU supports V's instructions.
#[inline(always)]
unsafe fn dot<V: F32x16>(a: &[f32], b: &[f32]) -> f32 {
    let len = a.len().min(b.len());
    let mut k = 0;
    // SAFETY: guaranteed by the caller; k + 16 <= len inside the loop, len - k < 16 after it.
    unsafe {
        let mut sums = V::splat(0.0);
        while k + LANES <= len {
            sums = sums.fma(V::load(a.as_ptr().add(k)), V::load(b.as_ptr().add(k)));
            k += LANES;
        }
        if k < len {
            let (a, b) = (a.as_ptr().add(k), b.as_ptr().add(k));
            sums = sums.fma(f32::load_part(a, len - k), f32::load_part(b, len - k));
        }
        sums.reduce_sum()
    }
}

/// Rotates the pairs (i, i + half) of each head by the row's angles.
pub(super) struct Rotate<'a> {
    /// Consecutive heads of `2 * cos.len()`.
    pub(super) heads: &'a mut [f32],
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        let half = self.cos.len();
        for head in self.heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(self.cos).zip(self.sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// `gate = silu(gate) * up`.
pub(super) struct SiluMul<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: F32x16>(self) {
        for (gate, &up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

/// Rounds to the nearest bf16, ties to even, like the `half` crate but without a branch.
///
/// Adds just under half a unit, which carries into the kept bits when it should. A NaN keeps its sign and
/// stays a NaN.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    bf16::from_bits((if x.is_nan() { bits | 0x0040_0000 } else { rounded } >> 16) as u16)
}

/// The bits of 2^-56.
const SMALLEST_FACTOR: u16 = (127 - 56) << 7;

/// Rounds a bf16 number to a factor of a product (docs/contract.md C1): below 2^-56 it becomes a zero of the
/// same sign.
///
/// All other numbers are multiples of 2^-63, so every product and every sum of products is a multiple of
/// 2^-126: no denormal number arises, which some instructions would treat as zero.
#[inline(always)]
pub(crate) fn as_factor(x: bf16) -> bf16 {
    let bits = x.to_bits();
    bf16::from_bits(if bits & 0x7fff < SMALLEST_FACTOR { bits & 0x8000 } else { bits })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn as_factor_flushes_small_numbers_to_zero() {
        let smallest = 2.0f32.powi(-56);
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            let expected = if x.to_f32().abs() < smallest { bf16::ZERO.copysign(x) } else { x };
            assert_eq!(as_factor(x).to_bits(), expected.to_bits(), "{x}");
        }
    }

    proptest! {
        #[test]
        fn rounds_as_the_half_crate_does(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(round_to_bf16(x).to_bits(), bf16::from_f32(x).to_bits());
        }
    }
}
