//! [`KvPools`]: what gateways want to know of the targets' KV, under vLLM's names, and of what they could commit. A router is one server to a
//! gateway, so the pools of a model's targets are added up. Must never decide anything.

use std::collections::BTreeMap;
use std::sync::Arc;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::WorkerInfo;
use service::metrics::EncodeLabelSet;
use speculation::Role;

use super::{ENGINE, Ending, Families, FinishLabels, ModelLabels};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CacheConfigLabels {
    model_name: String,
    engine: &'static str,
    block_size: String,
    num_gpu_blocks: String,
}

/// The KV of one target.
#[derive(Debug)]
struct Pool {
    model: String,
    block_size: u32,
    num_blocks: u64,
    credits: u64,
    reserved: u64,
    /// Tokens a second.
    headroom: u64,
}

/// The KV of all targets.
#[derive(Debug)]
pub struct KvPools {
    families: Arc<Families>,
    pools: BTreeMap<WorkerKey, Pool>,
    /// What is shown of each model's blocks.
    shown: BTreeMap<String, CacheConfigLabels>,
}

impl KvPools {
    pub(super) fn new(families: Arc<Families>) -> Self {
        Self { families, pools: BTreeMap::new(), shown: BTreeMap::new() }
    }

    /// A worker joined. Drafts' KV is not what a gateway asks for.
    pub fn joined(&mut self, key: WorkerKey, info: &WorkerInfo) {
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
        // A gateway takes a gauge that is not there for a server that is not well.
        let labels = ModelLabels { model_name: model.clone(), engine: ENGINE };
        drop(self.families.running.get_or_create(&labels));
        drop(self.families.waiting.get_or_create(&labels));
        // `vllm bench serve` takes counters that are not there before its first request for a server that does not speculate.
        for counts in [&self.families.drafts, &self.families.draft_tokens, &self.families.accepted_tokens] {
            drop(counts.get_or_create(&labels));
        }
        // An error rate needs errors that are counted before the first one.
        for ending in Ending::ALL {
            drop(self.families.success.get_or_create(&FinishLabels::new(&labels, ending)));
        }
        self.show(&model);
    }

    /// So many blocks of a worker may be reserved, and so many are.
    pub fn blocks(&mut self, key: WorkerKey, credits: u64, reserved: u64) {
        let Some(pool) = self.pools.get_mut(&key) else { return };
        (pool.credits, pool.reserved) = (credits, reserved);
        let model = pool.model.clone();
        self.show(&model);
    }

    /// A target could commit so many tokens a second more.
    pub fn headroom(&mut self, key: WorkerKey, tokens_per_second: u64) {
        let Some(pool) = self.pools.get_mut(&key) else { return };
        pool.headroom = tokens_per_second;
        let model = pool.model.clone();
        self.show(&model);
    }

    /// A worker left.
    pub fn left(&mut self, key: WorkerKey) {
        if let Some(pool) = self.pools.remove(&key) {
            self.show(&pool.model);
        }
    }

    fn show(&mut self, model: &str) {
        let labels = ModelLabels { model_name: model.to_owned(), engine: ENGINE };
        let pools: Vec<&Pool> = self.pools.values().filter(|pool| pool.model == model).collect();
        let sum = |of: fn(&Pool) -> u64| pools.iter().map(|pool| of(pool)).sum::<u64>();
        let (credits, reserved) = (sum(|pool| pool.credits), sum(|pool| pool.reserved));
        let usage = if credits == 0 { 0.0 } else { (reserved as f64 / credits as f64).min(1.0) };
        self.families.kv_cache_usage.get_or_create(&labels).set(usage);
        self.families.headroom.get_or_create(&labels).set(sum(|pool| pool.headroom) as i64);
        let config = pools.first().map(|pool| CacheConfigLabels {
            model_name: model.to_owned(),
            engine: ENGINE,
            block_size: pool.block_size.to_string(),
            num_gpu_blocks: sum(|pool| pool.num_blocks).to_string(),
        });
        if self.shown.get(model) == config.as_ref() {
            return;
        }
        if let Some(old) = self.shown.remove(model) {
            self.families.cache_config.remove(&old);
        }
        if let Some(config) = config {
            self.families.cache_config.get_or_create(&config).set(1);
            self.shown.insert(model.to_owned(), config);
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

    /// What a stock endpoint picker scrapes, by name, type and labels, from the first target on and without any request.
    #[test]
    fn a_gateway_finds_every_metric_that_it_asks_for() {
        let page = Metrics::new();
        let mut pools = RouterMetrics::register(&page).kv_pools();
        pools.joined(WorkerKey(1), &target("demo", 100));
        pools.joined(WorkerKey(2), &target("demo", 60));
        pools.joined(WorkerKey(3), &WorkerInfo { kv_blocks: 7, ..WorkerInfo::of(Role::Draft, "demo") });
        pools.blocks(WorkerKey(1), 100, 30);
        pools.blocks(WorkerKey(2), 50, 45);
        pools.headroom(WorkerKey(1), 70);
        pools.headroom(WorkerKey(2), 30);
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
        let since = text.lines().find_map(|line| line.strip_prefix(lora)).expect("it is there");
        assert!(since.parse::<f64>().expect("a number") > 1.6e9, "{since} is no time");
    }

    #[test]
    fn what_a_target_had_goes_with_it() {
        let page = Metrics::new();
        let mut pools = RouterMetrics::register(&page).kv_pools();
        pools.joined(WorkerKey(1), &target("demo", 100));
        pools.joined(WorkerKey(2), &target("demo", 60));
        pools.blocks(WorkerKey(1), 100, 100);
        pools.headroom(WorkerKey(1), 70);
        pools.left(WorkerKey(1));
        let text = page.encode(Exposition::Prometheus);
        assert!(text.contains(r#"headroom_tokens_per_second{model_name="demo",engine="0"} 0"#), "{text}");
        assert!(text.contains(r#"vllm:kv_cache_usage_perc{model_name="demo",engine="0"} 0"#), "{text}");
        assert!(
            text.contains(r#"num_gpu_blocks="60"} 1"#) && !text.contains(r#"num_gpu_blocks="160""#),
            "{text}"
        );
        pools.left(WorkerKey(2));
        assert!(!page.encode(Exposition::Prometheus).contains("num_gpu_blocks="));
    }
}
