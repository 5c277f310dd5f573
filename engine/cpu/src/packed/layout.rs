//! Splits K for integer sums. A piece is a range that is summed exactly before it is scaled: in int8 a
//! K-slice, in int4 a group of 32, or the part of one that a K-slice contains. Pieces are padded to whole
//! lines; padding is multiplied with zeros.

use std::ops::Range;

use super::k_per_line;
use crate::k_slices::KSlices;
use crate::matrix::QuantizedFormat;

/// Numbers along K per int4 scale.
pub(super) const GROUP: usize = 32;

/// A range of K that is summed in integers.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) k: Range<usize>,
    /// Start in a padded row.
    pub(super) start: usize,
    /// Length with padding.
    pub(super) len: usize,
}

/// Pieces and slices of one matrix.
#[derive(Debug, Clone)]
pub(super) struct KLayout {
    format: QuantizedFormat,
    k: usize,
    pieces: Vec<Piece>,
    /// The pieces of each K-slice; may be none.
    slices: Vec<Range<usize>>,
    padded: usize,
}

impl KLayout {
    pub(super) fn new(format: QuantizedFormat, slices: &KSlices) -> Self {
        let k = slices.ranges().last().map_or(0, |slice| slice.end);
        let mut layout = Self { format, k, pieces: Vec::new(), slices: Vec::new(), padded: 0 };
        for slice in slices.ranges() {
            let first = layout.pieces.len();
            let mut start = slice.start;
            while start < slice.end {
                let end = match format {
                    QuantizedFormat::Int8 => slice.end,
                    QuantizedFormat::Int4 => slice.end.min((start / GROUP + 1) * GROUP),
                };
                let len = (end - start).next_multiple_of(k_per_line(format));
                layout.pieces.push(Piece { k: start..end, start: layout.padded, len });
                layout.padded += len;
                start = end;
            }
            layout.slices.push(first..layout.pieces.len());
        }
        layout
    }

    /// Shifts K by `start`, where the first piece begins.
    pub(super) fn rebase(&mut self, start: usize) {
        self.k -= start;
        for piece in &mut self.pieces {
            piece.k = piece.k.start - start..piece.k.end - start;
        }
    }

    pub(super) fn format(&self) -> QuantizedFormat {
        self.format
    }

    /// Length of a row without padding.
    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// Length of a row with padding.
    pub(super) fn padded(&self) -> usize {
        self.padded
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Ranges of [`KLayout::pieces`].
    pub(super) fn slices(&self) -> &[Range<usize>] {
        &self.slices
    }

    /// The columns of these pieces in a row without padding.
    pub(super) fn columns(&self, pieces: &Range<usize>) -> Range<usize> {
        match &self.pieces[pieces.clone()] {
            [] => 0..0,
            [first, ..] => first.k.start..self.pieces[pieces.end - 1].k.end,
        }
    }

    /// The columns of these pieces in a padded row.
    pub(super) fn padded_range(&self, pieces: &Range<usize>) -> Range<usize> {
        let boundary = |piece: usize| self.pieces.get(piece).map_or(self.padded, |piece| piece.start);
        boundary(pieces.start)..boundary(pieces.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_across_a_slice_boundary_is_two_pieces() {
        // Slices of 24: borders at 24, 48, 72, .. and groups at 32, 64, 96.
        let layout = KLayout::new(QuantizedFormat::Int4, &KSlices::eighths(8 * 24, 24));
        let ends: Vec<usize> = layout.pieces()[..5].iter().map(|piece| piece.k.end).collect();
        assert_eq!(ends, [24, 32, 48, 64, 72]);
        assert_eq!(layout.slices()[..3], [0..1, 1..3, 3..5]);
    }

    #[test]
    fn pieces_are_whole_lines() {
        let layout = KLayout::new(QuantizedFormat::Int8, &KSlices::eighths(40, 5));
        assert!(layout.pieces().iter().all(|piece| piece.len == 8 && piece.start % 8 == 0));
        assert_eq!((layout.k(), layout.padded()), (40, 64));
    }
}
