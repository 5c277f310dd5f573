//! Has cuBLASLt load its kernels before NCCL connects several GPUs. The library loads a kernel when it is
//! first used, and the driver may then wait for all kernels of the device. In the middle of a forward these
//! include kernels that wait for another rank, which may itself wait to load a kernel.

use cpu_kernels::MatrixFormat;
use half::bf16;

use super::blas::{Product, ProductShape};
use super::executor::{Executor, Tensor};
use super::kv_budget::PASS_LIMITS;
use super::{CudaDevice, CudaError};
use crate::EngineError;
use crate::rank::on_threads;
use crate::shard::Shard;
use crate::weights::{LinearFormat, ModelSpec};

/// Sizes of a rank's matrix in bf16, and the most rows that it is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LibraryMatrix {
    /// Outputs per row.
    n: usize,
    /// Inputs per row.
    k: usize,
    max_rows: usize,
}

/// The matrices of a rank whose products cuBLASLt may compute.
fn library_matrices(model: &ModelSpec, shard: Shard) -> Vec<LibraryMatrix> {
    let ModelSpec { config, formats } = model;
    let is_bf16 = |format| format == LinearFormat::Float(MatrixFormat::Bf16);
    let (layout, hidden) = (shard.layout(config), config.hidden_size);
    let intermediate = shard.intermediate(config).len();
    let of_layers = [
        (layout.row_width(), hidden),
        (hidden, layout.q_width()),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    ];
    let of_layers = of_layers.map(|(n, k)| LibraryMatrix { n, k, max_rows: PASS_LIMITS.rows });
    let (n, max_rows) = (shard.vocabulary(config).len(), PASS_LIMITS.logit_rows);
    let vocabulary = LibraryMatrix { n, k: hidden, max_rows };
    let of_layers = of_layers.into_iter().filter(|_| is_bf16(formats.linear));
    of_layers.chain(is_bf16(formats.vocabulary()).then_some(vocabulary)).collect()
}

/// Warms up the devices of a model's ranks, side by side.
pub(super) fn warm_up(devices: &mut [CudaDevice], model: &ModelSpec) -> Result<(), EngineError> {
    let shards = Shard::all(devices.len(), &model.config)?;
    let ranks = devices.iter_mut().zip(shards);
    on_threads(ranks, |_, (device, shard)| Ok(run_once(device, &library_matrices(model, shard))?)).map(drop)
}

