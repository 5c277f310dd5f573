//! Result of a forward: one row of logits for each position that requested them.

use std::ops::Range;

/// Rows of `vocab_size` raw logits, in batch order. Callers may filter rows in place.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// `values` holds whole rows.
    pub(crate) fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        Self { values, vocab_size }
    }

    /// Number of positions that requested logits.
    pub fn rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Number of logits in a row.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Logits of the i-th position that requested them.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.vocab_size..(i + 1) * self.vocab_size]
    }

    /// Mutable logits of the i-th position that requested them.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        self.rows_mut(i..i + 1)
    }

    /// Several consecutive rows, mutable.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> &mut [f32] {
        &mut self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }
}
