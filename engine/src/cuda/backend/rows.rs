//! Rows in device memory.

use crate::cuda::executor::Tensor;

/// f32 numbers on the device. The allocation only grows.
#[derive(Debug)]
pub(crate) struct GpuRows<M> {
    pub(super) tensor: Option<Tensor<M, f32>>,
    pub(super) len: usize,
}

impl<M> Default for GpuRows<M> {
    fn default() -> Self {
        Self { tensor: None, len: 0 }
    }
}

impl<M> GpuRows<M> {
    /// The tensor and the number of valid elements. Panics if the rows were never sized, which is a bug in
    /// the forward.
    pub(super) fn read(&self) -> (&Tensor<M, f32>, usize) {
        (self.tensor.as_ref().expect("a forward sizes rows before it uses them"), self.len)
    }

    /// The tensor's slot and the number of valid elements.
    pub(in crate::cuda) fn slot(&mut self) -> (&mut Option<Tensor<M, f32>>, usize) {
        (&mut self.tensor, self.len)
    }

    /// Sets the number of elements, after another tensor was put into the slot.
    pub(in crate::cuda) fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    pub(super) fn write(&mut self) -> (&mut Tensor<M, f32>, usize) {
        (self.tensor.as_mut().expect("a forward sizes rows before it uses them"), self.len)
    }
}
