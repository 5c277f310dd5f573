//! Weights out of a seed, made on the device: what `weights::RandomTensors` makes on the host.

use super::{MAX_GRID_YZ, Output};
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::RANDOM;

/// Rows of a tensor that its name and a seed decide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomRows<'a> {
    pub(crate) seed: u64,
    /// The tensor's.
    pub(crate) name: &'a str,
    /// Numbers in a row.
    pub(crate) len: usize,
}

impl RandomRows<'_> {
    /// Rows `first_row..first_row + rows` to `out`, from its row `at_row` on.
    pub(crate) fn launch<E, M>(
        self,
        executor: &mut E,
        (first_row, rows): (usize, usize),
        (mut out, at_row): (Output<'_, M>, usize),
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
        M: DeviceMemory,
    {
        let kernel = out.choose(RANDOM.kernel(0), RANDOM.kernel(1));
        check(kernel.name, ("len", self.len), self.len > 0, "at least 1")?;
        check_len(kernel.name, "out", out.len(), (at_row + rows) * self.len)?;
        let name = Tensor::of(executor, self.name.as_bytes(), "a tensor's name")?;
        let size = (3.0 / self.len as f32).sqrt();
        let grid_x = self.len.div_ceil(kernel.threads as usize) as u32;
        for done in (0..rows).step_by(MAX_GRID_YZ) {
            let part = (rows - done).min(MAX_GRID_YZ);
            let params = out.param_from(Params::default().read(&name), (at_row + done) * self.len);
            let params = params.u64(self.seed).u64((first_row + done) as u64);
            let params = params.u32(self.name.len()).u32(self.len).f32(size);
            // SAFETY: the kernel's parameters; every number is there by the check.
            unsafe { executor.launch(kernel, [grid_x, part as u32, 1], &mut { params }) }?;
        }
        Ok(())
    }
}
