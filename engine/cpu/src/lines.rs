//! Memory that kernels stream, weights and KV blocks: whole cache lines in huge pages if the system has them,
//! so that hardware prefetchers and address translation do not restart every 4 KiB. Allocated at load and as
//! KV grows; it must never be allocated inside a forward.

mod mapping;

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

use mapping::Memory;

use super::instruction_set::amd_family;
use super::lanes::Lanes;
use crate::KernelError;

/// A cache line, aligned: a vector load that crosses two lines costs twice as much.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

/// Purpose of a matrix's lines, for errors.
const WEIGHTS: &str = "packed weights, use a smaller model or format";

/// Zeroed cache lines, aligned.
pub(crate) struct Lines {
    memory: Memory,
    len: usize,
}

impl Lines {
    /// Allocates lines in a mapping of their own. `purpose` goes into the error if there is no memory.
    pub(crate) fn zeroed(len: usize, purpose: &'static str) -> Result<Self, KernelError> {
        Self::new(len, purpose, Memory::alone)
    }

    /// Allocates lines of a matrix, which shares huge pages with other matrices.
    pub(crate) fn of_matrix(len: usize) -> Result<Self, KernelError> {
        Self::new(len, WEIGHTS, Memory::of_region)
    }

    fn new(
        len: usize,
        purpose: &'static str,
        map: impl FnOnce(usize) -> io::Result<Memory>,
    ) -> Result<Self, KernelError> {
        let bytes = len * size_of::<Line>();
        let memory = map(bytes).map_err(|_| KernelError::OutOfMemory { bytes: bytes as u64, purpose })?;
        Ok(Self { memory, len })
    }

    /// Commits the memory now, instead of page by page at the first write.
    pub(crate) fn populate(&self) {
        if let Err(error) = self.memory.populate() {
            tracing::debug!(%error, "cannot populate memory, pages are committed on first write");
        }
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline(always)]
    fn deref(&self) -> &[Line] {
        // SAFETY: the memory holds `len` lines and begins at a page, so they are aligned; any bytes make a
        // line, and they are written through a unique borrow only.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        // SAFETY: as in `deref`; the borrow is unique, and no other share has these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Prefetch strategy of a kernel that reads lines.
pub(super) trait Fetch {
    /// Whether the lines are in a cache already, so that the kernel is compute-bound.
    const NEAR: bool = false;

    /// Called before N lines are used, the first of which is line `line` of all that the kernel reads.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize);
}

/// For lines that are in a cache already.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Fetch for Nothing {
    const NEAR: bool = true;

    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, _: usize) {}
}

/// Lines per window: while one is read, the next is prefetched into the L2 cache.
const WINDOW: usize = 1024;
/// Positions of the next window that are prefetched in turn: machines read several streams faster than one.
const STREAMS: usize = 8;
/// Prefetch distance in bytes into the L1 cache when several streams are read in parallel.
const NEAR_BYTES: usize = 1024;

/// The fastest way to read memory on a CPU, as measured (docs/adr/0072-only-zen-5-reads-in-order.md).
#[derive(Clone, Copy)]
struct Reading {
    /// Prefetch distance in bytes into the L1 cache, within the stream.
    near_bytes: usize,
    /// Whether a share of the next window is prefetched too.
    windows: bool,
    /// Whether several streams in parallel are faster than one with window prefetch.
    side_by_side: bool,
    /// Whether one row (two for pairs of bf16) reads faster without software prefetch when a vector is a
    /// whole line: a line then takes so few instructions that the CPU itself runs far enough ahead.
    row_unaided: bool,
}

/// AMD's family 26 is Zen 5.
const ZEN_5: u32 = 26;

static READING: LazyLock<Reading> = LazyLock::new(|| match amd_family() {
    Some(family) if family >= ZEN_5 => {
        Reading { near_bytes: 6144, windows: false, side_by_side: true, row_unaided: false }
    }
    Some(_) => Reading { near_bytes: 4096, windows: true, side_by_side: false, row_unaided: true },
    None => Reading { near_bytes: NEAR_BYTES, windows: true, side_by_side: true, row_unaided: false },
});

