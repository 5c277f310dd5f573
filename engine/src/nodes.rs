//! A model whose ranks are spread over several processes, usually one per host: a *node* holds consecutive
//! ranks, the same number each. Node 0, the leader, has the [`crate::Engine`]: it sends each operation to the
//! other nodes ([`remote`]), which execute it ([`follower`]). On CPUs the sums of a forward go over the same
//! links ([`crate::collective`]); on GPUs NCCL moves them.
//!
//! The engine knows no sockets: the caller connects the nodes and passes a [`NodeLink`] per purpose.

mod follower;
mod remote;
mod sizes;
#[cfg(test)]
mod test_link;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use follower::Follower;
use remote::RemoteNode;
pub(crate) use sizes::Sizes;
#[cfg(test)]
pub(crate) use test_link::nodes_of_threads;

use crate::EngineError;
use crate::collective::RankBarrier;
use crate::load::WATCHDOG;
use crate::model_config::ModelConfig;
use crate::rank::Runner;
use crate::shard::Shard;

/// First byte of an agreement: what follows is the message, or the text of a failure.
const GOOD: u8 = 0;
const FAILED: u8 = 1;

/// A connection to another node. Messages arrive whole and in order. After an error all later calls fail,
/// too, and the error says which node is lost and why.
pub trait NodeLink: Send + Sync {
    /// Sends one message, given in two parts.
    fn send(&self, head: &[u8], body: &[u8]) -> io::Result<()>;

    /// Waits for the next message and replaces the content of `message` by it.
    fn receive(&self, message: &mut Vec<u8>) -> io::Result<()>;

    /// Waits for the next message, which has to have the length of `message`.
    fn receive_into(&self, message: &mut [u8]) -> io::Result<()>;

    /// Sends a message while it receives one of the length of `received`, so that two nodes can exchange long
    /// messages.
    fn exchange(&self, sent: &[u8], received: &mut [u8]) -> io::Result<()>;
}

/// Another node, connected to this one.
pub struct NodePeer {
    /// The node's number.
    pub node: usize,
    /// Carries the leader's operations and the replies to them.
    pub operations: Box<dyn NodeLink>,
    /// Carries partial sums of a forward on CPUs.
    pub sums: Box<dyn NodeLink>,
}

/// This node and its links.
pub struct Nodes {
    node: usize,
    count: usize,
    peers: Vec<NodePeer>,
}

impl Nodes {
    /// How long a wait for a sum of another node may take. Half of what the other ranks of this node wait for
    /// the one that waits, so that the error names the node.
    pub const SUM_PATIENCE: Duration = WATCHDOG.checked_div(2).expect("2 is not 0");

    /// Node `node` of `count` (2, 4 or 8). The leader's `peers` are all other nodes in order, a follower's
    /// only the leader.
    ///
    /// # Panics
    ///
    /// If the peers are others than that.
    pub fn new(node: usize, count: usize, peers: Vec<NodePeer>) -> Self {
        let expected = if node == 0 { 1..count } else { 0..1 };
        assert!(
            node < count && peers.iter().map(|peer| peer.node).eq(expected),
            "a leader is connected to all followers in order, a follower to the leader"
        );
        Self { node, count, peers }
    }

    /// Whether this node has the engine.
    pub fn is_leader(&self) -> bool {
        self.node == 0
    }

    /// Number of this node.
    pub fn node(&self) -> usize {
        self.node
    }

    /// Number of nodes.
    pub fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn peers(&self) -> &[NodePeer] {
        &self.peers
    }

    /// The leader sends `own` to all followers; every node returns it.
    pub(crate) fn share_from_leader(&self, own: Vec<u8>) -> Result<Vec<u8>, EngineError> {
        self.agree(&[], |_| Ok(own))
    }

