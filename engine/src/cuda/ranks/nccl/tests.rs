//! Exchanges over the host's NCCL (`emulator/nccl.hpp`), which refuses wrong buffers and waits for each rank.

use std::ops::Range;
use std::time::Duration;

use super::*;
use crate::backend::Backend;
use crate::collective::Collective;
use crate::cuda::backend::{Gpu, GpuRows};
use crate::cuda::executor::Executor;
use crate::cuda::host_driver::HostDriver;
use crate::cuda::ops::concat_ranks;
use crate::cuda::ranks::{GpuRank, SumPhases, exchange_once};

pub(super) const EIGHT_DEVICES: &[(&str, &str)] = &[("OUTRIDER_HOST_DEVICES", "8")];

/// A device and its exchange for each of `ranks` ranks.
pub(super) fn connected(
    driver: &HostDriver,
    ranks: usize,
    watchdog: Duration,
) -> (Vec<Rank>, Arc<RankBarrier>) {
    let barrier = Arc::new(RankBarrier::new(ranks, watchdog));
    let open = |ordinal| CudaDevice::open(ordinal, Some(&driver.kernels)).unwrap();
    let mut devices: Vec<CudaDevice> = (0..ranks).map(open).collect();
    let library = Arc::new(NcclLibrary::load().unwrap());
    let ends = connect(&mut devices, &library, &barrier).unwrap();
    let ranks = devices.into_iter().zip(ends).map(|(device, end)| Rank { device, end }).collect();
    (ranks, barrier)
}

/// Numbers of a rank's part.
fn numbers(rank: usize, range: Range<usize>) -> Vec<f32> {
    range.map(|i| (1000 * rank + i) as f32).collect()
}

pub(super) struct Rank {
    pub(super) device: CudaDevice,
    pub(super) end: NcclExchange,
}

impl Rank {
    /// This rank's part: numbers that no other rank has.
    fn part(&mut self, len: usize) -> Tensor<CudaMemory, f32> {
        Tensor::of(&mut self.device, &numbers(self.end.rank, 0..len), "a part").unwrap()
    }

    /// Exchanges parts, and returns the numbers at all addresses that this rank can read, one part after the
    /// other; `width` numbers in all.
    fn exchange(&mut self, lens: &[usize], readers: Readers, width: usize) -> Result<Vec<f32>, EngineError> {
        let part = self.part(lens[self.end.rank]);
        let mut joined = Tensor::of(&mut self.device, &vec![-1.0f32; width], "what was read")?;
        let mut has_read = false;
        self.end.with_parts(&mut self.device, &part, (lens, readers), &mut |device, parts| {
            has_read = true;
            // SAFETY: the addresses have the ranks' parts by the exchange's contract.
            unsafe { concat_ranks(device, parts, &mut joined, (1, width)) }
        })?;
        self.device.wait()?;
        assert_eq!(has_read, readers != Readers::First || self.end.rank == 0);
        Ok(if has_read { joined.read(&mut self.device, 0..width)? } else { Vec::new() })
    }
}

