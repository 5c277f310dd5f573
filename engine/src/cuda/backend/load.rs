//! Weights on the device: bf16 as in the checkpoint, FP8 with a byte per weight, int8 quantized on the device
//! row by row.

use std::sync::Arc;

use cpu_kernels::{KSlices, MatrixFormat, QuantizedFormat};
use half::bf16;

use super::Borders;
use super::upload::{Fp8RowForm, upload_bf16, upload_f32, upload_fp8};
use crate::EngineError;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Tensor};
use crate::cuda::ops::{
    BF16_GRAIN, BlockLayout, Fp8Layout, INT8_GRAIN, INT8_PANEL_COLUMNS, PANEL_COLUMNS, PackedChannels,
    QuantizeRows, StepLayout, TILE_CHANNELS, borders, check_borders, check_head_dim, fits_panels, pack_fp8,
    pack_panels, packed_len,
};
use crate::weights::{
    Fp8Scales, LinearFormat, LinearTensors, ModelSpec, StackedRows, TensorPart, TensorSource,
};

/// Bytes of the rows that are quantized or packed at a time.
const CHUNK_BYTES: usize = 64 << 20;

/// The embedding table.
#[derive(Debug)]
pub(crate) struct GpuTable<M> {
    /// `[rows, columns]`, row after row or in tiles.
    pub(super) numbers: Arc<Tensor<M, bf16>>,
    pub(super) is_tiled: bool,
    pub(super) columns: usize,
    rows: usize,
    /// Used if the table is also the vocabulary projection.
    borders: Borders<M>,
}

impl<M> Clone for GpuTable<M> {
    fn clone(&self) -> Self {
        let (numbers, borders) = (Arc::clone(&self.numbers), Arc::clone(&self.borders));
        Self { numbers, is_tiled: self.is_tiled, borders, columns: self.columns, rows: self.rows }
    }
}

/// Weights of a product.
#[derive(Debug)]
pub(super) enum GpuWeights<M> {
    /// `[n, k]`.
    Bf16(Arc<Tensor<M, bf16>>),
    /// `[n, k]`, in tiles.
    Bf16Tiles(Arc<Tensor<M, bf16>>),
    Fp8Tiles {
        /// `[n, k]`, in tiles.
        codes: Tensor<M, u8>,
        /// `[n]`. `None` if the scales are applied after an all-reduce.
        channel_scales: Option<Tensor<M, f32>>,
    },
    Fp8 {
        /// `[n, row bytes]`.
        codes: Tensor<M, u8>,
        /// `[n]`. `None` if the scales are applied after an all-reduce.
        channel_scales: Option<Tensor<M, f32>>,
        /// Borders of a row on the device, and the layout of a row.
        layout: (Tensor<M, u32>, Fp8Layout),
    },
    /// Scales by block, see [`BlockLayout`].
    Fp8Blocks {
        /// `[n, row bytes]` row after row, or `[n, k]` in tiles.
        codes: Tensor<M, u8>,
        is_tiled: bool,
        /// `[chains, n]`.
        scales: Tensor<M, f32>,
        /// [`BlockLayout::on_device`], and the layout.
        layout: (Tensor<M, u32>, BlockLayout),
    },
    Int8 {
        /// `[n, k]`, row after row or in tiles.
        steps: Tensor<M, i8>,
        is_tiled: bool,
        /// `[n]`. `None` if the scales are applied after an all-reduce.
        channel_scales: Option<Tensor<M, f32>>,
        /// Borders of the slices of an input row; each slice has its own scale.
        slice_borders: Tensor<M, u32>,
    },
}

/// Matrices that share their input, stacked.
#[derive(Debug)]
pub(crate) struct GpuLinear<M> {
    pub(super) weights: GpuWeights<M>,
    pub(super) bias: Option<Tensor<M, f32>>,
    /// `[n]` each, applied after the all-reduce of partial sums.
    pub(super) scales_after: Option<Tensor<M, f32>>,
    pub(super) bias_after: Option<Tensor<M, f32>>,
    pub(super) borders: Borders<M>,
    /// Outputs and inputs.
    pub(super) n: usize,
    pub(super) k: usize,
}

impl<M: DeviceMemory> GpuTable<M> {
    pub(super) fn as_linear(&self) -> GpuLinear<M> {
        let numbers = Arc::clone(&self.numbers);
        let weights = if self.is_tiled { GpuWeights::Bf16Tiles(numbers) } else { GpuWeights::Bf16(numbers) };
        let borders = Arc::clone(&self.borders);
        let (bias, scales_after, bias_after) = (None, None, None);
        GpuLinear { weights, bias, scales_after, bias_after, borders, n: self.rows, k: self.columns }
    }
}

