//! Feed-forward layers: two products with silu(gate) * up between them. A thread computes gates and ups of a
//! few columns at a time, multiplies them while they are in its cache, and packs them for the second product.

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::elementwise::SiluMul;
use crate::floats::{FloatMatrix, PANEL, STEP};
use crate::linear::{Linear, LinearWeights};
use crate::packed::PackedMatrix;
use crate::product::{Activations, COLUMN_GRAIN, OutputColumns, num_rows};
use crate::threads::SharedSliceMut;
use crate::{Cpu, EXP_WORK};

/// Bytes of gates and ups that a thread computes before it multiplies them: few enough to stay in the L2
/// cache together with the activations.
const GATE_UP_BYTES: usize = 128 * 1024;

/// One feed-forward layer of a pass: its linear layers, and rows in row-major order.
#[derive(Debug)]
pub struct FeedForwardStep<'a> {
    /// The first product, whose outputs are `[gate | up]`.
    pub gate_up: &'a Linear,
    /// The second product, of silu(gate) * up.
    pub down: &'a Linear,
    /// `[rows, gate_up.k()]`.
    pub x: &'a [f32],
    /// `[rows, gate_up.width()]`: overwritten, with unspecified content.
    pub gates_and_ups: &'a mut [f32],
    /// `[rows, down.k()]`: overwritten likewise.
    pub gated: &'a mut [f32],
    /// `[rows, down.width()]`.
    pub out: &'a mut [f32],
}

/// The layer's first product.
struct GateUp<'a> {
    linear: &'a Linear,
    /// `[rows, linear.k()]`.
    x: &'a [f32],
    /// `[rows, linear.width()]`: each thread uses the part of its columns for gates and ups.
    buffer: &'a mut [f32],
}

impl GateUp<'_> {
    fn num_rows(&self) -> usize {
        num_rows(self.linear, self.x)
    }

    /// Number of columns of the gate, and of the ups.
    fn width(&self) -> usize {
        self.linear.width() / 2
    }
}

/// Consecutive columns of silu(gate) * up.
struct GatedColumns<'a> {
    columns: Range<usize>,
    /// Rows of `stride` elements that begin with these columns.
    rows: &'a [f32],
    stride: usize,
}

impl Cpu {
    /// `x` times `gate_up`, then silu(gate) * up times `down` -> `out`.
    ///
    /// Equals `linear`, `silu_mul` and `linear` in every bit.
    pub fn feed_forward(&self, step: FeedForwardStep<'_>) {
        let FeedForwardStep { gate_up, down, x, gates_and_ups, gated, out } = step;
        let (rows, width) = (num_rows(gate_up, x), gate_up.width() / 2);
        assert!(
            gates_and_ups.len() == 2 * gated.len() && gated.len() == rows * width && width == down.k(),
            "buffers of a feed-forward layer have inconsistent sizes"
        );
        if !width.is_multiple_of(PANEL) {
            self.linear(gate_up, x, gates_and_ups);
            self.silu_mul(gates_and_ups, width, gated);
            self.linear(down, gated, out);
            return;
        }
        let gate_up = GateUp { linear: gate_up, x, buffer: gates_and_ups };
        let mut packed = self.gated.lock().unwrap_or_else(PoisonError::into_inner);
        match &down.weights {
            LinearWeights::Floats(weights) if weights.has_even_chains() => {
                self.gate_into_floats(gate_up, weights, &mut packed);
                self.multiply_packed(down, &packed, out);
            }
            LinearWeights::Packed(weights) if weights.num_slices() >= self.threads.len() => {
                self.gate_into_integers(gate_up, gated, weights, &mut packed);
                self.multiply_packed(down, &packed, out);
            }
            _ => {
                self.gate_into_rows(gate_up, gated);
                self.linear(down, gated, out);
            }
        }
    }

    /// Packs silu(gate) * up for a product with `weights`.
    fn gate_into_floats(&self, gate_up: GateUp<'_>, weights: &FloatMatrix, packed: &mut Activations) {
        let writer = packed.floats.writer(weights, gate_up.num_rows(), self.isa);
        self.gate(gate_up, |GatedColumns { columns, rows, stride }| {
            // SAFETY: `gate` passes each column once.
            unsafe { writer.write_columns((rows, stride), 0..columns.len(), columns.start / STEP) };
        });
    }

