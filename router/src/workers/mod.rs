//! The workers that this router knows: who exists ([`registry`]), the one stream to each ([`connection`]), and which draft
//! may serve which target ([`pairing`]).

pub mod connection;
pub mod pairing;
pub mod registry;
pub mod tls;

use proto::v1;
use speculation::Role;
use tokio::sync::mpsc;

/// Names one connection to one worker; a worker that reconnects has a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey(pub u64);

/// Frames that wait to be written to one worker.
pub const OUTBOX_FRAMES: usize = 64;

/// A worker that said hello.
#[derive(Debug, Clone)]
pub struct ConnectedWorker {
    /// This connection.
    pub key: WorkerKey,
    /// Its pool.
    pub role: Role,
    /// Where it is.
    pub address: String,
    /// What it said of itself.
    pub hello: v1::WorkerHello,
    /// The most KV blocks that this router may reserve there, if it said so with its hello.
    pub credits: Option<u64>,
    /// Frames to it.
    pub outbox: mpsc::Sender<v1::RouterFrame>,
}

/// What connections tell the owner of the sequences.
#[derive(Debug)]
pub enum WorkerEvent {
    /// It can be used.
    Up(ConnectedWorker),
    /// It said something.
    Frame(WorkerKey, v1::WorkerFrame),
    /// It is gone, with whatever it held.
    Down(WorkerKey),
}