/// Whether this CPU reads several streams in parallel faster than one.
pub(super) fn reads_side_by_side() -> bool {
    READING.side_by_side
}

/// Whether one row of vectors as wide as a line, or two rows of bf16 pairs, read faster without software
/// prefetch.
pub(super) fn reads_row_unaided() -> bool {
    READING.row_unaided
}

/// For lines in memory that the hardware prefetches fastest.
#[derive(Clone, Copy)]
pub(super) struct Unaided;

impl Fetch for Unaided {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, _: usize) {}
}

/// For lines that are read once, in order: prefetches the lines ahead into the L1 cache and, if that is
/// faster, a share of the next window into the L2 cache.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    first: *const u8,
    reading: Reading,
}

impl Ahead {
    /// Creates the strategy for lines that begin at `first`.
    pub(super) fn new(first: *const u8) -> Self {
        Self { first, reading: *READING }
    }

    /// Creates the strategy without windows.
    pub(super) fn in_order(first: *const u8) -> Self {
        Self { first, reading: Reading { windows: false, ..*READING } }
    }
}

impl Fetch for Ahead {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize) {
        let near = self
            .first
            .wrapping_add(line.wrapping_mul(size_of::<Line>()).wrapping_add(self.reading.near_bytes));
        for i in 0..N {
            // SAFETY: guaranteed by the caller.
            unsafe { V::prefetch_near(near.wrapping_add(i * size_of::<Line>())) };
        }
        if !self.reading.windows {
            return;
        }
        let in_window = line % WINDOW / N;
        let far = in_window % STREAMS * (WINDOW / STREAMS) + in_window / STREAMS * N;
        let next_window = (line | (WINDOW - 1)).wrapping_add(1);
        let far = self.first.wrapping_add(next_window.wrapping_add(far).wrapping_mul(size_of::<Line>()));
        for i in 0..N {
            // SAFETY: guaranteed by the caller.
            unsafe { V::prefetch_far(far.wrapping_add(i * size_of::<Line>())) };
        }
    }
}

/// For `STREAMS` streams of lines that are read in parallel, `apart` bytes from each other.
#[derive(Clone, Copy)]
pub(super) struct SideBySide<const STREAMS: usize> {
    /// Start of the first stream.
    pub(super) first: *const u8,
    pub(super) apart: usize,
}

impl<const STREAMS: usize> Fetch for SideBySide<STREAMS> {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize) {
        for stream in 0..STREAMS {
            for i in 0..N {
                let line = stream * self.apart + (line + i) * size_of::<Line>();
                // SAFETY: guaranteed by the caller.
                unsafe { V::prefetch_near(self.first.wrapping_add(line + NEAR_BYTES)) };
            }
        }
    }
}

/// For lines that several row tiles read one after the other: each tile prefetches its share of the next
/// lines into the L2 cache.
#[derive(Clone, Copy)]
pub(super) struct Share {
    at: *const u8,
    end: *const u8,
    /// Lines to prefetch per eight lines used, rounded up.
    of_eight: usize,
}

impl Share {
    /// The share of tile `index` of `tiles` in the `lines` lines at `next`, for a tile that uses the same
    /// number of lines.
    pub(super) fn new(next: *const u8, lines: usize, (index, tiles): (usize, usize)) -> Self {
        let at = |tile: usize| next.wrapping_add(lines * tile / tiles * size_of::<Line>());
        Self { at: at(index), end: at(index + 1), of_eight: 8usize.div_ceil(tiles) }
    }

    /// The same share for a tile that uses `lines` lines per line that it passes to `fetch`.
    pub(super) fn side_by_side(self, lines: usize) -> Self {
        Self { of_eight: self.of_eight * lines, ..self }
    }
}

impl Fetch for Share {
    const NEAR: bool = true;

    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize) {
        if line % 8 < N {
            for _ in 0..self.of_eight {
                // SAFETY: guaranteed by the caller.
                unsafe { V::prefetch_far(self.at) };
                self.at = self.at.wrapping_add(size_of::<Line>()).min(self.end);
            }
        }
    }
}
