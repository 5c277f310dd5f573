//! [`KvPools`]: KV metrics of the targets under vLLM's names, and their spare capacity, for gateways. To a
//! gateway the router is one server, so the pools of a model's targets are added up. Must never decide
//! anything.

use std::collections::BTreeMap;
use std::sync::Arc;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::WorkerInfo;
use service::metrics::EncodeLabelSet;
use speculation::Role;

use super::label_sets::{ENGINE, FinishLabels, ModelLabels};
use super::{ChoiceOutcome, Families};

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CacheConfigLabels {
    model_name: String,
    engine: &'static str,
    block_size: String,
    num_gpu_blocks: String,
}

/// KV pool of one target.
#[derive(Debug)]
struct Pool {
    model: String,
    block_size: u32,
    num_blocks: u64,
    credits: u64,
    reserved: u64,
    /// In tokens per second.
    headroom: u64,
}

/// KV pools of all targets.
#[derive(Debug)]
pub struct KvPools {
    families: Arc<Families>,
    pools: BTreeMap<WorkerKey, Pool>,
    /// Labels currently exposed for each model's blocks.
    exposed: BTreeMap<String, CacheConfigLabels>,
}

impl KvPools {
    pub(super) fn new(families: Arc<Families>) -> Self {
        Self { families, pools: BTreeMap::new(), exposed: BTreeMap::new() }
    }

    /// Adds a worker. Draft workers are ignored, because gateways ask for the targets' KV.
    pub fn add_worker(&mut self, key: WorkerKey, info: &WorkerInfo) {
        if info.role != Role::Target {
            return;
        }
        let pool = Pool {
            model: info.model_id.clone(),
            block_size: info.kv_block_size,
            num_blocks: info.kv_blocks,
            credits: info.credit_blocks.unwrap_or(info.kv_blocks),
            reserved: 0,
            headroom: 0,
        };
        let model = pool.model.clone();
        self.pools.insert(key, pool);
        // A gateway considers a server unhealthy if a gauge is missing.
        let labels = ModelLabels::of(&model);
        drop(self.families.running.get_or_create(&labels));
        drop(self.families.waiting.get_or_create(&labels));
        // If the counters are missing before the first request, `vllm bench serve` assumes a server without
        // speculation.
        for family in [&self.families.drafts, &self.families.draft_tokens, &self.families.accepted_tokens] {
            drop(family.get_or_create(&labels));
        }
        // An error rate needs the error series to exist before the first error.
        for outcome in ChoiceOutcome::ALL {
            drop(self.families.success.get_or_create(&FinishLabels::new(&labels, outcome)));
        }
        self.update_gauges(&model);
    }

    /// Sets the number of blocks of a worker that may be reserved, and of those that are.
    pub fn set_blocks(&mut self, key: WorkerKey, credits: u64, reserved: u64) {
        let Some(pool) = self.pools.get_mut(&key) else { return };
        (pool.credits, pool.reserved) = (credits, reserved);
        let model = pool.model.clone();
        self.update_gauges(&model);
    }

    /// Sets how many more tokens per second a target could commit.
    pub fn set_headroom(&mut self, key: WorkerKey, tokens_per_second: u64) {
        let Some(pool) = self.pools.get_mut(&key) else { return };
        pool.headroom = tokens_per_second;
        let model = pool.model.clone();
        self.update_gauges(&model);
    }

    /// Removes a worker.
    pub fn remove_worker(&mut self, key: WorkerKey) {
        if let Some(pool) = self.pools.remove(&key) {
            self.update_gauges(&pool.model);
        }
    }

    fn update_gauges(&mut self, model: &str) {
        let labels = ModelLabels::of(model);
        let pools: Vec<&Pool> = self.pools.values().filter(|pool| pool.model == model).collect();
        // Workers report these numbers, and may report any.
        let sum = |of: fn(&Pool) -> u64| pools.iter().fold(0, |sum: u64, pool| sum.saturating_add(of(pool)));
        let (credits, reserved) = (sum(|pool| pool.credits), sum(|pool| pool.reserved));
        let usage = if credits == 0 { 0.0 } else { (reserved as f64 / credits as f64).min(1.0) };
        self.families.kv_cache_usage.get_or_create(&labels).set(usage);
        self.families
            .headroom
            .get_or_create(&labels)
            .set(i64::try_from(sum(|pool| pool.headroom)).unwrap_or(i64::MAX));
        let config = pools.first().map(|pool| CacheConfigLabels {
            model_name: model.to_owned(),
            engine: ENGINE,
            block_size: pool.block_size.to_string(),
            num_gpu_blocks: sum(|pool| pool.num_blocks).to_string(),
        });
        if self.exposed.get(model) == config.as_ref() {
            return;
        }
        if let Some(old) = self.exposed.remove(model) {
            self.families.cache_config.remove(&old);
        }
        if let Some(config) = config {
            self.families.cache_config.get_or_create(&config).set(1);
            self.exposed.insert(model.to_owned(), config);
        }
    }
}

