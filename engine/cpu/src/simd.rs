//! Vectors of sixteen f32 lanes, the unit of all kernels. For a sum across lanes (of a norm or a softmax),
//! element k goes into lane k mod 16 by fused multiply-add, in order of k, and the lanes are folded by halves
//! (l with l + 8, + 4, + 2, + 1). All implementations do exactly that, so they agree bit for bit, and a
//! machine's vector width is not part of the numerics.

use half::bf16;

use crate::dispatch::Kernel;

/// Lanes in a vector.
pub(crate) const LANES: usize = 16;

/// A vector of sixteen f32.
///
/// # Safety
/// For every method: the CPU must support the instructions of the implementing type, which
/// [`super::dispatch::Isa`] checks before it runs a kernel; pointers must be valid for the elements that the
/// method names.
pub(crate) trait F32x16: Copy {
    /// Maximum activation rows of a tile, at most twelve: as many as have accumulators in registers.
    const TILE_ROWS: usize;
    /// Vectors of output channels that a tile multiplies at once, one or two.
    const TILE_VECTORS: usize;
    /// Rows up to which the accumulators of two vectors fit in registers.
    const TWO_VECTOR_ROWS: usize = if Self::TILE_VECTORS == 2 { Self::TILE_ROWS } else { 2 };
    /// Rows up to which the compiler may reorder loads: with more, accumulators need all registers.
    const REORDERED_LOAD_ROWS: usize = Self::TILE_ROWS;
    /// Whether [`F32x16::fma_pairs`] is one instruction, so that products with bf16 weights need no widening.
    const HAS_BF16_DOT: bool = false;
    /// Accumulators of attention that fit in registers beside the operands.
    const ATTENTION_ACCUMULATORS: usize = 4;

    /// Runs a part of a kernel as a separate function. If the tiles for all row counts were inlined into one
    /// function, it would take the compiler minutes.
    #[inline(never)]
    unsafe fn run_outlined<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: guaranteed by the caller.
        unsafe { kernel.run::<Self>() }
    }
    /// Sets all lanes to `x`.
    unsafe fn splat(x: f32) -> Self;
    /// Loads sixteen f32 from `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// Loads sixteen bf16 from `p`, widened.
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// Loads sixteen bf16 pairs of 32 bits from `p`, widened: the first of each pair, which is the upper
    /// half, and the second.
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self);
    /// Prefetches the cache line at `p`, any address, into the L1 cache.
    unsafe fn prefetch_l1(p: *const u8);
    /// Prefetches the cache line at `p`, any address, into the L2 cache.
    unsafe fn prefetch_l2(p: *const u8);
    /// Stores sixteen f32 to `p`.
    unsafe fn store(self, p: *mut f32);
    /// Stores the lowest byte of each lane's bits to `p`, which has space for sixteen.
    unsafe fn store_low_bytes(self, p: *mut u8);
    /// `self + a * b`, rounded once.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// `self + first a * first b + second a * second b`, rounded twice in this order, where each lane of `a`
    /// and of `b` holds a bf16 pair in the format of [`F32x16::load_bf16_pairs`]. No number, product or sum
    /// may be denormal.
    #[inline(always)]
    unsafe fn fma_pairs(self, a: Self, b: Self) -> Self {
        let pairs = |lanes: Self| {
            let mut stored = [0.0f32; LANES];
            // SAFETY: guaranteed by the caller; the array has room for sixteen lanes, and any bits make a
            // pair.
            unsafe {
                lanes.store(stored.as_mut_ptr());
                Self::load_bf16_pairs(stored.as_ptr().cast())
            }
        };
        let (a, b) = (pairs(a), pairs(b));
        // SAFETY: guaranteed by the caller.
        unsafe { self.fma(a.0, b.0).fma(a.1, b.1) }
    }
    /// Adds lane by lane.
    unsafe fn add(self, other: Self) -> Self;
    /// Multiplies lane by lane.
    unsafe fn mul(self, other: Self) -> Self;
    /// The sum of the lanes, by halves.
    unsafe fn reduce_sum(self) -> f32;
    /// The largest lane; unspecified if one is a NaN.
    unsafe fn reduce_max(self) -> f32;
}

