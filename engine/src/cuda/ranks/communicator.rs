//! One rank's communicator: it ends when its rank does, or when another rank is lost, whichever comes first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::nccl::sys::ncclComm_t;

use super::library::NcclLibrary;
use super::watch::Watch;
use crate::collective::Meeting;
use crate::cuda::CudaError;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(super) library: Arc<NcclLibrary>,
    /// None once it was aborted.
    comm: Mutex<Option<Pointer>>,
    meeting: Arc<Meeting>,
}

#[derive(Debug, Clone, Copy)]
struct Pointer(ncclComm_t);

// SAFETY: NCCL takes a communicator from any thread, one at a time; the mutex around it sees to that.
unsafe impl Send for Pointer {}

impl Communicator {
    /// # Safety
    /// `comm` came from this library's `init_all` and has no other holder.
    pub(super) unsafe fn new(library: Arc<NcclLibrary>, comm: ncclComm_t, meeting: Arc<Meeting>) -> Self {
        Self { library, comm: Mutex::new(Some(Pointer(comm))), meeting }
    }

    /// Uses it, unless it was aborted.
    pub(super) fn with(
        &self,
        use_it: impl FnOnce(&NcclLibrary, ncclComm_t) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let comm = self.lock();
        let Some(Pointer(comm)) = *comm else {
            return Err(CudaError::RanksApart { reason: "the communicator was aborted".to_owned() });
        };
        use_it(&self.library, comm)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pointer>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Communicator {
    fn fault(&self) -> Option<String> {
        // SAFETY: `with` hands out a communicator that was not aborted, and holds its lock meanwhile.
        let asked = self.with(|library, comm| unsafe { library.fault(comm) });
        let told = || self.meeting.check().err().map(|error| error.to_string());
        asked.err().map(|error| error.to_string()).or_else(told)
    }

    fn abort(&self) {
        if let Some(Pointer(comm)) = self.lock().take() {
            // SAFETY: taken out, so that nobody uses it after this.
            unsafe { self.library.abort(comm) }
        }
    }
}

impl Drop for Communicator {
    /// Aborted rather than destroyed: destroying waits for the other ranks, who may be gone.
    fn drop(&mut self) {
        self.abort();
    }
}
