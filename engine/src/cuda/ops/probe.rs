//! Reading memory and nothing else; multiplying and nothing else.

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::PROBE;

/// Reads all of `words`, a multiple of four; a block for each of `sums` leaves there what its words come to by exclusive or.
pub(crate) fn read_words<E: Executor>(
    executor: &mut E,
    words: &Tensor<E::Memory, u32>,
    sums: &mut Tensor<E::Memory, u32>,
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = PROBE.kernel(0);
    check(kernel.name, ("words", words.len()), words.len().is_multiple_of(4), "a multiple of 4")?;
    check(kernel.name, ("sums", sums.len()), !sums.len().is_multiple_of(1 << 31), "at least 1, below 2^31")?;
    let blocks = sums.len() as u32;
    let params = Params::default().read(words).write(sums).u64(words.len() as u64 / 4);
    // SAFETY: the kernel's parameters; it reads `words` and a block writes its own sum.
    unsafe { executor.launch(kernel, [blocks, 1, 1], &mut { params }) }
}

/// Floating-point operations of a block in a round: eight warps, eight products each, of 16 x 16 by 16 x 8.
const BLOCK_WORK: u64 = 8 * 8 * 2 * 16 * 16 * 8;

/// Multiplies ones with ones, so many rounds in a block for each of `sums`, which gets what they come to. Returns the floating-point
/// operations that this takes.
pub(crate) fn multiply_only<E: Executor>(
    executor: &mut E,
    rounds: usize,
    sums: &mut Tensor<E::Memory, f32>,
) -> Result<u64, CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = PROBE.kernel(1);
    // Sums of sixteens are exact in f32 up to there.
    check(kernel.name, ("rounds", rounds), rounds <= 1 << 20, "at most 2^20")?;
    check(kernel.name, ("sums", sums.len()), !sums.len().is_multiple_of(1 << 31), "at least 1, below 2^31")?;
    let blocks = sums.len();
    let params = Params::default().write(sums).u32(rounds);
    // SAFETY: the kernel's parameters; a block writes its own sum.
    unsafe { executor.launch(kernel, [blocks as u32, 1, 1], &mut { params }) }?;
    Ok(blocks as u64 * rounds as u64 * BLOCK_WORK)
}