/// Finds the algorithms for all products that the library computes of these matrices, and computes one
/// product of each matrix by each of its algorithms.
fn run_once(device: &mut CudaDevice, matrices: &[LibraryMatrix]) -> Result<(), CudaError> {
    let Some(from_rows) = device.cublaslt_min_rows().filter(|_| !matrices.is_empty()) else { return Ok(()) };
    let most = |numbers: fn(&LibraryMatrix) -> usize| matrices.iter().map(numbers).max().unwrap_or(0);
    let purpose = "products that warm up cublaslt";
    let x: Tensor<_, bf16> = Tensor::zeros(device, most(|matrix| matrix.max_rows * matrix.k), purpose)?;
    let weights: Tensor<_, bf16> = Tensor::zeros(device, most(|matrix| matrix.n * matrix.k), purpose)?;
    let out: Tensor<_, f32> = Tensor::zeros(device, most(|matrix| matrix.max_rows * matrix.n), purpose)?;
    let (mut products, mut computed) = (0u64, 0u64);
    for &LibraryMatrix { n, k, max_rows } in matrices {
        for rows in from_rows.max(1)..=max_rows {
            let (x, weights, out) = (x.address(), weights.address(), out.address());
            let product = Product { x, weights, out, shape: ProductShape { rows, n, k } };
            // SAFETY: the operands have room for each of these products, and are freed in stream order.
            let is_new = unsafe { device.warm_up(&product) }?;
            products += 1;
            computed += u64::from(is_new);
        }
    }
    drop((x, weights, out));
    // Waits for the products, and returns their memory to the device, where NCCL allocates its own.
    device.memory_info()?;
    tracing::info!(device = device.ordinal(), products, computed, "cublaslt is warmed up");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::cuda::GpuOptions;
    use crate::cuda::blas::{COMPUTED, PLANNED};
    use crate::cuda::gpus::load_on_gpus;
    use crate::cuda::host_driver::HostDriver;
    use crate::cuda::test_model::{TINY, changed_config};
    use crate::{Engine, SequenceRows};

    /// Shapes that the library was asked about, and the number of products that it computed, since the last
    /// call.
    fn take_counts() -> (Vec<ProductShape>, usize) {
        (std::mem::take(&mut *PLANNED.lock().unwrap()), COMPUTED.swap(0, Ordering::Relaxed))
    }

    #[test]
    fn what_was_warmed_up_is_not_looked_for_again() {
        let name = "cuda::warm_up::tests::what_was_warmed_up_is_not_looked_for_again";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let mut device = CudaDevice::open(0, Some(&driver.kernels)).unwrap();
        let matrices = [LibraryMatrix { n: 5, k: 4, max_rows: 6 }, LibraryMatrix { n: 4, k: 8, max_rows: 3 }];
        run_once(&mut device, &matrices).unwrap();
        assert_eq!(take_counts(), (vec![], 0), "without the library there is nothing to do");

        device.use_cublaslt(3).unwrap();
        run_once(&mut device, &matrices).unwrap();
        let shape = |(rows, n, k)| ProductShape { rows, n, k };
        let expected = [(3, 5, 4), (4, 5, 4), (5, 5, 4), (6, 5, 4), (3, 4, 8)].map(shape);
        // The host's library has another algorithm for each shape.
        assert_eq!(take_counts(), (expected.to_vec(), 5));
        run_once(&mut device, &matrices).unwrap();
        assert_eq!(take_counts(), (vec![], 0));
    }

    /// A forward multiplies with the matrices that are listed for it, and with no others.
    #[test]
    fn the_products_of_a_forward_are_those_that_are_warmed_up() {
        let name = "cuda::warm_up::tests::the_products_of_a_forward_are_those_that_are_warmed_up";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let (_dir, options) = changed_config(TINY, &[]);
        let gpus = GpuOptions {
            kernels: Some(driver.kernels.clone()),
            cublaslt_min_rows: Some(2),
            ..GpuOptions::for_devices(&[0])
        };
        let mut matrices = Vec::new();
        let mut engine = Engine::random_by(&options, 7, |source, model| {
            matrices = library_matrices(&model, Shard { rank: 0, ranks: 1 });
            load_on_gpus(&options, source, model, (&gpus, None))
        })
        .unwrap();
        assert_eq!(take_counts(), (vec![], 0), "no other rank could wait");
        let slot = engine.open();
        engine.forward(&[SequenceRows { slot, token_ids: &[1, 2, 3, 4, 5], num_logits: 3 }]).unwrap();
        let sizes = |shape: &ProductShape| (shape.n, shape.k);
        let found: HashSet<_> = take_counts().0.iter().map(sizes).collect();
        let expected: HashSet<_> = matrices.iter().map(|matrix| (matrix.n, matrix.k)).collect();
        assert_eq!(found, expected);
        assert_eq!(found.len(), 5);
    }

    /// From 2,048 rows on, so that there is one product of each matrix of the layers and none of the
    /// vocabulary.
    #[test]
    fn several_gpus_are_warmed_up_before_they_are_connected() {
        let name = "cuda::warm_up::tests::several_gpus_are_warmed_up_before_they_are_connected";
        let Some(driver) = HostDriver::for_test_with(name, &[("OUTRIDER_HOST_DEVICES", "2")]) else { return };
        // No two matrices of a rank have the same size.
        let (_dir, options) = changed_config(TINY, &[("intermediate_size", 192)]);
        let gpus = GpuOptions {
            kernels: Some(driver.kernels.clone()),
            cublaslt_min_rows: Some(PASS_LIMITS.rows),
            ..GpuOptions::for_devices(&[0, 1])
        };
        let mut matrices = Vec::new();
        let load = |source: &dyn crate::weights::TensorSource, model: ModelSpec| {
            for shard in Shard::all(2, &model.config).unwrap() {
                matrices.extend(library_matrices(&model, shard).into_iter().take(4));
            }
            load_on_gpus(&options, source, model, (&gpus, None))
        };
        drop(Engine::random_by(&options, 7, load).unwrap());
        let (planned, computed) = take_counts();
        let sorted = |mut sizes: Vec<(usize, usize, usize)>| {
            sizes.sort_unstable();
            sizes
        };
        let planned = planned.iter().map(|shape| (shape.rows, shape.n, shape.k)).collect();
        let expected = matrices.iter().map(|matrix| (matrix.max_rows, matrix.n, matrix.k)).collect();
        assert_eq!(sorted(planned), sorted(expected));
        assert_eq!(computed, 8);
    }
}