/// A stored number format that a vector can be loaded from.
pub(crate) trait Element: Copy + Send + Sync {
    const ZERO: Self;

    fn widen(self) -> f32;

    /// Loads sixteen elements from `p`.
    ///
    /// # Safety
    /// As for [`F32x16`].
    unsafe fn load<V: F32x16>(p: *const Self) -> V;

    /// Loads `n` < 16 elements from `p`, padded with zeros.
    ///
    /// # Safety
    /// As for [`F32x16`], for `n` elements.
    #[inline(always)]
    unsafe fn load_part<V: F32x16>(p: *const Self, n: usize) -> V {
        let mut padded = [Self::ZERO; LANES];
        // SAFETY: the caller's pointer holds n < 16 elements; the padded copy holds sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n);
            Self::load(padded.as_ptr())
        }
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<V: F32x16>(p: *const Self) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { V::load(p) }
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    unsafe fn load<V: F32x16>(p: *const Self) -> V {
        // SAFETY: guaranteed by the caller.
        unsafe { V::load_bf16(p) }
    }
}

/// The sum by halves on plain numbers: the definition.
#[inline(always)]
pub(crate) fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Plain Rust, for machines without the vector units of `x86` and `neon`.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl F32x16 for Portable {
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's pointer holds sixteen f32; an array of them needs no more alignment.
        Self(unsafe { p.cast::<[f32; LANES]>().read() })
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the caller's pointer holds sixteen bf16.
        Self(unsafe { p.cast::<[bf16; LANES]>().read() }.map(Element::widen))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self) {
        // SAFETY: the caller's pointer holds sixteen pairs.
        let pairs = unsafe { p.cast::<[u32; LANES]>().read() };
        (
            Self(pairs.map(|pair| f32::from_bits(pair & 0xffff_0000))),
            Self(pairs.map(|pair| f32::from_bits(pair << 16))),
        )
    }

    #[inline(always)]
    unsafe fn prefetch_l1(_: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_l2(_: *const u8) {}

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's pointer has room for sixteen f32.
        unsafe { p.cast::<[f32; LANES]>().write(self.0) };
    }

    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        // SAFETY: the caller's pointer has room for sixteen bytes.
        unsafe { p.cast::<[u8; LANES]>().write(self.0.map(|x| x.to_bits() as u8)) };
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        let mut out = self;
        for l in 0..LANES {
            out.0[l] = a.0[l].mul_add(b.0[l], self.0[l]);
        }
        out
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        let mut out = self;
        for l in 0..LANES {
            out.0[l] = self.0[l] + other.0[l];
        }
        out
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        let mut out = self;
        for l in 0..LANES {
            out.0[l] = self.0[l] * other.0[l];
        }
        out
    }

    #[inline(always)]
    unsafe fn reduce_sum(self) -> f32 {
        fold(self.0)
    }

    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        self.0.iter().fold(f32::NEG_INFINITY, |largest, &x| if x > largest { x } else { largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_reduced_by_halves() {
        // 2^26 swallows a lone 1, so the result shows the order of additions.
        let big = 67_108_864.0;
        let sum = |pairs: &[(usize, f32)]| {
            let mut lanes = [0.0; LANES];
            pairs.iter().for_each(|&(l, x)| lanes[l] = x);
            fold(lanes)
        };
        assert_eq!(sum(&[(0, big), (8, -big), (1, 1.0)]), 1.0);
        assert_eq!(sum(&[(0, big), (4, 1.0), (2, -big)]), 0.0);
        assert_eq!(sum(&[(0, 1.0), (2, big), (1, 1.0), (3, -big)]), 0.0);
    }
}
