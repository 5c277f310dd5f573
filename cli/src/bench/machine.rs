//! What ran the bench, for the head of its report.

use serde::Serialize;

/// This machine.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Machine {
    /// The processor's name, where the system tells.
    pub(super) processor: String,
    pub(super) cores: usize,
    /// Runnable processes over the last minute, where the system tells: much more than what was measured means a busy machine.
    pub(super) load_average: Option<f64>,
}

impl Machine {
    pub(super) fn here() -> Self {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            processor: name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load_average: load.and_then(|text| text.split(' ').next()?.parse().ok()),
        }
    }
}
