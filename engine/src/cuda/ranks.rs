//! A model on several ranks, each with an executor of its own: the [`Collective`] over rows that lie on devices. The
//! partitioning and everything else of a rank is the CPU ranks' own code.
//!
//! A sum over ranks is the rest of the contract's tree (docs/contract.md C2): every rank reads all parts and adds them up in
//! the same order, so that ranks change no bit. Of a large sum each rank adds up only its share and the shares are
//! gathered (`shares`), which moves fewer bytes. How the parts come to lie where a rank can read them is an [`Exchange`]:
//! `nccl` between GPUs, `on_device` where all ranks see one memory. Neither ever adds anything itself.

mod communicator;
mod library;
mod nccl;
mod on_device;
mod shares;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use library::NcclLibrary;
pub(crate) use nccl::connect;
pub(crate) use on_device::on_device;
pub(crate) use shares::SumPhases;
pub(crate) use watch::{Watch, wait_watched};

use super::CudaError;
use super::backend::{Gpu, GpuRows, SharedState};
use super::executor::{Executor, Tensor};
use super::numerics::Numerics;
use super::ops::{room, side_by_side, sum_ranks};
use crate::EngineError;
use crate::collective::{Alone, Collective, Meeting};
use crate::load::{Loaded, load_ranks};
use crate::model_config::ModelConfig;
use crate::options::LoadOptions;
use crate::weights::{Formats, TensorSource};

/// Which ranks read the parts of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// Every rank reads all parts.
    All,
    /// Every rank reads its own share of each part: rank r of R the r-th of R equal pieces.
    Shares,
    /// Only the first rank reads the parts.
    First,
}

/// Launches what reads the parts, by the address of each rank's.
pub(crate) type Read<'a, E> = &'a mut dyn FnMut(&mut E, &[u64]) -> Result<(), CudaError>;

/// How one rank gets at the parts of the others.
pub(crate) trait Exchange<E: Executor>: Send + Sync {
    /// Makes `lens[rank]` numbers of `part` readable, and calls `read` with the address of each rank's part if this rank
    /// reads; for [`Readers::Shares`] with the address of its share of each part, whose lengths are then equal and divisible
    /// by the number of ranks. Addresses hold until `read` and what it launched are done. Every rank calls this in the same
    /// order with the same `lens`.
    fn with_parts(
        &self,
        executor: &mut E,
        part: &Tensor<E::Memory, f32>,
        lens: (&[usize], Readers),
        read: Read<'_, E>,
    ) -> Result<(), EngineError>;
}

/// One rank's end.
pub(crate) struct GpuRank<E: Executor> {
    state: SharedState<E>,
    exchange: Box<dyn Exchange<E>>,
    rank: usize,
    ranks: usize,
    phases: SumPhases,
    scratch: Mutex<Scratch<E>>,
}

/// Where results are made while others still read the rows that they come from; then the two change places.
struct Scratch<E: Executor> {
    sums: Option<Tensor<E::Memory, f32>>,
    share: Option<Tensor<E::Memory, f32>>,
    joined: Option<Tensor<E::Memory, f32>>,
}

impl<E: Executor> GpuRank<E> {
    fn new(
        state: SharedState<E>,
        exchange: Box<dyn Exchange<E>>,
        (rank, ranks): (usize, usize),
        phases: SumPhases,
    ) -> Self {
        let scratch = Mutex::new(Scratch { sums: None, share: None, joined: None });
        Self { state, exchange, rank, ranks, phases, scratch }
    }
}

