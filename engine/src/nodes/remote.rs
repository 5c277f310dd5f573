//! The ranks of another node as one [`Runner`] of the leader: each operation is sent to the node, and ends
//! with its reply. Its results stay there: only the first rank of all, which is the leader's, returns any.

use std::sync::Arc;

use cpu_kernels::TokenCopy;

use super::Nodes;
use super::wire::{self, Operation};
use crate::EngineError;
use crate::collective::RankBarrier;
use crate::draws::{DrawPlan, RankOutput};
use crate::forward_batch::ReservedRows;
use crate::rank::Runner;

/// See the module documentation.
pub(crate) struct RemoteNode {
    nodes: Arc<Nodes>,
    peer_idx: usize,
    /// First rank of the node.
    rank: usize,
    barrier: Arc<RankBarrier>,
    /// The last message, kept to reuse its memory.
    message: Vec<u8>,
}

impl RemoteNode {
    pub(crate) fn new(nodes: Arc<Nodes>, peer_idx: usize, rank: usize, barrier: Arc<RankBarrier>) -> Self {
        Self { nodes, peer_idx, rank, barrier, message: Vec::new() }
    }

    fn run(&mut self, operation: &Operation<'_>) -> Result<(), EngineError> {
        self.message.clear();
        wire::write_operation(operation, &mut self.message);
        let Self { nodes, peer_idx, rank, barrier, message } = self;
        let peer = &nodes.peers()[*peer_idx];
        let exchanged = peer.operations.send(message, &[]).and_then(|()| peer.operations.receive(message));
        let reply = exchanged.and_then(|()| wire::read_reply(message));
        match reply {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(peer.failed(reason)),
            Err(error) => Err(peer.mark_lost(barrier, *rank, &error)),
        }
    }
}

impl Runner for RemoteNode {
    fn grow_kv(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        self.run(&Operation::GrowKv(num_blocks))
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), EngineError> {
        self.run(&Operation::CopyBlock(from, to))
    }

    fn copy_tokens(&mut self, copies: &[TokenCopy]) -> Result<(), EngineError> {
        self.run(&Operation::CopyTokens(copies))
    }

    /// Draws are not sent: the other nodes have no logits.
    fn forward(
        &mut self,
        batch: &[ReservedRows<'_>],
        _draws: &Arc<DrawPlan>,
    ) -> Result<RankOutput, EngineError> {
        self.run(&Operation::Forward(batch)).map(|()| RankOutput::default())
    }

    /// The node's threads are in another process, which pins them.
    fn num_threads(&self) -> usize {
        0
    }
}