impl<M> GpuLinear<M> {
    /// Bytes of weights, scales and bias that a product reads.
    pub(super) fn bytes(&self) -> u64 {
        let (numbers, vectors) = match &self.weights {
            GpuWeights::Bf16(_) | GpuWeights::Bf16Tiles(_) => (2 * self.n * self.k, 0),
            GpuWeights::Fp8Tiles { .. } => (self.n * self.k, 4 * self.n),
            GpuWeights::Fp8 { layout, .. } => (layout.1.row_bytes() * self.n, 4 * self.n),
            GpuWeights::Fp8Blocks { layout: (_, layout), .. } => {
                (layout.row().row_bytes() * self.n, 4 * layout.num_chains() * self.n)
            }
            GpuWeights::Int8 { .. } => (self.n * self.k, 4 * self.n),
        };
        let bias = self.bias.as_ref().or(self.bias_after.as_ref()).map_or(0, |_| 4 * self.n);
        (numbers + vectors + bias) as u64
    }
}

/// Uploads an embedding table, which may also be the vocabulary's projection (`is_tied`).
pub(super) fn table<E: Executor>(
    executor: &mut E,
    source: &dyn TensorSource,
    (part, format): (&TensorPart, MatrixFormat),
    is_tied: bool,
) -> Result<GpuTable<E::Memory>, EngineError> {
    if format != MatrixFormat::Bf16 {
        return Err(unsupported("f32"));
    }
    let stacked = StackedRows::new(source, vec![part.clone()])?;
    let (rows, columns) = (stacked.rows(), stacked.columns());
    let borders = upload_borders(executor, &KSlices::whole(columns), BF16_GRAIN)?;
    let is_tiled = is_tied && executor.multiplies_panels() && fits_panels(&borders.1, PANEL_COLUMNS);
    let numbers = if is_tiled {
        bf16_tiles(executor, &stacked, (rows, columns))?
    } else {
        let mut numbers = Tensor::zeros(executor, rows * columns, "the table of embeddings")?;
        upload_bf16(executor, &stacked, 0..rows, &mut numbers)?;
        numbers
    };
    Ok(GpuTable { numbers: Arc::new(numbers), is_tiled, columns, rows, borders })
}

/// Uploads matrices that share their input; quantizes them on the device if the format is int8.
pub(super) fn linear<E: Executor>(
    executor: &mut E,
    tensors: &LinearTensors<'_>,
) -> Result<GpuLinear<E::Memory>, EngineError> {
    let slices = tensors.slices.rebased();
    let (n, k) = (tensors.parts.iter().map(|part| part.rows.len()).sum(), slices.end());
    let (weights, scales_after, borders) = match tensors.format {
        LinearFormat::Float(MatrixFormat::F32) => return Err(unsupported("f32")),
        LinearFormat::Float(MatrixFormat::Bf16) => {
            let borders = upload_borders(executor, &slices, BF16_GRAIN)?;
            let rows = tensors.rows()?;
            let weights = if executor.multiplies_panels() && fits_panels(&borders.1, PANEL_COLUMNS) {
                GpuWeights::Bf16Tiles(Arc::new(bf16_tiles(executor, &rows, (n, k))?))
            } else {
                let mut weights = Tensor::zeros(executor, n * k, "weights")?;
                upload_bf16(executor, &rows, 0..n, &mut weights)?;
                GpuWeights::Bf16(Arc::new(weights))
            };
            (weights, None, borders)
        }
        LinearFormat::Fp8(Fp8Scales::Blocks) => {
            let (weights, borders) = fp8_blocks(executor, tensors, n)?;
            (weights, None, borders)
        }
        LinearFormat::Fp8(Fp8Scales::Channels) => {
            let borders = upload_borders(executor, &slices, BF16_GRAIN)?;
            let (layout, rows) = (Fp8Layout::new(&borders.1), tensors.rows()?);
            let form = Fp8RowForm { layout: &layout, scales_per_row: tensors.scales_per_row() };
            let is_tiled = executor.multiplies_panels() && fits_panels(&borders.1, PANEL_COLUMNS);
            let (codes, scales) = if is_tiled {
                fp8_tiles(executor, &rows, form, n)?
            } else {
                let mut codes = Tensor::zeros(executor, n * layout.row_bytes(), "weights")?;
                let scales = upload_fp8(executor, &rows, 0..n, form, &mut codes)?;
                (codes, scales)
            };
            let scales = Tensor::of(executor, &scales, "scales of weights")?;
            let (channel_scales, after) =
                if tensors.partial { (None, Some(scales)) } else { (Some(scales), None) };
            let weights = if is_tiled {
                GpuWeights::Fp8Tiles { codes, channel_scales }
            } else {
                let layout = (Tensor::of(executor, layout.borders(), "borders of slices")?, layout);
                GpuWeights::Fp8 { codes, channel_scales, layout }
            };
            (weights, after, borders)
        }
        LinearFormat::Quantized(QuantizedFormat::Int8) => {
            let is_tiled = executor.multiplies_panels()
                && fits_panels(&borders(&slices, INT8_PANEL_COLUMNS), INT8_PANEL_COLUMNS);
            let grain = if is_tiled { INT8_PANEL_COLUMNS } else { INT8_GRAIN };
            let borders = upload_borders(executor, &slices, grain)?;
            let layout = if is_tiled { StepLayout::Tiles(TILE_CHANNELS) } else { StepLayout::Rows };
            let (steps, scales) = quantize(executor, tensors, (n, k), layout)?;
            let ends = slices.ranges().iter().map(|slice| slice.end as u32);
            let slice_borders: Vec<u32> = std::iter::once(0).chain(ends).collect();
            let slice_borders = Tensor::of(executor, &slice_borders, "borders of slices")?;
            let (channel_scales, after) =
                if tensors.partial { (None, Some(scales)) } else { (Some(scales), None) };
            (GpuWeights::Int8 { steps, is_tiled, channel_scales, slice_borders }, after, borders)
        }
        LinearFormat::Quantized(QuantizedFormat::Int4) => return Err(unsupported("int4")),
    };
    let bias = tensors.bias.as_ref().map(|bias| Tensor::of(executor, bias, "bias")).transpose()?;
    let (bias, bias_after) = if tensors.partial { (None, bias) } else { (bias, None) };
    Ok(GpuLinear { weights, bias, scales_after, bias_after, borders, n, k })
}

