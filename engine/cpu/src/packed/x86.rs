//! [`Dots`] on AVX-512 VNNI (one register), AVX-VNNI and AVX2 (two). Only `dispatch` names these types.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{DotKernel, Dots};
use crate::dispatch::{run_avx_vnni, run_avx2_dots, run_vnni, run_vnni_256};
use crate::x86::{Avx2, Avx512};

/// One 512-bit register. One instruction adds four products to an accumulator, without saturation.
#[derive(Clone, Copy)]
pub(crate) struct VnniDots(__m512i);

/// Two 256-bit registers, accumulators 0..8 and 8..16, with the instruction of [`VnniDots`]: AVX-VNNI, or
/// with `EVEX` its AVX-512 encoding, which tests this code on machines without AVX-VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Vnni256Dots<const EVEX: bool>(__m256i, __m256i);

/// Two 256-bit registers: accumulators 0..8 and 8..16.
///
/// int8 products are computed in 16 bits and added in pairs to 32 (`vpmaddwd`), because `vpmaddubsw` on bytes
/// would saturate (255 * 127 * 2 exceeds an i16). On nibbles it does not, and sixteen products of a group
/// fit (15 * 127 * 16 = 30,480), so a group is summed in 16 bits and widened once.
#[derive(Clone, Copy)]
pub(crate) struct Avx2Dots(__m256i, __m256i);

/// Bytes per 256-bit register.
const HALF_LINE: usize = 32;

impl Dots for VnniDots {
    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;
    const ACCUMULATORS: usize = 12;
    const WIDE: bool = true;
    type F32x16 = Avx512;
    type Nibbles = __m512i;
    type Int8Line = __m512i;
    type GroupSums = Self;

