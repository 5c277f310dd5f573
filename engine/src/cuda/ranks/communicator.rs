//! NCCL communicator of one rank. It is aborted when the rank is dropped or when another rank is lost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::nccl::sys::ncclComm_t;

use super::library::NcclLibrary;
use super::watch::Watch;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(super) library: Arc<NcclLibrary>,
    /// `None` after an abort.
    comm: Mutex<Option<Pointer>>,
    barrier: Arc<RankBarrier>,
}

#[derive(Debug, Clone, Copy)]
struct Pointer(ncclComm_t);

// SAFETY: NCCL allows calls from any thread, one at a time; the mutex around it ensures that.
unsafe impl Send for Pointer {}

impl Communicator {
    /// # Safety
    /// `comm` came from this library's `init_all` and is used nowhere else.
    pub(super) unsafe fn new(library: Arc<NcclLibrary>, comm: ncclComm_t, barrier: Arc<RankBarrier>) -> Self {
        Self { library, comm: Mutex::new(Some(Pointer(comm))), barrier }
    }

    /// Calls a function with the communicator, unless it was aborted.
    pub(super) fn with(
        &self,
        use_it: impl FnOnce(&NcclLibrary, ncclComm_t) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let comm = self.lock();
        let Some(Pointer(comm)) = *comm else {
            return Err(CudaError::RankFailure { reason: "the communicator was aborted".to_owned() });
        };
        use_it(&self.library, comm)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pointer>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Communicator {
    fn fault(&self) -> Option<String> {
        // SAFETY: `with` passes a communicator that was not aborted, and holds its lock during the call.
        let asked = self.with(|library, comm| unsafe { library.fault(comm) });
        let told = || self.barrier.check().err().map(|error| error.to_string());
        asked.err().map(|error| error.to_string()).or_else(told)
    }

    fn abort(&self) {
        if let Some(Pointer(comm)) = self.lock().take() {
            // SAFETY: it was taken out of the mutex, so it is not used after this.
            unsafe { self.library.abort(comm) }
        }
    }
}

impl Drop for Communicator {
    /// Aborts instead of destroying, because destroying waits for other ranks, which may be lost.
    fn drop(&mut self) {
        self.abort();
    }
}
