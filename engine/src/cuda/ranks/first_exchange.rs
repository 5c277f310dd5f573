//! The first exchange between ranks on GPUs, also of several nodes, while a model is loaded. The library
//! connects two ranks, and allocates device memory for it, when they first exchange something. Done here,
//! that memory counts as used when the KV cache is sized, and GPUs that do not reach each other, or receive
//! numbers that were not sent, fail the start instead of a request.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use super::nccl::NcclExchange;
use super::{Exchange, Readers};
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::device::{CudaDevice, CudaMemory};
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::concat_ranks;

/// Numbers that each rank has for each rank.
const LEN: usize = 64;

/// A rank that has exchanged numbers, or failed to.
struct Member {
    rank: usize,
    /// Dropped before the device: it ends what the device waits for.
    end: NcclExchange,
    device: CudaDevice,
}

/// Exchanges numbers between all ranks in each way, and checks what arrives. Both lists are in order of rank.
pub(crate) fn exchange_once(
    devices: Vec<CudaDevice>,
    ends: Vec<NcclExchange>,
    barrier: &Arc<RankBarrier>,
) -> Result<Vec<(CudaDevice, NcclExchange)>, EngineError> {
    let (first, count) = (barrier.first(), devices.len());
    let (outbox, inbox) = sync_channel(count);
    for (device, end) in devices.into_iter().zip(ends) {
        let (rank, ranks) = end.place();
        let (mut member, outbox) = (Member { rank, end, device }, outbox.clone());
        let ranks_barrier = Arc::clone(barrier);
        let run = move || {
            if let Err(error) = member.exchange(ranks) {
                ranks_barrier.mark_lost(rank, format!("its first exchange failed: {error}"));
            }
            // Fails if the loop below has given up; then nobody needs the member.
            drop(outbox.send(member));
        };
        std::thread::Builder::new().name(format!("rank-{rank}")).spawn(run).map_err(|error| {
            EngineError::RankLost { rank, reason: format!("its thread failed to start: {error}") }
        })?;
    }
    drop(outbox);
    let mut members: Vec<Member> = Vec::with_capacity(count);
    while members.len() < count {
        // Longer than a member's own wait for its device, whose error says more.
        let Ok(member) = inbox.recv_timeout(2 * barrier.watchdog()) else {
            let is_missing = |rank: &usize| members.iter().all(|member| member.rank != *rank);
            let missing = (first..first + count).find(is_missing).unwrap_or(first);
            barrier.mark_lost(missing, "its first exchange did not end".to_owned());
            break;
        };
        members.push(member);
    }
    barrier.check()?;
    members.sort_by_key(|member| member.rank);
    Ok(members.into_iter().map(|Member { end, device, .. }| (device, end)).collect())
}

impl Member {
    fn exchange(&mut self, ranks: usize) -> Result<(), EngineError> {
        let Self { rank, end, device } = &mut *self;
        let purpose = "numbers of the first exchange";
        let part = Tensor::of(device, &numbers(*rank, ranks), purpose)?;
        let mut arrived: Tensor<_, f32> = Tensor::zeros(device, ranks * ranks * LEN, purpose)?;
        let lens = vec![ranks * LEN; ranks];
        for readers in [Readers::All, Readers::Shares, Readers::First] {
            let read = match readers {
                Readers::Shares => *rank * LEN..(*rank + 1) * LEN,
                Readers::All | Readers::First => 0..ranks * LEN,
            };
            let expected: Vec<f32> =
                (0..ranks).flat_map(|rank| numbers(rank, ranks)[read.clone()].to_vec()).collect();
            let mut has_read = false;
            end.with_parts(device, &part, (&lens, readers), &mut |device, parts| {
                has_read = true;
                // SAFETY: by the exchange's contract each address has the numbers of `read` until the launch
                // is done.
                unsafe { concat_ranks(device, parts, &mut arrived, (1, expected.len())) }
            })?;
            device.wait()?;
            if has_read && arrived.read(device, 0..expected.len())? != expected {
                let reason = "a gpu received other numbers than were sent to it: gpus of a machine do not \
                              read each other's memory correctly, NCCL_P2P_DISABLE=1 avoids that";
                return Err(CudaError::RankFailure { reason: reason.to_owned() }.into());
            }
        }
        self.add_up(&part, ranks)
    }

    /// Forms sums as a forward does, if kernels form them. Once more than there are regions for parts; the
    /// number of the second sum wraps around (`ops/all_reduce.rs`).
    fn add_up(&mut self, part: &Tensor<CudaMemory, f32>, ranks: usize) -> Result<(), EngineError> {
        let Self { end, device, .. } = self;
        let len = ranks * LEN;
        let mut sum: Tensor<_, f32> = Tensor::zeros(device, len, "a sum of the first exchange")?;
        let parts: Vec<Vec<f32>> = (0..ranks).map(|rank| numbers(rank, ranks)).collect();
        // Whole numbers: the sums are exact.
        let expected: Vec<f32> = (0..len).map(|i| parts.iter().map(|part| part[i]).sum()).collect();
        for _ in 0..3 {
            if !end.sum(device, (part, len), &mut sum)? {
                return Ok(());
            }
            if sum.read(device, 0..len)? != expected {
                let reason = "a sum over peer pointers is wrong: gpus of this machine do not read each other's \
                              memory correctly, serve without such sums";
                return Err(CudaError::RankFailure { reason: reason.to_owned() }.into());
            }
        }
        Ok(())
    }
}

/// Numbers that no other rank sends.
fn numbers(rank: usize, ranks: usize) -> Vec<f32> {
    let len = ranks * LEN;
    (0..len).map(|i| (rank * len + i + 1) as f32).collect()
}
