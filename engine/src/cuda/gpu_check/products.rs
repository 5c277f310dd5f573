//! Times of weight products against the device's memory bandwidth.

use std::time::Instant;

use cpu_kernels::KSlices;
use half::bf16;

use super::product_blocks::time_fp8_blocks;
use super::{CheckTarget, Report};
use crate::cuda::blas::ProductShape;
use crate::cuda::device::CudaMemory;
use crate::cuda::executor::{Executor, Tensor};
use crate::cuda::ops::{
    BF16_GRAIN, Fp8Layout, GemmBf16, GemmFp8, GemmInt8, GemmPanels, INT8_GRAIN, InputLayout, PackedChannels,
    PanelOperands, borders, multiply_only, pack_fp8, pack_panels, packed_len, read_words, to_panels,
};
use crate::cuda::{CudaDevice, CudaError};
use crate::{EngineError, WeightFormat};

/// Launches before timing, timed runs, and launches per run. One of each in a dry run, whose times mean
/// nothing.
const REPEATS: [u32; 3] = [5, 3, 20];
/// Numbers of rows: one, the most that cost as much as one, a verify batch, prefill.
const ROWS: [usize; 4] = [1, 8, 64, 512];
/// Much larger than any cache.
const READ_BYTES: usize = 4 << 30;
/// Blocks of the kernel that reads: several per multiprocessor of the largest device.
const READ_BLOCKS: usize = 8 * 160;
/// Rounds of the kernel that only multiplies; they take some milliseconds.
const MULTIPLY_ROUNDS: usize = 10_000;

/// Times the weight products of 8B to 70B layers relative to the bytes of their weights.
pub(super) fn products(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let mut device = target.open()?;
    let memory = read_bandwidth(&mut device, target.is_dry)?;
    report.say(format!("memory is read at {memory:.0} GB/s; rates below are of the weights' bytes"));
    report.say(format!("{:<36}{:>12}{:>12}{:>12}", "rows x outputs x inputs", "us", "GB/s", "of memory"));
    let large = [(4096, 4096), (28_672, 4096), (4096, 14_336), (8192, 8192)];
    // Whole tiles, and slices of whole panels.
    let shapes = if target.is_dry { &[(128, 1024)][..] } else { &large };
    for &(n, k) in shapes {
        for rows in ROWS {
            if target.is_dry && rows > 8 {
                continue;
            }
            let (shape, is_dry) = (ProductShape { rows, n, k }, target.is_dry);
            let mut times = vec![
                ("gemm_bf16", time_bf16(&mut device, shape, is_dry)?, n * k * 2),
                ("gemm_fp8", time_fp8(&mut device, shape, is_dry)?, n * k),
                ("gemm_int8", time_int8(&mut device, shape, is_dry)?, n * k),
            ];
            if device.has_panel_kernels() {
                let mut time = |format| time_tiles(&mut device, shape, format, is_dry);
                times.push(("gemm_panels", time(WeightFormat::Bf16)?, n * k * 2));
                times.push(("fp8_panels", time(WeightFormat::Fp8)?, n * k));
                times.push(("int8_panels", time(WeightFormat::Int8)?, n * k));
            }
            let (in_rows, in_panels) = time_fp8_blocks(&mut device, shape, is_dry)?;
            times.push(("gemm_fp8_blocks", in_rows, n * k));
            times.extend(in_panels.map(|us| ("fp8_block_panels", us, n * k)));
            for (kernel, us, bytes) in times {
                let rate = bytes as f64 / us / 1e3;
                let case = format!("{kernel} {rows} x {n} x {k}");
                report.say(format!("{case:<36}{us:>12.1}{rate:>12.0}{:>12.2}", rate / memory));
            }
        }
    }
    Ok(())
}

/// GB/s of a kernel that only reads memory.
pub(super) fn read_bandwidth(device: &mut CudaDevice, is_dry: bool) -> Result<f64, CudaError> {
    let (bytes, blocks) = if is_dry { (1 << 20, 2) } else { (READ_BYTES, READ_BLOCKS) };
    let words: Tensor<_, u32> = Tensor::zeros(device, bytes / 4, "memory to be read")?;
    let mut sums = Tensor::zeros(device, blocks, "what was read")?;
    let us = best_of(device, is_dry, |device| read_words(device, &words, &mut sums))?;
    Ok(bytes as f64 / us / 1e3)
}

