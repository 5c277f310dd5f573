//! bf16 products of cuBLASLt against the deterministic kernels of this crate: how many numbers differ and by
//! how much, whether whole models stay near the CPU engine's logits, and which is faster at which number of
//! rows.

use cpu_kernels::KSlices;
use half::bf16;

use super::models::BF16_TOLERANCE;
use super::products::{TiledProduct, best_of, weight_like};
use super::{CheckTarget, Report};
use crate::cuda::blas::ProductShape;
use crate::cuda::executor::Tensor;
use crate::cuda::ops::{BF16_GRAIN, GemmBf16, borders};
use crate::cuda::whole_model::{distance, options, run};
use crate::cuda::{CudaDevice, CudaError, GpuOptions};
use crate::{Engine, EngineError, WeightFormat};

const ROWS: [usize; 7] = [16, 32, 64, 128, 160, 512, 2048];
/// Outputs and inputs of the layers of an 8B model.
const SHAPES: [(usize, usize); 3] = [(4096, 4096), (28_672, 4096), (4096, 14_336)];
const DRY: ([usize; 2], [(usize, usize); 2]) = ([3, 40], [(36, 64), (20, 96)]);
/// Largest allowed difference from this crate's product, relative to the largest number: two orders of f32
/// sums over thousands of products.
const TOLERANCE: f32 = 1e-4;

/// See the module documentation.
pub(super) fn library(target: &CheckTarget, report: &mut Report<'_>) -> Result<(), EngineError> {
    let mut device = target.open()?;
    if let Err(error) = device.use_cublaslt(1) {
        report.skipped("cublaslt", error);
        return Ok(());
    }
    for model in target.models() {
        let options = options(model.clone(), WeightFormat::Bf16);
        let expected = run(&mut Engine::load(&options)?)?;
        // With graphs, the second occurrence is captured and the third is replayed.
        for (graphs, times) in [(false, 1), (true, 3)] {
            let gpus = GpuOptions { cublaslt_min_rows: Some(2), graphs, ..target.gpus() };
            let mut engine = Engine::load(&options.on_gpus(gpus))?;
            let mut worst = 0.0f32;
            for _ in 0..times {
                worst = worst.max(distance(&run(&mut engine)?, &expected));
            }
            let beside = if graphs { " beside graphs" } else { "" };
            let case = format!("logits of {}, products from 2 rows on by cublaslt{beside}", model.display());
            report.check(
                worst <= BF16_TOLERANCE,
                format!("{case}, against the cpu's: {worst:.1e} of the largest apart, allowed {BF16_TOLERANCE:.0e}"),
            );
        }
    }
    let (all_rows, shapes) = if target.is_dry { (&DRY.0[..], &DRY.1[..]) } else { (&ROWS[..], &SHAPES[..]) };
    let chosen_from = GpuOptions::CUBLASLT_MIN_ROWS;
    report.say(format!("--cuda-deterministic false chooses cublaslt from {chosen_from} rows on"));
    for &(n, k) in shapes {
        for &rows in all_rows {
            let both = ProductComparison::run(&mut device, ProductShape { rows, n, k }, target.is_dry)?;
            let work = 2.0 * (rows * n * k) as f64;
            let chosen = if rows < chosen_from { "own" } else { "cublaslt" };
            let faster = if both.own_us <= both.library_us { "own" } else { "cublaslt" };
            report.check(
                both.worst <= TOLERANCE,
                format!(
                    "{rows} x {n} x {k}: own {:.1} us{}, cublaslt {:.1} us ({:.1} TFLOP/s); chosen {chosen}, faster {faster}; {} of \
                     {} numbers differ, worst {:.1e} of the largest",
                    both.own_us,
                    both.fp8_us.map_or_else(String::new, |us| format!(" (fp8 weights {us:.1})")),
                    both.library_us,
                    work / both.library_us / 1e6,
                    both.differ,
                    rows * n,
                    both.worst
                ),
            );
        }
    }
    Ok(())
}

/// Times of both implementations of a product, and how much they differ.
struct ProductComparison {
    own_us: f64,
    library_us: f64,
    /// Time with FP8 weights, where the device has kernels for tiles of them.
    fp8_us: Option<f64>,
    /// Number of results whose bits differ.
    differ: usize,
    /// Largest difference, relative to the largest number.
    worst: f32,
}

impl ProductComparison {
    fn run(device: &mut CudaDevice, shape: ProductShape, is_dry: bool) -> Result<Self, CudaError> {
        let ProductShape { rows, n, k } = shape;
        let numbers = |len: usize| -> Vec<bf16> { (0..len).map(weight_like).collect() };
        let weights = Tensor::of(device, &numbers(n * k), "weights")?;
        let x = Tensor::of(device, &numbers(rows * k), "activations")?;
        let on_host = borders(&KSlices::eighths(k, 32), BF16_GRAIN);
        let on_device = Tensor::of(device, &on_host, "borders")?;
        let mut own = Tensor::zeros(device, rows * n, "products")?;
        let mut library = Tensor::zeros(device, rows * n, "products")?;
        let borders = (&on_device, on_host.as_slice());
        let mut fp8_us = None;
        let own_us = if device.has_panel_kernels() && !is_dry {
            let mut tiled = TiledProduct::new(device, shape, WeightFormat::Bf16)?;
            let us = best_of(device, is_dry, |device| tiled.launch(device))?;
            own = tiled.out;
            let mut tiled = TiledProduct::new(device, shape, WeightFormat::Fp8)?;
            fp8_us = Some(best_of(device, is_dry, |device| tiled.launch(device))?);
            us
        } else {
            best_of(device, is_dry, |device| {
                GemmBf16 { x: &x, weights: &weights, bias: None, borders, out: &mut own }
                    .launch(device, shape)
            })?
        };
        let library_us = best_of(device, is_dry, |device| {
            let mut product = GemmBf16 { x: &x, weights: &weights, bias: None, borders, out: &mut library };
            product.launch_cublaslt(device, shape).map(|done| assert!(done, "it takes every row"))
        })?;
        let (own, library) = (own.read(device, 0..rows * n)?, library.read(device, 0..rows * n)?);
        let differ = own.iter().zip(&library).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let worst = distance(&[library], &[own]);
        Ok(Self { own_us, library_us, fp8_us, differ, worst })
    }
}
