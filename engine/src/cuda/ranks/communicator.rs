//! NCCL communicator of one rank. It is aborted when the rank is dropped or when another rank is lost, and
//! with it the waits of all ranks' kernels for each other.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::nccl::sys::ncclComm_t;

use super::library::NcclLibrary;
use super::watch::Watch;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::device::SharedWord;

/// What the host writes to end waits; kernels write 1 + the rank that they gave up.
const ABORTED: u32 = u32::MAX;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(super) library: Arc<NcclLibrary>,
    /// `None` after an abort.
    comm: Mutex<Option<Pointer>>,
    barrier: Arc<RankBarrier>,
    /// One word for all ranks. Not 0: their kernels do not wait for each other (any more), and no result of
    /// any rank is used, because sums of another rank may be missing from it. Absent if no kernel ever waits.
    stop: OnceLock<Arc<SharedWord>>,
}

#[derive(Debug, Clone, Copy)]
struct Pointer(ncclComm_t);

// SAFETY: NCCL allows calls from any thread, one at a time; the mutex around it ensures that.
unsafe impl Send for Pointer {}

impl Communicator {
    /// # Safety
    /// `comm` came from this library's `init_all` or `init_ranks` and is used nowhere else.
    pub(super) unsafe fn new(library: Arc<NcclLibrary>, comm: ncclComm_t, barrier: Arc<RankBarrier>) -> Self {
        Self { library, comm: Mutex::new(Some(Pointer(comm))), barrier, stop: OnceLock::new() }
    }

    /// Keeps the word that ends the waits of all ranks' kernels. Called at most once.
    pub(super) fn keep_stop(&self, word: Arc<SharedWord>) {
        self.stop.set(word).expect("ranks agree on a word once");
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
        if let Some(stop) = self.stop.get() {
            // What a kernel wrote says more.
            stop.set_if_zero(ABORTED);
        }
        if let Some(Pointer(comm)) = self.lock().take() {
            // SAFETY: it was taken out of the mutex, so it is not used after this.
            unsafe { self.library.abort(comm) }
        }
    }

    fn gave_up(&self) -> Option<String> {
        match self.stop.get()?.load() {
            0 => None,
            ABORTED => Some("sums over ranks were aborted".to_owned()),
            rank => Some(format!("a kernel waited in vain for rank {}", rank - 1)),
        }
    }
}

impl Drop for Communicator {
    /// Aborts instead of destroying, because destroying waits for other ranks, which may be lost.
    fn drop(&mut self) {
        self.abort();
    }
}
