//! Pinned memory for copies to and from a device. [`StagingHalves`] decides where each copy to it begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, PinnedHostSlice, result, sys};

use super::driver::refused;
use super::{Watched, wait_until};
use crate::EngineError;
use crate::cuda::CudaError;
use crate::cuda::executor::Fill;
use crate::cuda::staging::{HALF_BYTES, Place, StagingHalves};

/// Size of the pinned memory for results, and the longest read that goes through it. The results of a step's
/// draws are at most a few hundred bytes for each of 512 rows.
pub(super) const DOWNLOAD_BYTES: usize = 1 << 20;

/// Pinned memory, and the progress of the copies to the device.
pub(super) struct Staging {
    halves: StagingHalves,
    pinned: [PinnedHostSlice<u8>; 2],
    /// For each half: event recorded after the last copy out of it.
    copied: [CudaEvent; 2],
    /// What was read last.
    download: PinnedHostSlice<u8>,
    stream: Arc<CudaStream>,
}

/// A word of the host's memory that kernels read and write too. It must outlive them.
#[derive(Debug)]
pub(in crate::cuda) struct SharedWord {
    /// Owns the memory; only accessed through `address`.
    _pinned: PinnedHostSlice<u32>,
    /// The address on the host and on every device, which are equal for pinned memory (unified addressing).
    address: u64,
}

impl SharedWord {
    /// A word that is 0.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let failed = refused("take memory that kernels share with the host");
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: it is written below before anything reads it.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u32>(1, flags) }.map_err(&failed)?;
        let word = pinned.as_mut_ptr().map_err(failed)?;
        // SAFETY: the pointer is that of one allocated number.
        unsafe { word.write(0) };
        Ok(Self { address: word as u64, _pinned: pinned })
    }

    pub(in crate::cuda) fn address(&self) -> u64 {
        self.address
    }

    /// Its value.
    pub(in crate::cuda) fn load(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Sets it to `new` if it is 0.
    pub(in crate::cuda) fn set_if_zero(&self, new: u32) {
        let _earlier = self.word().compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the memory is owned by `self`, aligned to a page, and only accessed atomically from now on.
        unsafe { AtomicU32::from_ptr(self.address as *mut u32) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Pinned memory must not be freed while a copy reads or writes it.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "a device was left with copies under way");
        }
    }
}

impl Staging {
    /// Allocates the memory for copies on this stream.
    pub(super) fn new(context: &Arc<CudaContext>, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let failed = refused("take memory that it copies from and to");
        // SAFETY: nothing is read from it before it was written. Not write-combined, because `fill` may also
        // read it.
        let pinned = |bytes| unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }.map_err(&failed);
        let event = || context.new_event(None).map_err(&failed);
        let (halves, stream) = (StagingHalves::new(HALF_BYTES), Arc::clone(stream));
        let (copied, download) = ([event()?, event()?], pinned(DOWNLOAD_BYTES)?);
        Ok(Self { halves, pinned: [pinned(HALF_BYTES)?, pinned(HALF_BYTES)?], copied, download, stream })
    }

    /// Fills a piece of at most [`HALF_BYTES`] and starts to copy it to the device.
    ///
    /// # Safety
    /// From `to` on, `bytes` bytes are allocated on the device until the stream has copied them.
    pub(super) unsafe fn upload(
        &mut self,
        (to, bytes): (u64, usize),
        fill: Fill<'_>,
        watch: &Watched,
    ) -> Result<(), EngineError> {
        let Place { half, range, switches_half } = self.halves.take(bytes);
        if switches_half {
            self.copied[1 - half].record(&self.stream).map_err(refused("mark a copy"))?;
            let copied = &self.copied[half];
            wait_until(
                watch,
                || copied.try_is_complete().map_err(refused("finish a copy")),
                || copied.synchronize().map_err(refused("finish a copy")),
            )?;
        }
        let place = self.pinned[half].as_mut_slice().map_err(refused("show pinned memory"))?;
        fill(&mut place[range.clone()])?;
        self.stream.context().bind_to_thread().map_err(refused("take the thread"))?;
        // SAFETY: the destination is allocated by this function's contract. The source stays allocated until
        // the stream is done, and is only overwritten after the wait above, when the copy has completed.
        let copied = unsafe { result::memcpy_htod_async(to, &place[range], self.stream.cu_stream()) };
        Ok(copied.map_err(refused("copy to the device"))?)
    }

    /// Starts to copy `len` bytes of the device, at most [`DOWNLOAD_BYTES`].
    ///
    /// # Safety
    /// From `from` on, `len` bytes are allocated on the device until the stream has copied them.
    pub(super) unsafe fn start_download(&mut self, from: u64, len: usize) -> Result<(), CudaError> {
        self.stream.context().bind_to_thread().map_err(refused("take the thread"))?;
        let pinned = self.download.as_mut_slice().map_err(refused("show pinned memory"))?;
        // SAFETY: the source is allocated by this function's contract. The destination stays allocated until
        // the stream is done, and is only read after a wait for it.
        unsafe { result::memcpy_dtoh_async(&mut pinned[..len], from, self.stream.cu_stream()) }
            .map_err(refused("copy from the device"))
    }

    /// The first bytes of the last download. Call only once the stream is done.
    pub(super) fn downloaded(&self, len: usize) -> Result<&[u8], CudaError> {
        Ok(&self.download.as_slice().map_err(refused("show pinned memory"))?[..len])
    }
}
