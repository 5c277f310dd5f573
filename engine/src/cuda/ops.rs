//! The kernels as checked calls: each file is one operation with its shapes; what could make a kernel touch
//! memory that is not there is refused before the launch. Nothing else launches.

mod attention;
mod draw;
mod elementwise;
mod gemm;
mod int8;
mod logits;
mod random;

pub(crate) use attention::{Attention, num_splits, tiles};
pub(crate) use draw::{DrawRow, Drawn, draw};
pub(crate) use elementwise::{Embedding, RmsNorm, RopeKv, Swiglu};
pub(crate) use gemm::{GRAIN as BF16_GRAIN, GemmBf16, borders};
pub(crate) use int8::{GRAIN as INT8_GRAIN, GemmInt8, QuantizeRows};
pub(crate) use logits::{edit_logits, edits_of};
pub(crate) use random::RandomRows;

use half::bf16;

use super::executor::{DeviceMemory, Params, Tensor};

/// Where an operation puts rows that a product will read: rounded to bf16, or whole where they are quantized.
#[derive(Debug)]
pub(crate) enum Output<'a, M> {
    F32(&'a mut Tensor<M, f32>),
    Bf16(&'a mut Tensor<M, bf16>),
}

impl<M: DeviceMemory> Output<'_, M> {
    fn len(&self) -> usize {
        match self {
            Self::F32(tensor) => tensor.len(),
            Self::Bf16(tensor) => tensor.len(),
        }
    }

    /// Which of two kernels writes it.
    fn choose<T>(&self, f32: T, bf16: T) -> T {
        match self {
            Self::F32(_) => f32,
            Self::Bf16(_) => bf16,
        }
    }

    fn param(&mut self, params: Params) -> Params {
        self.param_from(params, 0)
    }

    /// From element `at` on.
    fn param_from(&mut self, params: Params, at: usize) -> Params {
        match self {
            Self::F32(tensor) => params.write_from(tensor, at),
            Self::Bf16(tensor) => params.write_from(tensor, at),
        }
    }
}

/// Grids count blocks in 16 bits along y and z.
const MAX_GRID_YZ: usize = 65_535;
