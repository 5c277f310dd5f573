//! Products by cuBLASLt, for batches of many rows that need not be deterministic: the library chooses kernels
//! by shape, so a row's bits depend on the number of other rows. The algorithm found for a shape is cached
//! and the workspace is allocated once, so that a step makes no new heuristic query and no allocation.
//!
//! The library is column-major. It sees row-major weights `[n, k]` as a k x n matrix to be transposed,
//! activations `[rows, k]` as k x rows, and the product `[rows, n]` as n x rows.

mod library;

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
#[cfg(test)]
use std::sync::Mutex;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasLtMatrixLayout_t, cudaDataType,
};

pub(super) use library::BlasLibrary;
use library::Heuristic;

use super::CudaError;

/// Workspace of the library in bytes: what its documentation recommends for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// `CUBLAS_OP_N` and `CUBLAS_OP_T` of cublas_api.h: an operand as stored, and transposed.
const AS_IT_LIES: u32 = 0;
const TRANSPOSED: u32 = 1;
/// Minimum alignment of operands in bytes, for every allocator used here.
const ALIGNMENT: u32 = 16;

/// Shapes that this process has asked the library about, in order.
#[cfg(test)]
pub(in crate::cuda) static PLANNED: Mutex<Vec<ProductShape>> = Mutex::new(Vec::new());
/// Number of products that the library has computed in this process.
#[cfg(test)]
pub(in crate::cuda) static COMPUTED: AtomicUsize = AtomicUsize::new(0);

/// Sizes of a product: x `[rows, k]` times weights `[n, k]` -> out `[rows, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProductShape {
    pub(crate) rows: usize,
    /// Outputs per row.
    pub(crate) n: usize,
    /// Inputs per row.
    pub(crate) k: usize,
}

/// A product of operands in device memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    /// bf16.
    pub(crate) x: u64,
    /// bf16.
    pub(crate) weights: u64,
    /// f32.
    pub(crate) out: u64,
    pub(crate) shape: ProductShape,
}

/// The library on one device.
pub(super) struct Blas {
    library: BlasLibrary,
    handle: cublasLtHandle_t,
    operations: Operations,
    /// By shape. At most one per number of rows in a pass and matrix of a model.
    plans: HashMap<ProductShape, Plan>,
    /// Algorithms with which [`Blas::warm_up`] has computed a product, with the outputs and inputs per row.
    warm: HashSet<(usize, usize, Algorithm)>,
}

/// An algorithm, opaque to callers of the library.
type Algorithm = [u64; 8];

// SAFETY: descriptors and handle are only used through `&mut` access to the device, so by one thread at a
// time.
unsafe impl Send for Blas {}

/// Descriptors that all products share.
struct Operations {
    operation: cublasLtMatmulDesc_t,
    preference: cublasLtMatmulPreference_t,
}

/// Memory layouts of one shape's operands.
#[derive(Clone, Copy)]
struct Layouts {
    weights: cublasLtMatrixLayout_t,
    x: cublasLtMatrixLayout_t,
    out: cublasLtMatrixLayout_t,
}

/// Layouts and algorithm of one shape.
struct Plan {
    layouts: Layouts,
    algorithm: Algorithm,
}

impl Blas {
    /// Loads the library and creates a handle for the device of the thread's current context.
    pub(super) fn new() -> Result<Self, CudaError> {
        let library = BlasLibrary::load()?;
        let operations = Operations::new(&library, WORKSPACE_BYTES)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let created = library.check("cublasLtCreate", unsafe { (library.create)(&raw mut handle) });
        let (plans, warm) = Default::default();
        let blas = Self { library, handle, operations, plans, warm };
        created.map(|()| blas)
    }

    /// Version of the library that was found, for display.
    pub(super) fn version(&self) -> &str {
        &self.library.version
    }

