//! The cuBLASLt library, loaded only if it may compute products. All functions in use are resolved when it is
//! loaded, so that a missing function is an error at startup, not in a forward.

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType,
};
use libloading::Library;

use crate::cuda::CudaError;
use crate::cuda::functions::function_table;

/// File names of the library: the runtime package's, then the developer package's.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Oldest supported release, as `cublasLtGetVersion` counts: 12.0.
const OLDEST: usize = 120_000;

type Status = c_int;
type Bytes = *const c_void;
type Operation = cublasLtMatmulDesc_t;
type Layout = cublasLtMatrixLayout_t;
type Preference = cublasLtMatmulPreference_t;
type Stream = *mut c_void;

/// An algorithm for a product: `cublasLtMatmulHeuristicResult_t`, but with a status that may be any number.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heuristic {
    /// The algorithm itself, opaque to callers of the library.
    pub(super) algorithm: [u64; 8],
    pub(super) workspace_bytes: usize,
    pub(super) status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

function_table! {
    /// See the module documentation. Signatures are those of cublasLt.h, 12.0 and later.
    BlasLibrary, Blas,
    get_version = "cublasLtGetVersion": fn() -> usize,
    get_status_string = "cublasLtGetStatusString": fn(Status) -> *const c_char,
    create = "cublasLtCreate": fn(*mut cublasLtHandle_t) -> Status,
    destroy = "cublasLtDestroy": fn(cublasLtHandle_t) -> Status,
    operation_create = "cublasLtMatmulDescCreate": fn(*mut Operation, cublasComputeType_t, cudaDataType) -> Status,
    operation_destroy = "cublasLtMatmulDescDestroy": fn(Operation) -> Status,
    operation_set = "cublasLtMatmulDescSetAttribute": fn(Operation, cublasLtMatmulDescAttributes_t, Bytes, usize) -> Status,
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Layout, cudaDataType, u64, u64, i64) -> Status,
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Layout) -> Status,
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut Preference) -> Status,
    preference_destroy = "cublasLtMatmulPreferenceDestroy": fn(Preference) -> Status,
    preference_set = "cublasLtMatmulPreferenceSetAttribute": fn(
        Preference, cublasLtMatmulPreferenceAttributes_t, Bytes, usize,
    ) -> Status,
    find_heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(
        cublasLtHandle_t, Operation, Layout, Layout, Layout, Layout, Preference, c_int, *mut Heuristic, *mut c_int,
    ) -> Status,
    multiply = "cublasLtMatmul": fn(
        cublasLtHandle_t, Operation, Bytes, Bytes, Layout, Bytes, Layout, Bytes, Bytes, Layout, *mut c_void, Layout,
        *const [u64; 8], *mut c_void, usize, Stream,
    ) -> Status,
}

impl BlasLibrary {
    /// Loads the library. The error says what to install.
    pub(crate) fn load() -> Result<Self, CudaError> {
        // SAFETY: loads a CUDA library, whose initialisers do not affect invariants of this process.
        let found = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let advice = "products that need not be deterministic are cuBLASLt's: install CUDA 12 or 13 (or pip's nvidia-cublas) and name \
                      its lib folder in LD_LIBRARY_PATH";
        let library = found.ok_or(CudaError::LibraryMissing { library: NAMES[0], advice })?;
        let mut blas = Self::resolve(library)?;
        // SAFETY: takes no arguments.
        let version = unsafe { (blas.get_version)() };
        blas.version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        if version < OLDEST {
            let reason = format!("it is version {}, expected 12.0 or above", blas.version);
            return Err(CudaError::Blas { action: "cublasLtGetVersion", reason });
        }
        Ok(blas)
    }

    pub(super) fn check(&self, action: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string or null.
        let text = unsafe { (self.get_status_string)(status) };
        let said = match text.is_null() {
            true => String::new(),
            // SAFETY: as above; it ends with a zero byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(CudaError::Blas { action, reason: format!("status {status}: {said}") })
    }
}

#[cfg(test)]
mod tests {
    use cudarc::cublaslt::sys::cublasLtMatmulHeuristicResult_t;

    use super::super::{Operations, ProductShape, describe};
    use super::*;

    /// With the library on the path (deploy/cublas.sh) and no GPU: all functions are present, all attributes
    /// are accepted, and an impossible call returns an error. Without the library: one error that says what
    /// to install.
    #[test]
    fn the_library_is_whole_or_its_absence_is_one_line() {
        let blas = match BlasLibrary::load() {
            Ok(blas) => blas,
            Err(error) => {
                println!("cublaslt is not here, only its absence was checked: {error}");
                assert!(
                    error.to_string().starts_with("libcublasLt.so.13 was not found: products"),
                    "{error}"
                );
                return;
            }
        };
        println!("cublaslt {}: {} functions are there", blas.version, BlasLibrary::FUNCTIONS.len());
        let operations = Operations::new(&blas, 1 << 20).unwrap();
        let layouts = describe(&blas, ProductShape { rows: 100, n: 64, k: 32 }).unwrap();
        println!("its descriptors take every attribute");
        layouts.destroy(&blas);
        operations.destroy(&blas);
        // SAFETY: checks whether the driver's library is present.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            return;
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let error = blas.check("cublasLtCreate", unsafe { (blas.create)(&raw mut handle) }).unwrap_err();
        println!("without a gpu: {error}");
        assert!(error.to_string().starts_with("cublaslt failed at cublasLtCreate: status 1: "), "{error}");
    }

    #[test]
    fn a_library_without_a_function_is_refused_by_its_name() {
        // SAFETY: the C library, which is loaded in every process.
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        let error = BlasLibrary::resolve(library).unwrap_err().to_string();
        assert!(error.starts_with("cublaslt failed at cublasLtGetVersion: function not found: "), "{error}");
    }

    #[test]
    fn a_heuristic_is_as_large_as_the_librarys() {
        assert_eq!(size_of::<Heuristic>(), size_of::<cublasLtMatmulHeuristicResult_t>());
        assert_eq!(
            std::mem::offset_of!(Heuristic, status),
            std::mem::offset_of!(cublasLtMatmulHeuristicResult_t, state)
        );
    }
}
