//! Fuses an operation with the next one into one launch. A forward requests operations one by one. Adding
//! the groups of slices of a product, an addition that may be followed by a norm, and a rotation of heads
//! that may be followed by a KV write, are delayed until the next request. A kernel that writes the input of
//! a product also writes it rounded to bf16. Fused kernels give the same bits as the separate ones.
//!
//! A delayed operation refers to memory by address. It is launched before any operation other than the one it
//! is fused with, including frees and reads by other ranks: all access to the device goes through
//! [`State::flush_delayed`].

use cpu_kernels::HeadLayout;

use super::{GpuNorm, GpuPass, PassPart, State};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor, check_len};
use crate::cuda::ops::{GroupSums, RmsNorm, add_at, rotate_at};

/// An operation that was requested and not launched yet.
#[derive(Debug, Clone, Copy)]
pub(super) enum DelayedOp {
    /// Adding the groups of slices of a product.
    AddGroups(GroupSums),
    /// `sum += x`, where x are sums of groups or one group.
    Add { sum: u64, x: GroupSums },
    /// Rotary embedding of the queries and keys of `rows` rows at `qkv`, by the angles of this part.
    Rotate { qkv: u64, rows: usize, part: PassPart, layout: HeadLayout },
}

impl<E: Executor> State<E> {
    /// Launches the delayed operation, if there is one. Marks the rounded copy as invalid, because the next
    /// operation may overwrite it.
    pub(super) fn flush_delayed(&mut self) -> Result<(), CudaError> {
        self.rounded_source = None;
        match self.delayed.take() {
            None => Ok(()),
            // SAFETY: the memory was allocated when the operation was requested, and none was freed since.
            Some(DelayedOp::AddGroups(groups)) => unsafe { groups.add(&mut self.executor) },
            Some(DelayedOp::Add { sum, x }) => {
                // SAFETY: as above.
                unsafe { x.add(&mut self.executor) }?;
                // SAFETY: as above.
                unsafe { add_at(&mut self.executor, sum, x.out(), x.len()) }
            }
            Some(DelayedOp::Rotate { qkv, rows, part, layout }) => {
                let angles = self.inputs.part(part).angles(&self.drawing.arrays, self.angles.as_ref());
                // SAFETY: as above; the positions are this pass's.
                unsafe { rotate_at(&mut self.executor, qkv, &angles, (rows, layout)) }
            }
        }
    }

    pub(super) fn delay_add(
        &mut self,
        sum: &mut Tensor<E::Memory, f32>,
        x: &Tensor<E::Memory, f32>,
        len: usize,
    ) -> Result<(), CudaError> {
        check_len("add", "sum", sum.len(), len)?;
        check_len("add", "x", x.len(), len)?;
        let x = match self.delayed {
            Some(DelayedOp::AddGroups(groups)) if groups.are_of(x.address(), len) => groups,
            _ => {
                self.flush_delayed()?;
                GroupSums::of_one(x.address(), len)
            }
        };
        self.rounded_source = None;
        self.delayed = Some(DelayedOp::Add { sum: sum.address(), x });
        Ok(())
    }

    pub(super) fn delay_rotate(
        &mut self,
        qkv: &mut Tensor<E::Memory, f32>,
        pass: &GpuPass<'_>,
        layout: HeadLayout,
    ) -> Result<(), CudaError> {
        let (rows, part) = (pass.rows(), pass.part);
        check_len("rotate", "qkv", qkv.len(), rows * layout.row_width())?;
        self.delayed = Some(DelayedOp::Rotate { qkv: qkv.address(), rows, part, layout });
        Ok(())
    }

    /// Returns whether the rotation of these heads was delayed, and removes it: the caller fuses it. Launches
    /// any other delayed operation.
    pub(super) fn take_delayed_rotate(
        &mut self,
        heads: &Tensor<E::Memory, f32>,
        num_rows: usize,
    ) -> Result<bool, CudaError> {
        let is_these = |delayed: &DelayedOp| matches!(delayed, DelayedOp::Rotate { qkv, rows, .. } if *qkv == heads.address() && *rows == num_rows);
        let was_delayed = self.delayed.take_if(|delayed| is_these(delayed)).is_some();
        self.flush_delayed().map(|()| was_delayed)
    }

    /// A norm, fused with the delayed addition to its input if there is one.
    pub(super) fn rms_norm(
        &mut self,
        norm: &GpuNorm<E::Memory>,
        (x, len): (&Tensor<E::Memory, f32>, usize),
        out: &mut Tensor<E::Memory, f32>,
    ) -> Result<(), CudaError> {
        let delta = match self.delayed {
            Some(DelayedOp::Add { sum, x: delta }) if sum == x.address() && delta.len() == len => {
                self.delayed = None;
                Some(delta)
            }
            _ => None,
        };
        self.flush_delayed()?;
        let (address, size) = (out.address(), (len / norm.weight.len(), norm.weight.len()));
        let layout = self.ensure_rounded(size)?;
        let rounded = self.rounded.as_mut().zip(layout);
        let launch = RmsNorm { x, weight: &norm.weight, eps: norm.eps, out, rounded };
        // SAFETY: `add` had mutable access to `x` and was delayed until now, and `delta` has as many numbers.
        unsafe { launch.launch_with_add(&mut self.executor, size.0, delta) }?;
        self.set_rounded_source(address, size, layout);
        Ok(())
    }
}