    /// Every node sends `own`; the leader decides with the messages of all followers, in order, and every
    /// node returns its decision or fails with its reason. All nodes call this the same number of times,
    /// while they load.
    pub(crate) fn agree(
        &self,
        own: &[u8],
        decide: impl FnOnce(&[Vec<u8>]) -> Result<Vec<u8>, EngineError>,
    ) -> Result<Vec<u8>, EngineError> {
        if let (false, Some(leader)) = (self.is_leader(), self.peers.first()) {
            // A leader that has failed reads no more; what it sent before says why.
            let sent = leader.operations.send(&[GOOD], own).map_err(|error| leader.lost(&error));
            return match (sent, leader.receive_agreement()) {
                (Err(sent), Ok(_)) => Err(sent),
                (_, received) => received,
            };
        }
        let received = self.peers.iter().map(NodePeer::receive_agreement).collect::<Result<Vec<_>, _>>()?;
        let decision = decide(&received)?;
        for peer in &self.peers {
            peer.operations.send(&[GOOD], &decision).map_err(|error| peer.lost(&error))?;
        }
        Ok(decision)
    }

    /// Fails if a node computes other bits than the leader. Called when the weights of all are loaded.
    pub(crate) fn agree_on_numerics(&self, own: &str) -> Result<(), EngineError> {
        let decide = |others: &[Vec<u8>]| match others.iter().position(|other| other != own.as_bytes()) {
            None => Ok(Vec::new()),
            Some(i) => {
                let (node, other) = (self.peers[i].node, String::from_utf8_lossy(&others[i]));
                Err(EngineError::BadNode(format!(
                    "node {node} has the numerics id {other}, node 0 has {own}: give all nodes the same files of \
                     the checkpoint and the same kind of device"
                )))
            }
        };
        self.agree(own.as_bytes(), decide).map(drop)
    }

    /// Tells the other nodes why this one does not load. They fail in their next agreement.
    pub(crate) fn report_failure(&self, error: &EngineError) {
        for peer in &self.peers {
            // A node that is lost does not need to know.
            drop(peer.operations.send(&[FAILED], error.to_string().as_bytes()));
        }
    }
}

impl NodePeer {
    fn receive_agreement(&self) -> Result<Vec<u8>, EngineError> {
        let mut message = Vec::new();
        self.operations.receive(&mut message).map_err(|error| self.lost(&error))?;
        match message.split_first() {
            Some((&GOOD, decision)) => Ok(decision.to_vec()),
            Some((&FAILED, reason)) => Err(self.failed(String::from_utf8_lossy(reason).into_owned())),
            _ => Err(self.failed("it sent something other than an agreement".to_owned())),
        }
    }

    pub(crate) fn lost(&self, error: &io::Error) -> EngineError {
        self.failed(error.to_string())
    }

    /// Marks this node's first rank, `rank`, as lost. Returns the error of every later operation.
    pub(crate) fn mark_lost(&self, barrier: &RankBarrier, rank: usize, error: &io::Error) -> EngineError {
        barrier.mark_lost(rank, format!("node {}: {error}", self.node));
        barrier.check().err().unwrap_or_else(|| self.lost(error))
    }

    pub(crate) fn failed(&self, reason: String) -> EngineError {
        EngineError::NodeFailed { node: self.node, reason }
    }
}

/// The ranks of this node: `local` of them, out of those of all nodes.
pub(crate) fn shards_of_node(
    local: usize,
    nodes: Option<&Nodes>,
    config: &ModelConfig,
) -> Result<Vec<Shard>, EngineError> {
    let (count, ranks) = (nodes.map_or(1, Nodes::count), ranks_of_node(local, nodes));
    let mut shards = Shard::all(local * count, config)?;
    shards.truncate(ranks.end);
    Ok(shards.split_off(ranks.start))
}

/// Numbers of the ranks of this node, which has `local`.
pub(crate) fn ranks_of_node(local: usize, nodes: Option<&Nodes>) -> Range<usize> {
    let node = nodes.map_or(0, Nodes::node);
    node * local..(node + 1) * local
}

/// One runner per follower, each with the number of the node's first rank.
pub(crate) fn remote_runners(
    nodes: &Arc<Nodes>,
    local: usize,
    barrier: &Arc<RankBarrier>,
) -> Vec<(usize, Box<dyn Runner>)> {
    let remote = |(peer_idx, peer): (usize, &NodePeer)| {
        let rank = peer.node * local;
        let remote = RemoteNode::new(Arc::clone(nodes), peer_idx, rank, Arc::clone(barrier));
        (rank, Box::new(remote) as _)
    };
    let followers = if nodes.is_leader() { nodes.peers() } else { &[] };
    followers.iter().enumerate().map(remote).collect()
}
