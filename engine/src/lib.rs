//! Runs the models: weights, paged KV cache, forward pass. The crate sees token ids and KV blocks, never
//! text, sockets or lanes, and does not know about drafting: draft workers and target workers use the same
//! [`Engine`].
//!
//! Reading order, which is the order of a forward: [`Engine`] checks a batch and reserves its KV blocks
//! (`handle`, `block_manager`, `forward_batch`). Every `rank` (one, or a `rank_group` of several, each with
//! its `shard` of the model) runs `llama` from top to bottom on a `backend`. Ranks add up their partial
//! results with a `collective`; `nodes` are processes that hold ranks of one model. The CPU backend is
//! `host`; its arithmetic is the crate `cpu_kernels`. Loading comes before that: `model_config` and `rope`
//! parse config.json, `weights` reads the tensors of the [`weight_files`], `ballast` enlarges both if asked
//! to, and `host_memory` checks that the weights fit in memory. [`oracle`] is the reference for tests: it
//! computes the same numbers in the slowest and plainest way.
//!
//! Numerics: docs/contract.md part C. A row's logits depend on that row's sequence alone, bit for bit.
#![deny(unsafe_code)]

mod backend;
mod ballast;
mod block_manager;
mod collective;
pub mod cuda;
mod draws;
mod error;
mod forward_batch;
mod handle;
mod host;
mod host_memory;
mod instruction_set;
mod kv_limits;
mod lfs_pointer;
mod llama;
mod load;
mod logits;
mod model_config;
mod model_name;
mod model_settings;
mod model_shape;
mod multiply_probe;
mod nodes;
mod numerics_id;
mod options;
pub mod oracle;
mod rank;
mod rank_group;
mod read_probe;
mod rope;
mod shard;
pub mod system_memory;
pub mod weight_files;
mod weights;

pub use ballast::ParameterCount;
pub use block_manager::PrefixMatch;
pub use cpu_kernels::{KernelError, StageTimes, cpu_name, instruction_sets};
pub use draws::{Answers, DrawRequest, ForwardOutput, NumAnswers, PromptRows};
pub use error::EngineError;
pub use handle::{Engine, allowed_cores};
pub use instruction_set::{instruction_set, use_instruction_set};
pub use lfs_pointer::check_lfs_pointer;
pub use logits::Logits;
pub use model_config::{CONFIG_FILE, eos_token_ids};
pub use model_name::model_name;
pub use model_settings::{ModelSettings, ScaledRope};
pub use model_shape::{ModelShape, Projection};
pub use multiply_probe::multiply_adds_per_second;
pub use nodes::{Follower, NodeLink, NodePeer, Nodes};
pub use options::{EngineInfo, EngineStats, LoadOptions, SequenceRows, SlotId, TreeRows, WeightFormat};
pub use oracle::Oracle;
pub use read_probe::ReadProbe;
pub use speculation::TokenId;

/// Names of tensors outside the layers, as transformers saves them.
pub mod tensor_names {
    pub use crate::model_config::tensors::{EMBEDDING, FINAL_NORM, LM_HEAD};
}
