//! Runs the models: weights, paged KV, forward. It sees token ids and KV blocks, never text, sockets or
//! lanes, and it knows nothing of drafting: a draft worker and a target worker hold the same [`Engine`].
//!
//! Reading order, which is the life of a forward: [`Engine`] checks a batch and reserves its KV (`handle`,
//! `block_manager`, `forward_batch`), every `rank` (one, or a `rank_group` of several, each with its `shard` of the
//! model) has `llama` run it top to bottom over a `backend`, and ranks add up their parts by a `collective`. The CPU as a backend is
//! `host`, its arithmetic the crate `cpu_kernels`. Before that, loading: `model_config` and `rope` make sense of config.json, `weights` of the
//! tensors, `ballast` makes both heavier where that is asked for, `host_memory` says whether they fit. [`oracle`] is the judge: the same numbers by the slowest and plainest way.
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
mod llama;
mod load;
mod logits;
mod model_config;
mod model_shape;
mod multiply_probe;
mod numerics_id;
mod options;
pub mod oracle;
mod rank;
mod rank_group;
mod read_probe;
mod rope;
mod shard;
mod weights;

pub use ballast::ParameterCount;
pub use block_manager::Shared;
pub use cpu_kernels::{KernelError, StageTimes, cpu_name, instruction_sets};
pub use draws::{DrawRequest, Outcome, PromptRows};
pub use error::EngineError;
pub use handle::{Engine, allowed_cores};
pub use instruction_set::{instruction_set, use_instruction_set};
pub use logits::Logits;
pub use model_config::eos_token_ids;
pub use model_shape::{ModelShape, Projection};
pub use multiply_probe::multiply_adds_per_second;
pub use options::{EngineInfo, EngineStats, LoadOptions, SequenceRows, SlotId, TreeRows, WeightFormat};
pub use oracle::Oracle;
pub use read_probe::ReadProbe;
pub use speculation::TokenId;
