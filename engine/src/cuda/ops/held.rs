//! Device memory that is kept between steps and filled anew in each, so that a step that is no larger than one before it
//! allocates nothing.

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};

/// Buffers up to this size are taken in powers of two: what grows by a little with every token then seldom moves.
const ROUNDED_BYTES: usize = 4 << 20;

/// At least `len` elements in `slot`, whose content is of no matter.
pub(crate) fn room<'a, E: Executor, T: bytemuck::Pod>(
    slot: &'a mut Option<Tensor<E::Memory, T>>,
    executor: &mut E,
    len: usize,
    purpose: &'static str,
) -> Result<&'a mut Tensor<E::Memory, T>, CudaError> {
    if slot.as_ref().is_none_or(|tensor| tensor.len() < len) {
        // The old one goes first: both may not fit.
        executor.flush()?;
        *slot = None;
        *slot = Some(Tensor::zeros(executor, capacity(len, size_of::<T>()), purpose)?);
    }
    Ok(slot.as_mut().expect("filled above"))
}

/// Elements that are taken where `len` of `size` bytes are needed.
fn capacity(len: usize, size: usize) -> usize {
    if len * size <= ROUNDED_BYTES { len.next_power_of_two() } else { len }
}

/// Elements of one step.
#[derive(Debug)]
pub(crate) struct Held<M, T> {
    tensor: Option<Tensor<M, T>>,
    len: usize,
}

impl<M, T> Default for Held<M, T> {
    fn default() -> Self {
        Self { tensor: None, len: 0 }
    }
}

impl<M: DeviceMemory, T: bytemuck::Pod> Held<M, T> {
    /// Uploads this step's.
    pub(crate) fn fill<E>(
        &mut self,
        executor: &mut E,
        elements: &[T],
        purpose: &'static str,
    ) -> Result<&Tensor<M, T>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.make_room(executor, elements.len(), purpose)?.write(executor, 0, elements)?;
        Ok(self.tensor())
    }

    /// Room for this step's, whose content is of no matter.
    pub(crate) fn make_room<E>(
        &mut self,
        executor: &mut E,
        len: usize,
        purpose: &'static str,
    ) -> Result<&mut Tensor<M, T>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.len = len;
        room(&mut self.tensor, executor, len, purpose)
    }

    /// What holds this step's elements, and maybe more.
    pub(crate) fn tensor(&self) -> &Tensor<M, T> {
        self.tensor.as_ref().expect("a pass fills its inputs before it uses them")
    }

    /// The same, where there was a step that had any.
    pub(crate) fn held(&self) -> Option<&Tensor<M, T>> {
        self.tensor.as_ref()
    }

    /// This step's elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_buffers_have_slack_and_large_ones_do_not() {
        assert_eq!([capacity(0, 4), capacity(1, 4), capacity(5, 4), capacity(64, 4)], [1, 1, 8, 64]);
        assert_eq!(capacity((1 << 20) + 1, 4), (1 << 20) + 1);
    }
}