/// Runs `run` on each rank, in a thread each.
pub(super) fn on_every_rank<T: Send>(ranks: Vec<Rank>, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn each_rank_reads_the_parts_of_all_ranks() {
    let name = "cuda::ranks::nccl::tests::each_rank_reads_the_parts_of_all_ranks";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for count in [1, 2, 4, 8] {
        let (ranks, _) = connected(&driver, count, Duration::from_secs(100));
        on_every_rank(ranks, |mut rank| {
            // A large exchange first: the receive buffer is longer than what later ones need.
            for len in [24 * count, 8 * count, count] {
                let all = rank.exchange(&vec![len; count], Readers::All, count * len).unwrap();
                let expected: Vec<f32> = (0..count).flat_map(|part| numbers(part, 0..len)).collect();
                assert_eq!(all, expected);

                let shares = rank.exchange(&vec![len; count], Readers::Shares, len).unwrap();
                let (share, start) = (len / count, rank.end.rank * (len / count));
                let expected: Vec<f32> =
                    (0..count).flat_map(|part| numbers(part, start..start + share)).collect();
                assert_eq!(shares, expected);
            }
            // Parts of the vocabulary have unequal widths.
            let width = 8 * count + 3;
            let lens: Vec<usize> = (0..count).map(|r| (r + 1) * width / count - r * width / count).collect();
            let first = rank.exchange(&lens, Readers::First, width).unwrap();
            let expected: Vec<f32> = (0..count).flat_map(|part| numbers(part, 0..lens[part])).collect();
            assert_eq!(first, if rank.end.rank == 0 { expected } else { Vec::new() });
        });
    }
}

/// A rank that cannot exchange numbers ends the start of all ranks, with an error that names it.
#[test]
fn ranks_exchange_numbers_once_when_a_model_is_loaded() {
    let name = "cuda::ranks::nccl::tests::ranks_exchange_numbers_once_when_a_model_is_loaded";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let exchange = |count: usize, aborted: Option<usize>| {
        let (ranks, barrier) = connected(&driver, count, Duration::from_secs(100));
        let (devices, ends): (Vec<_>, Vec<_>) =
            ranks.into_iter().map(|Rank { device, end }| (device, end)).unzip();
        aborted.into_iter().for_each(|rank| ends[rank].communicator.abort());
        let before = driver.counts();
        let connected = exchange_once(devices, ends, &barrier)?;
        let received = driver.counts().since(before).bytes_from_ranks;
        let order: Vec<(usize, usize)> =
            connected.iter().map(|(device, end)| (device.ordinal(), end.rank)).collect();
        Ok::<_, EngineError>((order, received))
    };
    for count in [1, 2, 4, 8] {
        let (order, received) = exchange(count, None).unwrap();
        assert_eq!(order, (0..count).map(|rank| (rank, rank)).collect::<Vec<_>>());
        assert!(count == 1 || received > 0, "{count} ranks");
    }
    let error = exchange(4, Some(2)).unwrap_err();
    let said = error.to_string();
    assert!(error.is_fatal() && said.contains("rank 2 is lost: its first exchange failed"), "{said}");
    assert!(said.contains("the communicator was aborted"), "{said}");
}

/// Of a sum over eight ranks each rank receives 7 parts in one phase, and 1.75 in two.
#[test]
fn two_phases_receive_a_quarter_of_the_bytes() {
    let name = "cuda::ranks::nccl::tests::two_phases_receive_a_quarter_of_the_bytes";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let received = |exchanges: &(dyn Fn(&mut Rank) + Sync)| {
        let (ranks, _) = connected(&driver, 8, Duration::from_secs(100));
        let before = driver.counts();
        on_every_rank(ranks, |mut rank| exchanges(&mut rank));
        driver.counts().since(before).bytes_from_ranks
    };
    let (len, bytes) = (64, 64 * size_of::<f32>() as u64);
    let one = received(&|rank| drop(rank.exchange(&[len; 8], Readers::All, 8 * len).unwrap()));
    let two = received(&|rank| {
        rank.exchange(&[len; 8], Readers::Shares, len).unwrap();
        rank.exchange(&[len / 8; 8], Readers::All, len).unwrap();
    });
    assert_eq!((one, two), (8 * 7 * bytes, 8 * bytes * 7 / 4));
}

#[test]
fn a_rank_that_never_comes_or_is_lost_ends_the_wait() {
    let name = "cuda::ranks::nccl::tests::a_rank_that_never_comes_or_is_lost_ends_the_wait";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let first = |watchdog, lost: Option<&str>| {
        let (mut ranks, barrier) = connected(&driver, 2, watchdog);
        lost.into_iter().for_each(|reason| barrier.mark_lost(1, reason.to_owned()));
        let exchanged = ranks[0].exchange(&[4, 4], Readers::All, 8);
        let again = ranks[0].exchange(&[4, 4], Readers::All, 8).unwrap_err();
        (exchanged.unwrap_err().to_string(), again.to_string())
    };
    let (late, again) = first(Duration::from_millis(200), None);
    assert!(late.contains("not done within 200ms"), "{late}");
    assert!(again.contains("the communicator was aborted"), "{again}");
    let (lost, again) = first(Duration::from_secs(100), Some("its kernel failed"));
    assert!(lost.contains("rank 1 is lost") && lost.contains("its kernel failed"), "{lost}");
    assert_eq!(again, lost);
}

/// Ranks that disagree about a length would read each other's old numbers.
#[test]
fn a_fault_of_the_library_ends_the_wait_of_both_ranks() {
    let name = "cuda::ranks::nccl::tests::a_fault_of_the_library_ends_the_wait_of_both_ranks";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (ranks, _) = connected(&driver, 2, Duration::from_secs(100));
    let errors = on_every_rank(ranks, |mut rank| {
        let len = 4 + rank.end.rank;
        rank.exchange(&[len, len], Readers::All, 2 * len).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("a collective: invalid usage")), "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("nccl failed")), "{errors:?}");
}

/// What no other test would notice on the host, where all memory is one: the host's NCCL refuses it.
#[test]
fn buffers_that_are_too_short_are_refused() {
    let name = "cuda::ranks::nccl::tests::buffers_that_are_too_short_are_refused";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (mut ranks, _) = connected(&driver, 2, Duration::from_secs(100));
    let (part, foreign) = (ranks[0].part(4), ranks[1].part(4));
    let Rank { device, end } = &mut ranks[0];
    let stream = device.raw_stream().unwrap();
    let send = |address: u64, count| {
        // SAFETY: the host's NCCL checks the buffer before it uses it.
        end.communicator
            .with(|library, comm| unsafe { library.exchange((&[(1, address, count)], &[]), comm, stream) })
    };
    let refused = send(part.address(), 1 << 20).unwrap_err().to_string();
    assert!(refused.contains("ncclGroupEnd") && refused.contains("too short"), "{refused}");
    let refused = send(foreign.address(), 4).unwrap_err().to_string();
    assert!(refused.contains("not of the communicator's device"), "{refused}");
}

/// A rank as a model has it, with its part of a sum.
struct SummingRank {
    // In the order of a model's rank.
    gpu: Gpu<CudaDevice>,
    collective: GpuRank<CudaDevice>,
    rows: GpuRows<CudaMemory>,
}

impl SummingRank {
    fn new(Rank { device, end }: Rank, ranks: usize, len: usize) -> Self {
        let (gpu, rank) = (Gpu::new(device), end.rank);
        let collective = GpuRank::new(gpu.share_state(), Box::new(end), (rank, ranks), SumPhases::ALWAYS_TWO);
        let mut this = Self { gpu, collective, rows: GpuRows::default() };
        this.set_part(rank, len);
        this
    }

    fn set_part(&mut self, rank: usize, len: usize) {
        let state = self.gpu.share_state();
        let part = state.run(|device| Ok(Tensor::of(device, &numbers(rank, 0..len), "a part")?)).unwrap();
        *self.rows.slot().0 = Some(part);
        self.rows.set_len(len);
    }

    fn sums(&mut self) -> Vec<f32> {
        let (slot, len) = self.rows.slot();
        let sums = slot.as_ref().unwrap();
        self.gpu.share_state().run(|device| Ok(sums.read(device, 0..len)?)).unwrap()
    }
}

/// A sum in two phases launches one kernel on each rank: the gathered shares are the sums.
#[test]
fn a_sum_in_two_phases_is_one_launch() {
    let name = "cuda::ranks::nccl::tests::a_sum_in_two_phases_is_one_launch";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for count in [4, 8] {
        let (ranks, _) = connected(&driver, count, Duration::from_secs(100));
        let len = 16 * count;
        let earlier = driver.counts();
        on_every_rank(ranks, |rank| {
            let mut rank = SummingRank::new(rank, count, len);
            rank.collective.all_reduce(&mut rank.rows).unwrap();
            let of_all = |i: usize| (0..count).map(|rank| numbers(rank, i..i + 1)[0]).sum::<f32>();
            let expected: Vec<f32> = (0..len).map(of_all).collect();
            assert_eq!(rank.sums(), expected);
        });
        assert_eq!(driver.counts().since(earlier).launches, count as u64);
    }
}

/// The device has copies under way when it is dropped, and waits for them behind a sum that never ends.
#[test]
fn a_rank_can_be_dropped_after_another_is_lost() {
    let name = "cuda::ranks::nccl::tests::a_rank_can_be_dropped_after_another_is_lost";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for notices in [false, true] {
        let (mut ranks, barrier) = connected(&driver, 4, Duration::from_secs(100));
        let mut rank = SummingRank::new(ranks.swap_remove(0), 4, 16);
        rank.collective.all_reduce(&mut rank.rows).unwrap();
        barrier.mark_lost(1, "its kernel failed".to_owned());
        if notices {
            let lost = rank.collective.all_reduce(&mut rank.rows).unwrap_err().to_string();
            assert!(lost.contains("its kernel failed"), "{lost}");
            rank.gpu.wait().unwrap();
        }
        drop(rank);
    }
}
