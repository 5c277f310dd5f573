//! A node that executes the leader's operations.

use std::sync::Arc;

use super::Nodes;
use super::wire::{self, Received};
use crate::forward_batch::{OwnedRows, ReservedRows};
use crate::rank::Runner;
use crate::{Engine, EngineError, EngineInfo};

/// The loaded ranks of a node other than the leader.
pub struct Follower {
    engine: Engine,
    nodes: Arc<Nodes>,
}

impl Follower {
    /// `engine` has this node's ranks.
    pub(crate) fn new(engine: Engine, nodes: Arc<Nodes>) -> Self {
        Self { engine, nodes }
    }

    /// Facts about the whole model, as the leader has them.
    pub fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    /// Number of compute threads in this process.
    pub fn num_threads(&self) -> usize {
        self.engine.num_threads()
    }

    /// Pins this process's compute threads, see [`Engine::pin_threads`]. Called on the thread that will call
    /// [`Follower::run`].
    pub fn pin_threads(&mut self, cores: &[usize]) -> Result<(), EngineError> {
        self.engine.pin_threads(cores)
    }

    /// Executes operations until the leader is lost or ends, or this node fails; returns why.
    pub fn run(mut self) -> EngineError {
        let mut message = Vec::new();
        loop {
            if let Err(error) = self.run_next(&mut message) {
                return error;
            }
        }
    }

    /// Executes one operation. The error is this node's last one.
    fn run_next(&mut self, message: &mut Vec<u8>) -> Result<(), EngineError> {
        let leader = &self.nodes.peers()[0];
        leader.operations.receive(message).map_err(|error| leader.lost(&error))?;
        let operation = wire::read_operation(message).map_err(|error| {
            EngineError::BadNode(format!("node 0 sent an operation that this node cannot read: {error}"))
        })?;
        let executed = execute(self.engine.runner_mut(), &operation);
        wire::write_reply(executed.as_ref().map_err(ToString::to_string).copied(), message);
        leader.operations.send(message, &[]).map_err(|error| leader.lost(&error))?;
        match executed {
            // The leader may repeat other operations; a forward fails the group.
            Err(error) if error.is_fatal() || matches!(operation, Received::Forward(_)) => Err(error),
            _ => Ok(()),
        }
    }
}

fn execute(runner: &mut dyn Runner, operation: &Received) -> Result<(), EngineError> {
    match operation {
        Received::GrowKv(num_blocks) => runner.grow_kv(*num_blocks),
        Received::CopyBlock(from, to) => runner.copy_block(*from, *to),
        Received::CopyTokens(copies) => runner.copy_tokens(copies),
        Received::Forward(batch) => {
            let batch: Vec<ReservedRows<'_>> = batch.iter().map(OwnedRows::borrowed).collect();
            // The draws are made where the logits are, by the leader's first rank.
            runner.forward(&batch, &Arc::default()).map(drop)
        }
    }
}
