//! Reading memory and nothing else.

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
