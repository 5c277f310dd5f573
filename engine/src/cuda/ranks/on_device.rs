//! Ranks that share one memory: threads of this process on one GPU, or on the host in tests. Each rank
//! publishes the address of its part, and kernels read it there without a copy. For testing sharded models
//! without a second GPU: every exchange waits for the device.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::{Exchange, Read, Readers};
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};

/// Address of each rank's part. A rank that reads holds the read locks until its device is done. A rank that
/// withdraws its part takes the write lock, and so waits for the readers.
#[derive(Debug)]
struct PartAddresses {
    barrier: Arc<RankBarrier>,
    of_rank: Vec<RwLock<Option<u64>>>,
}

/// The exchange of one rank.
#[derive(Debug)]
pub(crate) struct SharedMemoryExchange {
    rank: usize,
    places: Arc<PartAddresses>,
}

/// Makes the exchanges of `ranks` ranks, which synchronise at `barrier`.
pub(crate) fn on_device(ranks: usize, barrier: &Arc<RankBarrier>) -> Vec<SharedMemoryExchange> {
    let of_rank = (0..ranks).map(|_| RwLock::default()).collect();
    let places = Arc::new(PartAddresses { barrier: Arc::clone(barrier), of_rank });
    (0..ranks).map(|rank| SharedMemoryExchange { rank, places: Arc::clone(&places) }).collect()
}

/// Publishes a part's address until it is dropped, also on errors.
struct PublishedPart<'a>(&'a RwLock<Option<u64>>);

impl<'a> PublishedPart<'a> {
    fn new(place: &'a RwLock<Option<u64>>, address: u64) -> Self {
        *place.write().unwrap_or_else(PoisonError::into_inner) = Some(address);
        Self(place)
    }
}

impl Drop for PublishedPart<'_> {
    fn drop(&mut self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl<E: Executor> Exchange<E> for SharedMemoryExchange {
    fn with_parts(
        &self,
        executor: &mut E,
        part: &Tensor<E::Memory, f32>,
        (lens, readers): (&[usize], Readers),
        read: Read<'_, E>,
    ) -> Result<(), EngineError>
    where
        E::Memory: DeviceMemory,
    {
        let PartAddresses { barrier, of_rank } = self.places.as_ref();
        assert!(lens[self.rank] <= part.len(), "a part holds what it gives away");
        executor.wait()?;
        let shown = PublishedPart::new(&of_rank[self.rank], part.address());
        barrier.wait(self.rank)?;
        if readers != Readers::First || self.rank == 0 {
            let held: Vec<RwLockReadGuard<'_, Option<u64>>> =
                of_rank.iter().map(|place| place.read().unwrap_or_else(PoisonError::into_inner)).collect();
            let parts: Option<Vec<u64>> = held.iter().map(|place| **place).collect();
            // A part is taken back early only by a rank that gave up.
            let Some(mut parts) = parts else { return barrier.wait(self.rank) };
            if readers == Readers::Shares {
                let start = self.rank * (lens[0] / parts.len()) * size_of::<f32>();
                parts.iter_mut().for_each(|part| *part += start as u64);
            }
            read(executor, &parts)?;
            executor.wait()?;
        }
        let met = barrier.wait(self.rank);
        drop(shown);
        met
    }
}
