//! What `make gpu-check` runs on a machine with a GPU: every kernel against its naive twin at the size of a model's
//! layer, then how long each takes. Without a GPU it is one error.

use std::time::Instant;

use super::executor::Tensor;
use super::ops::{BF16_GRAIN, GemmBf16, GemmInt8, INT8_GRAIN, Output, RandomRows, borders};
use super::parity::{Scale, run_all};
use super::{CudaDevice, CudaError};
use crate::k_slices::KSlices;

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
    let mut weights = Tensor::zeros(device, n * k, "weights")?;
    RandomRows { seed: 1, name: "weights", len: k }.launch(
        device,
        (0, n),
        (Output::Bf16(&mut weights), 0),
    )?;
    let mut x = Tensor::zeros(device, rows * k, "activations")?;
    RandomRows { seed: 1, name: "x", len: k }.launch(device, (0, rows), (Output::Bf16(&mut x), 0))?;
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
        let (x, weights) = ((&x, &scales), (&weights, &scales));
        let borders = (&on_device, on_host.as_slice());
        GemmInt8 { x, weights, bias: None, borders, slices: 8, out: &mut out }.launch(device, (rows, n, k))
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
