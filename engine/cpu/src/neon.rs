//! [`F32x16`] on NEON: four registers, lanes 0..4, 4..8, 8..12 and 12..16. Every 64-bit ARM CPU has it. Only
//! [`super::dispatch`] names this type.

use std::arch::aarch64::*;
use std::arch::asm;

use half::bf16;

use super::simd::F32x16;

/// Four 128-bit registers.
#[derive(Clone, Copy)]
pub(super) struct Neon(pub(super) [float32x4_t; 4]);

/// Lanes per register.
const QUARTER: usize = 4;

/// Applies an operation register by register.
macro_rules! each_quarter {
    ($op:ident, $($from:expr),+) => {
        // SAFETY: the trait's contract: the CPU supports NEON.
        unsafe { Neon(std::array::from_fn(|i| $op($($from.0[i]),+))) }
    };
}

impl F32x16 for Neon {
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the trait's contract: the CPU supports NEON.
        Self([unsafe { vdupq_n_f32(x) }; 4])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait's contract: sixteen f32 at p; the loads need no more alignment than theirs.
        Self(std::array::from_fn(|i| unsafe { vld1q_f32(p.add(QUARTER * i)) }))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the trait's contract: sixteen bf16 at p.
        Self(std::array::from_fn(|i| unsafe {
            let halves = vmovl_u16(vld1_u16(p.add(QUARTER * i).cast()));
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(halves))
        }))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self) {
        // SAFETY: the trait's contract: sixteen pairs at p.
        unsafe {
            let pairs: [uint32x4_t; 4] = std::array::from_fn(|i| vld1q_u32(p.add(QUARTER * i)));
            let high = vdupq_n_u32(0xffff_0000);
            (
                Self(pairs.map(|pairs| vreinterpretq_f32_u32(vandq_u32(pairs, high)))),
                Self(pairs.map(|pairs| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)))),
            )
        }
    }

    #[inline(always)]
    unsafe fn prefetch_l1(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe {
            asm!("prfm pldl1keep, [{p}]", p = in(reg) p.addr(), options(nomem, nostack, preserves_flags))
        };
    }

    #[inline(always)]
    unsafe fn prefetch_l2(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe {
            asm!("prfm pldl2keep, [{p}]", p = in(reg) p.addr(), options(nomem, nostack, preserves_flags))
        };
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for (i, quarter) in self.0.into_iter().enumerate() {
            // SAFETY: the trait's contract: space for sixteen f32 at p.
            unsafe { vst1q_f32(p.add(QUARTER * i), quarter) };
        }
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        let [a, b, c, d] = self.0;
        // SAFETY: the trait's contract: space for sixteen bytes at p.
        unsafe {
            let words = |lanes| vmovn_u32(vreinterpretq_u32_f32(lanes));
            let bytes = |a, b| vmovn_u16(vcombine_u16(words(a), words(b)));
            vst1q_u8(p, vcombine_u8(bytes(a, b), bytes(c, d)));
        }
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        each_quarter!(vfmaq_f32, self, a, b)
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        each_quarter!(vaddq_f32, self, other)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        each_quarter!(vmulq_f32, self, other)
    }

    #[inline(always)]
    unsafe fn reduce_sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: the trait's contract.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: the trait's contract.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d))) }
    }
}
