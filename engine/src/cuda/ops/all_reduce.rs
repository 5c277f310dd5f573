//! Sums over ranks whose devices access each other's memory, in one launch a rank.

use std::time::Duration;

use cpu_kernels::NUM_SLICES;

use super::ranks::{addresses, check_ranks};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor, check, check_len};
use crate::cuda::sources::ALL_REDUCE;

/// Most blocks of a launch; all of them must be on the device at once (kernels/all_reduce.cu).
const NUM_BLOCKS: usize = 64;
/// Words of arrivals and turns, which precede the regions.
const ARRIVALS: usize = NUM_BLOCKS * NUM_SLICES;
const HEADER_WORDS: usize = ARRIVALS + 2 * NUM_BLOCKS;
/// Numbers that a thread adds at once.
const VECTOR: usize = 4;
/// Number of the last sum before the first one. The number of the second sum wraps around: it is one of the
/// three that every start forms and checks (`ranks/first_exchange.rs`).
const BEFORE_FIRST: u32 = u32::MAX - 1;

/// Layout of the memory of each rank that all ranks access, in words; see kernels/all_reduce.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SumMemory {
    /// Numbers of a block's part.
    region: usize,
}

impl SumMemory {
    /// For sums of up to `max_len` numbers.
    pub(crate) fn for_sums_of(max_len: usize) -> Self {
        let threads = ALL_REDUCE.kernel(0).threads as usize;
        Self { region: VECTOR * max_len.div_ceil(VECTOR * NUM_BLOCKS).max(threads) }
    }

    /// Whether `len` numbers can be added.
    pub(crate) fn fits(self, len: usize) -> bool {
        len > 0 && len.is_multiple_of(VECTOR) && len <= NUM_BLOCKS * self.region
    }

    /// Size of a rank's memory.
    pub(crate) fn words(self) -> usize {
        HEADER_WORDS + 2 * NUM_BLOCKS * self.region
    }

    /// The first words of a rank's memory before the first sum. The others need no value.
    pub(crate) fn header() -> Vec<u32> {
        let turns = (0..NUM_BLOCKS).flat_map(|_| [BEFORE_FIRST, 0]);
        Self::arrivals(0).into_iter().chain(turns).collect()
    }

    /// The words at the beginning of a rank's memory when all ranks have put their parts of sum number `sum`,
    /// counted from 1, in place.
    pub(crate) fn arrivals(sum: u32) -> Vec<u32> {
        vec![BEFORE_FIRST.wrapping_add(sum); ARRIVALS]
    }

    /// Blocks, and numbers of each: at most a vector for each thread, unless all blocks have one.
    fn grid(self, len: usize) -> (usize, usize) {
        let (vectors, threads) = (len / VECTOR, ALL_REDUCE.kernel(0).threads as usize);
        let blocks = vectors.div_ceil(threads).min(NUM_BLOCKS);
        (blocks, VECTOR * vectors.div_ceil(blocks))
    }
}

/// One rank's launches of sums.
#[derive(Debug, Clone)]
pub(crate) struct AllReduce {
    /// Address of each rank's memory.
    pub(crate) memories: Vec<u64>,
    pub(crate) layout: SumMemory,
    pub(crate) rank: usize,
    /// Address of a word of the host's memory, one for all ranks: not 0 ends the waits for other ranks, and a
    /// kernel that gives up rank r sets it to r + 1.
    pub(crate) stop: u64,
    /// How long a kernel waits for another rank.
    pub(crate) patience: Duration,
}

