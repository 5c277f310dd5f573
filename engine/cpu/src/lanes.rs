//! Sixteen f32 side by side: the unit in which the kernels are written. Where a sum runs across lanes (a norm's, a
//! softmax's), element k goes into lane k mod 16 by fused multiply-add, in order of k, and the lanes are folded by
//! halves (l with l + 8, + 4, + 2, + 1). All implementations do exactly that, so they agree bit for bit, and a
//! machine's vector width is no part of the numerics.

use half::bf16;

use crate::dispatch::Kernel;

/// Lanes in a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen f32.
///
/// # Safety
/// Of every method: the CPU must have the instructions of the implementing type, which
/// [`super::dispatch::Isa`] has made sure of before it runs a kernel; pointers must be valid for the elements
/// that the method names.
pub(crate) trait Lanes: Copy {
    /// Activation rows in a tile, at most twelve: as many as leave room for their sums in registers.
    const TILE_ROWS: usize;
    /// Vectors of output channels that a tile meets side by side, one or two.
    const TILE_VECTORS: usize;
    /// Rows up to which a tile that is the only one meets two vectors side by side all the same: their sums fit.
    const BOTH_VECTORS_ROWS: usize = if Self::TILE_VECTORS == 2 { Self::TILE_ROWS } else { 0 };
    /// Rows up to which loads may be put in another order than they are written: with more, sums need all registers.
    const UNORDERED_ROWS: usize = Self::TILE_ROWS;
    /// Whether [`Lanes::fma_pairs`] is one instruction, so that products with bf16 weights widen nothing.
    const MULTIPLIES_PAIRS: bool = false;
    /// Sums of attention that fit in registers beside what is added to them.
    const ATTENTION_SUMS: usize = 4;

    /// Runs a part of a kernel as a function of its own. Inlined into one, the tiles of all numbers of rows are so long a function that
    /// the compiler takes minutes for it.
    #[inline(never)]
    unsafe fn run_apart<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the caller's promise.
        unsafe { kernel.run::<Self>() }
    }
    /// All lanes alike.
    unsafe fn splat(x: f32) -> Self;
    /// Sixteen f32 at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// Sixteen bf16 at `p`, widened.
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// Sixteen pairs of bf16 at `p`, one in 32 bits, widened: the first of each, which is the upper half, and the second.
    unsafe fn load_bf16_pairs(p: *const u32) -> (Self, Self);
    /// Asks for the cache line at `p`, which may lie anywhere, in the first-level cache.
    unsafe fn prefetch_near(p: *const u8);
    /// The same in the second-level cache.
    unsafe fn prefetch_far(p: *const u8);
    /// Sixteen f32 to `p`.
    unsafe fn store(self, p: *mut f32);
    /// The lowest byte of each lane's bits to `p`, which has room for sixteen.
    unsafe fn store_low_bytes(self, p: *mut u8);
    /// `self + a * b`, rounded once.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// `self + first a * first b + second a * second b`, rounded twice in this order, where each lane of `a` and of `b`
    /// holds a pair of bf16 as [`Lanes::load_bf16_pairs`] takes them. No number, product or sum may be denormal.
    #[inline(always)]
    unsafe fn fma_pairs(self, a: Self, b: Self) -> Self {
        let pairs = |lanes: Self| {
            let mut stored = [0.0f32; LANES];
            // SAFETY: the caller's promise; the array has room for sixteen lanes, and any bits make a pair.
            unsafe {
                lanes.store(stored.as_mut_ptr());
                Self::load_bf16_pairs(stored.as_ptr().cast())
            }
        };
        let (a, b) = (pairs(a), pairs(b));
        // SAFETY: the caller's promise.
        unsafe { self.fma(a.0, b.0).fma(a.1, b.1) }
    }
    /// Lane by lane.
    unsafe fn add(self, other: Self) -> Self;
    /// Lane by lane.
    unsafe fn mul(self, other: Self) -> Self;
    /// The sum by halves.
    unsafe fn fold(self) -> f32;
    /// The largest lane; what comes out where one is a NaN is of no matter.
    unsafe fn largest(self) -> f32;
}

/// A stored number that a vector can be loaded from.
pub(crate) trait Element: Copy + Send + Sync {
    const ZERO: Self;

    fn widen(self) -> f32;

    /// Sixteen at `p`.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn load<V: Lanes>(p: *const Self) -> V;

    /// `n` < 16 at `p`, then zeros.
    ///
    /// # Safety
    /// As for [`Lanes`], for `n` elements.
    #[inline(always)]
    unsafe fn load_part<V: Lanes>(p: *const Self, n: usize) -> V {
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
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's promise is the same.
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
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's promise is the same.
        unsafe { V::load_bf16(p) }
    }
}

/// The sum by halves, on plain numbers: the definition.
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

/// Plain Rust for machines without the vector units of `x86` and `neon`.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Lanes for Portable {
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
    unsafe fn prefetch_near(_: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}

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
    unsafe fn fold(self) -> f32 {
        fold(self.0)
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0.iter().fold(f32::NEG_INFINITY, |largest, &x| if x > largest { x } else { largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_folded_by_halves() {
        // 2^26 swallows a lone 1, so the result tells who met whom first.
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