    #[inline(always)]
    unsafe fn run_outlined<K: DotKernel>(kernel: K) {
        // SAFETY: the trait's contract.
        unsafe { run_vnni(kernel) };
    }

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX-512F.
        Self(unsafe { _mm512_set1_epi32(x) })
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(unsafe { _mm512_add_epi32(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn load_int8(line: *const u8, _: usize) -> __m512i {
        // SAFETY: the trait's contract: 64 bytes at `line`; the load needs no alignment.
        unsafe { _mm512_loadu_si512(line.cast()) }
    }

    #[inline(always)]
    unsafe fn dot(self, whole: __m512i, x: *const i8) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX-512 VNNI, and four i8 at x.
        unsafe {
            let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
            Self(_mm512_dpbusd_epi32(self.0, whole, x))
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(line: *const u8, high: bool) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe {
            let bytes = Self::load_int8(line, 0);
            let shifted = if high { _mm512_srli_epi16::<4>(bytes) } else { bytes };
            _mm512_and_si512(shifted, _mm512_set1_epi8(0x0f))
        }
    }

    #[inline(always)]
    unsafe fn begin_group(correction: i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self::splat(correction) }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(sums: Self, nibbles: __m512i, x: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe { sums.dot(nibbles, x) }
    }

    #[inline(always)]
    unsafe fn end_group(sums: Self, _: i32) -> Self {
        sums
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Avx512 {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_cvtepi32_ps(self.0) })
    }
}

impl<const EVEX: bool> Dots for Vnni256Dots<EVEX> {
    const TILE_ROWS: usize = 6;
    const ACCUMULATORS: usize = 6;
    const KEEPS_LOAD_ORDER: bool = true;
    type F32x16 = Avx2;
    type Nibbles = (__m256i, __m256i);
    type Int8Line = (__m256i, __m256i);
    type GroupSums = Self;

    #[inline(always)]
    unsafe fn run_outlined<K: DotKernel>(kernel: K) {
        // SAFETY: the trait's contract.
        unsafe { if EVEX { run_vnni_256(kernel) } else { run_avx_vnni(kernel) } };
    }

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX2.
        unsafe { Self(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_add_epi32(self.0, other.0), _mm256_add_epi32(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn load_int8(line: *const u8, _: usize) -> Self::Int8Line {
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe { load_line(line) }
    }

    #[inline(always)]
    unsafe fn dot(self, whole: Self::Int8Line, x: *const i8) -> Self {
        // SAFETY: the trait's contract: the CPU supports the instruction in this encoding, and four i8 at x.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            if EVEX {
                Self(_mm256_dpbusd_epi32(self.0, whole.0, x), _mm256_dpbusd_epi32(self.1, whole.1, x))
            } else {
                Self(_mm256_dpbusd_avx_epi32(self.0, whole.0, x), _mm256_dpbusd_avx_epi32(self.1, whole.1, x))
            }
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(line: *const u8, high: bool) -> Self::Nibbles {
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe { split_nibbles(line, high) }
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
    unsafe fn to_f32(self) -> Avx2 {
        // SAFETY: the trait's contract.
        unsafe { Avx2(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }
}

impl Dots for Avx2Dots {
    const TILE_ROWS: usize = 4;
    const ACCUMULATORS: usize = 1;
    const WORDS: usize = 2;
    const KEEPS_LOAD_ORDER: bool = true;
    const NO_UNROLL: bool = true;
    type F32x16 = Avx2;
    type Nibbles = (__m256i, __m256i);
    type Int8Line = (__m256i, __m256i);
    /// Pairs of 16-bit sums, each pair one accumulator.
    type GroupSums = (__m256i, __m256i);

    #[inline(always)]
    unsafe fn run_outlined<K: DotKernel>(kernel: K) {
        // SAFETY: the trait's contract.
        unsafe { run_avx2_dots(kernel) };
    }

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX2.
        unsafe { Self(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_add_epi32(self.0, other.0), _mm256_add_epi32(self.1, other.1)) }
    }

    /// Widens to 16 bits: bytes of even index for the first word, those of odd index for the second.
    #[inline(always)]
    unsafe fn load_int8(line: *const u8, word: usize) -> Self::Int8Line {
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe {
            let bytes = load_line(line);
            if word == 0 {
                let mask = _mm256_set1_epi16(0x00ff);
                (_mm256_and_si256(bytes.0, mask), _mm256_and_si256(bytes.1, mask))
            } else {
                (_mm256_srli_epi16::<8>(bytes.0), _mm256_srli_epi16::<8>(bytes.1))
            }
        }
    }

    #[inline(always)]
    unsafe fn dot(self, whole: Self::Int8Line, x: *const i8) -> Self {
        // SAFETY: the trait's contract: two i16 at x.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            let products = Self(_mm256_madd_epi16(whole.0, x), _mm256_madd_epi16(whole.1, x));
            let sums = self.add(products);
            Self(as_grouped(sums.0), as_grouped(sums.1))
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(line: *const u8, high: bool) -> Self::Nibbles {
        // SAFETY: the trait's contract: 64 bytes at `line`.
        unsafe { split_nibbles(line, high) }
    }

    #[inline(always)]
    unsafe fn begin_group(_: i32) -> Self::GroupSums {
        // SAFETY: the trait's contract.
        unsafe { (_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(sums: Self::GroupSums, nibbles: Self::Nibbles, x: *const i8) -> Self::GroupSums {
        // SAFETY: the trait's contract: four i8 at x.
        unsafe {
            let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
            let products = (_mm256_maddubs_epi16(nibbles.0, x), _mm256_maddubs_epi16(nibbles.1, x));
            let sums = (_mm256_add_epi16(sums.0, products.0), _mm256_add_epi16(sums.1, products.1));
            (as_grouped(sums.0), as_grouped(sums.1))
        }
    }

    #[inline(always)]
    unsafe fn end_group(sums: Self::GroupSums, correction: i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let sums = Self(_mm256_madd_epi16(sums.0, ones), _mm256_madd_epi16(sums.1, ones));
            sums.add(Self::splat(correction))
        }
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Avx2 {
        // SAFETY: the trait's contract.
        unsafe { Avx2(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }
}

/// Makes a sum opaque to the compiler. Otherwise it would first add the products of several lines to each
/// other, for a shorter chain, and spill what exceeds sixteen registers to memory.
#[inline]
#[target_feature(enable = "avx2")]
fn as_grouped(sum: __m256i) -> __m256i {
    let mut sum = sum;
    // SAFETY: it contains no instruction.
    unsafe { asm!("/* {0} */", inout(ymm_reg) sum, options(pure, nomem, nostack, preserves_flags)) };
    sum
}

/// # Safety
/// The CPU supports AVX2, and 64 bytes are readable at `line`.
#[inline(always)]
unsafe fn load_line(line: *const u8) -> (__m256i, __m256i) {
    // SAFETY: guaranteed by the caller; the loads need no alignment.
    unsafe { (_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(HALF_LINE).cast())) }
}

/// Loads the low half of each byte, or the high half.
///
/// # Safety
/// The CPU supports AVX2, and 64 bytes are readable at `line`.
#[inline(always)]
unsafe fn split_nibbles(line: *const u8, high: bool) -> (__m256i, __m256i) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (mut bytes, mask) = (load_line(line), _mm256_set1_epi8(0x0f));
        if high {
            bytes = (_mm256_srli_epi16::<4>(bytes.0), _mm256_srli_epi16::<4>(bytes.1));
        }
        (_mm256_and_si256(bytes.0, mask), _mm256_and_si256(bytes.1, mask))
    }
}
