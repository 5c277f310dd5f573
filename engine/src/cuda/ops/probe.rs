//! Launches of the probe kernels, which only read memory or only multiply.

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check};
use crate::cuda::sources::PROBE;

/// Reads all of `words`, a multiple of four. Launches one block per element of `sums`, which receives the
/// exclusive or of the block's words.
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
    // SAFETY: these are the kernel's parameters; it reads `words` and a block writes its own sum.
    unsafe { executor.launch(kernel, [blocks, 1, 1], &mut { params }) }
}

/// Floating-point operations per block and round: eight warps, eight products each, of 16 x 16 by 16 x 8.
const BLOCK_WORK: u64 = 8 * 8 * 2 * 16 * 16 * 8;

/// Multiplies ones by ones for `rounds` rounds. Launches one block per element of `sums`, which receives the
/// block's sum. Returns the number of floating-point operations.
pub(crate) fn multiply_only<E: Executor>(
    executor: &mut E,
    rounds: usize,
    sums: &mut Tensor<E::Memory, f32>,
) -> Result<u64, CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = PROBE.kernel(1);
    // Sums of sixteens are exact in f32 up to this number of rounds.
    check(kernel.name, ("rounds", rounds), rounds <= 1 << 20, "at most 2^20")?;
    check(kernel.name, ("sums", sums.len()), !sums.len().is_multiple_of(1 << 31), "at least 1, below 2^31")?;
    let blocks = sums.len();
    let params = Params::default().write(sums).u32(rounds);
    // SAFETY: these are the kernel's parameters; a block writes its own sum.
    unsafe { executor.launch(kernel, [blocks as u32, 1, 1], &mut { params }) }?;
    Ok(blocks as u64 * rounds as u64 * BLOCK_WORK)
}
