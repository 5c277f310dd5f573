//! Ranks on GPUs of one node or of several: NCCL moves the parts in stream order, and a kernel adds them.
//! `ncclAllReduce` is not used: the order in which it adds depends on the number of ranks and on the size
//! (docs/adr/0027).

#[cfg(test)]
mod node_tests;
#[cfg(test)]
mod peer_tests;
#[cfg(test)]
mod tests;

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::nccl::sys::ncclComm_t;

use super::communicator::Communicator;
use super::library::{CONNECT_LIMIT, GroupOfNodes, Message, NcclLibrary};
use super::peers::PeerSums;
use super::{Exchange, Read, Readers, Watch};
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::device::{CudaDevice, CudaMemory};
use crate::cuda::executor::Tensor;
use crate::cuda::ops::ensure_capacity;
use crate::nodes::Nodes;

/// The exchange of one rank.
#[derive(Debug)]
pub(crate) struct NcclExchange {
    rank: usize,
    ranks: usize,
    communicator: Arc<Communicator>,
    barrier: Arc<RankBarrier>,
    /// Receive buffer for parts of other ranks.
    receive_buffer: Mutex<Option<Tensor<CudaMemory, f32>>>,
    /// Forms short sums, if this was asked for and the GPUs access each other's memory.
    peers: Option<PeerSums>,
}

/// Connects devices, one rank each. Waits of each device then watch the other ranks.
pub(crate) fn connect(
    devices: &mut [CudaDevice],
    library: &Arc<NcclLibrary>,
    barrier: &Arc<RankBarrier>,
) -> Result<Vec<NcclExchange>, EngineError> {
    share_memory(devices)?;
    let ordinals: Vec<c_int> = devices.iter().map(|device| device.ordinal() as c_int).collect();
    let comms = library.init_all(&ordinals, CONNECT_LIMIT)?;
    let ranks = devices.len();
    Ok(ends_of(comms, devices, library, barrier, ranks))
}

/// Connects the devices of this node with each other and with those of the other nodes. The leader makes the
/// id by which ranks find each other.
pub(crate) fn connect_nodes(
    devices: &mut [CudaDevice],
    library: &Arc<NcclLibrary>,
    barrier: &Arc<RankBarrier>,
    nodes: &Nodes,
) -> Result<Vec<NcclExchange>, EngineError> {
    share_memory(devices)?;
    let own = if nodes.is_leader() { library.unique_id()?.to_vec() } else { Vec::new() };
    let id = nodes.share_from_leader(own)?.try_into().map_err(|_| {
        let reason = "the id that node 0 sent has another length".to_owned();
        CudaError::Nccl { action: "ncclCommInitRank", reason }
    })?;
    let contexts = devices.iter().map(CudaDevice::context).collect();
    let ranks = devices.len() * nodes.count();
    let comms =
        library.init_ranks(contexts, GroupOfNodes { id, first: barrier.first(), ranks }, CONNECT_LIMIT)?;
    Ok(ends_of(comms, devices, library, barrier, ranks))
}

/// Lets the devices of this process access each other's memory.
fn share_memory(devices: &[CudaDevice]) -> Result<(), CudaError> {
    for device in devices {
        let others = devices.iter().map(CudaDevice::ordinal).filter(|&other| other != device.ordinal());
        others.into_iter().try_for_each(|other| device.share_memory_with(other))?;
    }
    Ok(())
}

/// One end per communicator of this process, out of `ranks` in all.
fn ends_of(
    comms: Vec<ncclComm_t>,
    devices: &mut [CudaDevice],
    library: &Arc<NcclLibrary>,
    barrier: &Arc<RankBarrier>,
    ranks: usize,
) -> Vec<NcclExchange> {
    let mut ends = Vec::new();
    for ((rank, comm), device) in (barrier.first()..).zip(comms).zip(devices) {
        // SAFETY: just created, and not shared.
        let communicator = unsafe { Communicator::new(Arc::clone(library), comm, Arc::clone(barrier)) };
        let communicator = Arc::new(communicator);
        device.set_rank_watch(Arc::clone(&communicator) as _, barrier.watchdog());
        ends.push(NcclExchange {
            rank,
            ranks,
            communicator,
            barrier: Arc::clone(barrier),
            receive_buffer: Mutex::default(),
            peers: None,
        });
    }
    ends
}

impl Drop for NcclExchange {
    /// Ends what the device waits for: the other ranks may be lost.
    fn drop(&mut self) {
        self.communicator.abort();
    }
}

