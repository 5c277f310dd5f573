//! The coupled draw on the device: rows without filters; only ids come back.

use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Params, Tensor, check, check_len};
use crate::cuda::sources::DRAW;

/// One row's draw, as `draw.cu` reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct DrawRow {
    pub(crate) seed: u64,
    pub(crate) choice: u32,
    pub(crate) position: u32,
    pub(crate) temperature: f32,
    pub(crate) purpose: u32,
}

/// What came out of a row.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Drawn {
    pub(crate) token_id: u32,
    /// 0: drawn; 1: `token_id`'s logit is NaN or infinite; 2: nothing is allowed.
    pub(crate) status: u32,
}

/// Draws from `logits` `[rows, stride]`, of whose rows the first `vocab` count.
pub(crate) fn draw<E: Executor>(
    executor: &mut E,
    logits: &Tensor<E::Memory, f32>,
    draws: &[DrawRow],
    (vocab, stride): (usize, usize),
) -> Result<Vec<Drawn>, CudaError> {
    let kernel = DRAW.kernel(0);
    if draws.is_empty() {
        return Ok(Vec::new());
    }
    check(kernel.name, ("vocab", vocab), (1..=stride).contains(&vocab), format!("1 to {stride}"))?;
    check_len(kernel.name, "logits", logits.len(), draws.len() * stride)?;
    let rows = Tensor::of(executor, draws, "draws")?;
    let mut drawn = Tensor::<_, Drawn>::zeros(executor, draws.len(), "drawn ids")?;
    let params = Params::default().read(logits).read(&rows).write(&mut drawn).u32(vocab).u32(stride);
    // SAFETY: the kernel's parameters; every row is there by the checks.
    unsafe { executor.launch(kernel, [draws.len() as u32, 1, 1], &mut { params }) }?;
    drawn.read(executor, draws.len())
}
