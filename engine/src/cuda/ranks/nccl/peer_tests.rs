//! Sums over peer pointers on the host driver: every rank is a thread with a device, and its kernels wait for
//! those of the other ranks.

use std::sync::Barrier;
use std::time::Duration;

use cpu_kernels::{NUM_SLICES, tree_sum};
use cudarc::driver::sys;

use super::tests::{EIGHT_DEVICES, Rank, connected, on_every_rank};
use super::*;
use crate::Engine;
use crate::cuda::GpuOptions;
use crate::cuda::executor::Executor;
use crate::cuda::host_driver::HostDriver;
use crate::cuda::ops::sum_ranks;
use crate::cuda::ranks::{exchange_once, use_peers};
use crate::cuda::test_model::{TINY, changed_config};
use crate::cuda::whole_model::run;

const LONG: Duration = Duration::from_secs(100);

/// Ranks that form short sums over peer pointers. Whichever is dropped first ends the waits of all.
fn with_peers(driver: &HostDriver, count: usize, patience: Duration) -> (Vec<Rank>, Arc<RankBarrier>) {
    let (ranks, barrier) = connected(driver, count, patience);
    let (mut devices, mut ends): (Vec<_>, Vec<_>) =
        ranks.into_iter().map(|Rank { device, end }| (device, end)).unzip();
    assert!(use_peers(&mut devices, &mut ends, &barrier).unwrap());
    let ranks = devices.into_iter().zip(ends).map(|(device, end)| Rank { device, end }).collect();
    (ranks, barrier)
}