impl<E: Executor + Send> Collective<GpuRows<E::Memory>> for GpuRank<E>
where
    E::Memory: Send + Sync,
{
    fn all_reduce(&self, rows: &mut GpuRows<E::Memory>) -> Result<(), EngineError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.run(|executor| {
            let (slot, len) = rows.slot();
            let part = slot.as_ref().expect("a forward sizes rows before it uses them");
            let Scratch { sums: sums_slot, share: share_slot, .. } = &mut *scratch;
            let sums = room(sums_slot, executor, len, "sums over ranks")?;
            let lens = vec![len; self.ranks];
            if self.phases.adds_shares(len, self.ranks) {
                let share = len / self.ranks;
                let share_sums = room(share_slot, executor, share, "sums of a share")?;
                self.exchange.with_parts(
                    executor,
                    part,
                    (&lens, Readers::Shares),
                    &mut |executor, parts| {
                        // SAFETY: the exchange's contract: `share` numbers at each address until the launch is done.
                        unsafe { sum_ranks(executor, parts, share_sums, share) }
                    },
                )?;
                let lens = vec![share; self.ranks];
                self.exchange.with_parts(
                    executor,
                    share_sums,
                    (&lens, Readers::All),
                    &mut |executor, parts| {
                        // SAFETY: as above.
                        unsafe { side_by_side(executor, parts, sums, (1, len)) }
                    },
                )?;
            } else {
                self.exchange.with_parts(executor, part, (&lens, Readers::All), &mut |executor, parts| {
                    // SAFETY: the exchange's contract: `len` numbers at each address until the launch is done.
                    unsafe { sum_ranks(executor, parts, sums, len) }
                })?;
            }
            std::mem::swap(slot, sums_slot);
            Ok(())
        })
    }

    fn gather(&self, rows: &mut GpuRows<E::Memory>, widths: &[usize]) -> Result<(), EngineError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let width: usize = widths.iter().sum();
        let even =
            (0..self.ranks).all(|r| widths[r] == (r + 1) * width / self.ranks - r * width / self.ranks);
        assert!(even && widths.len() == self.ranks, "shards have even parts of the vocabulary");
        let joined = self.state.run(|executor| {
            let (slot, len) = rows.slot();
            let part = slot.as_ref().expect("a forward sizes rows before it uses them");
            let count = len / widths[self.rank];
            let lens: Vec<usize> = widths.iter().map(|width| count * width).collect();
            let (is_reader, scratch) = (self.rank == 0, &mut scratch.joined);
            if is_reader {
                room(scratch, executor, count * width, "rows of all ranks")?;
            }
            self.exchange.with_parts(executor, part, (&lens, Readers::First), &mut |executor, parts| {
                let joined = scratch.as_mut().expect("only the first rank reads, and it has made room");
                // SAFETY: the exchange's contract: each rank's rows behind its address until the launch is done.
                unsafe { side_by_side(executor, parts, joined, (count, width)) }
            })?;
            if is_reader {
                std::mem::swap(slot, scratch);
            }
            Ok(is_reader.then_some(count * width))
        })?;
        joined.into_iter().for_each(|len| rows.set_len(len));
        Ok(())
    }
}

/// An executor and how it reaches the others; none where it is alone.
pub(crate) type Member<E> = (E, Option<Box<dyn Exchange<E>>>);

/// All ranks of a model to be.
pub(crate) struct Ranks<E: Executor> {
    /// In order of rank.
    pub(crate) members: Vec<Member<E>>,
    /// Where they hear of one that is lost.
    pub(crate) meeting: Arc<Meeting>,
    /// The part of each device's memory that may be held, where that decides on KV.
    pub(crate) memory_utilization: Option<f32>,
    /// What decides the bits of these devices.
    pub(crate) numerics: Numerics,
    /// How sums over ranks are formed.
    pub(crate) phases: SumPhases,
}

#[cfg(test)]
impl<E: Executor> Ranks<E> {
    /// One rank without others.
    pub(crate) fn alone(executor: E) -> Self {
        let meeting = Arc::new(Meeting::new(1, std::time::Duration::from_secs(100)));
        let numerics = Numerics::emulated();
        let phases = SumPhases::BY_SIZE;
        Self { members: vec![(executor, None)], meeting, memory_utilization: None, numerics, phases }
    }
}

/// Loads a model onto what runs kernels, a rank each; refuses what has no kernels.
pub(crate) fn load_on<E>(
    ranks: Ranks<E>,
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: (ModelConfig, Formats),
) -> Result<Loaded, EngineError>
where
    E: Executor<Memory: Send + Sync> + Send + 'static,
{
    super::backend::check_model(&model.0, model.1)?;
    let Ranks { members, meeting, memory_utilization, numerics, phases } = ranks;
    let ranks = members.len();
    let with_collective = |(rank, (executor, exchange)): (usize, Member<E>)| {
        let gpu = Gpu::new(executor, memory_utilization);
        let end: Box<dyn Collective<GpuRows<E::Memory>>> = match exchange {
            None => Box::new(Alone),
            Some(exchange) => Box::new(GpuRank::new(gpu.share_state(), exchange, (rank, ranks), phases)),
        };
        (gpu, end)
    };
    let members = members.into_iter().enumerate().map(with_collective).collect();
    load_ranks((members, numerics.names()), &meeting, options, source, model)
}
