//! Resources held by a process: sequences, KV blocks, file descriptors, memory; and whether they have grown
//! since the start.

use anyhow::Context as _;
use outrider_cli::cluster::usage::resident_mib;

use super::fleet::{Engine, Fleet, KV_MEMORY_MIB, Server};

/// Allowed increase of file descriptors: for instance connections kept in a client's pool.
const MORE_DESCRIPTORS: usize = 8;

/// Allowed increase of memory: a share of the initial size, plus a number of MiB.
const MORE_MEMORY: (f64, f64) = (0.25, 24.0);

/// Resources held by one process at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Footprint {
    /// The process.
    pub name: String,
    /// Sequences cached by a worker, or running in a router.
    pub sequences: u64,
    /// KV blocks used by a worker's sequences, or reserved by a router.
    pub kv_blocks: u64,
    /// Open file descriptors.
    pub descriptors: usize,
    /// Resident memory, MiB, without a worker's cached prefixes: its KV memory is touched when first used,
    /// and then kept.
    pub memory_mib: f64,
}

impl Footprint {
    async fn of(server: &Server, engine: Engine) -> anyhow::Result<Self> {
        let page = server.metrics().await?;
        let cached = page.total("outrider_worker_kv_blocks_cached");
        let blocks = page.total("outrider_worker_kv_blocks").max(1.0);
        let cached_mib = if engine == Engine::Pair { KV_MEMORY_MIB as f64 * cached / blocks } else { 0.0 };
        let pid = server.pid();
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"));
        Ok(Self {
            name: server.name().to_owned(),
            sequences: page.sum("outrider_worker_sequences") + page.sum("vllm:num_requests_running"),
            kv_blocks: page.sum("outrider_worker_kv_blocks_used") + page.sum("outrider_pool_reserved_blocks"),
            descriptors: descriptors.with_context(|| format!("{} has exited", server.name()))?.count(),
            memory_mib: resident_mib(pid)? - cached_mib,
        })
    }

    /// Whether no sequences or KV blocks are held.
    pub fn is_idle(&self) -> bool {
        self.sequences == 0 && self.kv_blocks == 0
    }

    /// Describes each resource that has grown beyond its allowance since `before`; empty if none has.
    pub fn excess(&self, before: &Self) -> Vec<String> {
        let mut excess = Vec::new();
        if self.sequences > before.sequences {
            excess.push(format!("{} sequences", self.sequences));
        }
        if self.kv_blocks > before.kv_blocks {
            excess.push(format!("{} KV blocks", self.kv_blocks));
        }
        if self.descriptors > before.descriptors + MORE_DESCRIPTORS {
            excess.push(format!("{} descriptors more", self.descriptors - before.descriptors));
        }
        let limit = before.memory_mib * (1.0 + MORE_MEMORY.0) + MORE_MEMORY.1;
        if self.memory_mib > limit {
            excess.push(format!("{:.0} MiB more", self.memory_mib - before.memory_mib));
        }
        excess
    }
}

/// Footprints of all processes, in their order.
pub async fn footprints(fleet: &Fleet) -> anyhow::Result<Vec<Footprint>> {
    futures::future::try_join_all(fleet.servers().map(|server| Footprint::of(server, fleet.engine))).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_increase_is_reported() {
        let before = Footprint {
            name: "target-0".to_owned(),
            sequences: 0,
            kv_blocks: 0,
            descriptors: 20,
            memory_mib: 40.0,
        };
        assert!(before.excess(&before).is_empty() && before.is_idle());
        let small_increase = Footprint { descriptors: 28, memory_mib: 74.0, ..before.clone() };
        assert!(small_increase.excess(&before).is_empty());
        let large_increase =
            Footprint { sequences: 1, kv_blocks: 2, descriptors: 29, memory_mib: 75.0, ..before.clone() };
        assert_eq!(large_increase.excess(&before).len(), 4);
        assert!(!large_increase.is_idle());
    }
}