/// A rank's part of sum `number`: numbers of very different sizes, whose sum depends on the order.
fn part(rank: usize, number: usize, len: usize) -> Vec<f32> {
    let hash = |i: usize| (i + 1000 * rank + 77_777 * number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let number = |bits: usize| (bits % 20_011) as f32 / 10_000.0 - 1.0;
    (0..len).map(|i| number(hash(i)) * 10f32.powi((hash(i) / 20_011 % 7) as i32)).collect()
}

/// The contract's tree over the parts of all ranks.
fn expected(count: usize, number: usize, len: usize) -> Vec<f32> {
    let parts: Vec<Vec<f32>> = (0..count).map(|rank| part(rank, number, len)).collect();
    let sum = |i: usize| {
        let mut slices = [0.0; NUM_SLICES];
        parts.iter().enumerate().for_each(|(rank, part)| slices[rank * NUM_SLICES / count] = part[i]);
        tree_sum(slices)
    };
    (0..len).map(sum).collect()
}

impl Rank {
    /// Launches a sum over peer pointers; not one that the library moves.
    fn add(&mut self, number: usize, len: usize) -> Result<Tensor<CudaMemory, f32>, EngineError> {
        let part = Tensor::of(&mut self.device, &part(self.end.rank, number, len), "a part")?;
        let mut sum = Tensor::zeros(&mut self.device, len, "a sum")?;
        assert!(self.end.sum(&mut self.device, (&part, len), &mut sum)?, "{len} numbers");
        // The part is freed in stream order, after a launch that may only have been collected so far.
        self.device.flush()?;
        Ok(sum)
    }

    /// The same sum over the library.
    fn add_by_library(&mut self, number: usize, len: usize) -> Result<Vec<f32>, EngineError> {
        let part = Tensor::of(&mut self.device, &part(self.end.rank, number, len), "a part")?;
        let mut sum = Tensor::zeros(&mut self.device, len, "a sum")?;
        let lens = vec![len; self.end.ranks];
        self.end.with_parts(&mut self.device, &part, (&lens, Readers::All), &mut |device, parts| {
            // SAFETY: the addresses have the ranks' parts by the exchange's contract.
            unsafe { sum_ranks(device, parts, &mut sum, len) }
        })?;
        Ok(sum.read(&mut self.device, 0..len)?)
    }

    /// Lets the device run as far as it gets, and returns whether it has finished everything.
    fn runs_to_the_end(&mut self) -> bool {
        let stream = self.device.raw_stream().unwrap();
        // SAFETY: the stream is the device's. The first call runs what it can; the second says what is left.
        unsafe {
            let _pending = sys::cuStreamQuery(stream.cast());
            sys::cuStreamQuery(stream.cast()) == sys::CUresult::CUDA_SUCCESS
        }
    }
}

/// Sums in a row, longer and shorter ones, more than there are before numbers of sums wrap around: the bits
/// of the contract's tree, and of the parts that the library moves.
#[test]
fn sums_have_the_bits_of_the_tree_and_of_the_library() {
    let name = "cuda::ranks::nccl::peer_tests::sums_have_the_bits_of_the_tree_and_of_the_library";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let len_of = |number: usize| [4, 8, 3000, 1024, 64][number % 5];
    for count in [2, 4, 8] {
        let (ranks, _) = with_peers(&driver, count, LONG);
        on_every_rank(ranks, |mut rank| {
            // Two at a time before either is waited for, then all of them.
            for first in (0..12).step_by(2) {
                let sums = [first, first + 1].map(|number| rank.add(number, len_of(number)).unwrap());
                for (sum, number) in sums.iter().zip(first..) {
                    let len = len_of(number);
                    let found = sum.read(&mut rank.device, 0..len).unwrap();
                    assert_eq!(found, expected(count, number, len), "{count} ranks, sum {number}");
                    assert_eq!(
                        rank.add_by_library(number, len).unwrap(),
                        found,
                        "{count} ranks, sum {number}"
                    );
                }
            }
            let sums: Vec<_> = (20..40).map(|number| (number, rank.add(number, 16).unwrap())).collect();
            for (number, sum) in sums {
                let found = sum.read(&mut rank.device, 0..16).unwrap();
                assert_eq!(found, expected(count, number, 16), "{count} ranks, sum {number}");
            }
            rank
        });
    }
}

/// In turn, each rank launches its sum only when all others wait for it on their devices; and then the others
/// are ahead by a sum of which this rank has launched nothing.
#[test]
fn a_late_rank_is_waited_for() {
    let name = "cuda::ranks::nccl::peer_tests::a_late_rank_is_waited_for";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for count in [2, 4, 8] {
        let (ranks, _) = with_peers(&driver, count, LONG);
        let waiting = Barrier::new(count);
        on_every_rank(ranks, |mut rank| {
            for round in 0..2 * count {
                let (late, len) = (round % count, 4 * (1 + round % 3));
                let numbers = [2 * round, 2 * round + 1];
                let sums = if rank.end.rank == late {
                    waiting.wait();
                    numbers.map(|number| rank.add(number, len).unwrap())
                } else {
                    let sums = numbers.map(|number| rank.add(number, len).unwrap());
                    assert!(!rank.runs_to_the_end(), "rank {late} has launched nothing");
                    waiting.wait();
                    sums
                };
                for (sum, number) in sums.iter().zip(numbers) {
                    let found = sum.read(&mut rank.device, 0..len).unwrap();
                    assert_eq!(found, expected(count, number, len), "{count} ranks, sum {number}");
                }
            }
            rank
        });
    }
}

/// A sum is one launch on each rank and no message of the library; longer sums are left to the library.
#[test]
fn a_sum_is_one_launch_and_long_ones_are_left_to_the_library() {
    let name = "cuda::ranks::nccl::peer_tests::a_sum_is_one_launch_and_long_ones_are_left_to_the_library";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (ranks, _) = with_peers(&driver, 4, LONG);
    let earlier = driver.counts();
    let ranks = on_every_rank(ranks, |mut rank| {
        let sum = rank.add(0, 64).unwrap();
        assert_eq!(sum.read(&mut rank.device, 0..64).unwrap(), expected(4, 0, 64));
        rank
    });
    let counts = driver.counts().since(earlier);
    assert_eq!((counts.launches, counts.bytes_from_ranks), (4, 0), "{counts:?}");
    // The part goes up and the sum comes back.
    assert_eq!((counts.copies_to_device, counts.copies_from_device), (4, 4), "{counts:?}");

    on_every_rank(ranks, |mut rank| {
        // Regions have room for 64 blocks of 4,688 numbers.
        assert!(rank.end.peers.as_ref().unwrap().takes(300_032));
        // One vector more, and a length that is no whole number of vectors.
        for len in [300_036, 6] {
            let part = Tensor::zeros(&mut rank.device, len, "a part").unwrap();
            let mut sum = Tensor::zeros(&mut rank.device, len, "a sum").unwrap();
            assert!(!rank.end.sum(&mut rank.device, (&part, len), &mut sum).unwrap(), "{len}");
        }
    });
}

#[test]
fn ranks_that_do_not_reach_each_other_leave_sums_to_the_library() {
    let name = "cuda::ranks::nccl::peer_tests::ranks_that_do_not_reach_each_other_leave_sums_to_the_library";
    let variables = [EIGHT_DEVICES[0], ("OUTRIDER_HOST_ISOLATED", "2")];
    let Some(driver) = HostDriver::for_test_with(name, &variables) else { return };
    for (count, are_used) in [(1, false), (2, true), (4, false)] {
        let (ranks, barrier) = connected(&driver, count, LONG);
        let (mut devices, mut ends): (Vec<_>, Vec<_>) =
            ranks.into_iter().map(|Rank { device, end }| (device, end)).unzip();
        assert_eq!(use_peers(&mut devices, &mut ends, &barrier).unwrap(), are_used, "{count} ranks");
        assert!(ends.iter().all(|end| end.peers.is_some() == are_used), "{count} ranks");
    }
}

/// The first exchange of a start forms sums too, so wrong ones fail the start.
#[test]
fn the_first_exchange_forms_sums() {
    let name = "cuda::ranks::nccl::peer_tests::the_first_exchange_forms_sums";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for (count, makes_sums) in [(2, false), (2, true), (8, true)] {
        let (ranks, barrier) = match makes_sums {
            true => with_peers(&driver, count, LONG),
            false => connected(&driver, count, LONG),
        };
        let (devices, ends): (Vec<_>, Vec<_>) =
            ranks.into_iter().map(|Rank { device, end }| (device, end)).unzip();
        let earlier = driver.counts();
        exchange_once(devices, ends, &barrier).unwrap();
        let launches = driver.counts().since(earlier).launches as usize;
        // What arrived is concatenated on all ranks twice, and on the first one.
        let of_sums = if makes_sums { 3 * count } else { 0 };
        assert_eq!(launches, 2 * count + 1 + of_sums, "{count} ranks");
    }
}

/// Nobody marks the other rank as lost, and the host would wait much longer: the kernel itself gives up.
#[test]
fn a_kernel_gives_up_a_rank_that_never_comes() {
    let name = "cuda::ranks::nccl::peer_tests::a_kernel_gives_up_a_rank_that_never_comes";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (mut ranks, _) = with_peers(&driver, 2, Duration::from_millis(100));
    let mut rank = ranks.swap_remove(0);
    let watch: Arc<dyn Watch> = Arc::clone(&rank.end.communicator) as _;
    rank.device.set_rank_watch(watch, LONG);
    let sum = rank.add(0, 4).unwrap();
    let said = sum.read(&mut rank.device, 0..4).unwrap_err();
    assert!(said.is_fatal(), "{said}");
    let said = said.to_string();
    assert_eq!(said, "ranks lost each other: a kernel waited in vain for rank 1");
    assert_eq!(rank.device.wait().unwrap_err().to_string(), said, "lost for good");
}

/// Its own sums may be complete, but what it gathers from the other rank later was computed from wrong ones.
#[test]
fn no_rank_uses_a_result_after_another_gave_up() {
    let name = "cuda::ranks::nccl::peer_tests::no_rank_uses_a_result_after_another_gave_up";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (mut ranks, _) = with_peers(&driver, 2, Duration::from_millis(100));
    for Rank { device, end } in &mut ranks {
        let watch: Arc<dyn Watch> = Arc::clone(&end.communicator) as _;
        device.set_rank_watch(watch, LONG);
    }
    let [first, second] = ranks.as_mut_slice() else { unreachable!("two ranks") };
    let _given_up = second.add(0, 4).unwrap();
    let said = second.device.wait().unwrap_err().to_string();
    assert_eq!(said, "ranks lost each other: a kernel waited in vain for rank 0");
    // Its kernel finds both parts in place, and waits for nothing.
    let complete = first.add(0, 4).unwrap();
    assert_eq!(complete.read(&mut first.device, 0..4).unwrap_err().to_string(), said);
}

/// A lost rank, or one that is late for longer than the host waits, ends the wait of the others.
#[test]
fn a_lost_rank_ends_the_wait_of_kernels() {
    let name = "cuda::ranks::nccl::peer_tests::a_lost_rank_ends_the_wait_of_kernels";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (mut ranks, barrier) = with_peers(&driver, 4, LONG);
    let mut rank = ranks.swap_remove(0);
    let sums: Vec<_> = (0..3).map(|number| rank.add(number, 4).unwrap()).collect();
    barrier.mark_lost(1, "its kernel failed".to_owned());
    let lost = sums[2].read(&mut rank.device, 0..4).unwrap_err().to_string();
    assert!(lost.contains("rank 1 is lost") && lost.contains("its kernel failed"), "{lost}");
    assert!(rank.device.wait().is_err(), "no result is used");
    let again = rank.add(3, 4).map(drop).unwrap_err().to_string();
    assert!(again.contains("rank 1 is lost"), "{again}");
    // The kernels that were under way end.
    while !rank.runs_to_the_end() {
        std::thread::yield_now();
    }

    let (mut ranks, _) = with_peers(&driver, 2, LONG);
    let mut rank = ranks.swap_remove(1);
    let watch: Arc<dyn Watch> = Arc::clone(&rank.end.communicator) as _;
    rank.device.set_rank_watch(watch, Duration::from_millis(100));
    let sum = rank.add(0, 4).unwrap();
    let late = sum.read(&mut rank.device, 0..4).unwrap_err().to_string();
    assert!(late.contains("not done within 100ms"), "{late}");
}

/// Its kernels wait for the other ranks, which never launch anything, and its memory is accessed by none
/// afterwards.
#[test]
fn a_rank_can_be_dropped_while_its_kernels_wait() {
    let name = "cuda::ranks::nccl::peer_tests::a_rank_can_be_dropped_while_its_kernels_wait";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    for (count, first) in [(2, 0), (4, 3), (8, 5)] {
        let (mut ranks, _) = with_peers(&driver, count, LONG);
        let mut rank = ranks.swap_remove(first);
        let sums: Vec<_> = (0..3).map(|number| rank.add(number, 4).unwrap()).collect();
        drop(sums);
        let Rank { device, end } = rank;
        // In the order of a model's rank.
        drop(end);
        drop(device);
        // The others still have their memories.
        drop(ranks);
    }
}

/// Whole models, launched and replayed, with the same steps several times.
#[test]
fn models_have_the_bits_of_one_rank() {
    let name = "cuda::ranks::nccl::peer_tests::models_have_the_bits_of_one_rank";
    let Some(driver) = HostDriver::for_test_with(name, EIGHT_DEVICES) else { return };
    let (_dir, options) = changed_config(TINY, &[]);
    let engine = |ordinals: &[usize], peer_sums, graphs| {
        let kernels = Some(driver.kernels.clone());
        let gpus = GpuOptions { kernels, peer_sums, graphs, ..GpuOptions::for_devices(ordinals) };
        Engine::random(&options.on_gpus(gpus), 7).unwrap()
    };
    let mut whole = engine(&[0], false, false);
    let numerics_id = whole.info().numerics_id.clone();
    let expected = run(&mut whole).unwrap();
    let mut launched = None;
    for graphs in [false, true] {
        let mut moved = Vec::new();
        for peer_sums in [false, true] {
            let mut engine = engine(&[0, 1], peer_sums, graphs);
            assert_eq!(engine.info().numerics_id, numerics_id);
            let earlier = driver.counts();
            for i in 0..4 {
                let found = run(&mut engine).unwrap();
                assert!(found == expected, "run {i}, peers {peer_sums}, graphs {graphs}: the bits differ");
            }
            moved.push(driver.counts().since(earlier));
        }
        let [library, peers] = moved.as_slice() else { unreachable!("two models") };
        println!("graphs {graphs}: by the library {library:?}, over peers {peers:?}");
        // What is left to the library is gathering logits.
        assert!(peers.bytes_from_ranks < library.bytes_from_ranks, "{peers:?}, {library:?}");
        // A kernel that adds what the library has moved, or one that does both.
        assert!(graphs || peers.launches == library.launches, "{peers:?}, {library:?}");
        // Launches of a replayed graph are not counted.
        let of_launched = *launched.get_or_insert(peers.launches);
        assert!(!graphs || peers.launches < of_launched, "nothing is replayed: {peers:?}");
        assert_eq!(peers.copies_to_device, library.copies_to_device, "{peers:?}, {library:?}");
        assert_eq!(peers.copies_from_device, library.copies_from_device, "{peers:?}, {library:?}");
    }
}