/// TFLOP/s of a kernel that only multiplies: bf16 on tensor cores, with the instruction that all kernels here
/// use.
pub(super) fn multiply_peak(device: &mut CudaDevice, is_dry: bool) -> Result<f64, CudaError> {
    let (blocks, rounds) = if is_dry { (2, 3) } else { (READ_BLOCKS, MULTIPLY_ROUNDS) };
    let mut sums = Tensor::zeros(device, blocks, "sums of products")?;
    let mut work = 0;
    let us =
        best_of(device, is_dry, |device| multiply_only(device, rounds, &mut sums).map(|done| work = done))?;
    Ok(work as f64 / us / 1e6)
}

fn time_bf16(device: &mut CudaDevice, shape: ProductShape, is_dry: bool) -> Result<f64, CudaError> {
    let ProductShape { rows, n, k } = shape;
    let numbers: Vec<bf16> = (0..n * k).map(weight_like).collect();
    let weights = Tensor::of(device, &numbers, "weights")?;
    let x: Vec<bf16> = (0..rows * k).map(weight_like).collect();
    let x = Tensor::of(device, &x, "activations")?;
    let on_host = borders(&KSlices::eighths(k, 32), BF16_GRAIN);
    let on_device = Tensor::of(device, &on_host, "borders")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    best_of(device, is_dry, |device| {
        let (weights, borders) = (&weights, (&on_device, on_host.as_slice()));
        GemmBf16 { x: &x, weights, bias: None, borders, out: &mut out }.launch(device, shape)
    })
}

fn time_fp8(device: &mut CudaDevice, shape: ProductShape, is_dry: bool) -> Result<f64, CudaError> {
    let ProductShape { rows, n, k } = shape;
    let layout = Fp8Layout::new(&borders(&KSlices::eighths(k, 32), BF16_GRAIN));
    // Any bytes are valid weights in every layout.
    let number = |i: usize| (i.wrapping_mul(40_503) >> 7) as u8;
    let codes: Vec<u8> = (0..n * layout.row_bytes()).map(number).collect();
    let weights = Tensor::of(device, &codes, "weights")?;
    let x: Vec<bf16> = (0..rows * k).map(weight_like).collect();
    let x = Tensor::of(device, &x, "activations")?;
    let scales = Tensor::of(device, &vec![0.01f32; n], "scales")?;
    let on_device = Tensor::of(device, layout.borders(), "borders")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    best_of(device, is_dry, |device| {
        let (weights, channel_scales, layout) = (&weights, Some(&scales), (&on_device, &layout));
        GemmFp8 { x: &x, weights, channel_scales, bias: None, layout, out: &mut out }.launch(device, shape)
    })
}

/// Products of weights in tiles.
fn time_tiles(
    device: &mut CudaDevice,
    shape: ProductShape,
    format: WeightFormat,
    is_dry: bool,
) -> Result<f64, CudaError> {
    let mut tiled = TiledProduct::new(device, shape, format)?;
    best_of(device, is_dry, |device| tiled.launch(device))
}

/// Operands in panels and tiles.
enum Tiles {
    Bf16 {
        x: Tensor<CudaMemory, bf16>,
        weights: Tensor<CudaMemory, bf16>,
    },
    Fp8 {
        x: Tensor<CudaMemory, bf16>,
        codes: Tensor<CudaMemory, u8>,
        scales: Tensor<CudaMemory, f32>,
    },
    Int8 {
        x: Tensor<CudaMemory, i8>,
        steps: Tensor<CudaMemory, i8>,
        /// Of rows and slices, and of channels.
        scales: Tensor<CudaMemory, f32>,
    },
}

/// A product whose operands are in panels and tiles.
pub(super) struct TiledProduct {
    operands: Tiles,
    borders: (Tensor<CudaMemory, u32>, Vec<u32>),
    sums: Option<Tensor<CudaMemory, f32>>,
    pub(super) out: Tensor<CudaMemory, f32>,
    shape: ProductShape,
}

