//! What a forward returns: one row of logits for each position that asked.

use std::ops::Range;

/// Rows of `vocab_size` raw logits, in batch order. Rows are mutable so that callers may filter them in
/// place.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// `values` is whole rows.
    pub(crate) fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        Self { values, vocab_size }
    }

    /// How many positions asked for logits.
    pub fn rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Logits in one row.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The logits of the i-th position that asked.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.vocab_size..(i + 1) * self.vocab_size]
    }

    /// The same, to be changed in place.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        self.rows_mut(i..i + 1)
    }

    /// Several rows, one behind the other.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> &mut [f32] {
        &mut self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }
}
