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
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            processor: engine::cpu_name(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load_average: load.and_then(|text| text.split(' ').next()?.parse().ok()),
        }
    }
}
