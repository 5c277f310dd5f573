//! [`Dots`] on NEON with its dot products of signed bytes (`dotprod`, in all server processors since 2018),
//! and for int8 with its products of 2 x 8 by 8 x 2 matrices (`i8mm`, in most since 2021). Only `dispatch`
//! names this type.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{DotKernel, Dots};
use crate::dispatch::{run_neon_dots, run_neon_i8mm};
use crate::neon::Neon;

/// Four 128-bit registers. One instruction adds four products to an accumulator, without saturation. With
/// `I8MM` two rows of int8 are multiplied together, eight products per accumulator: then the accumulators are
/// in the order 0, 1 of the first row, 0, 1 of the second, 2, 3 of the first and so on, over two of these.
#[derive(Clone, Copy)]
pub(crate) struct NeonDots<const I8MM: bool>([int32x4_t; 4]);

/// Bytes per register.
const QUARTER: usize = 16;

impl<const I8MM: bool> Dots for NeonDots<I8MM> {
    const TILE_ROWS: usize = 4;
    const ACCUMULATORS: usize = 8;
    const SIGNED: bool = true;
    const PAIRS: bool = I8MM;
    type F32x16 = Neon;
    type Nibbles = [uint8x16_t; 4];
    type Int8Line = [uint8x16_t; 4];
    type GroupSums = Self;

    #[inline(always)]
    unsafe fn run_outlined<K: DotKernel>(kernel: K) {
        // SAFETY: the trait's contract.
        unsafe { if I8MM { run_neon_i8mm(kernel) } else { run_neon_dots(kernel) } };
    }

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: the CPU supports NEON.
        Self([unsafe { vdupq_n_s32(x) }; 4])
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(std::array::from_fn(|i| unsafe { vaddq_s32(self.0[i], other.0[i]) }))
    }

    #[inline(always)]
    unsafe fn load_int8(line: *const u8, _: usize) -> Self::Int8Line {
        // Flipping the top bit subtracts 128.
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe { load_line(line).map(|bytes| veorq_u8(bytes, vdupq_n_u8(0x80))) }
    }

    #[inline(always)]
    unsafe fn dot(self, whole: Self::Int8Line, x: *const i8) -> Self {
        // SAFETY: the trait's contract: the CPU supports the dot products, and four i8 at x.
        unsafe {
            let x = vdupq_n_s32(x.cast::<i32>().read_unaligned());
            Self(std::array::from_fn(|i| sdot(self.0[i], whole[i], x)))
        }
    }

    #[inline(always)]
    unsafe fn dot_pair(pair: [Self; 2], whole: [Self::Int8Line; 2], x: [*const i8; 2]) -> [Self; 2] {
        // SAFETY: the trait's contract: the CPU supports the matrix products, and eight i8 at each x.
        unsafe {
            let [first, second] = x.map(|x| vld1_s32(x.cast()));
            // Eight numbers of the first row, then eight of the second.
            let x = vcombine_s32(vzip1_s32(first, second), vzip2_s32(first, second));
            let mut pair = pair;
            for i in 0..4 {
                let [low, high] = whole.map(|whole| vreinterpretq_u32_u8(whole[i]));
                // Eight numbers of one channel, then eight of the next.
                let channels = [vzip1q_u32(low, high), vzip2q_u32(low, high)];
                for (j, channels) in channels.into_iter().enumerate() {
                    let sums = &mut pair[i / 2].0[2 * (i % 2) + j];
                    *sums = smmla(*sums, x, vreinterpretq_u8_u32(channels));
                }
            }
            pair
        }
    }

    #[inline(always)]
    unsafe fn end_pair(pair: [Self; 2]) -> [Self; 2] {
        let sums = |i: usize| pair[i / 4].0[i % 4];
        // SAFETY: the trait's contract: the CPU supports NEON.
        unsafe {
            let first =
                |i| vzip1q_s64(vreinterpretq_s64_s32(sums(2 * i)), vreinterpretq_s64_s32(sums(2 * i + 1)));
            let second =
                |i| vzip2q_s64(vreinterpretq_s64_s32(sums(2 * i)), vreinterpretq_s64_s32(sums(2 * i + 1)));
            [
                Self(std::array::from_fn(|i| vreinterpretq_s32_s64(first(i)))),
                Self(std::array::from_fn(|i| vreinterpretq_s32_s64(second(i)))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(line: *const u8, high: bool) -> Self::Nibbles {
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
    unsafe fn dot_nibbles(sums: Self, nibbles: Self::Nibbles, x: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe { sums.dot(nibbles, x) }
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
/// 64 bytes are readable at `line`.
#[inline(always)]
unsafe fn load_line(line: *const u8) -> [uint8x16_t; 4] {
    // SAFETY: guaranteed by the caller; every 64-bit ARM CPU has NEON.
    std::array::from_fn(|i| unsafe { vld1q_u8(line.add(QUARTER * i)) })
}

/// The `sdot` instruction, whose intrinsic is not stable yet.
///
/// # Safety
/// The CPU supports `dotprod`.
#[inline(always)]
unsafe fn sdot(mut sums: int32x4_t, bytes: uint8x16_t, x: int32x4_t) -> int32x4_t {
    // SAFETY: guaranteed by the caller; it affects only these registers.
    unsafe {
        asm!(
            // For the assembler, if this is not inlined into the function with the target feature.
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

/// The `smmla` instruction, whose intrinsic is not stable yet: accumulators 0 and 1 of the first row of `x`,
/// then of the second.
///
/// # Safety
/// The CPU supports `i8mm`.
#[inline(always)]
unsafe fn smmla(mut sums: int32x4_t, x: int32x4_t, channels: uint8x16_t) -> int32x4_t {
    // SAFETY: guaranteed by the caller; it affects only these registers.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {x:v}.16b, {channels:v}.16b",
            sums = inout(vreg) sums,
            x = in(vreg) x,
            channels = in(vreg) channels,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
