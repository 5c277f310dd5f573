//! Arrays of a step that are copied between host and device: one copy uploads the inputs of all its kernels,
//! those of draws first and edits of logits last, and one copy downloads all results of the draws.

use std::marker::PhantomData;
use std::ops::Range;

use super::StepBuffer;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, View};

/// Alignment of arrays: 16 bytes.
const ALIGN_WORDS: usize = 4;

/// Minimum size of the inputs of draws, in words: those of 128 rows without filters.
const MIN_DRAW_WORDS: usize = 1024;

/// Where an array is.
#[derive(Debug)]
pub(crate) struct Place<T> {
    words: Range<usize>,
    element: PhantomData<T>,
}

impl<T> Place<T> {
    /// An array without elements.
    pub(crate) const EMPTY: Self = Self { words: 0..0, element: PhantomData };
}

impl<T> Default for Place<T> {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// The arrays of a step; their memory is reused by the next one.
#[derive(Debug)]
pub(crate) struct StepArrays<M> {
    /// The inputs in sequence, each aligned to 16 bytes.
    packed: Vec<u32>,
    inputs: StepBuffer<M, u32>,
    /// Minimum size of the inputs' memory, in words.
    room: usize,
    results: StepBuffer<M, u32>,
    /// Words of the results that have a place so far.
    result_words: usize,
}

impl<M> Default for StepArrays<M> {
    fn default() -> Self {
        let (packed, inputs, results) = Default::default();
        Self { packed, inputs, room: 0, results, result_words: 0 }
    }
}

impl<M> StepArrays<M> {
    /// Begins a step without arrays.
    pub(super) fn clear(&mut self) {
        self.packed.clear();
        self.room = 0;
        self.result_words = 0;
    }

    /// Adds an input of kernels.
    pub(crate) fn put<T: bytemuck::Pod>(&mut self, elements: &[T]) -> Place<T> {
        if elements.is_empty() {
            return Place::EMPTY;
        }
        let start = self.packed.len().next_multiple_of(ALIGN_WORDS);
        self.packed.resize(start, 0);
        self.packed.extend_from_slice(bytemuck::cast_slice(elements));
        Place { words: start..self.packed.len(), element: PhantomData }
    }

    /// Adds the last input, with room for `most` elements: the memory then stays where it is when their number
    /// changes, and graphs of launches can still be replayed.
    pub(super) fn put_last<T: bytemuck::Pod>(&mut self, elements: &[T], most: usize) -> Place<T> {
        let start = self.packed.len().next_multiple_of(ALIGN_WORDS);
        self.room = start + most * size_of::<T>() / size_of::<u32>();
        self.put(elements)
    }

    /// Ends the inputs of draws. Pads them to a power of two, so that the inputs after them seldom move when
    /// other rows are drawn: a graph of launches is only replayed at the same addresses.
    pub(crate) fn end_draws(&mut self) {
        let words = self.packed.len().next_power_of_two().max(MIN_DRAW_WORDS);
        self.packed.resize(words, 0);
    }

    /// Adds room for `len` results.
    pub(super) fn reserve<T: bytemuck::Pod>(&mut self, len: usize) -> Place<T> {
        if len == 0 {
            return Place::EMPTY;
        }
        let start = self.result_words.next_multiple_of(ALIGN_WORDS);
        self.result_words = start + len * size_of::<T>() / size_of::<u32>();
        Place { words: start..self.result_words, element: PhantomData }
    }
}

impl<M: DeviceMemory> StepArrays<M> {
    /// Uploads the inputs and makes room for the results.
    pub(super) fn upload<E>(&mut self, executor: &mut E) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        self.results.resize(executor, self.result_words, "results of a step")?;
        let len = self.packed.len().max(self.room);
        self.inputs.resize(executor, len, "inputs of a step")?.write(executor, 0, &self.packed)
    }

