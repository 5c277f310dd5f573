//! [`Dots`] on AVX-512 VNNI (one register) and AVX2 (two). Only `cpu::dispatch` names these types.

use std::arch::x86_64::*;

use super::Dots;
use crate::cpu::x86::{Avx2, Avx512};

/// One 512-bit register; four products are added to a sum by one instruction, without saturation.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct VnniDots(__m512i);

/// Two 256-bit registers: sums 0..8 and 8..16. Products are made in 16 bits and added in pairs to 32
/// (`maddubs` would saturate in 16).
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2Dots(__m256i, __m256i);

impl Dots for VnniDots {
    const TILE_ROWS: usize = 12;
    type Lanes = Avx512;
    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: AVX-512F is there.
        Self(unsafe { _mm512_set1_epi32(x) })
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(unsafe { _mm512_add_epi32(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        // SAFETY: the trait's contract: 64 bytes at p; the load needs no alignment.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn low_halves(bytes: __m512i) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn high_halves(bytes: __m512i) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(0x0f)) }
    }

    #[inline(always)]
    unsafe fn dot(self, bytes: __m512i, x: *const i8) -> Self {
        // SAFETY: the trait's contract: AVX-512 VNNI is there, and four i8 at x.
        unsafe {
            let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
            Self(_mm512_dpbusd_epi32(self.0, bytes, x))
        }
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Avx512 {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_cvtepi32_ps(self.0) })
    }
}

impl Dots for Avx2Dots {
    const TILE_ROWS: usize = 4;
    type Lanes = Avx2;
    type Bytes = (__m256i, __m256i);

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        // SAFETY: the trait's contract: AVX2 is there.
        unsafe { Self(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_add_epi32(self.0, other.0), _mm256_add_epi32(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self::Bytes {
        // SAFETY: the trait's contract: 64 bytes at p; the loads need no alignment.
        unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
    }

    #[inline(always)]
    unsafe fn low_halves(bytes: Self::Bytes) -> Self::Bytes {
        // SAFETY: the trait's contract.
        unsafe {
            let mask = _mm256_set1_epi8(0x0f);
            (_mm256_and_si256(bytes.0, mask), _mm256_and_si256(bytes.1, mask))
        }
    }

    #[inline(always)]
    unsafe fn high_halves(bytes: Self::Bytes) -> Self::Bytes {
        // SAFETY: the trait's contract.
        unsafe {
            let mask = _mm256_set1_epi8(0x0f);
            let shifted = (_mm256_srli_epi16::<4>(bytes.0), _mm256_srli_epi16::<4>(bytes.1));
            (_mm256_and_si256(shifted.0, mask), _mm256_and_si256(shifted.1, mask))
        }
    }

    #[inline(always)]
    unsafe fn dot(self, bytes: Self::Bytes, x: *const i8) -> Self {
        // SAFETY: the trait's contract: four i8 at x.
        unsafe {
            let [a, b, c, d] = x.cast::<[i8; 4]>().read().map(i16::from);
            let pair = |low: i16, high: i16| i32::from(low) & 0xffff | i32::from(high) << 16;
            let x = (_mm256_set1_epi32(pair(a, c)), _mm256_set1_epi32(pair(b, d)));
            Self(dot_8(self.0, bytes.0, x), dot_8(self.1, bytes.1, x))
        }
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Avx2 {
        // SAFETY: the trait's contract.
        unsafe { Avx2(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }
}

/// Eight sums: bytes of even index meet the first pair of `x`, those of odd index the second.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn dot_8(sums: __m256i, bytes: __m256i, x: (__m256i, __m256i)) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let even = _mm256_and_si256(bytes, _mm256_set1_epi16(0x00ff));
        let odd = _mm256_srli_epi16::<8>(bytes);
        let products = _mm256_add_epi32(_mm256_madd_epi16(even, x.0), _mm256_madd_epi16(odd, x.1));
        _mm256_add_epi32(sums, products)
    }
}
