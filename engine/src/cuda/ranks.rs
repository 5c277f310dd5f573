//! A model on several ranks, each with its executor: the [`Collective`] for rows in device memory. The
//! partitioning and the rest of a rank are the same code as for CPU ranks.
//!
//! An all-reduce computes the upper levels of the contract's summation tree (docs/contract.md C2): every rank
//! reads the partial sums of all ranks and adds them in the same order, so the result does not depend on the
//! number of ranks. Of a large sum each rank adds only its share, and the shares are gathered (`shares`),
//! which sends fewer bytes. An [`Exchange`] puts the parts where a rank can read them: `nccl` between GPUs,
//! `on_device` if all ranks share one memory. With several nodes these are the ranks of one node; NCCL also
//! reaches those of the others. Short sums may be one kernel that also moves the parts
//! (`peers`).

mod communicator;
mod first_exchange;
mod library;
mod nccl;
mod on_device;
mod peers;
mod shares;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use first_exchange::exchange_once;
pub(crate) use library::NcclLibrary;
pub(crate) use nccl::{NcclExchange, connect, connect_nodes};
pub(crate) use on_device::on_device;
pub(crate) use peers::use_peers;
pub(crate) use shares::SumPhases;
pub(crate) use watch::{Watch, wait_watched};

use super::CudaError;
use super::backend::{Gpu, GpuRows, SharedState};
use super::executor::{Executor, Tensor};
use super::numerics::Numerics;
use super::ops::{concat_ranks, ensure_capacity, sum_ranks};
use crate::EngineError;
use crate::collective::{Collective, RankBarrier, SingleRank};
use crate::kv_limits::KvSize;
use crate::load::{ConnectedRanks, Loaded, check_kv_options, load_ranks};
use crate::nodes::{Nodes, shards_of_node};
use crate::options::LoadOptions;
use crate::shard::Shard;
use crate::weights::{ModelSpec, TensorSource};

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

/// Launches the kernel that reads the parts, given the address of each rank's part.
pub(crate) type Read<'a, E> = &'a mut dyn FnMut(&mut E, &[u64]) -> Result<(), CudaError>;

/// Gives a rank access to the parts of the other ranks.
pub(crate) trait Exchange<E: Executor>: Send + Sync {
    /// Makes `lens[rank]` numbers of `part` available to the readers, and calls `read` with the address of
    /// each rank's part if this rank is a reader. For [`Readers::Shares`] all parts have one length,
    /// divisible by the number of ranks, and the addresses are those of this rank's share. Addresses are
    /// valid until `read` and the kernels it launched are done. All ranks make these calls in the same order
    /// and with the same `lens`.
    fn with_parts(
        &self,
        executor: &mut E,
        part: &Tensor<E::Memory, f32>,
        lens: (&[usize], Readers),
        read: Read<'_, E>,
    ) -> Result<(), EngineError>;

    /// Puts the sum of `len` numbers of every rank's `part` into `sum`, in one launch, if this exchange forms
    /// sums of this length itself. Returns whether it did, which is the same on all ranks. All ranks make
    /// this call.
    fn sum(
        &self,
        executor: &mut E,
        (part, len): (&Tensor<E::Memory, f32>, usize),
        sum: &mut Tensor<E::Memory, f32>,
    ) -> Result<bool, EngineError> {
        let _ = (executor, part, len, sum);
        Ok(false)
    }

    /// Puts `len` numbers of every rank's `part` into `out`, in order of rank. All ranks make this call.
    fn gather(
        &self,
        executor: &mut E,
        (part, len): (&Tensor<E::Memory, f32>, usize),
        (out, ranks): (&mut Tensor<E::Memory, f32>, usize),
    ) -> Result<(), EngineError> {
        self.with_parts(executor, part, (&vec![len; ranks], Readers::All), &mut |executor, parts| {
            // SAFETY: by the exchange's contract each address has `len` numbers until the launch is done.
            unsafe { concat_ranks(executor, parts, out, (1, ranks * len)) }
        })
    }
}

/// The collective of one rank.
pub(crate) struct GpuRank<E: Executor> {
    /// Dropped first: it ends what the device waits for, and the device is waited for when it is dropped.
    exchange: Box<dyn Exchange<E>>,
    state: SharedState<E>,
    rank: usize,
    ranks: usize,
    phases: SumPhases,
    scratch: Mutex<Scratch<E>>,
}

