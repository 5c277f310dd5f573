//! Device memory that is reused between steps: a step that is no larger than an earlier one allocates
//! nothing.

use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};

/// Buffers up to this size are allocated in powers of two, larger ones in sixteenths of one: buffers that
/// grow slightly with every token are then seldom reallocated.
const ROUNDED_BYTES: usize = 4 << 20;

/// Ensures that `slot` holds at least `len` elements. Their content is unspecified.
pub(crate) fn ensure_capacity<'a, E: Executor, T: bytemuck::Pod>(
    slot: &'a mut Option<Tensor<E::Memory, T>>,
    executor: &mut E,
    len: usize,
    purpose: &'static str,
) -> Result<&'a mut Tensor<E::Memory, T>, CudaError> {
    if slot.as_ref().is_none_or(|tensor| tensor.len() < len) {
        // The old buffer is freed first: both may not fit.
        executor.flush()?;
        *slot = None;
        *slot = Some(Tensor::zeros(executor, capacity(len, size_of::<T>()), purpose)?);
    }
    Ok(slot.as_mut().expect("filled above"))
}

/// Number of elements to allocate if `len` elements of `size` bytes are needed. At most an eighth more for
/// large buffers: a batch that grows row by row reallocates them eight times until it has doubled.
pub(crate) fn capacity(len: usize, size: usize) -> usize {
    let doubled = len.next_power_of_two();
    if len * size <= ROUNDED_BYTES { doubled } else { len.next_multiple_of(doubled / 16) }
}

/// Buffer of one step's elements.
#[derive(Debug)]
pub(crate) struct StepBuffer<M, T> {
    tensor: Option<Tensor<M, T>>,
    len: usize,
}

impl<M, T> Default for StepBuffer<M, T> {
    fn default() -> Self {
        Self { tensor: None, len: 0 }
    }
}

impl<M: DeviceMemory, T: bytemuck::Pod> StepBuffer<M, T> {
    /// Uploads this step's elements.
    pub(crate) fn fill<E>(
        &mut self,
        executor: &mut E,
        elements: &[T],
        purpose: &'static str,
    ) -> Result<&Tensor<M, T>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.resize(executor, elements.len(), purpose)?.write(executor, 0, elements)?;
        Ok(self.tensor())
    }

    /// Ensures room for this step's elements. Their content is unspecified.
    pub(crate) fn resize<E>(
        &mut self,
        executor: &mut E,
        len: usize,
        purpose: &'static str,
    ) -> Result<&mut Tensor<M, T>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.len = len;
        ensure_capacity(&mut self.tensor, executor, len, purpose)
    }

    /// The buffer of this step's elements; it may be larger.
    pub(crate) fn tensor(&self) -> &Tensor<M, T> {
        self.tensor.as_ref().expect("a pass fills its inputs before it uses them")
    }

    /// Number of this step's elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cuda::emulator::Emulator;

    #[test]
    fn small_buffers_have_much_slack_and_large_ones_little() {
        assert_eq!([capacity(0, 4), capacity(1, 4), capacity(5, 4), capacity(64, 4)], [1, 1, 8, 64]);
        assert_eq!(capacity((1 << 20) + 1, 4), 9 << 17);
        // Gate and up of 2,048 rows of Llama 3 8B.
        assert_eq!(capacity(2048 * 28_672, 4), 2048 * 28_672);
    }

    #[test]
    fn a_growing_batch_seldom_takes_memory() {
        let mut e = Emulator::build();
        let allocations = e.allocations();
        let mut slot: Option<Tensor<_, f32>> = None;
        let rows = 257..=1024;
        for len in rows.clone().map(|rows| rows * 4096) {
            let tensor = ensure_capacity(&mut slot, &mut e, len, "rows").unwrap();
            assert!((len..=len / 8 * 9 + 9).contains(&tensor.len()), "{len}");
        }
        let found = allocations.load(Ordering::Relaxed);
        println!("{found} allocations for {} batches", rows.count());
        assert_eq!(found, 16);
    }
}
