//! The workers known to this router: membership (`follow.rs`), models ([`registry`], `served_models.rs`), the
//! stream to each worker ([`connection`]) and its frames (`frame_queue.rs`), and TLS ([`tls`]).

pub mod connection;
mod follow;
mod frame_queue;
mod reconnect;
pub mod registry;
mod served_models;
pub mod tls;
mod token_differences;

pub use self::follow::{Membership, follow};
use proto::v1;
use scheduling::cost::{BatchTimePoint, StepTimePoint};
use scheduling::cpu_share::CpuShare;
pub use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::WorkerInfo;
use speculation::Role;
use speculation::tree::MAX_TREE_TOKENS;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

/// Capacity of the queue of frames to one worker, and maximum number of its own frames that wait here.
pub const QUEUED_FRAMES: usize = 64;

/// A worker after its handshake.
#[derive(Debug, Clone)]
pub struct ConnectedWorker {
    /// Identifies this connection.
    pub key: WorkerKey,
    /// Properties from its hello.
    pub info: WorkerInfo,
    /// Frames to the worker.
    pub outbox: mpsc::Sender<v1::RouterFrame>,
    /// Cancel to end the connection.
    pub disconnect: CancellationToken,
}

/// Events from the connections to the scheduler's driver.
#[derive(Debug)]
pub enum WorkerEvent {
    /// The worker is connected and can be used.
    Up(ConnectedWorker),
    /// The worker sent a frame. Dropping the permit lets it send another one.
    Frame(WorkerKey, v1::WorkerFrame, OwnedSemaphorePermit),
    /// An operator removed the worker from the list (false) or put it back (true). A removed worker finishes
    /// its work.
    Listed(WorkerKey, bool),
    /// The connection has ended; the worker's state is lost.
    Down(WorkerKey),
}

/// Converts a worker's hello to the scheduler's types.
pub fn worker_info(role: Role, address: &str, hello: &v1::WorkerHello, credits: Option<u64>) -> WorkerInfo {
    let point = |point: &v1::StepTimePoint| StepTimePoint {
        rows: point.rows,
        context: point.kv_tokens,
        micros: point.micros,
    };
    let batch = |batch: &v1::BatchTimePoint| BatchTimePoint {
        sequences: batch.sequences,
        rows: batch.rows,
        context: batch.kv_tokens,
        micros: batch.micros,
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
        batch_times: hello.batch_times.iter().map(batch).collect(),
        max_tree_tokens: hello.max_tree_tokens.min(MAX_TREE_TOKENS as u32),
        is_shadow: hello.shadow,
        cpu: hello
            .cpu
            .as_ref()
            .map(|cpu| CpuShare::new(cpu.host_id.clone(), cpu.cores.iter().copied(), cpu.threads)),
    }
}
