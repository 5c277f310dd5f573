//! Sums over ranks by one kernel a rank, with the memory of all ranks on one device. Kernels run one after
//! another here, so arrivals are set beforehand: no kernel waits, and the last rank of a sum finds the parts
//! of all ranks in place.

use std::time::Duration;

use cpu_kernels::{NUM_SLICES, tree_sum};

use super::{Numbers, Parity, Scale, compare, compare_equal};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};
use crate::cuda::ops::{AllReduce, SumMemory};

/// Sums in a row: the numbers of sums wrap around, and each region is used several times.
const SUMS: usize = 9;

pub(super) fn cases<E: Executor>(e: &mut E, scale: Scale) -> Result<Vec<Parity>, CudaError> {
    let lens = scale.pick(&[4, 2052, 24][..], &[8192, 4, 5 * 8192, 15 * 8192]);
    let mut parities = Vec::new();
    for ranks in [1, 2, 4, 8] {
        parities.push(sums(e, ranks, lens)?);
    }
    parities.extend(given_up(e)?);
    Ok(parities)
}

/// Memory of all ranks and what their launches share.
struct Ranks<M> {
    layout: SumMemory,
    memories: Vec<Tensor<M, u32>>,
    stop: Tensor<M, u32>,
}

impl<M: DeviceMemory> Ranks<M> {
    fn new<E: Executor<Memory = M>>(e: &mut E, count: usize, max_len: usize) -> Result<Self, CudaError> {
        let layout = SumMemory::for_sums_of(max_len);
        let memory = |_| -> Result<_, CudaError> {
            let mut memory: Tensor<_, u32> = Tensor::zeros(e, layout.words(), "memory of a rank")?;
            memory.write(e, 0, &SumMemory::header())?;
            Ok(memory)
        };
        let memories = (0..count).map(memory).collect::<Result<_, _>>()?;
        Ok(Self { layout, memories, stop: Tensor::zeros(e, 1, "the word that stops waits")? })
    }

    /// All ranks have put their parts of this sum in place.
    fn set_arrivals<E: Executor<Memory = M>>(&mut self, e: &mut E, sum: usize) -> Result<(), CudaError> {
        self.memories.iter_mut().try_for_each(|memory| memory.write(e, 0, &SumMemory::arrivals(sum as u32)))
    }

    fn launch<E: Executor<Memory = M>>(
        &self,
        e: &mut E,
        rank: usize,
        part: &Tensor<M, f32>,
        sum: &mut Tensor<M, f32>,
    ) -> Result<(), CudaError> {
        let memories = self.memories.iter().map(Tensor::address).collect();
        let (layout, stop, patience) = (self.layout, self.stop.address(), Duration::ZERO);
        let len = part.len();
        // SAFETY: all memory is of this layout and outlives the launch, which is waited for when it is read.
        unsafe { AllReduce { memories, layout, rank, stop, patience }.launch(e, part, sum, len) }
    }
}

/// Sums of different lengths in a row; another rank is the last one each time.
fn sums<E: Executor>(e: &mut E, count: usize, lens: &[usize]) -> Result<Parity, CudaError> {
    let max_len = lens.iter().copied().max().unwrap_or(0);
    let mut ranks = Ranks::new(e, count, max_len)?;
    let (mut numbers, mut found, mut expected) = (Numbers(31), Vec::new(), Vec::new());
    for number in 1..=SUMS {
        let len = lens[number % lens.len()];
        let parts: Vec<Vec<f32>> = (0..count).map(|_| numbers.vec(len, 1e3)).collect();
        let mut sum = Tensor::zeros(e, len, "a sum")?;
        ranks.set_arrivals(e, number)?;
        for rank in (1..=count).map(|place| (number + place) % count) {
            let part = Tensor::of(e, &parts[rank], "a part")?;
            ranks.launch(e, rank, &part, &mut sum)?;
            e.flush()?;
        }
        found.extend(sum.read(e, 0..len)?);
        expected.extend((0..len).map(|i| {
            let mut slices = [0.0; NUM_SLICES];
            parts.iter().enumerate().for_each(|(rank, part)| slices[rank * NUM_SLICES / count] = part[i]);
            tree_sum(slices)
        }));
    }
    Ok(compare(format!("all_reduce of {count} ranks, {SUMS} sums"), 0.0, &found, &expected))
}

/// A rank whose neighbour never comes tells which one it gave up, and signals no later sum.
fn given_up<E: Executor>(e: &mut E) -> Result<Vec<Parity>, CudaError> {
    let mut ranks = Ranks::new(e, 2, 4)?;
    let part = Tensor::of(e, &[1.0f32; 4], "a part")?;
    let mut sum = Tensor::of(e, &[7.0f32; 4], "a sum")?;
    ranks.launch(e, 0, &part, &mut sum)?;
    let first_sum = SumMemory::arrivals(1)[0];
    let mut parities = vec![
        compare_equal("all_reduce names the rank it gave up", &ranks.stop.read(e, 0..1)?, &[2]),
        compare_equal("all_reduce has signalled", &ranks.memories[1].read(e, 0..1)?, &[first_sum]),
    ];
    // Not even if it arrives at last.
    ranks.memories[0].write(e, 0, &SumMemory::arrivals(2))?;
    ranks.launch(e, 0, &part, &mut sum)?;
    let signalled = ranks.memories[1].read(e, 0..1)?;
    parities.push(compare_equal("all_reduce that gave up signals no more", &signalled, &[first_sum]));
    parities.push(compare("all_reduce that gave up adds nothing", 0.0, &sum.read(e, 0..4)?, &[7.0; 4]));
    Ok(parities)
}
