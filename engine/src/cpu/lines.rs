//! Memory for weights that kernels stream: whole cache lines, in large pages where the system has them, so that
//! neither a hardware prefetcher nor the address translation starts anew every 4 KiB. Taken once at load; it must
//! never be part of a forward.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

use super::lanes::Lanes;
use crate::EngineError;

/// What a vector load takes, where a cache line begins: one that straddled two would cost twice.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

/// A large page of x86-64, and of most others.
const LARGE_PAGE: usize = 2 << 20;

/// Zeroed lines; they begin at a large page.
pub(super) struct Lines {
    map: MmapMut,
    /// Bytes of the map before the first large page.
    start: usize,
    len: usize,
}

impl Lines {
    pub(super) fn zeroed(len: usize) -> Result<Self, EngineError> {
        let bytes = len * size_of::<Line>();
        let out_of_memory = |_| EngineError::OutOfMemory {
            bytes: bytes as u64,
            purpose: "packed weights, take a smaller model or format",
        };
        // More than is asked for, so that a large page begins inside; what is not touched takes no memory.
        let map = MmapMut::map_anon(bytes + LARGE_PAGE).map_err(out_of_memory)?;
        let start = map.as_ptr().align_offset(LARGE_PAGE);
        let whole_pages = bytes / LARGE_PAGE * LARGE_PAGE;
        if whole_pages > 0
            && let Err(error) = map.advise_range(Advice::HugePage, start, whole_pages)
        {
            tracing::debug!(%error, "no large pages for weights, reading them will be slower");
        }
        Ok(Self { map, start, len })
    }
}

impl Deref for Lines {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        let bytes = &self.map[self.start..self.start + self.len * size_of::<Line>()];
        // SAFETY: the bytes begin at a large page, so lines are aligned; any bytes make a line.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        let bytes = &mut self.map[self.start..self.start + self.len * size_of::<Line>()];
        // SAFETY: as in `deref`; the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Lines of a window: while one is read, the next is fetched into the second-level cache.
const WINDOW: usize = 1024;
/// Places of the next window that are fetched in turns: a machine fetches several streams faster than one.
const STREAMS: usize = 8;
/// How far ahead in its own stream a line is fetched into the first-level cache.
const NEAR_BYTES: usize = 1024;

/// Fetches what will be read when the N lines from `line` of those at `first` are: lines soon to come, and their share of
/// the window after this one.
///
/// # Safety
/// V's instructions are there.
#[inline(always)]
pub(super) unsafe fn fetch_ahead<V: Lanes, const N: usize>(first: *const u8, line: usize) {
    let in_window = line % WINDOW / N;
    let far =
        line - line % WINDOW + WINDOW + in_window % STREAMS * (WINDOW / STREAMS) + in_window / STREAMS * N;
    let near = first.wrapping_add(line * size_of::<Line>() + NEAR_BYTES);
    let far = first.wrapping_add(far * size_of::<Line>());
    for i in 0..N {
        // SAFETY: the caller's promise.
        unsafe {
            V::prefetch_near(near.wrapping_add(i * size_of::<Line>()));
            V::prefetch_far(far.wrapping_add(i * size_of::<Line>()));
        }
    }
}

/// The first half of [`fetch_ahead`], for whoever reads several streams by itself.
///
/// # Safety
/// V's instructions are there.
#[inline(always)]
pub(super) unsafe fn fetch_near<V: Lanes>(line: *const u8) {
    // SAFETY: the caller's promise.
    unsafe { V::prefetch_near(line.wrapping_add(NEAR_BYTES)) };
}
