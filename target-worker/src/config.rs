//! Settings of the target worker: those common to all workers, with different default ports, and those of
//! several nodes.

use clap::Parser;
use serde::{Deserialize, Serialize};
use service::config::{Faults, RawConfig};
use worker::compute_device::ComputeDevice;
use worker::config::{DefaultPorts, RawWorker, WorkerConfig, WorkerFlags};

use crate::nodes::config::{NodesConfig, NodesFlags, RawNodes};

const EXAMPLES: &str = "\
Examples:
  outrider-target-worker --model models/qwen3-32b --device cuda:0,1 --insecure \\
      --discovery etcd://10.0.0.5:2379/outrider \\
      --listen 0.0.0.0:8110 --advertise http://10.0.0.11:8110
  outrider-target-worker --model models/llama-70b --device cuda:0,1 --nnodes 2 --node-rank 0 \\
      --dist-init-addr 10.0.0.11:7070   # and the same with --node-rank 1 on another host
  outrider-target-worker --model models/demo/target --weights int8 --threads 8 --kv-memory 4GiB \\
      --discovery static:workers.toml";

/// Serves a target model: checks drafted tokens in one forward pass and draws every token of the text.
///
/// Settings come from --config FILE (TOML), then OUTRIDER_* environment variables, then flags; later ones
/// win.
#[derive(Debug, Parser, Serialize)]
#[command(name = "outrider-target-worker", version = service::release::version(), after_long_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub worker: WorkerFlags,
    #[command(flatten)]
    #[serde(flatten)]
    #[expect(missing_docs, reason = "clap would take a doc comment here for the help of every flag below")]
    pub nodes: NodesFlags,
}

/// Unvalidated settings.
#[derive(Debug, Serialize, Deserialize)]
pub struct RawTarget {
    #[serde(flatten)]
    worker: RawWorker,
    #[serde(flatten)]
    nodes: RawNodes,
}

/// Validated settings.
#[derive(Debug, Clone)]
pub struct TargetConfig {
    /// Those common to all workers.
    pub worker: WorkerConfig,
    /// Those of several nodes; `None`: this process has the whole model.
    pub nodes: Option<NodesConfig>,
}

impl Default for RawTarget {
    fn default() -> Self {
        let worker = RawWorker::new(DefaultPorts { listen: 8110, admin: 8111 });
        Self { worker, nodes: RawNodes::default() }
    }
}

impl RawConfig for RawTarget {
    type Config = TargetConfig;

    fn validate(self, faults: &mut Faults) -> Option<TargetConfig> {
        let Self { worker, nodes } = self;
        if worker.needs_model() {
            faults.require("model", worker.model());
        }
        let (count, given) = (nodes.count(), worker.tensor_parallel());
        faults.check("nnodes", count < 2 || worker.needs_model(), || {
            "a synthetic engine has no ranks: remove --nnodes".to_owned()
        });
        if let Some(ranks) = given {
            faults.check("tensor_parallel", count == 0 || ranks.is_multiple_of(count), || {
                format!("{ranks} ranks cannot be shared by --nnodes {count}: give a multiple of that")
            });
        }
        let is_insecure = worker.is_insecure();
        let worker = worker.validate(faults);
        let nodes = nodes.validate(is_insecure, faults);
        let mut worker = worker?;
        match &worker.device {
            ComputeDevice::Cpu if given.is_none() => worker.tensor_parallel = count,
            ComputeDevice::Cuda(gpus) if count > 1 => {
                let fits = are_ranks(gpus.len(), count, given);
                faults.check("device", fits, || {
                    let ranks = gpus.len() * count;
                    format!(
                        "{count} nodes with as many gpus as this one have {ranks}: a model needs 2, 4 or 8, \
                             and --tensor-parallel, if it is set, is that number"
                    )
                });
            }
            ComputeDevice::Cpu | ComputeDevice::Cuda(_) => {}
        }
        Some(TargetConfig { worker, nodes })
    }
}

/// Whether a model can be split over the GPUs of all nodes, each with `gpus` of them, and that is what
/// `--tensor-parallel` says, if it is given.
fn are_ranks(gpus: usize, nodes: usize, given: Option<usize>) -> bool {
    let ranks = gpus * nodes;
    matches!(ranks, 2 | 4 | 8) && given.is_none_or(|given| given == ranks)
}

#[cfg(test)]
mod tests {
    use super::are_ranks;

    #[test]
    fn the_gpus_of_all_nodes_are_the_ranks_of_one_model() {
        for fits in [(1, 2, None), (2, 2, Some(4)), (4, 2, None), (1, 8, Some(8))] {
            assert!(are_ranks(fits.0, fits.1, fits.2), "{fits:?}");
        }
        for other in [(3, 2, None), (2, 8, None), (1, 2, Some(4)), (2, 2, Some(2))] {
            assert!(!are_ranks(other.0, other.1, other.2), "{other:?}");
        }
    }
}
