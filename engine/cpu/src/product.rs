//! Products of rows with the weights of linear layers: packs the activations once, then every thread
//! multiplies ranges of columns.

use std::ops::Range;
use std::sync::{MutexGuard, PoisonError};

use crate::Cpu;
use crate::floats::{FloatMatMul, PANEL, TiledRows};
use crate::linear::{Linear, LinearWeights};
use crate::packed::{PackedMatMul, QuantizedRows};
use crate::threads::SharedSliceMut;

/// Columns per unit of work of a thread: whole panels of weights of any format.
pub(crate) const COLUMN_GRAIN: usize = PANEL;

/// Inputs of a product, packed for its kernels.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    pub(crate) floats: TiledRows,
    pub(crate) quantized: QuantizedRows,
}

/// Destination of a range of a product's columns.
#[derive(Clone, Copy)]
pub(crate) struct OutputColumns<'a> {
    /// Row-major.
    pub(crate) numbers: &'a SharedSliceMut<'a, f32>,
    /// Index of the range's first column in row 0.
    pub(crate) start: usize,
    /// Elements per row.
    pub(crate) stride: usize,
}

impl OutputColumns<'_> {
    /// `len` columns of a row from the `column`-th of the range on.
    ///
    /// # Safety
    /// No two slices that live at the same time may overlap.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "as for `SharedSliceMut::slice_mut`")]
    pub(crate) unsafe fn slice_mut(&self, row: usize, column: usize, len: usize) -> &mut [f32] {
        let start = self.start + row * self.stride + column;
        // SAFETY: guaranteed by the caller.
        unsafe { self.numbers.slice_mut(start..start + len) }
    }
}

impl Cpu {
    /// `x` `[rows, k]` -> `out` `[rows, width]`, both row-major.
    pub fn linear(&self, linear: &Linear, x: &[f32], out: &mut [f32]) {
        assert!(
            out.len() == num_rows(linear, x) * linear.width(),
            "input and output of a linear layer have different numbers of rows"
        );
        self.multiply_packed(linear, &self.pack(linear, x), out);
    }

    /// Packs the input of a product.
    pub(crate) fn pack(&self, linear: &Linear, x: &[f32]) -> MutexGuard<'_, Activations> {
        let mut activations = self.activations.lock().unwrap_or_else(PoisonError::into_inner);
        let with = (self.isa, &self.threads);
        match &linear.weights {
            LinearWeights::Floats(weights) => activations.floats.fill(weights, x, with),
            LinearWeights::Packed(weights) => activations.quantized.fill(weights, x, with),
        }
        activations
    }

    /// Multiplies packed rows -> `out` `[rows, width]`.
    pub(crate) fn multiply_packed(&self, linear: &Linear, x: &Activations, out: &mut [f32]) {
        let (k, width) = (linear.k(), linear.width());
        let (work, numbers) = (out.len() * k, &SharedSliceMut::new(out));
        self.threads.for_ranges(width, COLUMN_GRAIN, work, |columns| {
            let out = OutputColumns { numbers, start: columns.start, stride: width };
            self.multiply_columns(linear, x, columns, out);
        });
    }

    /// Multiplies packed rows with a range of columns: whole panels, except at the matrix's end.
    pub(crate) fn multiply_columns(
        &self,
        linear: &Linear,
        x: &Activations,
        columns: Range<usize>,
        out: OutputColumns<'_>,
    ) {
        let (scales, bias) = (linear.scales.as_deref(), linear.bias.as_deref());
        match &linear.weights {
            LinearWeights::Floats(weights) => {
                self.isa.run_floats(FloatMatMul { x: &x.floats, weights, scales, bias, columns, out });
            }
            LinearWeights::Packed(weights) => {
                self.isa.run_dots(PackedMatMul { x: &x.quantized, weights, bias, columns, out });
            }
        }
    }
}

/// Number of rows of an input `[rows, k]`.
pub(crate) fn num_rows(linear: &Linear, x: &[f32]) -> usize {
    let rows = x.len() / linear.k();
    assert!(x.len() == rows * linear.k(), "the input of a linear layer has a part of a row");
    rows
}
