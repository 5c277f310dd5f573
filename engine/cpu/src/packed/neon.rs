//! [`Dots`] on NEON with its dot products of signed bytes (`dotprod`, in all server processors since 2018). Only
//! `dispatch` names this type.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Dots;
use crate::neon::Neon;

/// Four 128-bit registers; four products are added to a sum by one instruction, without saturation.
#[derive(Clone, Copy)]
pub(crate) struct NeonDots([int32x4_t; 4]);

/// Bytes in a register.
const QUARTER: usize = 16;

impl Dots for NeonDots {
    const TILE_ROWS: usize = 4;
    const SUMS: usize = 8;
    const SIGNED: bool = true;
    type Lanes = Neon;
    type Halves = [uint8x16_t; 4];
    type Whole = [uint8x16_t; 4];
    type GroupSums = Self;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: NEON is there.
        Self([unsafe { vdupq_n_s32(x) }; 4])
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(std::array::from_fn(|i| unsafe { vaddq_s32(self.0[i], other.0[i]) }))
    }

    #[inline(always)]
    unsafe fn whole(line: *const u8, _: usize) -> Self::Whole {
        // Another top bit is 128 less.
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe { load_line(line).map(|bytes| veorq_u8(bytes, vdupq_n_u8(0x80))) }
    }

    #[inline(always)]
    unsafe fn dot(self, whole: Self::Whole, x: *const i8) -> Self {
        // SAFETY: the trait's contract: the dot products are there, and four i8 at x.
        unsafe {
            let x = vdupq_n_s32(x.cast::<i32>().read_unaligned());
            Self(std::array::from_fn(|i| sdot(self.0[i], whole[i], x)))
        }
    }

    #[inline(always)]
    unsafe fn half(line: *const u8, high: bool) -> Self::Halves {
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe {
            let bytes = load_line(line);
            if high {
                bytes.map(|bytes| vshrq_n_u8::<4>(bytes))
            } else {
                bytes.map(|bytes| vandq_u8(bytes, vdupq_n_u8(0x0f)))
            }
        }
    }

    #[inline(always)]
    unsafe fn begin_group(correction: i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self::splat(correction) }
    }

    #[inline(always)]
    unsafe fn dot_halves(sums: Self, halves: Self::Halves, x: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe { sums.dot(halves, x) }
    }

    #[inline(always)]
    unsafe fn end_group(sums: Self, _: i32) -> Self {
        sums
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Neon {
        // SAFETY: the trait's contract.
        Neon(self.0.map(|sums| unsafe { vcvtq_f32_s32(sums) }))
    }
}

/// # Safety
/// 64 bytes are at `line`.
#[inline(always)]
unsafe fn load_line(line: *const u8) -> [uint8x16_t; 4] {
    // SAFETY: the caller's promise; NEON is in every 64-bit ARM.
    std::array::from_fn(|i| unsafe { vld1q_u8(line.add(QUARTER * i)) })
}

/// The instruction, whose intrinsic is not stable yet.
///
/// # Safety
/// The CPU has `dotprod`.
#[inline(always)]
unsafe fn sdot(mut sums: int32x4_t, bytes: uint8x16_t, x: int32x4_t) -> int32x4_t {
    // SAFETY: the caller's promise; it touches nothing but these registers.
    unsafe {
        asm!(
            // For the assembler, where this is compiled apart from the function that has the feature.
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {bytes:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums,
            bytes = in(vreg) bytes,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
