//! The target worker's settings: those of every worker, with its own ports.

use clap::Parser;
use engine::ParameterCount;
use serde::{Deserialize, Serialize};
use service::config::{Faults, RawConfig};
use worker::config::{DefaultPorts, RawWorker, WorkerConfig, WorkerFlags};

const EXAMPLES: &str = "\
Examples:
  outrider-target-worker --model models/qwen3-32b --device cuda:0,1 --discovery etcd://10.0.0.5:2379/outrider \\
      --listen 0.0.0.0:8110 --advertise http://10.0.0.11:8110
  outrider-target-worker --model models/demo/target --weights int8 --threads 8 --kv-memory 4GiB --discovery static:workers.toml";

/// Serves a target model: checks drafted tokens in one forward pass and draws every token of the text.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-target-worker", version, after_long_help = EXAMPLES)]
pub struct Flags {
    /// For demonstrations and benchmarks: about so many parameters more, such as 250M, which change no token but cost the time and memory
    /// (2 bytes each in bf16) of a bigger model
    #[arg(long, value_name = "PARAMS")]
    pub ballast: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker: WorkerFlags,
}

/// Raw settings.
#[derive(Debug, Serialize, Deserialize)]
pub struct RawTarget {
    ballast: String,
    #[serde(flatten)]
    worker: RawWorker,
}

impl Default for RawTarget {
    fn default() -> Self {
        Self { ballast: "0".to_owned(), worker: RawWorker::default() }
    }
}

impl RawConfig for RawTarget {
    type Config = WorkerConfig;

    fn validate(self, faults: &mut Faults) -> Option<WorkerConfig> {
        let ballast = faults.parse::<ParameterCount>("ballast", &self.ballast);
        if self.worker.needs_model() {
            faults.require("model", self.worker.model());
        } else {
            faults.check("ballast", ballast.is_none_or(|ballast| ballast.0 == 0), || {
                "a synthetic engine has no weights: leave it out".to_owned()
            });
        }
        let config = self.worker.validate(DefaultPorts { listen: 8110, admin: 8111 }, faults)?;
        Some(WorkerConfig { ballast: ballast?.0, ..config })
    }
}