impl AllReduce {
    /// Adds the first `len` numbers of all ranks' parts in the contract's tree -> `sum`. All ranks launch the
    /// same sums in the same order. The sum is undefined if the word at `stop` is not 0 afterwards.
    ///
    /// # Safety
    /// Each of `memories` must be the address of memory of this layout that began with [`SumMemory::header`],
    /// that the executor's device can access, and that is freed only after the launches of all ranks have
    /// finished; so must `stop` be, of a word.
    pub(crate) unsafe fn launch<E: Executor>(
        &self,
        executor: &mut E,
        part: &Tensor<E::Memory, f32>,
        sum: &mut Tensor<E::Memory, f32>,
        len: usize,
    ) -> Result<(), CudaError> {
        let kernel = ALL_REDUCE.kernel(0);
        let Self { memories, layout, rank, stop, patience } = self;
        check_ranks(kernel.name, memories)?;
        check(kernel.name, ("rank", *rank), *rank < memories.len(), "one of the ranks")?;
        check(kernel.name, ("numbers", len), layout.fits(len), "a multiple of 4 that fits the memory")?;
        check_len(kernel.name, "part", part.len(), len)?;
        check_len(kernel.name, "sum", sum.len(), len)?;
        let (blocks, chunk) = layout.grid(len);
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let params = addresses(memories).read(part).write(sum).u64(*stop).u64(patience);
        let params = params.u32(len).u32(chunk).u32(layout.region).u32(*rank).u32(memories.len());
        // SAFETY: these are the kernel's parameters; the checks ensure that `part` and `sum` are in bounds
        // and that no block's part is longer than its region, this function's contract the rest.
        unsafe { executor.launch(kernel, [blocks as u32, 1, 1], &mut { params }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;

    #[test]
    fn a_grid_covers_every_number_once_within_its_regions() {
        let layout = SumMemory::for_sums_of(900_000);
        let lens = (1..3000).chain([16_384, 16_385, 65_536, 224_999, 225_000]).map(|vectors| 4 * vectors);
        for len in lens {
            let (blocks, chunk) = layout.grid(len);
            assert!(layout.fits(len) && blocks <= NUM_BLOCKS && chunk <= layout.region, "{len}");
            assert!(chunk.is_multiple_of(VECTOR) && blocks * chunk >= len, "{len}");
            assert!((blocks - 1) * chunk < len, "{len}: the last block has numbers");
        }
        assert!(!layout.fits(0) && !layout.fits(6) && !layout.fits(1 << 20));
        // The shortest sums fit even if the memory is for a single number.
        assert!(SumMemory::for_sums_of(1).fits(4 * 256 * NUM_BLOCKS));
    }

    #[test]
    fn the_number_of_the_second_sum_wraps_around() {
        assert_eq!([0, 1, 2, 3].map(|sum| SumMemory::arrivals(sum)[0]), [BEFORE_FIRST, u32::MAX, 0, 1]);
    }

    #[test]
    fn wrong_sums_are_refused_by_name() {
        let mut e = Emulator::build();
        let layout = SumMemory::for_sums_of(1);
        let memory: Tensor<_, u32> = Tensor::zeros(&mut e, layout.words(), "memory").unwrap();
        let part = Tensor::of(&mut e, &[1.0f32; 8], "a part").unwrap();
        let mut sum = Tensor::zeros(&mut e, 4, "a sum").unwrap();
        let mut check = |memories: &[u64], rank, len, says: &str| {
            let (memories, patience) = (memories.to_vec(), Duration::ZERO);
            let sums = AllReduce { memories, layout, rank, stop: memory.address(), patience };
            // SAFETY: nothing is launched.
            let error = unsafe { sums.launch(&mut e, &part, &mut sum, len) }.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        let at = memory.address();
        check(&[at; 3], 0, 4, "ranks is 3, expected 1, 2, 4 or 8");
        check(&[at, 0], 0, 4, "a rank without a part is 1");
        check(&[at, at], 2, 4, "rank is 2, expected one of the ranks");
        check(&[at, at], 1, 6, "numbers is 6, expected a multiple of 4");
        check(&[at, at], 1, 8, "sum is 4, expected at least 8 elements");
        check(&[at, at], 1, 12, "part is 8, expected at least 12 elements");
    }
}
