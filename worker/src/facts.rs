//! What a worker says of itself when a router connects.

use proto::version::PROTOCOL_VERSIONS;
use proto::{SAMPLING_SCHEME, v1};
use speculation::Role;
use speculation::step::MAX_DRAFT_TOKENS;

use crate::assets::Assets;

/// The facts of the handshake that do not follow from the build.
#[derive(Debug, Clone)]
pub struct WorkerFacts {
    /// Drawn at start: names this process.
    pub worker_id: u64,
    /// Draft or target.
    pub role: Role,
    /// The name that clients ask for, at a target.
    pub model_id: String,
    /// Names the class of workers whose bits are equal.
    pub numerics_id: String,
    /// Ids that may occur; 0 where the worker takes any (n-gram).
    pub vocab_size: u32,
    /// Longest sequence.
    pub max_model_len: u32,
    /// Ids that end a text.
    pub eos_token_ids: Vec<u32>,
    /// KV blocks there are.
    pub kv_blocks: u64,
    /// Tokens in one.
    pub kv_block_size: u32,
    /// Ids of a token tree that it verifies; 0: chains only.
    pub max_tree_tokens: u32,
    /// Task types that this draft worker is meant for; empty for all.
    pub task_types: Vec<String>,
    /// Whether this draft worker is on trial.
    pub is_shadow: bool,
    /// Parameters of ballast in the model: 0 but in demonstrations and benchmarks.
    pub ballast_parameters: u64,
    /// What forwards take; empty where it was not profiled, or where steps are nearly free (n-gram).
    pub step_times: Vec<v1::StepTimePoint>,
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
            step_times: self.step_times.clone(),
            max_tree_tokens: self.max_tree_tokens,
            shadow: self.is_shadow,
        }
    }
}
