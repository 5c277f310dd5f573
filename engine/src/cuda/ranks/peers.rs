//! Sums over ranks by one kernel a rank, which reads the parts of all ranks over peer pointers
//! (kernels/all_reduce.cu). For short sums, whose time is the latency of a collective; NCCL moves everything
//! else, and these sums too where GPUs do not access each other's memory. Nothing of it needs the host
//! between two kernels, so a graph contains the sums of a whole step.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::SumPhases;
use super::nccl::NcclExchange;
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::device::{CudaDevice, CudaMemory, SharedWord};
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{AllReduce, SumMemory};

/// One rank's sums.
#[derive(Debug)]
pub(super) struct PeerSums {
    launches: AllReduce,
    stream: Arc<CudaStream>,
    /// Ends the waits of all ranks' kernels.
    _stop: Arc<SharedWord>,
    /// Of all ranks: kernels of a rank access the memory of every rank, so none is freed before the kernels
    /// of all have finished.
    _memories: Arc<Vec<Tensor<CudaMemory, u32>>>,
}

/// Has ranks that [`connect`](super::connect) connected form short sums over peer pointers from now on, if
/// every GPU accesses the memory of every other one. Returns whether they do.
pub(crate) fn use_peers(
    devices: &mut [CudaDevice],
    ends: &mut [NcclExchange],
    barrier: &RankBarrier,
) -> Result<bool, EngineError> {
    let ranks = devices.len();
    if ranks < 2 || !are_connected(devices)? {
        return Ok(false);
    }
    let layout = SumMemory::for_sums_of(SumPhases::max_len_over_peers(ranks));
    let memory = |device: &mut CudaDevice| -> Result<_, CudaError> {
        let mut memory: Tensor<_, u32> = Tensor::zeros(device, layout.words(), "parts of sums over ranks")?;
        memory.write(device, 0, &SumMemory::header())?;
        Ok(memory)
    };
    let memories = devices.iter_mut().map(memory).collect::<Result<Vec<_>, _>>()?;
    // No rank's kernel may write to memory that is still being prepared.
    devices.iter_mut().try_for_each(CudaDevice::wait)?;
    let addresses: Vec<u64> = memories.iter().map(Tensor::address).collect();
    let (memories, patience) = (Arc::new(memories), barrier.watchdog());
    // One for all ranks: a rank may have given up before another one, whose own sums were complete, ends its
    // forward.
    let word = Arc::new(devices[0].shared_word()?);
    let stop = word.address();
    for (rank, (device, end)) in devices.iter().zip(ends).enumerate() {
        end.communicator().keep_stop(Arc::clone(&word));
        let launches = AllReduce { memories: addresses.clone(), layout, rank, stop, patience };
        end.use_peers(PeerSums {
            launches,
            stream: Arc::clone(device.stream()),
            _stop: Arc::clone(&word),
            _memories: Arc::clone(&memories),
        });
    }
    Ok(true)
}

fn are_connected(devices: &[CudaDevice]) -> Result<bool, CudaError> {
    for (i, device) in devices.iter().enumerate() {
        for (j, other) in devices.iter().enumerate() {
            if i != j && !device.is_connected_to(other.ordinal())? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

impl PeerSums {
    /// Whether a sum of this length is formed here. The same on all ranks.
    pub(super) fn takes(&self, len: usize) -> bool {
        self.launches.layout.fits(len)
    }

    /// Puts the sum of all ranks' parts into `sum`. All ranks make this call, in the same order.
    pub(super) fn add(
        &self,
        device: &mut CudaDevice,
        (part, len): (&Tensor<CudaMemory, f32>, usize),
        sum: &mut Tensor<CudaMemory, f32>,
    ) -> Result<(), CudaError> {
        // SAFETY: the memories were prepared by `use_peers`. They and the word at `stop` are freed only when
        // all ranks' kernels have finished (`drop`).
        unsafe { self.launches.launch(device, part, sum, len) }
    }
}

impl Drop for PeerSums {
    /// Waits until this rank's kernels have finished: then they access no memory of other ranks any more, and
    /// others may free it. The exchange that owns this has ended their waits before (`NcclExchange::drop`).
    fn drop(&mut self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "a rank was left with sums under way");
        }
    }
}
