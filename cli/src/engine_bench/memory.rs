//! What memory this process takes, as the system counts it; nothing where the system does not say.

use std::path::Path;

/// Memory around a load, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadMemory {
    before: u64,
    /// The most that was in memory at any time of the load.
    peak: u64,
}

impl LoadMemory {
    /// What the load took at most, over what was there before.
    pub(super) fn bytes(self) -> u64 {
        self.peak.saturating_sub(self.before)
    }
}

/// A load that is watched from here on.
pub(super) struct Watch {
    before: Option<u64>,
}

impl Watch {
    /// Forgets the peak so far.
    pub(super) fn begin() -> Self {
        let forgotten = std::fs::write("/proc/self/clear_refs", "5").is_ok();
        Self { before: status("VmRSS:").filter(|_| forgotten) }
    }

    pub(super) fn end(self) -> Option<LoadMemory> {
        Some(LoadMemory { before: self.before?, peak: status("VmHWM:")? })
    }
}

/// What is in memory now.
pub(super) fn resident_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// What was asked for, but no more than a quarter of the free memory where the system tells it.
pub(super) fn probe_bytes(wanted: usize) -> usize {
    let free = bytes_in(Path::new("/proc/meminfo"), "MemAvailable:");
    free.map_or(wanted, |free| wanted.min(usize::try_from(free / 4).unwrap_or(wanted)))
}

fn status(field: &str) -> Option<u64> {
    bytes_in(Path::new("/proc/self/status"), field)
}

/// A line of the kind `VmRSS:   1234 kB`.
fn bytes_in(path: &Path, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}
