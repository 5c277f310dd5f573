//! The facts that a worker reports when a router connects.

use proto::version::PROTOCOL_VERSIONS;
use proto::{SAMPLING_SCHEME, v1};
use scheduling::cost::{BatchTimePoint, StepTimePoint};
use speculation::Role;
use speculation::step::MAX_DRAFT_TOKENS;

use crate::assets::Assets;

/// Handshake facts that are not fixed by the build.
#[derive(Debug, Clone)]
pub struct WorkerFacts {
    /// Random number that identifies this process.
    pub worker_id: u64,
    /// Draft or target.
    pub role: Role,
    /// Model name that clients request; targets only.
    pub model_id: String,
    /// Identifies the class of workers whose results are bit-identical.
    pub numerics_id: String,
    /// Number of token ids; 0 if the worker accepts any (n-gram).
    pub vocab_size: u32,
    /// Maximum sequence length.
    pub max_model_len: u32,
    /// Ids that end a text (EOS).
    pub eos_token_ids: Vec<u32>,
    /// Total KV blocks.
    pub kv_blocks: u64,
    /// Tokens per KV block.
    pub kv_block_size: u32,
    /// Maximum ids of a token tree that this worker verifies; 0: chains only.
    pub max_tree_tokens: u32,
    /// Task types of this draft worker; empty for all.
    pub task_types: Vec<String>,
    /// Whether this draft worker is on trial (shadow).
    pub is_shadow: bool,
    /// Ballast parameters in the model; 0 except in demonstrations and benchmarks.
    pub ballast_parameters: u64,
    /// Forward times; empty if not profiled, or if steps are nearly free (n-gram).
    pub step_times: Vec<StepTimePoint>,
    /// Forward times of several sequences; empty if not profiled.
    pub batch_times: Vec<BatchTimePoint>,
    /// The CPU cores that the worker computes on, if any.
    pub cpu: Option<v1::CpuShare>,
}

impl WorkerFacts {
    /// The first frame to a router.
    pub fn hello(&self, assets: Option<&Assets>) -> v1::WorkerHello {
        v1::WorkerHello {
            protocol_version_min: *PROTOCOL_VERSIONS.start(),
            protocol_version_max: *PROTOCOL_VERSIONS.end(),
            worker_id: self.worker_id,
            role: match self.role {
                Role::Draft => v1::WorkerRole::Draft,
                Role::Target => v1::WorkerRole::Target,
            }
            .into(),
            model_id: self.model_id.clone(),
            numerics_id: self.numerics_id.clone(),
            vocab_size: self.vocab_size,
            tokenizer_fingerprint: assets.map(|assets| assets.token_list().fingerprint()).unwrap_or_default(),
            sampling_scheme: SAMPLING_SCHEME.to_owned(),
            max_draft_tokens: MAX_DRAFT_TOKENS as u32,
            kv_blocks: self.kv_blocks,
            kv_block_size: self.kv_block_size,
            task_types: self.task_types.clone(),
            max_model_len: self.max_model_len,
            eos_token_ids: self.eos_token_ids.clone(),
            assets: assets.map(Assets::list).unwrap_or_default(),
            step_times: self.step_times.iter().map(step_time_to_wire).collect(),
            max_tree_tokens: self.max_tree_tokens,
            shadow: self.is_shadow,
            cpu: self.cpu.clone(),
            batch_times: self.batch_times.iter().map(batch_time_to_wire).collect(),
        }
    }
}

fn step_time_to_wire(point: &StepTimePoint) -> v1::StepTimePoint {
    let StepTimePoint { rows, context, micros } = *point;
    v1::StepTimePoint { rows, kv_tokens: context, micros }
}

fn batch_time_to_wire(point: &BatchTimePoint) -> v1::BatchTimePoint {
    let BatchTimePoint { sequences, rows, context, micros } = *point;
    v1::BatchTimePoint { sequences, rows, kv_tokens: context, micros }
}
