//! Sums over ranks by one kernel over peer pointers, against parts that NCCL moves and a kernel adds: equal
//! bits, and times.

use std::sync::Arc;
use std::time::Instant;

use super::ranks::PATIENCE;
use super::{CheckTarget, Report};
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::device::{CudaDevice, CudaMemory};
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::sum_ranks;
use crate::cuda::ranks::{Exchange, NcclExchange, NcclLibrary, Readers, SumPhases, connect, use_peers};
use crate::rank::on_threads;

/// Compares both ways on the first `count` GPUs, for rows of a 70B model. Returns whether they ran, which
/// needs GPUs that access each other's memory.
pub(super) fn peer_sums(
    target: &CheckTarget,
    count: usize,
    report: &mut Report<'_>,
) -> Result<bool, EngineError> {
    let (width, repeats) = if target.is_dry { (64, 2) } else { (8192, 200) };
    let most = SumPhases::max_len_over_peers(count);
    let rows: Vec<usize> = [1, 5, 8, 15, 36, 109].into_iter().filter(|rows| rows * width <= most).collect();
    let barrier = Arc::new(RankBarrier::new(count, PATIENCE));
    let open = |ordinal| CudaDevice::open(ordinal, target.kernels.as_deref());
    let mut devices = (0..count).map(open).collect::<Result<Vec<_>, _>>()?;
    let mut ends = connect(&mut devices, &Arc::new(NcclLibrary::load()?), &barrier)?;
    if !use_peers(&mut devices, &mut ends, &barrier)? {
        let why = "these gpus do not access each other's memory";
        report.skipped(&format!("sums over peer pointers of {count} gpus"), why);
        return Ok(false);
    }
    let ranks = devices.into_iter().zip(ends);
    let run = |rank: usize, (device, end): (CudaDevice, NcclExchange)| {
        let mut sums = RankSums { end, device, rank, ranks: count, repeats };
        let compared = rows.iter().map(|rows| sums.compare(rows * width)).collect::<Result<Vec<_>, _>>();
        // Otherwise the other ranks would wait for this one.
        let compared = compared.inspect_err(|error| barrier.mark_lost(rank, error.to_string()))?;
        // Connected until all ranks are done.
        Ok::<_, EngineError>((sums, compared))
    };
    let of_ranks = on_threads(ranks, run)?;
    for (i, rows) in rows.iter().enumerate() {
        let Compared { peers_us, nccl_us, .. } = of_ranks[0].1[i];
        let are_equal = of_ranks.iter().all(|(_, compared)| compared[i].are_equal);
        let case = format!("{count} gpus, {rows} rows of {width}: sums over peer pointers == over nccl");
        report.check(are_equal, format!("{case}; {peers_us:.1} us, nccl {nccl_us:.1} us"));
    }
    Ok(true)
}

/// One rank, and how often it repeats a sum.
struct RankSums {
    /// Dropped before the device: it ends what the device waits for.
    end: NcclExchange,
    device: CudaDevice,
    rank: usize,
    ranks: usize,
    repeats: usize,
}

/// Both ways of one sum.
#[derive(Debug, Clone, Copy)]
struct Compared {
    peers_us: f64,
    nccl_us: f64,
    are_equal: bool,
}

impl RankSums {
    fn compare(&mut self, len: usize) -> Result<Compared, EngineError> {
        let (ranks, lens) = (self.ranks, vec![len; self.ranks]);
        let number = |i: usize| ((i * 7919 + self.rank * 104_729) % 2003) as f32 / 1001.0 - 1.0;
        let numbers: Vec<f32> = (0..len).map(number).collect();
        let part = Tensor::of(&mut self.device, &numbers, "a part")?;
        let mut over_peers = Tensor::zeros(&mut self.device, len, "a sum")?;
        let mut over_nccl = Tensor::zeros(&mut self.device, len, "a sum")?;
        let peers_us = self.time(|device, end| {
            if end.sum(device, (&part, len), &mut over_peers)? {
                return Ok(());
            }
            let reason = format!("{ranks} ranks leave a sum of {len} numbers to nccl");
            Err(CudaError::RankFailure { reason }.into())
        })?;
        let nccl_us = self.time(|device, end| {
            end.with_parts(device, &part, (&lens, Readers::All), &mut |device, parts| {
                // SAFETY: by the exchange's contract each address has `len` numbers until the launch is done.
                unsafe { sum_ranks(device, parts, &mut over_nccl, len) }
            })
        })?;
        let mut bits_of = |sum: &Tensor<CudaMemory, f32>| -> Result<Vec<u32>, CudaError> {
            Ok(sum.read(&mut self.device, 0..len)?.into_iter().map(f32::to_bits).collect())
        };
        let are_equal = bits_of(&over_peers)? == bits_of(&over_nccl)?;
        Ok(Compared { peers_us, nccl_us, are_equal })
    }

    /// Microseconds of a launch, of many in a row.
    fn time(
        &mut self,
        mut launch: impl FnMut(&mut CudaDevice, &NcclExchange) -> Result<(), EngineError>,
    ) -> Result<f64, EngineError> {
        let Self { device, end, repeats, .. } = self;
        launch(device, end)?;
        device.wait()?;
        let began = Instant::now();
        for _ in 0..*repeats {
            launch(device, end)?;
        }
        device.wait()?;
        Ok(began.elapsed().as_secs_f64() * 1e6 / *repeats as f64)
    }
}
