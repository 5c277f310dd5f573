//! Splits work over threads. The caller divides the work into items whose results do not depend on the thread
//! that computes them, so that the number of threads cannot change a bit. This file distributes items, and
//! `thread_pool` has the threads.

mod cores;
mod event_count;
mod spin_policy;
mod thread_pool;

use std::marker::PhantomData;
use std::ops::Range;

use crate::KernelError;
pub use cores::allowed_cores;
use cores::pin_to_core;
pub use spin_policy::SpinPolicy;
use thread_pool::ThreadPool;

/// Multiply-adds below which using another thread costs more than it saves.
const MIN_PARALLEL_WORK: usize = 1_000_000;

/// Chunks per thread: with several, a slow thread does not delay the others by its whole share.
const CHUNKS_PER_THREAD: usize = 3;

/// The threads of one engine: its own threads, which live as long as it does, and the calling thread. With
/// one thread all work runs on the calling thread.
#[derive(Debug)]
pub struct Threads {
    pool: Option<ThreadPool>,
    min_parallel_work: usize,
}

impl Threads {
    /// Creates `count` threads, the calling one included: starts `count - 1`. Zero counts as one.
    pub fn new(count: usize) -> Result<Self, KernelError> {
        let pool = if count > 1 { Some(start_pool(count - 1, |_| Ok(()))?) } else { None };
        Ok(Self { pool, min_parallel_work: MIN_PARALLEL_WORK })
    }

    /// Number of compute threads, the calling one included.
    #[expect(clippy::len_without_is_empty, reason = "the calling thread always counts")]
    pub fn len(&self) -> usize {
        self.pool.as_ref().map_or(1, ThreadPool::len)
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
        if self.pool.is_some() {
            // A new thread inherits the core of the thread that starts it.
            self.pool = Some(start_pool(count - 1, |index| pin_to_core(cores[index]))?);
        }
        pin_to_core(cores[0])
    }

    /// Creates threads that split even the smallest work, for tests.
    pub(crate) fn always_parallel(count: usize) -> Result<Self, KernelError> {
        Ok(Self { min_parallel_work: 0, ..Self::new(count)? })
    }

    /// Returns `run` of every item, in order.
    pub fn map<T: Sync, R: Send>(&self, items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
        let Some(pool) = &self.pool else { return items.iter().map(run).collect() };
        let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
        let shared = SharedSliceMut::new(&mut results);
        pool.run(items.len(), &|i| {
            // SAFETY: every task runs once and has a separate element.
            let result = unsafe { shared.slice_mut(i..i + 1) };
            result[0] = Some(run(&items[i]));
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
        let num_chunks = self.pool.as_ref().map_or(1, |pool| pool.len() * CHUNKS_PER_THREAD);
        let chunk_len = items.div_ceil(num_chunks).max(1);
        let starts: Vec<usize> = (0..items).step_by(chunk_len).collect();
        self.map(&starts, |&start| run(start..items.min(start + chunk_len))).into_iter().collect()
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
        let Some(pool) = &self.pool else { return run(0..items) };
        if work < self.min_parallel_work || items <= grain {
            return run(0..items);
        }
        let max_chunks = work / (self.min_parallel_work / 4).max(1);
        let num_chunks = (pool.len() * CHUNKS_PER_THREAD).min(max_chunks).max(1);
        let chunk_len = items.div_ceil(num_chunks).next_multiple_of(grain);
        pool.run(items.div_ceil(chunk_len), &|i| run(i * chunk_len..items.min((i + 1) * chunk_len)));
    }
}

/// Starts a pool of `num_threads` threads. Calls `before_start` before each start, with the index of the
/// thread from 1.
fn start_pool(
    num_threads: usize,
    before_start: impl Fn(usize) -> Result<(), KernelError>,
) -> Result<ThreadPool, KernelError> {
    let mut pool = ThreadPool::default();
    for index in 1..=num_threads {
        before_start(index)?;
        pool.spawn_thread().map_err(|error| KernelError::BadOption {
            option: "threads",
            value: num_threads as u64 + 1,
            reason: format!("cannot start threads: {error}"),
        })?;
    }
    Ok(pool)
}

/// A buffer whose disjoint parts are written by several threads.
pub(crate) struct SharedSliceMut<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: this is a `&mut [T]`; callers of `slice_mut` guarantee that they access disjoint parts.
unsafe impl<T: Send> Sync for SharedSliceMut<'_, T> {}

impl<'a, T> SharedSliceMut<'a, T> {
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
