//! Generates random weights on the device.

use half::bf16;

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::RANDOM;
use crate::weights::RowSeeds;

/// Generates rows of bf16 numbers, from row `to_row` of `out` on.
pub(crate) fn random_bf16<E: Executor>(
    executor: &mut E,
    seeds: &RowSeeds,
    (out, to_row): (&mut Tensor<E::Memory, bf16>, usize),
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    launch(executor, 0, seeds, (out, to_row))
}

/// Generates the same numbers, widened to f32.
pub(crate) fn random_f32<E: Executor>(
    executor: &mut E,
    seeds: &RowSeeds,
    (out, to_row): (&mut Tensor<E::Memory, f32>, usize),
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    launch(executor, 1, seeds, (out, to_row))
}

fn launch<E: Executor, T: bytemuck::Pod>(
    executor: &mut E,
    kernel: usize,
    seeds: &RowSeeds,
    (out, to_row): (&mut Tensor<E::Memory, T>, usize),
) -> Result<(), CudaError>
where
    E::Memory: DeviceMemory,
{
    let kernel = RANDOM.kernel(kernel);
    let (rows, columns) = (seeds.states.len(), seeds.columns.len());
    check(kernel.name, ("rows", rows), rows > 0, "at least 1")?;
    let fits =
        u32::try_from(seeds.columns.end).is_ok() && u32::try_from(rows).is_ok_and(|rows| rows < 1 << 31);
    check(kernel.name, ("columns", seeds.columns.end), fits, "below 2^32, in fewer than 2^31 rows")?;
    check_len(kernel.name, "out", out.len(), (to_row + rows) * columns)?;
    let states = Tensor::of(executor, &seeds.states, "seeds of rows")?;
    let params = Params::default().read(&states).write_from(out, to_row * columns);
    let params = params.u32(seeds.columns.start).u32(columns).f32(seeds.size);
    // SAFETY: these are the kernel's parameters; the checks ensure that rows are in bounds, and `states` is
    // freed in stream order, after a flush.
    unsafe { executor.launch(kernel, [rows as u32, 1, 1], &mut { params }) }?;
    executor.flush()
}