impl TiledProduct {
    /// Weights and inputs are [`weight_like`], or random bytes, which are valid numbers of FP8 and int8. Any
    /// format but these two is bf16. `n` is a multiple of 128.
    pub(super) fn new(
        device: &mut CudaDevice,
        shape: ProductShape,
        format: WeightFormat,
    ) -> Result<Self, CudaError> {
        let ProductShape { rows, n, k } = shape;
        let numbers: Vec<bf16> = (0..n * k).map(weight_like).collect();
        let channels = PackedChannels { first: 0, count: n, k };
        let operands = match format {
            WeightFormat::Int8 => Tiles::Int8 {
                x: Tensor::of(
                    device,
                    &(0..rows.next_multiple_of(8) * k).map(step_like).collect::<Vec<_>>(),
                    "x",
                )?,
                steps: Tensor::of(device, &(0..n * k).map(step_like).collect::<Vec<_>>(), "tiles")?,
                scales: Tensor::of(device, &vec![0.01; n.max(rows * 8)], "scales")?,
            },
            WeightFormat::Fp8 => {
                let codes: &[u8] = bytemuck::cast_slice(&numbers[..n * k / 2]);
                let by_rows = Tensor::of(device, codes, "weights")?;
                let mut codes = Tensor::zeros(device, packed_len(n, k), "tiles")?;
                pack_fp8(device, &by_rows, &mut codes, channels)?;
                let scales = Tensor::of(device, &vec![0.01; n], "scales")?;
                Tiles::Fp8 { x: panels(device, (rows, k))?, codes, scales }
            }
            _ => {
                let by_rows = Tensor::of(device, &numbers, "weights")?;
                let mut weights = Tensor::zeros(device, packed_len(n, k), "tiles")?;
                pack_panels(device, &by_rows, &mut weights, channels)?;
                Tiles::Bf16 { x: panels(device, (rows, k))?, weights }
            }
        };
        let on_host = borders(&KSlices::eighths(k, 32), BF16_GRAIN);
        let borders = (Tensor::of(device, &on_host, "borders")?, on_host);
        let out = Tensor::zeros(device, rows * n, "products")?;
        // The unpacked operands are freed here.
        device.wait()?;
        Ok(Self { operands, borders, sums: None, out, shape })
    }

    pub(super) fn launch(&mut self, device: &mut CudaDevice) -> Result<(), CudaError> {
        let Self { operands, borders, sums, out, shape } = self;
        let operands = match operands {
            Tiles::Bf16 { x, weights } => PanelOperands::Bf16 { x, weights },
            Tiles::Fp8 { x, codes, scales } => PanelOperands::Fp8 { x, codes, channel_scales: Some(scales) },
            Tiles::Int8 { x, steps, scales } => {
                PanelOperands::Int8 { x: (x, scales), steps, channel_scales: Some(scales), scales_of_row: 8 }
            }
        };
        let borders = (&borders.0, borders.1.as_slice());
        GemmPanels { operands, bias: None, borders, sums, out }.launch_whole(device, *shape, None)
    }
}

/// Inputs in panels.
pub(super) fn panels(
    device: &mut CudaDevice,
    (rows, k): (usize, usize),
) -> Result<Tensor<CudaMemory, bf16>, CudaError> {
    let x: Vec<f32> = (0..rows * k).map(|i| weight_like(i).to_f32()).collect();
    let by_rows = Tensor::of(device, &x, "activations")?;
    let mut x = Tensor::zeros(device, InputLayout::Panels.len(rows, k), "panels")?;
    to_panels(device, &by_rows, &mut x, (rows, k))?;
    // The rows are freed here.
    device.wait()?;
    Ok(x)
}

fn time_int8(device: &mut CudaDevice, shape: ProductShape, is_dry: bool) -> Result<f64, CudaError> {
    let ProductShape { rows, n, k } = shape;
    let numbers: Vec<i8> = (0..n * k).map(step_like).collect();
    let weights = Tensor::of(device, &numbers, "weights")?;
    let x: Vec<i8> = (0..rows * k).map(step_like).collect();
    let x = Tensor::of(device, &x, "activations")?;
    let scales = Tensor::of(device, &vec![0.01f32; n.max(rows * 8)], "scales")?;
    let on_host = borders(&KSlices::eighths(k, 32), INT8_GRAIN);
    let on_device = Tensor::of(device, &on_host, "borders")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    best_of(device, is_dry, |device| {
        let (x, channel_scales, borders) = ((&x, &scales), Some(&scales), (&on_device, on_host.as_slice()));
        GemmInt8 { x, weights: &weights, channel_scales, bias: None, borders, slices: 8, out: &mut out }
            .launch(device, shape)
    })
}

/// Varied numbers: zeros would take less power and raise the clock rate.
pub(super) fn weight_like(i: usize) -> bf16 {
    bf16::from_bits(0x3f00 | ((i.wrapping_mul(40_503) >> 7) as u16 & 0x80ff))
}

/// The same for int8.
fn step_like(i: usize) -> i8 {
    (i.wrapping_mul(40_503) >> 7) as i8
}

/// Best mean of several timed runs, in microseconds per launch.
pub(super) fn best_of(
    device: &mut CudaDevice,
    is_dry: bool,
    mut launch: impl FnMut(&mut CudaDevice) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let [warm_up, runs, launches] = if is_dry { [1; 3] } else { REPEATS };
    for _ in 0..warm_up {
        launch(device)?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        device.wait()?;
        let start = Instant::now();
        for _ in 0..launches {
            launch(device)?;
        }
        device.wait()?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(launches));
    }
    Ok(best)
}
