//! A node that executes the leader's operations.

use std::sync::Arc;

use super::{Nodes, wire};
use crate::rank_group::{Command, execute};
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
        let command = wire::read_operation(message).map_err(|error| {
            EngineError::BadNode(format!("node 0 sent an operation that this node cannot read: {error}"))
        })?;
        // The number of the rank only matters to commands that do not arrive here.
        let executed = execute(0, self.engine.runner_mut(), &command).map(drop);
        wire::write_reply(executed.as_ref().map_err(ToString::to_string).copied(), message);
        leader.operations.send(message, &[]).map_err(|error| leader.lost(&error))?;
        match executed {
            // The leader may repeat other operations; a forward fails the group.
            Err(error) if error.is_fatal() || matches!(command, Command::Forward(_)) => Err(error),
            _ => Ok(()),
        }
    }
}
