//! What `make gpu-check` runs on a machine with a GPU: every kernel against its naive twin at the size of a model's
//! layer, then how long each takes. Without a GPU it is one error.

mod ranks;

use std::path::Path;
use std::time::Instant;

use half::bf16;

use super::executor::{Executor, Tensor};
use super::ops::{BF16_GRAIN, GemmBf16, GemmInt8, INT8_GRAIN, borders};
use super::parity::{Scale, run_all};
use super::whole_model::{decode_on_gpu, distance_on_gpu, options, run};
use super::{CudaDevice, CudaError, GpuOptions};
use crate::k_slices::KSlices;
use crate::{Engine, EngineError, WeightFormat};
pub use ranks::ranks;

/// What was found.
#[derive(Debug)]
pub struct ParityReport {
    /// A line for each case.
    pub lines: Vec<String>,
    /// Cases in which a kernel and its twin differ.
    pub failed: usize,
}

/// Runs all cases on the device.
pub fn parity(device: &mut CudaDevice) -> Result<ParityReport, CudaError> {
    let parities = run_all(device, Scale::Large)?;
    let failed = parities.iter().filter(|parity| !parity.is_good()).count();
    Ok(ParityReport { lines: parities.iter().map(ToString::to_string).collect(), failed })
}

/// How far logits on a GPU may lie from the CPU engine's, as a part of the largest.
const LOGITS_TOLERANCE: f32 = 1e-2;

/// A checkpoint's logits, bf16 and int8, against the CPU engine's.
pub fn logits(ordinal: usize, model_dir: &Path) -> Result<ParityReport, EngineError> {
    let (mut lines, mut failed) = (Vec::new(), 0);
    for weights in [WeightFormat::Bf16, WeightFormat::Int8] {
        let distance = distance_on_gpu(ordinal, model_dir, weights)?;
        let is_good = distance <= LOGITS_TOLERANCE;
        failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "DIFFERS" };
        let model = model_dir.display();
        lines.push(format!(
            "{verdict:<8}logits of {model} as {weights:?}: {distance:.1e} of the largest apart"
        ));
    }
    Ok(ParityReport { lines, failed })
}

/// A checkpoint's logits with graphs, twice over, so that steps are replayed, against those without: equal bits.
pub fn graphs(ordinal: usize, model_dir: &Path) -> Result<ParityReport, EngineError> {
    let options = options(model_dir.to_owned(), WeightFormat::Bf16);
    let launched = GpuOptions::on(&[ordinal]);
    let expected = run(&mut Engine::load_on_cuda(&options, &launched)?)?;
    let mut engine = Engine::load_on_cuda(&options, &GpuOptions { graphs: true, ..launched })?;
    let (mut lines, mut failed) = (Vec::new(), 0);
    for times in 1..=4 {
        let is_good = run(&mut engine)? == expected;
        failed += usize::from(!is_good);
        let verdict = if is_good { "ok" } else { "DIFFERS" };
        lines.push(format!(
            "{verdict:<8}graphs, time {times}, {}: logits == launched ones",
            model_dir.display()
        ));
    }
    Ok(ParityReport { lines, failed })
}

/// Decode steps of a model of random weights, by its config.json: milliseconds, and the rate at which weights are read.
pub fn decode(ordinal: usize, config: &Path) -> Result<Vec<String>, EngineError> {
    const SEQUENCES: [usize; 4] = [1, 8, 64, 256];
    let mut lines = Vec::new();
    for weights in [WeightFormat::Bf16, WeightFormat::Int8] {
        for graphs in [false, true] {
            let gpus = GpuOptions { memory_utilization: Some(0.9), graphs, ..GpuOptions::on(&[ordinal]) };
            let (seconds, bytes) = decode_on_gpu(&gpus, config, weights, &SEQUENCES)?;
            let by = if graphs { "graphs" } else { "launches" };
            for (sequences, seconds) in SEQUENCES.into_iter().zip(seconds) {
                let (ms, rate) = (seconds * 1e3, bytes as f64 / seconds / 1e9);
                lines.push(format!(
                "{weights:?}, {sequences:>3} sequences, {by}: {ms:>8.2} ms a step, weights at {rate:.0} GB/s"
            ));
            }
        }
    }
    Ok(lines)
}

