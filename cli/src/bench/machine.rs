//! The machine that runs the bench, for the head of its report.

use serde::Serialize;

/// This machine.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Machine {
    /// The processor's name, or the architecture if the system does not report one.
    pub(super) processor: String,
    pub(super) cores: usize,
    /// Load average over the last minute, if the system reports it: far above the measured load it indicates
    /// a busy machine.
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
