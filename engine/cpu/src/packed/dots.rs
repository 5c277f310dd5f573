//! Sixteen i32 sums side by side, one for each channel of a panel: exact, so that every implementation gives
//! the same numbers whatever order it adds them in. Sums may wrap on the way; what is left when the shift is
//! taken back fits.

use super::rows::QUAD;
use crate::lanes::{LANES, Lanes, Portable};
use crate::lines::Line;

/// Work that is compiled once for each instruction set. `run` and all that it calls must be
/// `#[inline(always)]`, or it is compiled without the instructions.
pub(crate) trait DotKernel {
    /// # Safety
    /// The CPU has the instructions of `D`.
    unsafe fn run<D: Dots>(self);
}

/// Sixteen i32.
///
/// # Safety
/// Of every method: the CPU must have the instructions of the implementing type; pointers must be valid for
/// what the method names.
pub(crate) trait Dots: Copy {
    /// Activation rows in a tile, at most twelve: as many as leave room for their sums in registers.
    const TILE_ROWS: usize;
    /// Panels of int8 that one of several tiles is multiplied with side by side, one or two.
    const TILE_PANELS: usize = 1;
    /// Sums that fit in registers. A tile of fewer rows has several chains of sums for each, which hides the latency of
    /// the instruction; 1 where there is nothing to hide.
    const SUMS: usize;
    /// Four-byte words that hold four activations for int8: one of four i8, or two of two i16 each.
    const WORDS: usize = 1;
    /// Whether registers are few: then loads stay in the order in which they are written, lest the compiler holds more values than
    /// there are registers.
    const IN_ORDER: bool = false;
    /// Whether the loop over lines of int8 that are near is faster when it is not unrolled.
    const ROLLED: bool = false;
    /// Whether `dot` takes int8 as signed: then its sums need no correction for the shift of stored numbers. (Half bytes are
    /// the same either way.)
    const SIGNED: bool = false;
    /// Whether two rows of int8 are multiplied together, two lines at a time, by `dot_pair`.
    const PAIRS: bool = false;
    /// Whether a vector takes a whole line.
    const WIDE: bool = false;
    /// The floats that go with it.
    type Lanes: Lanes;
    /// 64 bytes, four for each sum: half bytes, one in each.
    type Halves: Copy;
    /// The numbers of a line of int8 that meet one word of activations.
    type Whole: Copy;
    /// Sums of products of half bytes, which may be too narrow for more than `GROUP` products.
    type GroupSums: Copy;

    /// As [`Lanes::run_apart`].
    #[inline(never)]
    unsafe fn run_apart<K: DotKernel>(kernel: K) {
        // SAFETY: the caller's promise.
        unsafe { kernel.run::<Self>() };
    }
    /// All sums alike.
    unsafe fn splat(x: i32) -> Self;
    /// Sum by sum, wrapping.
    unsafe fn add(self, other: Self) -> Self;
    /// The numbers of the line at `line` that meet the `word`-th word of activations.
    unsafe fn whole(line: *const u8, word: usize) -> Self::Whole;
    /// Adds to each sum the products of its numbers with the activations in the word at `x`.
    unsafe fn dot(self, whole: Self::Whole, x: *const i8) -> Self;
    /// Adds to the sums of two rows the products of two lines' numbers with the words of both rows, which are side by side at each
    /// `x`. The sums begin with zeros, and only `end_pair` tells which is whose.
    #[inline(always)]
    unsafe fn dot_pair(pair: [Self; 2], whole: [Self::Whole; 2], x: [*const i8; 2]) -> [Self; 2] {
        let mut pair = pair;
        for (r, sums) in pair.iter_mut().enumerate() {
            for (line, x) in x.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                *sums = unsafe { sums.dot(whole[line], x.add(QUAD * r)) };
            }
        }
        pair
    }
    /// The sums of the first row, and those of the second.
    #[inline(always)]
    unsafe fn end_pair(pair: [Self; 2]) -> [Self; 2] {
        pair
    }
    /// The low half of each byte of the line at `line`, or the high half.
    unsafe fn half(line: *const u8, high: bool) -> Self::Halves;
    /// Sums without products. The correction for the shift is added here or in `end_group`.
    unsafe fn begin_group(correction: i32) -> Self::GroupSums;
    /// Adds to sum c the products of half bytes 4 c .. 4 c + 4 with the four i8 at `x`.
    unsafe fn dot_halves(sums: Self::GroupSums, halves: Self::Halves, x: *const i8) -> Self::GroupSums;
    /// The sums with their correction.
    unsafe fn end_group(sums: Self::GroupSums, correction: i32) -> Self;
    /// Rounded to f32, ties to even.
    unsafe fn to_f32(self) -> Self::Lanes;
}

/// Plain Rust for machines without the vector units of `x86` and `neon`.
#[derive(Clone, Copy)]
pub(crate) struct PortableDots([i32; LANES]);

impl Dots for PortableDots {
    const TILE_ROWS: usize = 4;
    const SUMS: usize = 1;
    type Lanes = Portable;
    type Halves = Line;
    type Whole = Line;
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
    unsafe fn whole(line: *const u8, _: usize) -> Line {
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
    unsafe fn half(line: *const u8, high: bool) -> Line {
        // SAFETY: the caller's promise.
        let bytes = unsafe { Self::whole(line, 0) }.0;
        Line(bytes.map(|byte| if high { byte >> 4 } else { byte & 0x0f }))
    }

    #[inline(always)]
    unsafe fn begin_group(correction: i32) -> Self {
        Self([correction; LANES])
    }

    #[inline(always)]
    unsafe fn dot_halves(sums: Self, halves: Line, x: *const i8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { sums.dot(halves, x) }
    }

    #[inline(always)]
    unsafe fn end_group(sums: Self, _: i32) -> Self {
        sums
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Portable {
        let floats = self.0.map(|sum| sum as f32);
        // SAFETY: sixteen f32 are there.
        unsafe { Portable::load(floats.as_ptr()) }
    }
}