fn upload_borders<E: Executor>(
    executor: &mut E,
    slices: &KSlices,
    grain: usize,
) -> Result<Borders<E::Memory>, CudaError> {
    upload_checked(executor, borders(slices, grain), (slices.end(), grain))
}

fn upload_checked<E: Executor>(
    executor: &mut E,
    on_host: Vec<u32>,
    (k, grain): (usize, usize),
) -> Result<Borders<E::Memory>, CudaError> {
    check_borders("a product", &on_host, (k, grain))?;
    let on_device = Tensor::of(executor, &on_host, "borders of slices")?;
    Ok(Arc::new((on_device, on_host)))
}

/// Uploads rows in chunks and packs them into tiles on the device.
fn bf16_tiles<E: Executor>(
    executor: &mut E,
    rows: &StackedRows<'_>,
    (n, k): (usize, usize),
) -> Result<Tensor<E::Memory, bf16>, EngineError> {
    let mut weights = Tensor::zeros(executor, packed_len(n, k), "weights")?;
    let channels = packed_len(n, k) / k;
    let chunk = (CHUNK_BYTES / (2 * k)).next_multiple_of(packed_len(1, 1)).min(channels);
    let mut unpacked = Tensor::zeros(executor, chunk * k, "rows to pack")?;
    for first in (0..channels).step_by(chunk) {
        upload_bf16(executor, rows, first..n.min(first + chunk), &mut unpacked)?;
        let packed = PackedChannels { first, count: chunk.min(channels - first), k };
        pack_panels(executor, &unpacked, &mut weights, packed)?;
    }
    // The rows are freed here, but launches that use them may still be collected and not enqueued.
    executor.flush()?;
    Ok(weights)
}

/// Weights, and the borders of their slices.
type SlicedWeights<M> = (GpuWeights<M>, Borders<M>);