/// What one operation took.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Operation and shape.
    pub case: String,
    /// Best of several launches, microseconds.
    pub best_us: f64,
    /// Bytes that it must read at least, over that time.
    pub gb_per_s: f64,
}

/// Launches before timing, and launches in one timed run.
const WARM_UP: usize = 5;
const TIMED: u32 = 20;
/// Rows of weight products: one, the widest that costs one, a verify batch, prefill.
const ROWS: [usize; 4] = [1, 8, 64, 512];

/// Times the weight products of a 7B to 70B layer against the bytes of their weights.
pub fn timings(device: &mut CudaDevice) -> Result<Vec<Timing>, CudaError> {
    let mut timings = Vec::new();
    for (n, k) in [(4096, 4096), (28_672, 4096), (4096, 14_336), (57_344, 8192)] {
        for rows in ROWS {
            timings.push(time_bf16(device, (rows, n, k))?);
            timings.push(time_int8(device, (rows, n, k))?);
        }
    }
    Ok(timings)
}

fn time_bf16(device: &mut CudaDevice, (rows, n, k): (usize, usize, usize)) -> Result<Timing, CudaError> {
    // Zeros would cost less power and flatter the clock.
    let number = |i: usize| bf16::from_bits(0x3f00 | ((i.wrapping_mul(40_503) >> 7) as u16 & 0x80ff));
    let numbers: Vec<bf16> = (0..n * k).map(number).collect();
    let weights = Tensor::of(device, &numbers, "weights")?;
    let x = Tensor::of(device, &numbers[..rows * k], "activations")?;
    let on_host = borders(&KSlices::eighths(k, 32), BF16_GRAIN);
    let on_device = Tensor::of(device, &on_host, "borders")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    let best_us = best_of(device, |device| {
        let (weights, borders) = (&weights, (&on_device, on_host.as_slice()));
        GemmBf16 { x: &x, weights, bias: None, borders, out: &mut out }.launch(device, (rows, n, k))
    })?;
    let bytes = (n * k * 2) as f64;
    Ok(Timing { case: format!("gemm_bf16 {rows} x {n} x {k}"), best_us, gb_per_s: bytes / best_us / 1e3 })
}

fn time_int8(device: &mut CudaDevice, (rows, n, k): (usize, usize, usize)) -> Result<Timing, CudaError> {
    let weights: Tensor<_, i8> = Tensor::zeros(device, n * k, "weights")?;
    let x: Tensor<_, i8> = Tensor::zeros(device, rows * k, "activations")?;
    let scales: Tensor<_, f32> = Tensor::zeros(device, n.max(rows * 8), "scales")?;
    let on_host = borders(&KSlices::eighths(k, 32), INT8_GRAIN);
    let on_device = Tensor::of(device, &on_host, "borders")?;
    let mut out = Tensor::zeros(device, rows * n, "products")?;
    let best_us = best_of(device, |device| {
        let (x, channel_scales, borders) = ((&x, &scales), Some(&scales), (&on_device, on_host.as_slice()));
        GemmInt8 { x, weights: &weights, channel_scales, bias: None, borders, slices: 8, out: &mut out }
            .launch(device, (rows, n, k))
    })?;
    let bytes = (n * k) as f64;
    Ok(Timing { case: format!("gemm_int8 {rows} x {n} x {k}"), best_us, gb_per_s: bytes / best_us / 1e3 })
}

/// Best mean of three timed runs, microseconds a launch.
fn best_of(
    device: &mut CudaDevice,
    mut launch: impl FnMut(&mut CudaDevice) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    for _ in 0..WARM_UP {
        launch(device)?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        device.wait()?;
        let start = Instant::now();
        for _ in 0..TIMED {
            launch(device)?;
        }
        device.wait()?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(TIMED));
    }
    Ok(best)
}