    /// Enqueues a product on the stream.
    ///
    /// # Safety
    /// The product's operands stay allocated on the stream's device until the stream is done, and so do
    /// [`WORKSPACE_BYTES`] at `workspace`, a multiple of 256, which nothing else uses.
    pub(super) unsafe fn multiply(
        &mut self,
        product: &Product,
        workspace: u64,
        stream: *mut c_void,
    ) -> Result<(), CudaError> {
        self.ensure_plan(product.shape)?;
        let Plan { layouts: Layouts { weights, x, out }, algorithm } = &self.plans[&product.shape];
        let (one, zero) = (1.0f32, 0.0f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let at = |address: u64| address as *mut c_void;
        // SAFETY: descriptors live as long as this; the addresses are the caller's contract. With a factor of
        // zero the library does not read the previous content of `out`.
        let status = unsafe {
            (self.library.multiply)(
                self.handle,
                self.operations.operation,
                one,
                at(product.weights),
                *weights,
                at(product.x),
                *x,
                zero,
                at(product.out),
                *out,
                at(product.out),
                *out,
                algorithm,
                at(workspace),
                WORKSPACE_BYTES,
                stream,
            )
        };
        #[cfg(test)]
        COMPUTED.fetch_add(1, Ordering::Relaxed);
        self.library.check("cublasLtMatmul", status)
    }

    /// Finds the algorithm for a product. Enqueues the product if it is the first of its matrix with that
    /// algorithm, so that the library loads the kernel now: the number of rows only changes the grid. Returns
    /// whether it did.
    ///
    /// # Safety
    /// As for [`Blas::multiply`].
    pub(super) unsafe fn warm_up(
        &mut self,
        product: &Product,
        workspace: u64,
        stream: *mut c_void,
    ) -> Result<bool, CudaError> {
        self.ensure_plan(product.shape)?;
        let ProductShape { n, k, .. } = product.shape;
        if !self.warm.insert((n, k, self.plans[&product.shape].algorithm)) {
            return Ok(false);
        }
        // SAFETY: by this function's contract.
        unsafe { self.multiply(product, workspace, stream) }.map(|()| true)
    }

    fn ensure_plan(&mut self, shape: ProductShape) -> Result<(), CudaError> {
        if !self.plans.contains_key(&shape) {
            let plan = self.plan(shape)?;
            self.plans.insert(shape, plan);
        }
        Ok(())
    }

    /// Asks the library for an algorithm for a shape. It looks for one on the host, so a failure says nothing
    /// about the device.
    fn plan(&self, shape: ProductShape) -> Result<Plan, CudaError> {
        #[cfg(test)]
        PLANNED.lock().expect("no test fails while it counts").push(shape);
        let layouts = describe(&self.library, shape)?;
        let Layouts { weights, x, out } = layouts;
        let Operations { operation, preference } = self.operations;
        let (mut found, mut count): (Heuristic, c_int) = (Heuristic::default(), 0);
        let wanted: c_int = 1;
        // SAFETY: descriptors live as long as this; one heuristic and one number are written.
        let status = unsafe {
            (self.library.find_heuristic)(
                self.handle,
                operation,
                weights,
                x,
                out,
                out,
                preference,
                wanted,
                &raw mut found,
                &raw mut count,
            )
        };
        let action = "cublasLtMatmulAlgoGetHeuristic";
        let checked = self.library.check(action, status);
        let reason = match checked.and_then(|()| self.library.check(action, found.status)) {
            Err(error) => error.to_string(),
            Ok(()) if count < 1 || found.workspace_bytes > WORKSPACE_BYTES => {
                format!("it knows no way in {WORKSPACE_BYTES} bytes")
            }
            Ok(()) => return Ok(Plan { layouts, algorithm: found.algorithm }),
        };
        layouts.destroy(&self.library);
        let ProductShape { rows, n, k } = shape;
        Err(CudaError::NoBlasAlgorithm { rows, n, k, reason })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.plans.values().for_each(|plan| plan.layouts.destroy(&self.library));
        self.operations.destroy(&self.library);
        if !self.handle.is_null() {
            // SAFETY: made by the same library, and not used any more. What it returns changes nothing.
            let _status = unsafe { (self.library.destroy)(self.handle) };
        }
    }
}

impl Operations {
    /// Descriptors for f32 sums of products of bf16 numbers, with the first operand transposed and a
    /// workspace of `workspace_bytes`.
    fn new(blas: &BlasLibrary, workspace_bytes: usize) -> Result<Self, CudaError> {
        let float = cudaDataType::CUDA_R_32F;
        let sums = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (mut operation, mut preference) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: writes one pointer each.
        let created = unsafe {
            [
                (blas.operation_create)(&raw mut operation, sums, float),
                (blas.preference_create)(&raw mut preference),
            ]
        };
        blas.check("cublasLtMatmulDescCreate", created[0])?;
        blas.check("cublasLtMatmulPreferenceCreate", created[1])?;
        let made = Self { operation, preference };
        for (attribute, value) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, AS_IT_LIES),
        ] {
            // SAFETY: the descriptor is alive; the attribute is of four bytes, which are copied.
            let status = unsafe {
                (blas.operation_set)(operation, attribute, (&raw const value).cast(), size_of_val(&value))
            };
            blas.check("cublasLtMatmulDescSetAttribute", status)?;
        }
        let workspace = workspace_bytes as u64;
        let (pointer, bytes): (*const c_void, _) = ((&raw const workspace).cast(), size_of_val(&workspace));
        // SAFETY: as above, of eight bytes.
        let status = unsafe {
            (blas.preference_set)(
                preference,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                pointer,
                bytes,
            )
        };
        blas.check("cublasLtMatmulPreferenceSetAttribute", status)?;
        let alignment = ALIGNMENT;
        for attribute in [
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            let (pointer, bytes): (*const c_void, _) =
                ((&raw const alignment).cast(), size_of_val(&alignment));
            // SAFETY: as above, of four bytes.
            let status = unsafe { (blas.preference_set)(preference, attribute, pointer, bytes) };
            blas.check("cublasLtMatmulPreferenceSetAttribute", status)?;
        }
        Ok(made)
    }

    fn destroy(&self, blas: &BlasLibrary) {
        // SAFETY: made by the same library, and not used any more. What it returns changes nothing.
        let _statuses =
            unsafe { [(blas.operation_destroy)(self.operation), (blas.preference_destroy)(self.preference)] };
    }
}

