//! Queries the cores that a thread may run on, and pins a thread to one. Pinning is only done on request: an
//! unpinned thread can move to a core that an idle peer leaves free, a pinned one has to wait
//! (docs/adr/0019-own-thread-pool.md).

use crate::KernelError;

/// Returns the cores that the calling thread may run on, in the system's order.
pub fn allowed_cores() -> Result<Vec<usize>, KernelError> {
    system::allowed().map_err(|error| pin_error(0, "read the CPU affinity of this thread", error))
}

/// Pins the calling thread, and threads that it starts later, to one core.
pub(super) fn pin_to_core(core: usize) -> Result<(), KernelError> {
    system::pin_to_core(core).map_err(|error| pin_error(core, "pin a thread to this core", error))
}

fn pin_error(core: usize, what: &str, error: std::io::Error) -> KernelError {
    let reason = format!("cannot {what}: {error}; do not pin");
    KernelError::BadOption { option: "pin", value: core as u64, reason }
}

#[cfg(target_os = "linux")]
mod system {
    use std::io::Result;

    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    /// The pid that means the calling thread in these system calls.
    fn current_thread() -> Pid {
        Pid::from_raw(0)
    }

    pub(super) fn allowed() -> Result<Vec<usize>> {
        let set = sched_getaffinity(current_thread())?;
        Ok((0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect())
    }

    pub(super) fn pin_to_core(core: usize) -> Result<()> {
        let mut set = CpuSet::new();
        set.set(core)?;
        Ok(sched_setaffinity(current_thread(), &set)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io::{Error, ErrorKind, Result};

    pub(super) fn allowed() -> Result<Vec<usize>> {
        Err(Error::new(ErrorKind::Unsupported, "not supported on this system"))
    }

    pub(super) fn pin_to_core(_core: usize) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "not supported on this system"))
    }
}
