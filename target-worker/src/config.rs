//! Settings of the target worker: those common to all workers, with different default ports.

use clap::Parser;
use serde::{Deserialize, Serialize};
use service::config::{Faults, RawConfig};
use worker::config::{DefaultPorts, RawWorker, WorkerConfig, WorkerFlags};

const EXAMPLES: &str = "\
Examples:
  outrider-target-worker --model models/qwen3-32b --device cuda:0,1 --insecure \\
      --discovery etcd://10.0.0.5:2379/outrider \\
      --listen 0.0.0.0:8110 --advertise http://10.0.0.11:8110
  outrider-target-worker --model models/demo/target --weights int8 --threads 8 --kv-memory 4GiB \\
      --discovery static:workers.toml";

/// Serves a target model: checks drafted tokens in one forward pass and draws every token of the text.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones
/// win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-target-worker", version, after_long_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker: WorkerFlags,
}

/// Unvalidated settings.
#[derive(Debug, Serialize, Deserialize)]
pub struct RawTarget {
    #[serde(flatten)]
    worker: RawWorker,
}

impl Default for RawTarget {
    fn default() -> Self {
        Self { worker: RawWorker::new(DefaultPorts { listen: 8110, admin: 8111 }) }
    }
}

impl RawConfig for RawTarget {
    type Config = WorkerConfig;

    fn validate(self, faults: &mut Faults) -> Option<WorkerConfig> {
        if self.worker.needs_model() {
            faults.require("model", self.worker.model());
        }
        self.worker.validate(faults)
    }
}
