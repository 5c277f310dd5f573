//! Memory that kernels stream, weights and KV blocks: whole cache lines in huge pages if the system has them,
//! so that hardware prefetchers and address translation do not restart every 4 KiB. Allocated at load and as
//! KV grows; it must never be allocated inside a forward.

mod mapping;

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

use mapping::Memory;

use super::instruction_set::amd_family;
use super::simd::F32x16;
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
        Self::new(len, purpose, Memory::dedicated)
    }

    /// Allocates lines of a matrix, which shares huge pages with other matrices.
    pub(crate) fn of_matrix(len: usize) -> Result<Self, KernelError> {
        Self::new(len, WEIGHTS, Memory::in_region)
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
pub(super) trait Prefetch {
    /// Whether the lines are in a cache already, so that the kernel is compute-bound.
    const IS_CACHED: bool = false;

    /// Called before N lines are used, the first of which is line `line` of all that the kernel reads.
    ///
    /// # Safety
    /// The CPU supports V's instructions.
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, line: usize);
}

/// The loop that borrows a prefetch continues where the last one ended.
impl<P: Prefetch> Prefetch for &mut P {
    const IS_CACHED: bool = P::IS_CACHED;

    #[inline(always)]
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, line: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { (**self).prefetch::<V, N>(line) };
    }
}

/// Lines per window: while one is read, the next is prefetched into the L2 cache.
const WINDOW: usize = 1024;
/// Positions of the next window that are prefetched in turn: machines read several streams faster than one.
const STREAMS: usize = 8;
/// Prefetch distance in bytes into the L1 cache when several streams are read in parallel.
const L1_DISTANCE_BYTES: usize = 1024;

/// The fastest way to read memory on a CPU, as measured (docs/adr/0072-only-zen-5-reads-in-order.md).
#[derive(Clone, Copy)]
struct ReadStrategy {
    /// Prefetch distance in bytes into the L1 cache, within the stream.
    l1_distance_bytes: usize,
    /// Whether a share of the next window is prefetched too.
    prefetches_windows: bool,
    /// Whether several streams in parallel are faster than one with window prefetch.
    multi_stream: bool,
    /// Whether one row (two for pairs of bf16) reads faster without software prefetch when a vector is a
    /// whole line: a line then takes so few instructions that the CPU itself runs far enough ahead.
    row_hardware_prefetch: bool,
}

/// AMD's family 26 is Zen 5.
const ZEN_5: u32 = 26;

static READ_STRATEGY: LazyLock<ReadStrategy> = LazyLock::new(|| match amd_family() {
    Some(family) if family >= ZEN_5 => ReadStrategy {
        l1_distance_bytes: 6144,
        prefetches_windows: false,
        multi_stream: true,
        row_hardware_prefetch: false,
    },
    Some(_) => ReadStrategy {
        l1_distance_bytes: 4096,
        prefetches_windows: true,
        multi_stream: false,
        row_hardware_prefetch: true,
    },
    None => ReadStrategy {
        l1_distance_bytes: L1_DISTANCE_BYTES,
        prefetches_windows: true,
        multi_stream: true,
        row_hardware_prefetch: false,
    },
});

/// Whether this CPU reads several streams in parallel faster than one.
pub(super) fn prefers_multi_stream() -> bool {
    READ_STRATEGY.multi_stream
}

/// Whether one row of vectors as wide as a line, or two rows of bf16 pairs, read faster without software
/// prefetch.
pub(super) fn prefers_hardware_prefetch() -> bool {
    READ_STRATEGY.row_hardware_prefetch
}

/// For lines in memory that the hardware prefetches fastest.
#[derive(Clone, Copy)]
pub(super) struct HardwarePrefetch;

impl Prefetch for HardwarePrefetch {
    #[inline(always)]
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, _: usize) {}
}

/// For lines that are read once, in order: prefetches the lines ahead into the L1 cache and, if that is
/// faster, a share of the next window into the L2 cache.
#[derive(Clone, Copy)]
pub(super) struct StreamPrefetch {
    first: *const u8,
    strategy: ReadStrategy,
}

impl StreamPrefetch {
    /// Creates the strategy for lines that begin at `first`.
    pub(super) fn new(first: *const u8) -> Self {
        Self { first, strategy: *READ_STRATEGY }
    }

    /// Creates the strategy without windows.
    pub(super) fn without_windows(first: *const u8) -> Self {
        Self { first, strategy: ReadStrategy { prefetches_windows: false, ..*READ_STRATEGY } }
    }
}

impl Prefetch for StreamPrefetch {
    #[inline(always)]
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, line: usize) {
        let l1 = self
            .first
            .wrapping_add(line.wrapping_mul(size_of::<Line>()).wrapping_add(self.strategy.l1_distance_bytes));
        for i in 0..N {
            // SAFETY: guaranteed by the caller.
            unsafe { V::prefetch_l1(l1.wrapping_add(i * size_of::<Line>())) };
        }
        if !self.strategy.prefetches_windows {
            return;
        }
        let in_window = line % WINDOW / N;
        let l2 = in_window % STREAMS * (WINDOW / STREAMS) + in_window / STREAMS * N;
        let next_window = (line | (WINDOW - 1)).wrapping_add(1);
        let l2 = self.first.wrapping_add(next_window.wrapping_add(l2).wrapping_mul(size_of::<Line>()));
        for i in 0..N {
            // SAFETY: guaranteed by the caller.
            unsafe { V::prefetch_l2(l2.wrapping_add(i * size_of::<Line>())) };
        }
    }
}

/// For `STREAMS` streams of lines that are read in parallel, `stride` bytes from each other.
#[derive(Clone, Copy)]
pub(super) struct MultiStreamPrefetch<const STREAMS: usize> {
    /// Start of the first stream.
    pub(super) first: *const u8,
    pub(super) stride: usize,
}

impl<const STREAMS: usize> Prefetch for MultiStreamPrefetch<STREAMS> {
    #[inline(always)]
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, line: usize) {
        for stream in 0..STREAMS {
            for i in 0..N {
                let line = stream * self.stride + (line + i) * size_of::<Line>();
                // SAFETY: guaranteed by the caller.
                unsafe { V::prefetch_l1(self.first.wrapping_add(line + L1_DISTANCE_BYTES)) };
            }
        }
    }
}

/// For lines that several passes read one after the other: each pass prefetches its share of the next lines
/// into the L2 cache, evenly over the lines that it uses. It never branches, because a branch in the inner
/// loop keeps the compiler from ordering the loop's loads.
#[derive(Clone, Copy)]
pub(super) struct TilePrefetch {
    at: *const u8,
    /// Bytes to prefetch per line used, at most a line. Rounded up, so a pass may go a little beyond its
    /// share.
    bytes_per_line: usize,
}

impl TilePrefetch {
    /// The share of pass `index` of `passes` in the `lines` lines at `next`, for passes that use `used` lines
    /// each.
    pub(super) fn new(next: *const u8, lines: usize, (index, passes): (usize, usize), used: usize) -> Self {
        let share = lines * size_of::<Line>() / passes;
        Self { at: next.wrapping_add(index * share), bytes_per_line: share.div_ceil(used.max(1)) }
    }
}

impl Prefetch for TilePrefetch {
    const IS_CACHED: bool = true;

    #[inline(always)]
    unsafe fn prefetch<V: F32x16, const N: usize>(&mut self, _: usize) {
        for _ in 0..N {
            // SAFETY: guaranteed by the caller.
            unsafe { V::prefetch_l2(self.at) };
            self.at = self.at.wrapping_add(self.bytes_per_line);
        }
    }
}