/// Uploads FP8 weights with scales by block. A rank's part of a sum is scaled before the all-reduce.
fn fp8_blocks<E: Executor>(
    executor: &mut E,
    tensors: &LinearTensors<'_>,
    n: usize,
) -> Result<SlicedWeights<E::Memory>, EngineError> {
    let (layout, rows) = (BlockLayout::new(&tensors.slices), tensors.rows()?);
    let borders = upload_checked(executor, layout.of_k().to_vec(), (rows.columns(), BF16_GRAIN))?;
    let is_tiled = executor.multiplies_panels() && fits_panels(layout.of_chains(), PANEL_COLUMNS);
    let form = Fp8RowForm { layout: layout.row(), scales_per_row: tensors.scales_per_row() };
    let (codes, scales) = if is_tiled {
        fp8_tiles(executor, &rows, form, n)?
    } else {
        let mut codes = Tensor::zeros(executor, n * layout.row().row_bytes(), "weights")?;
        let scales = upload_fp8(executor, &rows, 0..n, form, &mut codes)?;
        (codes, scales)
    };
    let scales = Tensor::of(executor, &layout.scales(&scales), "scales of weights")?;
    let layout = (Tensor::of(executor, &layout.on_device(), "chains of slices")?, layout);
    Ok((GpuWeights::Fp8Blocks { codes, is_tiled, scales, layout }, borders))
}

/// FP8 weights and the scales of their rows.
type Fp8Weights<M> = (Tensor<M, u8>, Vec<f32>);

/// Uploads rows in chunks and packs them into tiles on the device.
fn fp8_tiles<E: Executor>(
    executor: &mut E,
    rows: &StackedRows<'_>,
    form: Fp8RowForm<'_>,
    n: usize,
) -> Result<Fp8Weights<E::Memory>, EngineError> {
    let k = form.layout.row_bytes();
    let mut codes = Tensor::zeros(executor, packed_len(n, k), "weights")?;
    let channels = packed_len(n, k) / k;
    let chunk = (CHUNK_BYTES / k).next_multiple_of(packed_len(1, 1)).min(channels);
    let mut unpacked = Tensor::zeros(executor, chunk * k, "rows to pack")?;
    let mut scales = Vec::with_capacity(n * form.scales_per_row);
    for first in (0..channels).step_by(chunk) {
        let wanted = first..n.min(first + chunk);
        scales.extend(upload_fp8(executor, rows, wanted, form, &mut unpacked)?);
        let packed = PackedChannels { first, count: chunk.min(channels - first), k };
        pack_fp8(executor, &unpacked, &mut codes, packed)?;
    }
    // The rows are freed here, but launches that use them may still be collected and not enqueued.
    executor.flush()?;
    Ok((codes, scales))
}

/// Int8 weights `[n, k]` and scales `[n]`.
type Quantized<M> = (Tensor<M, i8>, Tensor<M, f32>);

/// Quantizes whole rows to int8 on the device and keeps the columns of this rank's slices.
fn quantize<E: Executor>(
    executor: &mut E,
    tensors: &LinearTensors<'_>,
    (n, k): (usize, usize),
    layout: StepLayout,
) -> Result<Quantized<E::Memory>, EngineError> {
    let rows = tensors.whole_rows()?;
    let (whole_k, first) = (rows.columns(), tensors.slices.start());
    let (mut steps, mut scales) = (
        Tensor::zeros(executor, layout.len(n, k), "weights")?,
        Tensor::zeros(executor, n, "scales of weights")?,
    );
    let whole_row = Tensor::of(executor, &[0, whole_k as u32], "borders of a row")?;
    // Whole tiles.
    let chunk_rows = (CHUNK_BYTES / (4 * whole_k)).max(1).next_multiple_of(TILE_CHANNELS).min(n);
    let mut floats = Tensor::zeros(executor, chunk_rows * whole_k, "rows to quantize")?;
    for from in (0..n).step_by(chunk_rows) {
        let count = chunk_rows.min(n - from);
        upload_f32(executor, &rows, from..from + count, &mut floats)?;
        let (x, borders, columns) = (&floats, &whole_row, first..first + k);
        QuantizeRows { x, borders, steps: &mut steps, layout, scales: &mut scales, to_row: from, columns }
            .launch(executor, count, whole_k)?;
    }
    // The floats are freed here, but launches that use them may still be collected and not enqueued.
    executor.flush()?;
    Ok((steps, scales))
}

/// The error for formats without kernels.
fn unsupported(format: &'static str) -> EngineError {
    CudaError::UnsupportedFormat { format }.into()
}

/// Returns an error if there are no kernels for a model's head size or formats. Needs no device.
pub(in crate::cuda) fn check_model(model: &ModelSpec) -> Result<(), EngineError> {
    check_head_dim(model.config.head_dim)?;
    let format = model.formats.as_str();
    match model.formats.linear {
        LinearFormat::Float(MatrixFormat::F32) | LinearFormat::Quantized(QuantizedFormat::Int4) => {
            Err(unsupported(format))
        }
        _ if model.formats.embedding == MatrixFormat::F32 => {
            Err(CudaError::UnsupportedTable { format }.into())
        }
        _ => Ok(()),
    }
}
