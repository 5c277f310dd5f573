//! The target worker's settings: those of every worker, with its own ports.

use clap::Parser;
use serde::{Deserialize, Serialize};
use service::config::{Faults, RawConfig};
use worker::config::{DefaultPorts, RawWorker, WorkerConfig, WorkerFlags};

/// Serves a target model: checks drafted tokens in one forward pass and draws every token of the text.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-target-worker", version)]
pub struct Flags {
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker: WorkerFlags,
}

/// Raw settings.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RawTarget {
    #[serde(flatten)]
    worker: RawWorker,
}

impl RawConfig for RawTarget {
    type Config = WorkerConfig;

    fn validate(self, faults: &mut Faults) -> Option<WorkerConfig> {
        if self.worker.needs_model() {
            faults.require("model", self.worker.model());
        }
        self.worker.validate(DefaultPorts { listen: 8110, admin: 8111 }, faults)
    }
}