    /// Quantizes silu(gate) * up for a product with `weights`. The scale of a K-slice needs all its numbers,
    /// so `gated` collects them, and the thread that completes a slice quantizes it.
    fn gate_into_integers(
        &self,
        gate_up: GateUp<'_>,
        gated: &mut [f32],
        weights: &PackedMatrix,
        packed: &mut Activations,
    ) {
        let num_rows = gate_up.num_rows();
        let slices = weights.slice_columns();
        let writer = packed.quantized.writer(weights, num_rows, self.isa);
        // `[slice][row][column of the slice]`
        let gated = SharedSliceMut::new(gated);
        let missing: Vec<_> = slices.iter().map(|slice| AtomicUsize::new(slice.len())).collect();
        for slice in (0..slices.len()).filter(|&slice| slices[slice].is_empty()) {
            // SAFETY: no thread completes a slice without columns.
            unsafe { writer.write_slice(slice, (&[], 0)) };
        }
        self.gate(gate_up, |GatedColumns { columns, rows, stride }| {
            for (index, slice) in slices.iter().enumerate() {
                let part = columns.start.max(slice.start)..columns.end.min(slice.end);
                if part.is_empty() {
                    continue;
                }
                for (row, numbers) in rows.chunks_exact(stride).enumerate() {
                    let start = num_rows * slice.start + row * slice.len() + (part.start - slice.start);
                    // SAFETY: `gate` passes each column once.
                    let out = unsafe { gated.slice_mut(start..start + part.len()) };
                    out.copy_from_slice(&numbers[part.start - columns.start..part.end - columns.start]);
                }
                if missing[index].fetch_sub(part.len(), Ordering::AcqRel) == part.len() {
                    // SAFETY: all columns of the slice are written, and only one thread finds that.
                    unsafe {
                        let numbers = gated.slice_mut(num_rows * slice.start..num_rows * slice.end);
                        writer.write_slice(index, (numbers, slice.len()));
                    }
                }
            }
        });
    }

    /// Writes silu(gate) * up to `gated` `[rows, width]`.
    fn gate_into_rows(&self, gate_up: GateUp<'_>, gated: &mut [f32]) {
        let width = gate_up.width();
        let gated = SharedSliceMut::new(gated);
        self.gate(gate_up, |GatedColumns { columns, rows, stride }| {
            for (row, numbers) in rows.chunks_exact(stride).enumerate() {
                let range = row * width + columns.start..row * width + columns.end;
                // SAFETY: `gate` passes each column once.
                unsafe { gated.slice_mut(range) }.copy_from_slice(&numbers[..columns.len()]);
            }
        });
    }

    /// Computes silu(gate) * up and passes it to `finish`, each column once.
    fn gate(&self, gate_up: GateUp<'_>, finish: impl Fn(GatedColumns<'_>) + Sync) {
        let (rows, width) = (gate_up.num_rows(), gate_up.width());
        let GateUp { linear, x, buffer } = gate_up;
        let columns_in_cache = GATE_UP_BYTES / (2 * size_of::<f32>() * rows.max(1));
        let max_columns = columns_in_cache.max(1).next_multiple_of(PANEL);
        let (activations, numbers) = (self.pack(linear, x), &SharedSliceMut::new(buffer));
        let work = (x.len() * 2 + rows * EXP_WORK) * width;
        self.threads.for_ranges(width, COLUMN_GRAIN, work, |columns| {
            let start = 2 * rows * columns.start;
            for first in columns.clone().step_by(max_columns) {
                let columns = first..columns.end.min(first + max_columns);
                let (len, stride) = (columns.len(), 2 * columns.len());
                let at = |start| OutputColumns { numbers, start, stride };
                self.multiply_columns(linear, &activations, columns.clone(), at(start));
                let ups = columns.start + width..columns.end + width;
                self.multiply_columns(linear, &activations, ups, at(start + len));
                // SAFETY: this thread alone uses the part of the buffer that has as many elements as gates and
                // ups of its columns.
                let rows = unsafe { numbers.slice_mut(start..start + rows * stride) };
                for row in rows.chunks_exact_mut(stride) {
                    let (gate, up) = row.split_at_mut(len);
                    self.isa.run(SiluMul { gate, up });
                }
                finish(GatedColumns { columns, rows, stride });
            }
        });
    }
}