impl Exchange<CudaDevice> for NcclExchange {
    fn with_parts(
        &self,
        device: &mut CudaDevice,
        part: &Tensor<CudaMemory, f32>,
        (lens, readers): (&[usize], Readers),
        read: Read<'_, CudaDevice>,
    ) -> Result<(), EngineError> {
        assert!(lens[self.rank] <= part.len(), "a part holds what it gives away");
        let stream = self.begin(device)?;
        if readers == Readers::First && self.rank > 0 {
            // SAFETY: the check above ensures that the part has enough numbers; it is freed in stream order.
            self.communicator.with(|library, comm| unsafe {
                library.send_to_first((part.address(), lens[self.rank]), comm, stream)
            })?;
            return Ok(());
        }
        let mut receive_buffer = self.receive_buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let len = if readers == Readers::Shares { lens[0] } else { lens.iter().sum() };
        let receive_buffer = ensure_capacity(&mut receive_buffer, device, len, "parts of other ranks")?;
        let parts = match readers {
            Readers::Shares => self.exchange_shares(part, receive_buffer, lens[0], stream)?,
            Readers::All | Readers::First => {
                let starts = lens.iter().scan(0, |next, len| Some(std::mem::replace(next, *next + len)));
                let mut parts: Vec<u64> = starts.map(|start| receive_buffer.address_of(start)).collect();
                if readers == Readers::All {
                    // SAFETY: `receive_buffer` has room for all parts, which have equal lengths; both are
                    // freed in stream order.
                    self.communicator.with(|library, comm| unsafe {
                        library.all_gather((part.address(), receive_buffer.address()), lens[0], comm, stream)
                    })?;
                } else {
                    let others: Vec<Message> =
                        (1..lens.len()).map(|rank| (rank, parts[rank], lens[rank])).collect();
                    self.exchange((&[], &others), stream)?;
                    parts[0] = part.address();
                }
                parts
            }
        };
        Ok(read(device, &parts)?)
    }

    fn sum(
        &self,
        device: &mut CudaDevice,
        (part, len): (&Tensor<CudaMemory, f32>, usize),
        sum: &mut Tensor<CudaMemory, f32>,
    ) -> Result<bool, EngineError> {
        let Some(peers) = self.peers.as_ref().filter(|peers| peers.takes(len)) else { return Ok(false) };
        self.check_ranks()?;
        peers.add(device, (part, len), sum)?;
        Ok(true)
    }

    /// The library gathers in order of rank, so it can write to `out` itself.
    fn gather(
        &self,
        device: &mut CudaDevice,
        (part, len): (&Tensor<CudaMemory, f32>, usize),
        (out, ranks): (&mut Tensor<CudaMemory, f32>, usize),
    ) -> Result<(), EngineError> {
        assert!(ranks == self.ranks && len <= part.len() && ranks * len <= out.len(), "a sum has its shares");
        let stream = self.begin(device)?;
        // SAFETY: both have enough numbers by the assertion above, and are freed in stream order.
        self.communicator.with(|library, comm| unsafe {
            library.all_gather((part.address(), out.address()), len, comm, stream)
        })?;
        Ok(())
    }
}

impl NcclExchange {
    /// The number of this rank, and the number of all ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    pub(super) fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// Has short sums formed over peer pointers.
    pub(super) fn use_peers(&mut self, peers: PeerSums) {
        self.peers = Some(peers);
    }

    /// Begins an exchange over the library. Launches that were only collected start before it.
    fn begin(&self, device: &mut CudaDevice) -> Result<*mut c_void, EngineError> {
        self.check_ranks()?;
        Ok(device.raw_stream()?)
    }

    /// Returns an error if a rank is lost: then this rank's device must not wait for it any more.
    fn check_ranks(&self) -> Result<(), EngineError> {
        self.barrier.check().inspect_err(|_| self.communicator.abort())?;
        self.barrier.record_progress();
        Ok(())
    }

    /// Sends every rank its share of `part`, `len` numbers long, and receives this rank's share of the other
    /// parts in `receive_buffer`. Returns the address of this rank's share of each part.
    fn exchange_shares(
        &self,
        part: &Tensor<CudaMemory, f32>,
        receive_buffer: &Tensor<CudaMemory, f32>,
        len: usize,
        stream: *mut c_void,
    ) -> Result<Vec<u64>, EngineError> {
        let ranks = self.ranks;
        let share = len / ranks;
        let others = (0..ranks).filter(|&rank| rank != self.rank);
        let sent: Vec<Message> =
            others.clone().map(|rank| (rank, part.address_of(rank * share), share)).collect();
        let received: Vec<Message> =
            others.map(|rank| (rank, receive_buffer.address_of(rank * share), share)).collect();
        self.exchange((&sent, &received), stream)?;
        let mut shares: Vec<u64> = (0..ranks).map(|rank| receive_buffer.address_of(rank * share)).collect();
        shares[self.rank] = part.address_of(self.rank * share);
        Ok(shares)
    }

    fn exchange(&self, messages: (&[Message], &[Message]), stream: *mut c_void) -> Result<(), CudaError> {
        // SAFETY: the messages are disjoint parts of tensors of this device, which are freed in stream order.
        self.communicator.with(|library, comm| unsafe { library.exchange(messages, comm, stream) })
    }
}
