//! Memory usage of this process as the operating system reports it; `None` if it does not.

/// Memory usage during a load, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadMemory {
    before: u64,
    /// Peak resident memory during the load.
    peak: u64,
}

impl LoadMemory {
    /// Peak memory of the load beyond the memory in use before.
    pub(super) fn bytes(self) -> u64 {
        self.peak.saturating_sub(self.before)
    }
}

/// Measures the memory usage of a load, from `begin` to `end`.
pub(super) struct LoadMemoryMeter {
    before: Option<u64>,
}

impl LoadMemoryMeter {
    /// Resets the peak.
    pub(super) fn begin() -> Self {
        let is_reset = std::fs::write("/proc/self/clear_refs", "5").is_ok();
        Self { before: status("VmRSS:").filter(|_| is_reset) }
    }

    pub(super) fn end(self) -> Option<LoadMemory> {
        Some(LoadMemory { before: self.before?, peak: status("VmHWM:")? })
    }
}

/// Resident memory now.
pub(super) fn resident_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// The requested size, limited to a quarter of the available memory if the operating system reports it.
pub(super) fn probe_bytes(wanted: usize) -> usize {
    let free = engine::system_memory::free_bytes();
    free.map_or(wanted, |free| wanted.min(usize::try_from(free / 4).unwrap_or(wanted)))
}

/// Bytes in a line of this process's status, such as `VmRSS:   1234 kB`.
fn status(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}