/// Describes the memory layouts of a product of this shape.
fn describe(blas: &BlasLibrary, shape: ProductShape) -> Result<Layouts, CudaError> {
    let ProductShape { rows, n, k } = shape;
    let (bf16, f32) = (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_32F);
    let mut made: Vec<cublasLtMatrixLayout_t> = Vec::new();
    for (format, height, width) in [(bf16, k, n), (bf16, k, rows), (f32, n, rows)] {
        let mut layout = std::ptr::null_mut();
        // No gaps between columns.
        // SAFETY: writes one pointer.
        let status = unsafe {
            (blas.layout_create)(&raw mut layout, format, height as u64, width as u64, height as i64)
        };
        if let Err(error) = blas.check("cublasLtMatrixLayoutCreate", status) {
            // SAFETY: made above, and not used any more.
            made.iter().for_each(|&layout| _ = unsafe { (blas.layout_destroy)(layout) });
            return Err(error);
        }
        made.push(layout);
    }
    Ok(Layouts { weights: made[0], x: made[1], out: made[2] })
}

impl Layouts {
    fn destroy(self, blas: &BlasLibrary) {
        for layout in [self.weights, self.x, self.out] {
            // SAFETY: made by the same library, and not used any more. What it returns changes nothing.
            let _status = unsafe { (blas.layout_destroy)(layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaDevice;
    use crate::cuda::executor::{Executor, Tensor};
    use crate::cuda::host_driver::HostDriver;

    /// x `[3, 4]`, weights `[5, 4]`: all three sizes differ, so that a swapped operand layout gives a wrong
    /// result.
    const SHAPE: ProductShape = ProductShape { rows: 3, n: 5, k: 4 };

    /// The host's library rejects every call after the first: each differs from it in one wrong argument.
    #[test]
    fn what_is_wrong_with_a_call_shows_on_the_host() {
        let name = "cuda::blas::tests::what_is_wrong_with_a_call_shows_on_the_host";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let mut device = CudaDevice::open(0, Some(&driver.kernels)).unwrap();
        let stream = device.raw_stream().unwrap();
        let numbers = |len: u16| -> Vec<half::bf16> {
            (0..len).map(|i| f32::from(i) - 7.0).map(half::bf16::from_f32).collect()
        };
        let x = Tensor::of(&mut device, &numbers(12), "x").unwrap();
        let weights = Tensor::of(&mut device, &numbers(20), "weights").unwrap();
        let out: Tensor<_, f32> = Tensor::zeros(&mut device, 15, "out").unwrap();
        let workspace: Tensor<_, u8> = Tensor::zeros(&mut device, WORKSPACE_BYTES, "workspace").unwrap();
        let good = Product { x: x.address(), weights: weights.address(), out: out.address(), shape: SHAPE };
        let run = |blas: &mut Blas, product: &Product, workspace: u64| {
            // SAFETY: the host's library checks every address before it reads it.
            unsafe { blas.multiply(product, workspace, stream) }.map_err(|error| error.to_string())
        };
        let mut blas = Blas::new().unwrap();
        assert_eq!(run(&mut blas, &good, workspace.address()), Ok(()));
        device.wait().unwrap();
        let at = |row: usize, i: usize| (row * 4 + i) as f32 - 7.0;
        let product = |at_out: usize| (0..4).map(|i| at(at_out / 5, i) * at(at_out % 5, i)).sum();
        let expected: Vec<f32> = (0..15).map(product).collect();
        assert_eq!(out.read(&mut device, 0..15).unwrap(), expected);

        let refused = |said: Result<(), String>, status: &str| {
            let said = said.unwrap_err();
            assert!(said.contains(&format!("cublasLtMatmul: status {status}: ")), "{said}");
        };
        // Misaligned operands and workspace; memory that is too short.
        refused(run(&mut blas, &Product { x: good.x + 2, ..good }, workspace.address()), "7");
        refused(run(&mut blas, &Product { out: good.out + 4, ..good }, workspace.address()), "7");
        refused(run(&mut blas, &good, workspace.address() + 16), "7");
        refused(
            run(&mut blas, &Product { shape: ProductShape { n: 500, ..SHAPE }, ..good }, workspace.address()),
            "7",
        );
        // An algorithm that was found for another shape.
        let other = blas.plan(ProductShape { rows: 4, ..SHAPE }).unwrap();
        blas.plans.get_mut(&SHAPE).unwrap().algorithm = other.algorithm;
        refused(run(&mut blas, &good, workspace.address()), "7");
        other.layouts.destroy(&blas.library);
    }

    /// Attributes of wrong sizes, and operands whose shapes do not match.
    #[test]
    fn what_is_described_wrongly_is_refused_on_the_host() {
        let name = "cuda::blas::tests::what_is_described_wrongly_is_refused_on_the_host";
        let Some(driver) = HostDriver::for_test(name) else { return };
        let _device = CudaDevice::open(0, Some(&driver.kernels)).unwrap();
        let blas = Blas::new().unwrap();
        let set = |attribute, value: u64, bytes| {
            // SAFETY: the descriptor is alive, and the value is of eight bytes.
            unsafe {
                (blas.library.operation_set)(
                    blas.operations.operation,
                    attribute,
                    (&raw const value).cast(),
                    bytes,
                )
            }
        };
        assert_eq!(set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 0, 8), 7, "eight bytes for four");
        assert_eq!(set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 9, 4), 7, "no such operation");
        assert_eq!(set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, 1, 4), 15, "not one that is known here");
        assert!(blas.plan(SHAPE).is_ok());
        assert_eq!(set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 0, 4), 0);
        let error = blas.plan(SHAPE).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("AlgoGetHeuristic: status 15: "), "weights that are not transposed: {error}");
    }
}
