//! Splits work over threads. The caller divides the work into items whose results do not depend on the thread
//! that computes them, so that the number of threads cannot change a bit. This file distributes items, and
//! `crew` has the threads.

mod bell;
mod cores;
mod crew;
mod patience;

use std::marker::PhantomData;
use std::ops::Range;

use crate::KernelError;
pub use cores::allowed_cores;
use cores::stay_on;
use crew::Crew;
pub use patience::Patience;

/// Multiply-adds below which using another thread costs more than it saves.
const MIN_PARALLEL_WORK: usize = 1_000_000;

/// Chunks per thread: with several, a slow thread does not delay the others by its whole share.
const PIECES_PER_THREAD: usize = 3;

/// The threads of one engine: its own threads, which live as long as it does, and the calling thread. With
/// one thread all work runs on the calling thread.
#[derive(Debug)]
pub struct Threads {
    crew: Option<Crew>,
    min_parallel_work: usize,
}

impl Threads {
    /// Creates `count` threads, the calling one included: starts `count - 1`. Zero counts as one.
    pub fn new(count: usize) -> Result<Self, KernelError> {
        let crew = if count > 1 { Some(start(count - 1, |_| Ok(()))?) } else { None };
        Ok(Self { crew, min_parallel_work: MIN_PARALLEL_WORK })
    }

    /// Number of compute threads, the calling one included.
    #[expect(clippy::len_without_is_empty, reason = "the calling thread always counts")]
    pub fn len(&self) -> usize {
        self.crew.as_ref().map_or(1, Crew::len)
    }

    /// Pins every thread to one of `cores`: the calling thread to the first, each other thread to the next.
    /// All later calls must come from this calling thread. After an error the calling thread may be pinned to
    /// any of the cores.
    pub fn pin(&mut self, cores: &[usize]) -> Result<(), KernelError> {
        let count = self.len();
        if cores.len() < count {
            let reason = format!(
                "pinning needs one core per thread, and there are {}; use fewer threads, or do not pin",
                cores.len()
            );
            return Err(KernelError::BadOption { option: "threads", value: count as u64, reason });
        }
        if self.crew.is_some() {
            // A new thread inherits the core of the thread that starts it.
            self.crew = Some(start(count - 1, |other| stay_on(cores[other]))?);
        }
        stay_on(cores[0])
    }

    /// Creates threads that split even the smallest work, for tests.
    pub(crate) fn eager(count: usize) -> Result<Self, KernelError> {
        Ok(Self { min_parallel_work: 0, ..Self::new(count)? })
    }

    /// Returns `run` of every item, in order.
    pub fn map<T: Sync, R: Send>(&self, items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
        let Some(crew) = &self.crew else { return items.iter().map(run).collect() };
        let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
        let shared = Shared::new(&mut results);
        crew.run(items.len(), &|i| {
            // SAFETY: every task runs once and has a separate element.
            let place = unsafe { shared.slice_mut(i..i + 1) };
            place[0] = Some(run(&items[i]));
        });
        results.into_iter().map(|result| result.expect("the pool runs every task")).collect()
    }

    /// Calls `run` on consecutive ranges that cover `0..items`. Each range must be large work. Returns the
    /// error of the first range that failed.
    pub(crate) fn try_for_ranges(
        &self,
        items: usize,
        run: impl Fn(Range<usize>) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        let pieces = self.crew.as_ref().map_or(1, |crew| crew.len() * PIECES_PER_THREAD);
        let piece = items.div_ceil(pieces).max(1);
        let starts: Vec<usize> = (0..items).step_by(piece).collect();
        self.map(&starts, |&start| run(start..items.min(start + piece))).into_iter().collect()
    }

    /// Calls `run` on consecutive ranges that cover `0..items`; all but the last have a multiple of `grain`
    /// items. `work` is the total number of multiply-adds.
    pub(crate) fn for_ranges(
        &self,
        items: usize,
        grain: usize,
        work: usize,
        run: impl Fn(Range<usize>) + Sync,
    ) {
        let Some(crew) = &self.crew else { return run(0..items) };
        if work < self.min_parallel_work || items <= grain {
            return run(0..items);
        }
        let worthwhile = work / (self.min_parallel_work / 4).max(1);
        let pieces = (crew.len() * PIECES_PER_THREAD).min(worthwhile).max(1);
        let piece = items.div_ceil(pieces).next_multiple_of(grain);
        crew.run(items.div_ceil(piece), &|i| run(i * piece..items.min((i + 1) * piece)));
    }
}

/// Starts a pool of `others` threads. Calls `place` before each start, with the index of the
/// thread from 1.
fn start(others: usize, place: impl Fn(usize) -> Result<(), KernelError>) -> Result<Crew, KernelError> {
    let mut crew = Crew::default();
    for other in 1..=others {
        place(other)?;
        crew.hire().map_err(|error| KernelError::BadOption {
            option: "threads",
            value: others as u64 + 1,
            reason: format!("cannot start threads: {error}"),
        })?;
    }
    Ok(crew)
}

/// A buffer whose disjoint parts are written by several threads.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: this is a `&mut [T]`; callers of `slice_mut` guarantee that they access disjoint parts.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// A part of the buffer.
    ///
    /// # Safety
    /// No two slices that live at the same time may overlap.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "that is what this type is for; the caller promises that parts are disjoint"
    )]
    pub(crate) unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range is outside the shared buffer");
        // SAFETY: in bounds by the assertion, unaliased as the caller guarantees, alive as long as the borrow
        // in `lifetime`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests;
