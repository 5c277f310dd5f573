//! [`F32x16`] on AVX-512 (one register) and AVX2 with FMA (two). Only [`super::dispatch`] names these types.

use std::arch::x86_64::*;

use half::bf16;

use super::dispatch::{Kernel, run_avx2, run_avx512, run_avx512_bf16};
use super::simd::F32x16;

/// One 512-bit register. PAIRS: whether to use AVX512-BF16, which multiplies pairs of bf16 but is missing or
/// slow on some AVX-512 CPUs.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const PAIRS: bool = false>(pub(super) __m512);

/// Two 256-bit registers: lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub(super) struct Avx2(pub(super) __m256, pub(super) __m256);

impl<const PAIRS: bool> F32x16 for Avx512<PAIRS> {
    const TILE_ROWS: usize = 12;
    const TILE_VECTORS: usize = 2;
    const HAS_BF16_DOT: bool = PAIRS;
    const ATTENTION_ACCUMULATORS: usize = 24;

    #[inline(always)]
    unsafe fn run_outlined<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the trait's contract.
        unsafe { if PAIRS { run_avx512_bf16(kernel) } else { run_avx512(kernel) } }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX-512F.
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait's contract; the load needs no alignment.
        Self(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the trait's contract; sixteen bf16 are 256 bits, and the load needs no alignment.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self) {
        // SAFETY: the trait's contract: sixteen pairs are 512 bits; the load needs no alignment.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Self(_mm512_castsi512_ps(high)), Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))))
        }
    }

    #[inline(always)]
    unsafe fn prefetch_l1(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn prefetch_l2(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait's contract; the store needs no alignment.
        unsafe { _mm512_storeu_ps(p, self.0) };
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        // SAFETY: the trait's contract: space for sixteen bytes at p; the store needs no alignment.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0))) };
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }

    #[inline(always)]
    unsafe fn fma_pairs(self, a: Self, b: Self) -> Self {
        // SAFETY: the trait's contract: with PAIRS the CPU supports AVX512-BF16, and this is called only with
        // PAIRS. Any bits make thirty-two bf16. The instruction adds the product of the upper halves first,
        // each product by a fused multiply-add; it treats denormal numbers as zeros, but there are none.
        unsafe {
            let pairs = |lanes: Self| std::mem::transmute::<__m512, __m512bh>(lanes.0);
            Self(_mm512_dpbf16_ps(self.0, pairs(a), pairs(b)))
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn reduce_sum(self) -> f32 {
        // SAFETY: the trait's contract; AVX-512F has AVX2.
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            reduce_sum_8(_mm256_add_ps(low, high))
        }
    }

    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}

impl F32x16 for Avx2 {
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;
    const REORDERED_LOAD_ROWS: usize = 4;
    const ATTENTION_ACCUMULATORS: usize = 6;

    #[inline(always)]
    unsafe fn run_outlined<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the trait's contract.
        unsafe { run_avx2(kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the trait's contract: the CPU supports AVX2 and FMA.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait's contract: sixteen f32 at p; the loads need no alignment.
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the trait's contract: sixteen bf16 at p; the loads need no alignment.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            let widened = (_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high));
            Self(_mm256_castsi256_ps(widened.0), _mm256_castsi256_ps(widened.1))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self) {
        // SAFETY: the trait's contract: sixteen pairs at p; the loads need no alignment.
        unsafe {
            let (a, b) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let low = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
            let high = (_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
            (
                Self(_mm256_castsi256_ps(high.0), _mm256_castsi256_ps(high.1)),
                Self(_mm256_castsi256_ps(low.0), _mm256_castsi256_ps(low.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn prefetch_l1(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn prefetch_l2(p: *const u8) {
        // SAFETY: a prefetch never faults, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait's contract: space for sixteen f32 at p; the stores need no alignment.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        // SAFETY: the trait's contract: space for sixteen bytes at p; the store needs no alignment.
        unsafe {
            let low = |lanes| _mm256_and_si256(_mm256_castps_si256(lanes), _mm256_set1_epi32(0xff));
            // Packing works on halves of registers: the middle two quarters must be swapped.
            let words = _mm256_packus_epi32(low(self.0), low(self.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (first, second) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(first, second));
        }
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn reduce_sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe { reduce_sum_8(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe {
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

/// The last three foldings.
///
/// # Safety
/// The CPU supports AVX.
#[inline(always)]
unsafe fn reduce_sum_8(lanes: __m256) -> f32 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
