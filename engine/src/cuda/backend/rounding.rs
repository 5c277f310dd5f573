//! Inputs of products, rounded to bf16 or quantized to int8. The kernel that writes an input in f32 also
//! writes it in bf16, in the layout that the model's products read. A product that needs another layout
//! rounds its input itself, and one of int8 quantizes it.

use half::bf16;

use super::State;
use super::load::GpuWeights;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};
use crate::cuda::ops::{
    InputLayout, Int8Rows, PANEL_COLUMNS, QuantizeRows, StepLayout, ensure_capacity, to_bf16, to_panels,
};

/// How many of a model's matrices read inputs in bf16 of either layout.
#[derive(Debug, Default)]
pub(super) struct InputReaders {
    rows: usize,
    panels: usize,
}

impl InputReaders {
    pub(super) fn add<M>(&mut self, weights: &GpuWeights<M>) {
        match weights {
            GpuWeights::Bf16Tiles(_) | GpuWeights::Fp8Tiles { .. } => self.panels += 1,
            GpuWeights::Bf16(_) | GpuWeights::Fp8 { .. } => self.rows += 1,
            GpuWeights::Fp8Blocks { is_tiled: true, .. } => self.panels += 1,
            GpuWeights::Fp8Blocks { is_tiled: false, .. } => self.rows += 1,
            GpuWeights::Int8 { .. } => {}
        }
    }

    /// The layout in which rows of `width` are written; `None` if no product reads bf16.
    fn layout(&self, width: usize) -> Option<InputLayout> {
        let is_packed = self.panels > self.rows && width.is_multiple_of(PANEL_COLUMNS);
        let layout = if is_packed { InputLayout::Panels } else { InputLayout::Rows };
        (self.panels + self.rows > 0).then_some(layout)
    }
}

/// Numbers in f32 of which `rounded` holds a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoundedSource {
    address: u64,
    len: usize,
    layout: InputLayout,
}

/// Memory for the input of a product, quantized to int8.
#[derive(Debug)]
pub(super) struct QuantizedRows<M> {
    /// `[rows, width]`.
    steps: Option<Tensor<M, i8>>,
    /// `[rows, slices]`.
    scales: Option<Tensor<M, f32>>,
}

impl<M> QuantizedRows<M> {
    /// Memory that is allocated when it is needed.
    pub(super) const EMPTY: Self = Self { steps: None, scales: None };
}

/// Input of a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductRows<'a, M> {
    /// `[rows, width]`.
    pub(super) x: &'a Tensor<M, f32>,
    pub(super) rows: usize,
    pub(super) width: usize,
    /// The numbers of which `rounded` holds a copy.
    pub(super) source: Option<RoundedSource>,
}

impl<M: DeviceMemory> ProductRows<'_, M> {
    /// Rounds the rows in this layout: returns the copy in `rounded` if it is theirs, else a new one.
    pub(super) fn rounded<'a, E: Executor<Memory = M>>(
        &self,
        executor: &mut E,
        rounded: &'a mut Option<Tensor<M, bf16>>,
        layout: InputLayout,
    ) -> Result<&'a Tensor<M, bf16>, CudaError> {
        let Self { x, rows, width, source } = *self;
        let wanted = RoundedSource { address: x.address(), len: rows * width, layout };
        let copy = ensure_capacity(rounded, executor, layout.len(rows, width), "rounded activations")?;
        match (source == Some(wanted), layout) {
            (true, _) => {}
            (false, InputLayout::Rows) => to_bf16(executor, x, copy, rows * width)?,
            (false, InputLayout::Panels) => to_panels(executor, x, copy, (rows, width))?,
        }
        Ok(copy)
    }

    /// Quantizes the rows in this layout, with a scale for each slice between two of `borders`. Returns steps
    /// and scales.
    pub(super) fn quantized<'a, E: Executor<Memory = M>>(
        &self,
        executor: &mut E,
        QuantizedRows { steps, scales }: &'a mut QuantizedRows<M>,
        borders: &Tensor<M, u32>,
        layout: StepLayout,
    ) -> Result<Int8Rows<'a, M>, CudaError> {
        let Self { x, rows, width, .. } = *self;
        let steps = ensure_capacity(steps, executor, layout.len(rows, width), "quantized activations")?;
        let len = rows * (borders.len() - 1);
        let scales = ensure_capacity(scales, executor, len, "scales of activations")?;
        QuantizeRows { x, borders, steps, layout, scales, to_row: 0, columns: 0..width }
            .launch(executor, rows, width)?;
        Ok((steps, scales))
    }
}

impl<E: Executor> State<E> {
    /// Ensures that the buffer of rounded inputs has room for these rows, if products read bf16. Returns the
    /// layout in which to write them.
    pub(super) fn ensure_rounded(
        &mut self,
        (rows, width): (usize, usize),
    ) -> Result<Option<InputLayout>, CudaError> {
        let Some(layout) = self.readers.layout(width) else { return Ok(None) };
        ensure_capacity(
            &mut self.rounded,
            &mut self.executor,
            layout.len(rows, width),
            "rounded activations",
        )?;
        Ok(Some(layout))
    }

    /// Records that `rounded` holds the rounded copy of these rows until the next operation.
    pub(super) fn set_rounded_source(
        &mut self,
        address: u64,
        (rows, width): (usize, usize),
        layout: Option<InputLayout>,
    ) {
        self.rounded_source = layout.map(|layout| RoundedSource { address, len: rows * width, layout });
    }
}
