//! Sixteen i32 accumulators, one per channel of a panel. Sums are exact, so every implementation gives the
//! same numbers in any order of additions. Intermediate sums may wrap; the result after the shift's
//! correction fits.

use super::rows::QUAD;
use crate::lines::Line;
use crate::simd::{F32x16, LANES, Portable};

/// An integer kernel, compiled once for each instruction set. `run` and everything that it calls must be
/// `#[inline(always)]`, or it is compiled without the instructions.
pub(crate) trait DotKernel {
    /// # Safety
    /// The CPU supports the instructions of `D`.
    unsafe fn run<D: Dots>(self);
}

/// A vector of sixteen i32 accumulators.
///
/// # Safety
/// For every method: the CPU must support the instructions of the implementing type; pointers must be valid
/// for what the method names.
pub(crate) trait Dots: Copy {
    /// Maximum activation rows of a tile, at most twelve: as many as have accumulators in registers.
    const TILE_ROWS: usize;
    /// int8 panels that one of several tiles multiplies at once, one or two.
    const TILE_PANELS: usize = 1;
    /// Accumulators that fit in registers. A tile of few rows uses several chains of accumulators per row,
    /// which hides the latency of the instruction; 1 if there is nothing to hide.
    const ACCUMULATORS: usize;
    /// Four-byte words that hold four int8 activations: one word of four i8, or two of two i16 each.
    const WORDS: usize = 1;
    /// Whether registers are scarce: then loads keep their order, so that the compiler holds no more values
    /// than there are registers.
    const KEEPS_LOAD_ORDER: bool = false;
    /// Whether the loop over cached int8 lines is faster when it is not unrolled.
    const NO_UNROLL: bool = false;
    /// Whether `dot` takes int8 as signed, so that its sums need no correction for the shift of stored
    /// numbers. (Nibbles are not affected.)
    const SIGNED: bool = false;
    /// Whether `dot_pair` multiplies two rows of int8 together, two lines at a time.
    const PAIRS: bool = false;
    /// Whether a vector is as wide as a cache line.
    const WIDE: bool = false;
    /// The float vectors of the same instruction set.
    type F32x16: F32x16;
    /// 64 bytes with one nibble each, four per accumulator.
    type Nibbles: Copy;
    /// The numbers of an int8 line that one word of activations is multiplied with.
    type Int8Line: Copy;
    /// Accumulators of nibble products, which may be too narrow for more than `GROUP` products.
    type GroupSums: Copy;

    /// As [`F32x16::run_outlined`].
    #[inline(never)]
    unsafe fn run_outlined<K: DotKernel>(kernel: K) {
        // SAFETY: guaranteed by the caller.
        unsafe { kernel.run::<Self>() };
    }
    /// Sets all accumulators to `x`.
    unsafe fn splat(x: i32) -> Self;
    /// Adds accumulator by accumulator, wrapping.
    unsafe fn add(self, other: Self) -> Self;
    /// Loads the numbers of the line at `line` for the `word`-th word of activations.
    unsafe fn load_int8(line: *const u8, word: usize) -> Self::Int8Line;
    /// Adds the products of each accumulator's numbers with the activations in the word at `x`.
    unsafe fn dot(self, whole: Self::Int8Line, x: *const i8) -> Self;
    /// Adds the products of two lines with the words of two rows, which are adjacent at each `x`, to the
    /// accumulators of the two rows. Accumulators start from zero, and their order is unspecified until
    /// `end_pair`.
    #[inline(always)]
    unsafe fn dot_pair(pair: [Self; 2], whole: [Self::Int8Line; 2], x: [*const i8; 2]) -> [Self; 2] {
        let mut pair = pair;
        for (r, sums) in pair.iter_mut().enumerate() {
            for (line, x) in x.into_iter().enumerate() {
                // SAFETY: guaranteed by the caller.
                *sums = unsafe { sums.dot(whole[line], x.add(QUAD * r)) };
            }
        }
        pair
    }
    /// Returns the accumulators of the first row and of the second row.
    #[inline(always)]
    unsafe fn end_pair(pair: [Self; 2]) -> [Self; 2] {
        pair
    }
    /// Loads the low half of each byte of the line at `line`, or the high half.
    unsafe fn load_nibbles(line: *const u8, high: bool) -> Self::Nibbles;
    /// Initial accumulators of a group. The correction for the shift is added here or in `end_group`.
    unsafe fn begin_group(correction: i32) -> Self::GroupSums;
    /// Adds the products of nibbles 4 c .. 4 c + 4 with the four i8 at `x` to accumulator c.
    unsafe fn dot_nibbles(sums: Self::GroupSums, nibbles: Self::Nibbles, x: *const i8) -> Self::GroupSums;
    /// Returns the sums with their correction.
    unsafe fn end_group(sums: Self::GroupSums, correction: i32) -> Self;
    /// Rounds to f32, ties to even.
    unsafe fn to_f32(self) -> Self::F32x16;
}

/// Plain Rust, for machines without the vector units of `x86` and `neon`.
#[derive(Clone, Copy)]
pub(crate) struct PortableDots([i32; LANES]);

impl Dots for PortableDots {
    const TILE_ROWS: usize = 4;
    const ACCUMULATORS: usize = 1;
    type F32x16 = Portable;
    type Nibbles = Line;
    type Int8Line = Line;
    type GroupSums = Self;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        let mut out = self;
        for c in 0..LANES {
            out.0[c] = self.0[c].wrapping_add(other.0[c]);
        }
        out
    }

    #[inline(always)]
    unsafe fn load_int8(line: *const u8, _: usize) -> Line {
        // SAFETY: the caller's pointer holds 64 bytes; an array of bytes needs no alignment.
        Line(unsafe { line.cast::<[u8; 64]>().read() })
    }

    #[inline(always)]
    unsafe fn dot(self, whole: Line, x: *const i8) -> Self {
        // SAFETY: the caller's pointer holds four i8.
        let x = unsafe { x.cast::<[i8; 4]>().read() };
        let mut out = self;
        for c in 0..LANES {
            for (j, x) in x.into_iter().enumerate() {
                let product = i32::from(whole.0[4 * c + j]) * i32::from(x);
                out.0[c] = out.0[c].wrapping_add(product);
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn load_nibbles(line: *const u8, high: bool) -> Line {
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { Self::load_int8(line, 0) }.0;
        Line(bytes.map(|byte| if high { byte >> 4 } else { byte & 0x0f }))
    }

    #[inline(always)]
    unsafe fn begin_group(correction: i32) -> Self {
        Self([correction; LANES])
    }

    #[inline(always)]
    unsafe fn dot_nibbles(sums: Self, nibbles: Line, x: *const i8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { sums.dot(nibbles, x) }
    }

    #[inline(always)]
    unsafe fn end_group(sums: Self, _: i32) -> Self {
        sums
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Portable {
        let floats = self.0.map(|sum| sum as f32);
        // SAFETY: the array holds sixteen f32.
        unsafe { Portable::load(floats.as_ptr()) }
    }
}
