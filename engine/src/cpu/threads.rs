//! Work over threads. Whoever calls cuts the work into items whose results do not depend on who computes
//! them, so that the number of threads cannot change a bit; this file only hands items out.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

use crate::EngineError;

/// Multiply-adds below which waking another thread costs more than it saves.
const MIN_PARALLEL_WORK: usize = 1_000_000;

/// Pieces per thread, so that a thread that was late does not hold up the others for a whole share.
const PIECES_PER_THREAD: usize = 3;

/// The threads of one engine. With one thread nothing is ever dispatched.
#[derive(Debug)]
pub(crate) struct Threads {
    pool: Option<rayon::ThreadPool>,
    min_parallel_work: usize,
}

impl Threads {
    pub(crate) fn new(count: usize) -> Result<Self, EngineError> {
        let pool = if count > 1 {
            let built = rayon::ThreadPoolBuilder::new()
                .num_threads(count)
                .thread_name(|i| format!("engine-{i}"))
                .build();
            Some(built.map_err(|error| EngineError::BadOption {
                option: "threads",
                value: count as u64,
                reason: format!("the threads could not be started: {error}"),
            })?)
        } else {
            None
        };
        Ok(Self { pool, min_parallel_work: MIN_PARALLEL_WORK })
    }

    /// Threads that share even the smallest work.
    #[cfg(test)]
    pub(crate) fn eager(count: usize) -> Self {
        Self { min_parallel_work: 0, ..Self::new(count).unwrap() }
    }

    /// Enters the pool once for all that runs inside, if it is about enough work to share more than once.
    /// Work behind is dispatched from there without waking anyone first.
    pub(crate) fn enter<R: Send>(&self, work: usize, run: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) if work / 4 >= self.min_parallel_work => pool.install(run),
            _ => run(),
        }
    }

    /// `run` of every item, in their order.
    pub(crate) fn map<T: Sync, R: Send>(&self, items: &[T], run: impl Fn(&T) -> R + Sync + Send) -> Vec<R> {
        match &self.pool {
            Some(pool) => pool.install(|| items.par_iter().map(run).collect()),
            None => items.iter().map(run).collect(),
        }
    }

    /// Calls `run` on consecutive ranges that cover `0..items`, each but the last a multiple of `grain` long.
    /// `work` is the number of multiply-adds in all.
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
        let worthwhile = work / (self.min_parallel_work / 4).max(1);
        let pieces = (pool.current_num_threads() * PIECES_PER_THREAD).min(worthwhile).max(1);
        let piece = items.div_ceil(pieces).next_multiple_of(grain);
        let pieces = items.div_ceil(piece);
        // From a thread of the pool, `install` just calls.
        pool.install(|| (0..pieces).into_par_iter().for_each(|i| run(i * piece..items.min((i + 1) * piece))));
    }
}

/// A buffer of which several threads write disjoint parts.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose users promise, at each `slice_mut`, to touch disjoint parts.
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
        assert!(range.start <= range.end && range.end <= self.len, "slice out of the shared buffer");
        // SAFETY: in bounds by the assertion, unaliased by the caller's promise, alive as long as the borrow
        // in `lifetime`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}
