//! Memory that kernels stream, weights and KV blocks: whole cache lines, in large pages where the system has them, so
//! that neither a hardware prefetcher nor the address translation starts anew every 4 KiB. Taken at load, and as KV grows; it
//! must never be taken inside a forward.

mod mapping;

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

use mapping::Memory;

use super::instruction_set::amd_family;
use super::lanes::Lanes;
use crate::KernelError;

/// What a vector load takes, where a cache line begins: one that straddled two would cost twice.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

/// What the lines of a matrix are for.
const WEIGHTS: &str = "packed weights, take a smaller model or format";

/// Zeroed lines; they begin at a cache line.
pub(crate) struct Lines {
    memory: Memory,
    len: usize,
}

impl Lines {
    /// Lines whose memory goes with them. `purpose` says for whom, and what to do where there is no memory.
    pub(crate) fn zeroed(len: usize, purpose: &'static str) -> Result<Self, KernelError> {
        Self::new(len, purpose, Memory::alone)
    }

    /// Lines of a matrix, which shares large pages with others.
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

    /// Takes the memory now, not page by page as it is first written.
    pub(crate) fn populate(&self) {
        if let Err(error) = self.memory.populate() {
            tracing::debug!(%error, "memory is taken as it is first written");
        }
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline(always)]
    fn deref(&self) -> &[Line] {
        // SAFETY: the memory holds `len` lines and begins at a page, so they are aligned; any bytes make a line, and they are
        // written through a unique borrow only.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        // SAFETY: as in `deref`; the borrow is unique, and the bytes are in no other share.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("len", &self.len).finish_non_exhaustive()
    }
}

/// What a kernel fetches while it reads lines.
pub(super) trait Fetch {
    /// Whether the lines that are used are in a cache already, so that arithmetic sets the pace.
    const NEAR: bool = false;

    /// Called before N lines, from the `line`-th on of all that the kernel reads from, are used.
    ///
    /// # Safety
    /// V's instructions are there.
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize);
}

/// Lines are near already.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Fetch for Nothing {
    const NEAR: bool = true;

    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, _: usize) {}
}

/// Lines of a window: while one is read, the next is fetched into the second-level cache.
const WINDOW: usize = 1024;
/// Places of the next window that are fetched in turns: a machine fetches several streams faster than one.
const STREAMS: usize = 8;
/// How far ahead a line is fetched into the first-level cache where several streams are read side by side.
const NEAR_BYTES: usize = 1024;

/// How a CPU reads memory fastest, as measured (docs/adr/0072-only-zen-5-reads-in-order.md).
#[derive(Clone, Copy)]
struct Reading {
    /// How far ahead in its own stream a line is fetched into the first-level cache.
    near_bytes: usize,
    /// Whether a share of the next window is fetched, too.
    windows: bool,
    /// Whether several streams that are read side by side are faster than one of which windows are fetched.
    side_by_side: bool,
    /// Whether one row (of pairs of bf16 two) reads faster without windows where a vector takes a whole line: then so few
    /// instructions use a line that the CPU looks far enough ahead itself.
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

/// Whether this CPU reads several streams side by side faster than one.
pub(super) fn reads_side_by_side() -> bool {
    READING.side_by_side
}

/// Whether one row of vectors as wide as a line, or two of pairs of bf16, read them faster if nothing but lines soon to come are
/// fetched.
pub(super) fn reads_row_unaided() -> bool {
    READING.row_unaided
}

/// Lines are far, but the CPU fetches them fastest by itself.
#[derive(Clone, Copy)]
pub(super) struct Unaided;

impl Fetch for Unaided {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, _: usize) {}
}

/// For lines that are read once, one after the other: lines soon to come and, where that is faster, a share of the window after
/// this one.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    first: *const u8,
    reading: Reading,
}

impl Ahead {
    /// Lines begin at `first`.
    pub(super) fn new(first: *const u8) -> Self {
        Self { first, reading: *READING }
    }

    /// The same without windows.
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
            // SAFETY: the caller's promise.
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
            // SAFETY: the caller's promise.
            unsafe { V::prefetch_far(far.wrapping_add(i * size_of::<Line>())) };
        }
    }
}

/// For `STREAMS` streams of lines that are read side by side, so many bytes apart.
#[derive(Clone, Copy)]
pub(super) struct SideBySide<const STREAMS: usize> {
    /// Where lines of the first begin.
    pub(super) first: *const u8,
    pub(super) apart: usize,
}

impl<const STREAMS: usize> Fetch for SideBySide<STREAMS> {
    #[inline(always)]
    unsafe fn fetch<V: Lanes, const N: usize>(&mut self, line: usize) {
        for stream in 0..STREAMS {
            for i in 0..N {
                let line = stream * self.apart + (line + i) * size_of::<Line>();
                // SAFETY: the caller's promise.
                unsafe { V::prefetch_near(self.first.wrapping_add(line + NEAR_BYTES)) };
            }
        }
    }
}

/// For lines that several tiles of rows read in turns: each fetches its share of what is read next into the second-level
/// cache.
#[derive(Clone, Copy)]
pub(super) struct Share {
    at: *const u8,
    end: *const u8,
    /// Lines of the share for eight that are used, rounded up.
    of_eight: usize,
}

impl Share {
    /// The share of tile `index` of `tiles` in the `lines` at `next`, for a tile that uses as many.
    pub(super) fn new(next: *const u8, lines: usize, (index, tiles): (usize, usize)) -> Self {
        let at = |tile: usize| next.wrapping_add(lines * tile / tiles * size_of::<Line>());
        Self { at: at(index), end: at(index + 1), of_eight: 8usize.div_ceil(tiles) }
    }

    /// The same for a tile that uses `lines` neighbouring lines for each one that it asks for.
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
                // SAFETY: the caller's promise.
                unsafe { V::prefetch_far(self.at) };
                self.at = self.at.wrapping_add(size_of::<Line>()).min(self.end);
            }
        }
    }
}
