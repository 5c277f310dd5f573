//! Collective of ranks that are threads of one process. A sum takes two barriers: every rank publishes its
//! rows, adds up one stripe of all ranks' rows, and copies the stripes that the others computed.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cpu_kernels::NUM_SLICES;

use super::{Collective, RankBarrier, join_columns};
use crate::EngineError;
use crate::host::HostRows;

/// State shared by all ranks.
#[derive(Debug)]
struct SharedState {
    barrier: Arc<RankBarrier>,
    /// Rows that each rank published. Written before the first barrier of an operation, read until the
    /// second.
    published: Vec<RwLock<HostRows>>,
    /// The stripe that each rank added up. Written between the barriers, read until the next operation's
    /// first barrier.
    stripes: Vec<RwLock<Vec<f32>>>,
}

#[derive(Debug)]
struct SharedMemory {
    /// Counted from the first rank of this process.
    rank: usize,
    shared: Arc<SharedState>,
}

/// Creates the collective's ends for `ranks` ranks that synchronise at `barrier`.
pub(crate) fn shared_memory(ranks: usize, barrier: &Arc<RankBarrier>) -> Vec<Box<dyn Collective<HostRows>>> {
    let shared = Arc::new(SharedState {
        barrier: Arc::clone(barrier),
        published: (0..ranks).map(|_| RwLock::default()).collect(),
        stripes: (0..ranks).map(|_| RwLock::default()).collect(),
    });
    (0..ranks)
        .map(|rank| Box::new(SharedMemory { rank, shared: Arc::clone(&shared) }) as Box<dyn Collective<_>>)
        .collect()
}

impl Collective<HostRows> for SharedMemory {
    fn all_reduce(&self, rows: &mut HostRows) -> Result<(), EngineError> {
        self.publish(rows)?;
        {
            let parts: Vec<RwLockReadGuard<'_, HostRows>> = self.shared.published.iter().map(read).collect();
            let parts: Vec<&[f32]> = parts.iter().map(|part| &part[..]).collect();
            rows.resize(parts[0].len());
            let mut sums = write(&self.shared.stripes[self.rank]);
            sums.clear();
            sums.extend(self.stripe(self.rank, parts[0].len()).map(|i| tree_sum_over_ranks(&parts, i)));
        }
        self.wait()?;
        for (rank, sums) in self.shared.stripes.iter().enumerate() {
            let stripe = self.stripe(rank, rows.len());
            rows[stripe].copy_from_slice(&read(sums));
        }
        Ok(())
    }

    fn gather(&self, rows: &mut HostRows, widths: &[usize]) -> Result<(), EngineError> {
        self.publish(rows)?;
        if self.rank == 0 {
            let parts: Vec<RwLockReadGuard<'_, HostRows>> = self.shared.published.iter().map(read).collect();
            let parts: Vec<&[f32]> = parts.iter().map(|part| &part[..]).collect();
            join_columns(&parts, widths, rows);
        }
        self.wait()
    }
}

impl SharedMemory {
    /// Publishes the rows and waits until all ranks have done so. The content of `rows` is unspecified
    /// afterwards.
    fn publish(&self, rows: &mut HostRows) -> Result<(), EngineError> {
        std::mem::swap(&mut *write(&self.shared.published[self.rank]), rows);
        self.wait()
    }

    fn wait(&self) -> Result<(), EngineError> {
        let barrier = &self.shared.barrier;
        barrier.wait(barrier.first() + self.rank)
    }

    fn stripe(&self, rank: usize, len: usize) -> Range<usize> {
        let ranks = self.shared.published.len();
        rank * len / ranks..(rank + 1) * len / ranks
    }
}

/// Sum over ranks of element `i`, neighbouring ranks first.
pub(super) fn tree_sum_over_ranks(parts: &[&[f32]], i: usize) -> f32 {
    let mut sums = [0.0; NUM_SLICES];
    let mut left = parts.len();
    for (sum, part) in sums.iter_mut().zip(parts) {
        *sum = part[i];
    }
    while left > 1 {
        left /= 2;
        for pair in 0..left {
            sums[pair] = sums[2 * pair] + sums[2 * pair + 1];
        }
    }
    sums[0]
}

fn read<T>(buffer: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    buffer.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(buffer: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    buffer.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cpu_kernels::tree_sum;

    use super::*;

    /// Numbers whose sum depends on the order.
    fn part(rank: usize, len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7 + rank * 13) % 11) as f32 * 10f32.powi((i + 3 * rank) as i32 % 9 - 4))
            .collect()
    }

    fn on_every_rank<T: Send>(
        ranks: usize,
        run: impl Fn(usize, &dyn Collective<HostRows>) -> T + Sync,
    ) -> Vec<T> {
        let barrier = Arc::new(RankBarrier::new(ranks, Duration::from_secs(100)));
        let ends = shared_memory(ranks, &barrier);
        std::thread::scope(|scope| {
            let threads: Vec<_> = ends
                .iter()
                .enumerate()
                .map(|(rank, end)| {
                    let run = &run;
                    scope.spawn(move || run(rank, end.as_ref()))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_tree_sum_of_the_contract() {
        for ranks in [1, 2, 4, 8] {
            for len in [1, 7, 64, 300] {
                let expected: Vec<u32> = (0..len)
                    .map(|i| {
                        // A rank's branch of the tree is its first slice; the other slices are zeros.
                        let mut slices = [0.0; NUM_SLICES];
                        (0..ranks).for_each(|rank| slices[rank * NUM_SLICES / ranks] = part(rank, len)[i]);
                        tree_sum(slices).to_bits()
                    })
                    .collect();
                let found = on_every_rank(ranks, |rank, end| {
                    let mut sums = HostRows::default();
                    for _ in 0..20 {
                        sums = part(rank, len).into();
                        end.all_reduce(&mut sums).unwrap();
                    }
                    sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                });
                assert!(found.iter().all(|sums| *sums == expected), "{ranks} ranks, {len} numbers");
            }
        }
    }

    #[test]
    fn gather_concatenates_columns_of_unequal_width() {
        let widths = [3, 2, 1, 2];
        let found = on_every_rank(4, |rank, end| {
            let mut rows: HostRows = (0..2 * widths[rank])
                .map(|i| (100 * rank + 10 * (i / widths[rank]) + i % widths[rank]) as f32)
                .collect::<Vec<_>>()
                .into();
            end.gather(&mut rows, &widths).unwrap();
            rows.take()
        });
        let row = |r: f32| [0., 1., 2., 100., 101., 200., 300., 301.].map(|x| x + 10. * r);
        assert_eq!(found[0], [row(0.), row(1.)].concat());
    }

    #[test]
    fn a_missing_rank_is_named_by_all_others() {
        let barrier = Arc::new(RankBarrier::new(4, Duration::from_secs(2)));
        let ends = shared_memory(4, &barrier);
        let errors: Vec<String> = std::thread::scope(|scope| {
            let arrive = |rank: usize| {
                let end = &ends[rank];
                scope.spawn(move || end.all_reduce(&mut vec![1.0].into()).unwrap_err().to_string())
            };
            let threads = [arrive(0), arrive(1), arrive(3)];
            threads.map(|thread| thread.join().unwrap()).to_vec()
        });
        assert!(errors.iter().all(|error| error.contains("rank 2") && error.contains(" 2s")), "{errors:?}");
        let late = ends[2].all_reduce(&mut vec![1.0].into()).unwrap_err().to_string();
        assert!(late.contains("rank 2"), "{late}");
    }
}