#[cfg(test)]
mod tests {
    use service::metrics::{Exposition, Metrics};

    use super::super::RouterMetrics;
    use super::*;

    fn target(model: &str, kv_blocks: u64) -> WorkerInfo {
        WorkerInfo { kv_blocks, kv_block_size: 16, ..WorkerInfo::of(Role::Target, model) }
    }

    /// The metrics that a stock endpoint picker scrapes exist with the first target, before any request.
    #[test]
    fn metrics_of_an_endpoint_picker_exist_before_the_first_request() {
        let page = Metrics::new();
        let mut pools = RouterMetrics::register(&page).kv_pools();
        pools.add_worker(WorkerKey(1), &target("demo", 100));
        pools.add_worker(WorkerKey(2), &target("demo", 60));
        pools.add_worker(WorkerKey(3), &WorkerInfo { kv_blocks: 7, ..WorkerInfo::of(Role::Draft, "demo") });
        pools.set_blocks(WorkerKey(1), 100, 30);
        pools.set_blocks(WorkerKey(2), 50, 45);
        pools.set_headroom(WorkerKey(1), 70);
        pools.set_headroom(WorkerKey(2), 30);
        let text = page.encode(Exposition::Prometheus);
        for line in [
            "# TYPE vllm:num_requests_waiting gauge",
            "# TYPE vllm:num_requests_running gauge",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            "# TYPE vllm:cache_config_info gauge",
            "# TYPE vllm:lora_requests_info gauge",
            "# TYPE outrider:goodput_headroom_tokens_per_second gauge",
            r#"outrider:goodput_headroom_tokens_per_second{model_name="demo",engine="0"} 100"#,
            r#"vllm:num_requests_waiting{model_name="demo",engine="0"} 0"#,
            r#"vllm:num_requests_running{model_name="demo",engine="0"} 0"#,
            r#"vllm:request_success_total{model_name="demo",engine="0",finished_reason="error"} 0"#,
            r#"vllm:spec_decode_num_drafts_total{model_name="demo",engine="0"} 0"#,
            r#"vllm:spec_decode_num_draft_tokens_total{model_name="demo",engine="0"} 0"#,
            r#"vllm:spec_decode_num_accepted_tokens_total{model_name="demo",engine="0"} 0"#,
            r#"outrider_rounds_ignored_total{reason="late_draft"} 0"#,
            r#"vllm:kv_cache_usage_perc{model_name="demo",engine="0"} 0.5"#,
            r#"vllm:cache_config_info{model_name="demo",engine="0",block_size="16",num_gpu_blocks="160"} 1"#,
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing from\n{text}");
        }
        let lora =
            r#"vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} "#;
        let started_at =
            text.lines().find_map(|line| line.strip_prefix(lora)).expect("the series is missing");
        assert!(started_at.parse::<f64>().expect("a number") > 1.6e9, "{started_at} is not a Unix time");
    }

    #[test]
    fn targets_that_report_the_largest_pools_do_not_overflow_a_sum() {
        let page = Metrics::new();
        let mut pools = RouterMetrics::register(&page).kv_pools();
        for key in [WorkerKey(1), WorkerKey(2)] {
            pools.add_worker(key, &target("demo", u64::MAX));
            pools.set_blocks(key, u64::MAX, u64::MAX);
            pools.set_headroom(key, u64::MAX);
        }
        let text = page.encode(Exposition::Prometheus);
        assert!(text.contains(&format!(r#"num_gpu_blocks="{}"}} 1"#, u64::MAX)), "{text}");
        assert!(text.contains(&format!(r#"model_name="demo",engine="0"}} {}"#, i64::MAX)), "{text}");
    }

    #[test]
    fn a_removed_target_no_longer_counts() {
        let page = Metrics::new();
        let mut pools = RouterMetrics::register(&page).kv_pools();
        pools.add_worker(WorkerKey(1), &target("demo", 100));
        pools.add_worker(WorkerKey(2), &target("demo", 60));
        pools.set_blocks(WorkerKey(1), 100, 100);
        pools.set_headroom(WorkerKey(1), 70);
        pools.remove_worker(WorkerKey(1));
        let text = page.encode(Exposition::Prometheus);
        assert!(text.contains(r#"headroom_tokens_per_second{model_name="demo",engine="0"} 0"#), "{text}");
        assert!(text.contains(r#"vllm:kv_cache_usage_perc{model_name="demo",engine="0"} 0"#), "{text}");
        assert!(
            text.contains(r#"num_gpu_blocks="60"} 1"#) && !text.contains(r#"num_gpu_blocks="160""#),
            "{text}"
        );
        pools.remove_worker(WorkerKey(2));
        assert!(!page.encode(Exposition::Prometheus).contains("num_gpu_blocks="));
    }
}
