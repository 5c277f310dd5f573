//! The workers that this router knows: who exists (`follow.rs`), what they are ([`registry`]), the one stream to each ([`connection`]), and TLS towards them ([`tls`]).

pub mod connection;
mod follow;
mod keep;
pub mod registry;
pub mod tls;

pub use self::follow::{Membership, follow};
use proto::v1;
use scheduling::cost::StepTimePoint;
pub use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::WorkerInfo;
use speculation::Role;
use speculation::tree::MAX_TREE_TOKENS;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Frames that wait to be written to one worker.
pub const OUTBOX_FRAMES: usize = 64;

/// A worker that said hello.
#[derive(Debug, Clone)]
pub struct ConnectedWorker {
    /// This connection.
    pub key: WorkerKey,
    /// What it said of itself.
    pub info: WorkerInfo,
    /// Frames to it.
    pub outbox: mpsc::Sender<v1::RouterFrame>,
    /// Cancelled to end the connection.
    pub end: CancellationToken,
}

/// What connections tell the scheduler's driver.
#[derive(Debug)]
pub enum WorkerEvent {
    /// It can be used.
    Up(ConnectedWorker),
    /// It said something.
    Frame(WorkerKey, v1::WorkerFrame),
    /// An operator took it off the list, or put it back (true). It is to run out of work, not to be cut.
    Listed(WorkerKey, bool),
    /// It is gone, with whatever it held.
    Down(WorkerKey),
}

/// A worker's hello in the scheduler's terms.
pub fn worker_info(role: Role, address: &str, hello: &v1::WorkerHello, credits: Option<u64>) -> WorkerInfo {
    let point = |point: &v1::StepTimePoint| StepTimePoint {
        rows: point.rows,
        kv_tokens: point.kv_tokens,
        micros: point.micros,
    };
    WorkerInfo {
        role,
        address: address.to_owned(),
        model_id: hello.model_id.clone(),
        numerics_id: hello.numerics_id.clone(),
        tokenizer_fingerprint: hello.tokenizer_fingerprint.clone(),
        sampling_scheme: hello.sampling_scheme.clone(),
        task_types: hello.task_types.clone(),
        vocab_size: hello.vocab_size,
        max_model_len: hello.max_model_len,
        kv_blocks: hello.kv_blocks,
        kv_block_size: hello.kv_block_size,
        credit_blocks: credits,
        step_times: hello.step_times.iter().map(point).collect(),
        max_tree_tokens: hello.max_tree_tokens.min(MAX_TREE_TOKENS as u32),
        is_shadow: hello.shadow,
    }
}
