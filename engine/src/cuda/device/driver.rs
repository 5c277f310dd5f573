//! Checks for the driver before the first use of a device, and its errors.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::cuda::CudaError;
use crate::cuda::toolkit::CudaVersion;

/// Checks for the driver's library, the driver and the device in this order, with a separate error for each.
pub(super) fn open_context(ordinal: usize) -> Result<Arc<CudaContext>, CudaError> {
    let count = start_driver()?;
    if ordinal >= count {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    }
    CudaContext::new(ordinal).map_err(refused("open the device"))
}

/// Loads and initialises the driver, and returns its number of devices.
pub(super) fn start_driver() -> Result<usize, CudaError> {
    // SAFETY: loads the driver's library, whose initialisers do not affect this process's invariants.
    if !unsafe { sys::is_culib_present() } {
        let advice = "install the nvidia driver, or run with --device cpu";
        return Err(CudaError::LibraryMissing { library: "libcuda.so", advice });
    }
    result::init().map_err(refused("start"))?;
    let count = result::device::get_count().map_err(refused("count its devices"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The newest CUDA version that the driver supports.
pub(super) fn driver_version() -> Result<CudaVersion, CudaError> {
    let mut version = 0;
    // SAFETY: writes one number.
    let said = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    said.result().map_err(refused("tell its version"))?;
    Ok(CudaVersion::of_driver(version))
}

pub(in crate::cuda) fn refused(action: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { action, reason: error.to_string() }
}