    /// Overwrites an input of [`StepArrays::put_last`] with at most `most` elements.
    pub(super) fn overwrite<E, T>(
        &mut self,
        executor: &mut E,
        place: &Place<T>,
        elements: &[T],
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
        T: bytemuck::Pod,
    {
        let len = self.inputs.len();
        self.inputs.resize(executor, len, "inputs of a step")?.write(
            executor,
            place.words.start,
            bytemuck::cast_slice(elements),
        )
    }

    /// Size of the inputs' memory in words.
    #[cfg(test)]
    pub(super) fn input_words(&self) -> usize {
        self.inputs.tensor().len()
    }

    /// An uploaded input.
    pub(crate) fn input<T: bytemuck::Pod>(&self, place: &Place<T>) -> View<'_, T> {
        self.inputs.tensor().view_as(place.words.clone())
    }

    /// Room for results; their content is unspecified until a kernel writes it.
    pub(super) fn result<T: bytemuck::Pod>(&self, place: &Place<T>) -> View<'_, T> {
        self.results.tensor().view_as(place.words.clone())
    }

    /// Waits for the step's kernels and downloads their results.
    pub(super) fn download<E>(&self, executor: &mut E) -> Result<Downloaded, CudaError>
    where
        E: Executor<Memory = M>,
    {
        if self.result_words == 0 {
            return Ok(Downloaded(Vec::new()));
        }
        self.results.tensor().read(executor, 0..self.result_words).map(Downloaded)
    }
}

/// The results of a step on the host.
#[derive(Debug)]
pub(crate) struct Downloaded(Vec<u32>);

impl Downloaded {
    /// The results at a place of the same step.
    pub(super) fn get<T: bytemuck::Pod>(&self, place: &Place<T>) -> Vec<T> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.0[place.words.clone()]);
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::{Emulator, HostMemory};

    /// Each array begins at a multiple of 16 bytes; what was put or reserved in an earlier step is gone.
    #[test]
    fn arrays_have_their_places() {
        let mut e = Emulator::build();
        let mut arrays = StepArrays::<HostMemory>::default();
        for step in 0..2u32 {
            arrays.clear();
            let (small, none, large) =
                (arrays.put(&[step]), arrays.put::<u64>(&[]), arrays.put(&[7u64, 8, 9]));
            assert_eq!([&small.words, &none.words, &large.words], [&(0..1), &(0..0), &(4..10)]);
            let (one, none, two) =
                (arrays.reserve::<f64>(1), arrays.reserve::<u64>(0), arrays.reserve::<u32>(2));
            assert_eq!([&one.words, &none.words, &two.words], [&(0..2), &(0..0), &(4..6)]);
            arrays.upload(&mut e).unwrap();
            let lens = (arrays.input(&large).len(), arrays.result(&two).len(), arrays.result(&none).len());
            assert_eq!(lens, (3, 2, 0));
            // What kernels would write.
            let (low, high) = (1.5f64.to_bits() as u32, (1.5f64.to_bits() >> 32) as u32);
            let results = arrays.results.resize(&mut e, 6, "results of a step").unwrap();
            results.write(&mut e, 0, &[low, high, 0, 0, step, 5]).unwrap();
            let found = arrays.download(&mut e).unwrap();
            assert_eq!(
                (found.get(&one), found.get(&none), found.get(&two)),
                (vec![1.5], vec![], vec![step, 5])
            );
        }
        arrays.clear();
        assert!(arrays.download(&mut e).unwrap().0.is_empty());
    }

    /// The arrays after those of draws only move when these need twice the room.
    #[test]
    fn arrays_of_draws_have_room_to_grow() {
        let mut arrays = StepArrays::<HostMemory>::default();
        for (words, start) in [(0, 1024), (1, 1024), (1024, 1024), (1025, 2048), (5000, 8192)] {
            arrays.clear();
            arrays.put(&vec![7u32; words]);
            arrays.end_draws();
            assert_eq!(arrays.put(&[1u32]).words, start..start + 1, "{words} words");
        }
    }
}
