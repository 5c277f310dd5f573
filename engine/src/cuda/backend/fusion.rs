//! Operations that become one launch with the operation behind them. A forward asks for one operation after
//! the other; a sum that is normed next, and heads that are turned before they are stored, wait for what is
//! asked for next, and whoever writes the input of a product leaves it rounded besides. Nothing is computed
//! otherwise: each joined kernel has the bits of its parts.
//!
//! What is delayed names memory by its address. It is launched before anything but the operation that it
//! joins, memory that is freed or that other ranks read included: every way to the device goes through
//! [`State::settle`].

use cpu_kernels::HeadLayout;

use super::{GpuNorm, State};
use crate::cuda::CudaError;
use crate::cuda::executor::{Executor, Tensor, check_len};
use crate::cuda::ops::{RmsNorm, add_at, room, rotate_at};

/// An operation that waits.
#[derive(Debug, Clone, Copy)]
pub(super) enum Delayed {
    /// `sum += x`, so many numbers.
    Add { sum: u64, x: u64, len: usize },
    /// Queries and keys of so many rows at `qkv` are turned by the pass's angles.
    Turn { qkv: u64, rows: usize, layout: HeadLayout },
}

impl<E: Executor> State<E> {
    /// Launches what is delayed. What the operation before left rounded is forgotten: the one behind may
    /// write it.
    pub(super) fn settle(&mut self) -> Result<(), CudaError> {
        self.rounded_of = None;
        match self.delayed.take() {
            None => Ok(()),
            // SAFETY: both were there, with so many numbers, when the operation was asked for, and nothing
            // was freed since.
            Some(Delayed::Add { sum, x, len }) => unsafe { add_at(&mut self.executor, sum, x, len) },
            Some(Delayed::Turn { qkv, rows, layout }) => {
                let angles = self.inputs.angles();
                // SAFETY: as above; the angles are this pass's.
                unsafe { rotate_at(&mut self.executor, qkv, angles, (rows, layout)) }
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
        self.delayed = Some(Delayed::Add { sum: sum.address(), x: x.address(), len });
        Ok(())
    }

    pub(super) fn delay_turn(
        &mut self,
        qkv: &mut Tensor<E::Memory, f32>,
        (rows, layout): (usize, HeadLayout),
    ) -> Result<(), CudaError> {
        check_len("rotate", "qkv", qkv.len(), rows * layout.row_width())?;
        self.delayed = Some(Delayed::Turn { qkv: qkv.address(), rows, layout });
        Ok(())
    }

    /// Whether these heads wait to be turned: they do not any more. Anything else that is delayed is
    /// launched.
    pub(super) fn take_turn(
        &mut self,
        heads: &Tensor<E::Memory, f32>,
        num_rows: usize,
    ) -> Result<bool, CudaError> {
        let is_these = |delayed: &Delayed| matches!(delayed, Delayed::Turn { qkv, rows, .. } if *qkv == heads.address() && *rows == num_rows);
        let is_turn = self.delayed.take_if(|delayed| is_these(delayed)).is_some();
        self.settle().map(|()| is_turn)
    }

    /// A norm, with the sum before it where that waits.
    pub(super) fn rms_norm(
        &mut self,
        norm: &GpuNorm<E::Memory>,
        (x, len): (&Tensor<E::Memory, f32>, usize),
        out: &mut Tensor<E::Memory, f32>,
    ) -> Result<(), CudaError> {
        let delta = match self.delayed {
            Some(Delayed::Add { sum, x: delta, len: added }) if sum == x.address() && added == len => {
                self.delayed = None;
                delta
            }
            _ => 0,
        };
        self.settle()?;
        self.make_rounded(len)?;
        let (address, rows) = (out.address(), len / norm.weight.len());
        let rounded = self.rounded.as_mut().filter(|_| self.reads_bf16);
        let launch = RmsNorm { x, weight: &norm.weight, eps: norm.eps, out, rounded };
        // SAFETY: `add` had `x` to write and was delayed until now, with as many numbers of `delta`.
        unsafe { launch.launch_after_adding(&mut self.executor, rows, delta) }?;
        self.note_rounded(address, len);
        Ok(())
    }

    /// Room for so many rounded numbers, where products read them.
    pub(super) fn make_rounded(&mut self, len: usize) -> Result<(), CudaError> {
        if self.reads_bf16 {
            room(&mut self.rounded, &mut self.executor, len, "rounded activations")?;
        }
        Ok(())
    }

    /// The numbers of these rows lie in `rounded` until the next operation.
    pub(super) fn note_rounded(&mut self, address: u64, len: usize) {
        self.rounded_of = self.reads_bf16.then_some((address, len));
    }
}
