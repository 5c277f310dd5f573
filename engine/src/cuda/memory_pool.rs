//! The driver's memory pool of a device: which other devices may access it, and when freed memory returns to
//! the system. `cuCtxEnablePeerAccess` does not cover memory of pools (CUDA programming guide, stream-ordered
//! allocation).

use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
};

use super::CudaError;
use super::device::refused;

/// A device's default pool.
#[derive(Debug)]
pub(super) struct MemoryPool {
    pool: sys::CUmemoryPool,
    device: sys::CUdevice,
}

// SAFETY: the driver's functions for pools may be called by any thread; the handle lives as long as the
// device's primary context.
unsafe impl Send for MemoryPool {}
// SAFETY: as above.
unsafe impl Sync for MemoryPool {}

impl MemoryPool {
    /// The pool of an open device.
    pub(super) fn of_device(ordinal: usize) -> Result<Self, CudaError> {
        let device = handle_of(ordinal)?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let said = unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, device) };
        said.result().map_err(refused("return its memory pool"))?;
        Ok(Self { pool, device })
    }

    /// Keeps freed memory in the pool for the next allocation. By default the pool returns all of it whenever
    /// the device is idle, and the next allocation requests it from the system again.
    pub(super) fn keep_freed(&self) -> Result<(), CudaError> {
        let mut threshold = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a number of eight bytes, which is copied.
        let said = unsafe { sys::cuMemPoolSetAttribute(self.pool, attribute, (&raw mut threshold).cast()) };
        said.result().map_err(refused("keep freed memory"))
    }

    /// Returns all freed memory to the system, so that it counts as free.
    pub(super) fn release_freed(&self) -> Result<(), CudaError> {
        // SAFETY: the pool is the device's own.
        unsafe { sys::cuMemPoolTrimTo(self.pool, 0) }.result().map_err(refused("release freed memory"))
    }

    /// Whether another device can access memory of this pool's device.
    pub(super) fn is_connected_to(&self, ordinal: usize) -> Result<bool, CudaError> {
        let other = handle_of(ordinal)?;
        let mut connected = 0;
        // SAFETY: writes one number.
        let said = unsafe { sys::cuDeviceCanAccessPeer(&raw mut connected, other, self.device) };
        said.result().map_err(refused("report which devices are connected"))?;
        Ok(connected != 0)
    }

    /// Lets another device read and write all present and future memory of this pool, if the two devices are
    /// connected.
    pub(super) fn share_with(&self, ordinal: usize) -> Result<(), CudaError> {
        if !self.is_connected_to(ordinal)? {
            tracing::warn!(from = ordinal, to = self.device, "these gpus cannot read each other's memory");
            return Ok(());
        }
        let other = handle_of(ordinal)?;
        let location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: other };
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location, flags };
        // SAFETY: one description is read.
        let said = unsafe { sys::cuMemPoolSetAccess(self.pool, &raw const access, 1) };
        said.result().map_err(refused("share its memory with another device"))
    }
}

fn handle_of(ordinal: usize) -> Result<sys::CUdevice, CudaError> {
    let ordinal = i32::try_from(ordinal).expect("the driver has counted this device");
    result::device::get(ordinal).map_err(refused("name a device"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaDevice;
    use crate::cuda::executor::{Executor, Tensor};
    use crate::cuda::host_driver::HostDriver;

    /// The host driver refuses what would fault on a GPU: access to another device's pool without permission.
    #[test]
    fn another_device_touches_a_pool_that_is_shared_with_it() {
        let name = "cuda::memory_pool::tests::another_device_touches_a_pool_that_is_shared_with_it";
        let Some(driver) = HostDriver::for_test_with(name, &[("OUTRIDER_HOST_DEVICES", "2")]) else { return };
        let open = |ordinal| CudaDevice::open(ordinal, Some(&driver.kernels)).unwrap();
        let (mut owner, mut other) = (open(0), open(1));
        let from: Tensor<_, u32> = Tensor::of(&mut other, &[1, 2, 3, 4], "numbers").unwrap();
        let to: Tensor<_, u32> = Tensor::of(&mut owner, &[0; 4], "room").unwrap();
        owner.wait().unwrap();
        other.wait().unwrap();
        let mut push = || {
            let stream = other.raw_stream().unwrap().cast();
            // SAFETY: the host driver checks both addresses before it uses them; both have 16 bytes.
            let copied = unsafe { result::memcpy_dtod_async(to.address(), from.address(), 16, stream) };
            other.wait().unwrap();
            copied.map_err(|error| error.0)
        };
        assert_eq!(push(), Err(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        owner.share_memory_with(1).unwrap();
        assert_eq!(push(), Ok(()));
        assert_eq!(to.read(&mut owner, 0..4).unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_in_one_line() {
        let name = "cuda::memory_pool::tests::a_driver_that_is_too_old_is_told_in_one_line";
        let Some(driver) = HostDriver::for_test_with(name, &[("OUTRIDER_HOST_DRIVER_VERSION", "11080")])
        else {
            return;
        };
        let said = CudaDevice::open(0, Some(&driver.kernels)).unwrap_err().to_string();
        assert!(
            said.starts_with("the driver is for cuda 11.8 and does not load kernels made by cuda 12.0: "),
            "{said}"
        );
    }
}
