//! Rows of a pass in a reused buffer: shrinking and growing again neither allocates nor clears.

use std::ops::{Deref, DerefMut};

/// f32 numbers, of which the first `len` are valid.
#[derive(Debug, Default)]
pub(crate) struct HostRows {
    numbers: Vec<f32>,
    len: usize,
}

impl HostRows {
    /// Sets the number of elements. Their content is unspecified: the caller writes all of them.
    pub(crate) fn resize(&mut self, len: usize) {
        if self.numbers.len() < len {
            self.numbers.resize(len, 0.0);
        }
        self.len = len;
    }

    /// Moves the numbers out and leaves the rows empty.
    pub(crate) fn take(&mut self) -> Vec<f32> {
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.truncate(std::mem::take(&mut self.len));
        numbers
    }
}

impl From<Vec<f32>> for HostRows {
    fn from(numbers: Vec<f32>) -> Self {
        Self { len: numbers.len(), numbers }
    }
}

impl Deref for HostRows {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.numbers[..self.len]
    }
}

impl DerefMut for HostRows {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.numbers[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_is_reused_and_only_len_numbers_are_valid() {
        let mut rows = HostRows::from(vec![1.0, 2.0, 3.0, 4.0]);
        let address = rows.as_ptr();
        rows.resize(1);
        assert_eq!(&rows[..], [1.0]);
        rows.resize(3);
        assert_eq!((rows.len(), rows.as_ptr()), (3, address));
        assert_eq!((rows.take().len(), rows.len()), (3, 0));
    }
}
