//! Sixteen i32 sums side by side, one for each channel of a panel: exact, so that every implementation gives
//! the same numbers whatever order it adds them in. Sums may wrap on the way; what is left when the shift is
//! taken back fits.

use crate::cpu::lanes::{LANES, Lanes, Portable};
use crate::cpu::lines::Line;

/// Work that is compiled once for each instruction set. `run` and all that it calls must be
/// `#[inline(always)]`, or it is compiled without the instructions.
pub(in crate::cpu) trait DotKernel {
    /// # Safety
    /// The CPU has the instructions of `D`.
    unsafe fn run<D: Dots>(self);
}

/// Sixteen i32.
///
/// # Safety
/// Of every method: the CPU must have the instructions of the implementing type; pointers must be valid for
/// what the method names.
pub(in crate::cpu) trait Dots: Copy {
    /// Activation rows in a tile, four or twelve: as many as leave room for their sums in registers.
    const TILE_ROWS: usize;
    /// Whether `dot` takes bytes as signed. Then `whole_bytes` takes the shift of stored int8 back, and sums of them are not
    /// corrected for it. (Half bytes are the same either way.)
    const SIGNED: bool = false;
    /// The floats that go with it.
    type Lanes: Lanes;
    /// 64 bytes, four for each sum.
    type Bytes: Copy;

    /// All sums alike.
    unsafe fn splat(x: i32) -> Self;
    /// Sum by sum, wrapping.
    unsafe fn add(self, other: Self) -> Self;
    /// The bytes at `p`.
    unsafe fn load(p: *const u8) -> Self::Bytes;
    /// Stored int8 as `dot` takes them.
    #[inline(always)]
    unsafe fn whole_bytes(bytes: Self::Bytes) -> Self::Bytes {
        bytes
    }
    /// The low half of each byte.
    unsafe fn low_halves(bytes: Self::Bytes) -> Self::Bytes;
    /// The high half of each byte.
    unsafe fn high_halves(bytes: Self::Bytes) -> Self::Bytes;
    /// Adds to sum c the products of bytes 4 c .. 4 c + 4 with the four i8 at `x`.
    unsafe fn dot(self, bytes: Self::Bytes, x: *const i8) -> Self;
    /// Rounded to f32, ties to even.
    unsafe fn to_f32(self) -> Self::Lanes;
}

/// Plain Rust for machines without the vector units of `x86` and `neon`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct PortableDots([i32; LANES]);

impl Dots for PortableDots {
    const TILE_ROWS: usize = 4;
    type Lanes = Portable;
    type Bytes = Line;

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
    unsafe fn load(p: *const u8) -> Line {
        // SAFETY: the caller's pointer holds 64 bytes; an array of bytes needs no alignment.
        Line(unsafe { p.cast::<[u8; 64]>().read() })
    }

    #[inline(always)]
    unsafe fn low_halves(bytes: Line) -> Line {
        Line(bytes.0.map(|byte| byte & 0x0f))
    }

    #[inline(always)]
    unsafe fn high_halves(bytes: Line) -> Line {
        Line(bytes.0.map(|byte| byte >> 4))
    }

    #[inline(always)]
    unsafe fn dot(self, bytes: Line, x: *const i8) -> Self {
        // SAFETY: the caller's pointer holds four i8.
        let x = unsafe { x.cast::<[i8; 4]>().read() };
        let mut out = self;
        for c in 0..LANES {
            for (j, x) in x.into_iter().enumerate() {
                let product = i32::from(bytes.0[4 * c + j]) * i32::from(x);
                out.0[c] = out.0[c].wrapping_add(product);
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn to_f32(self) -> Portable {
        let floats = self.0.map(|sum| sum as f32);
        // SAFETY: sixteen f32 are there.
        unsafe { Portable::load(floats.as_ptr()) }
    }
}