/// Buffers for results while other ranks still read the rows they are computed from; afterwards the buffers
/// are swapped.
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
        Self { exchange, state, rank, ranks, phases, scratch }
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
            let sums = ensure_capacity(sums_slot, executor, len, "sums over ranks")?;
            if self.exchange.sum(executor, (part, len), sums)? {
                std::mem::swap(slot, sums_slot);
                return Ok(());
            }
            let lens = vec![len; self.ranks];
            if self.phases.adds_shares(len, self.ranks) {
                let share = len / self.ranks;
                let share_sums = ensure_capacity(share_slot, executor, share, "sums of a share")?;
                self.exchange.with_parts(
                    executor,
                    part,
                    (&lens, Readers::Shares),
                    &mut |executor, parts| {
                        // SAFETY: by the exchange's contract each address has `share` numbers until the
                        // launch is done.
                        unsafe { sum_ranks(executor, parts, share_sums, share) }
                    },
                )?;
                self.exchange.gather(executor, (&*share_sums, share), (sums, self.ranks))?;
            } else {
                self.exchange.with_parts(executor, part, (&lens, Readers::All), &mut |executor, parts| {
                    // SAFETY: by the exchange's contract each address has `len` numbers until the launch is
                    // done.
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
                ensure_capacity(scratch, executor, count * width, "rows of all ranks")?;
            }
            self.exchange.with_parts(executor, part, (&lens, Readers::First), &mut |executor, parts| {
                let joined = scratch.as_mut().expect("only the first rank reads, and it has made room");
                // SAFETY: by the exchange's contract each address has the rank's rows until the launch is
                // done.
                unsafe { concat_ranks(executor, parts, joined, (count, width)) }
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

/// An executor and its exchange with the other ranks; `None` for a single rank.
pub(crate) type RankMember<E> = (E, Option<Box<dyn Exchange<E>>>);

/// The ranks of a model that is to be loaded.
pub(crate) struct Ranks<E: Executor> {
    /// In order of rank.
    pub(crate) members: Vec<RankMember<E>>,
    /// Barrier of the ranks, which also reports a lost rank.
    pub(crate) barrier: Arc<RankBarrier>,
    /// Share of each device's memory that may be used in total, if the KV cache is sized by it.
    pub(crate) memory_utilization: Option<f32>,
    /// Kernel and device class, which determine the bits of results.
    pub(crate) numerics: Numerics,
    /// How sums over ranks are formed.
    pub(crate) phases: SumPhases,
}

#[cfg(test)]
impl<E: Executor> Ranks<E> {
    /// A single rank.
    pub(crate) fn alone(executor: E) -> Self {
        let barrier = Arc::new(RankBarrier::new(1, std::time::Duration::from_secs(100)));
        let numerics = Numerics::emulated();
        let phases = SumPhases::BY_SIZE;
        Self { members: vec![(executor, None)], barrier, memory_utilization: None, numerics, phases }
    }
}

/// Refuses a model for which there are no kernels or that cannot be split over this many ranks, and KV
/// options that do not suit it. Reads no weights and uses no device.
pub(crate) fn check_loadable(
    options: &LoadOptions,
    model: &ModelSpec,
    (ranks, memory_utilization): (usize, Option<f32>),
    nodes: Option<&Nodes>,
) -> Result<(), EngineError> {
    super::backend::check_model(model)?;
    check_kv_options(KvSize::new(options, memory_utilization), options, model, (ranks, nodes))
}

/// Loads a model onto one executor per rank, after [`check_loadable`].
pub(crate) fn load_on<E>(
    ranks: Ranks<E>,
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError>
where
    E: Executor<Memory: Send + Sync> + Send + 'static,
{
    load_on_node(ranks, None, options, source, model)
}

/// Loads a model onto one executor per rank, after [`check_loadable`]; with `nodes` the ranks of this node.
pub(crate) fn load_on_node<E>(
    ranks: Ranks<E>,
    nodes: Option<&Arc<Nodes>>,
    options: &LoadOptions,
    source: &dyn TensorSource,
    model: ModelSpec,
) -> Result<Loaded, EngineError>
where
    E: Executor<Memory: Send + Sync> + Send + 'static,
{
    let Ranks { members, barrier, memory_utilization, numerics, phases } = ranks;
    let node = nodes.map(Arc::as_ref);
    check_loadable(options, &model, (members.len(), memory_utilization), node)?;
    let shards = shards_of_node(members.len(), node, &model.config)?;
    let with_collective = |(shard, (executor, exchange)): (Shard, RankMember<E>)| {
        let gpu = Gpu::new(executor);
        gpu.add_tilings(&model.config, shard);
        let of = (shard.rank, shard.ranks);
        let end: Box<dyn Collective<GpuRows<E::Memory>>> = match exchange {
            None => Box::new(SingleRank),
            Some(exchange) => Box::new(GpuRank::new(gpu.share_state(), exchange, of, phases)),
        };
        (gpu, end)
    };
    let members = shards.into_iter().zip(members).map(with_collective).collect();
    let (numerics, kv_size) = (numerics.names(), KvSize::new(options, memory_utilization));
    load_ranks(ConnectedRanks { members, barrier, numerics, kv_size }, nodes, options, source, model)
}
