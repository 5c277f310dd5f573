//! Collective of CPU ranks on several nodes. The ranks of a node first form the sum of that node's branch of
//! the tree (docs/contract.md C2) in shared memory. The first rank of the node then exchanges it with the
//! other nodes, and the total goes to the node's other ranks. A node's ranks are consecutive and their number
//! is a power of two, so the additions are those of one process.
//!
//! Two nodes send each other their sums. Of more nodes the leader adds up all sums and sends back the total.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::shared_memory::tree_sum_over_ranks;
use super::{Collective, RankBarrier, SingleRank, join_columns, shared_memory};
use crate::EngineError;
use crate::host::HostRows;
use crate::nodes::{NodePeer, Nodes};

/// Bytes are sent as they are in memory.
const _: () = assert!(cfg!(target_endian = "little"), "numbers between nodes are little-endian");

/// One rank's end.
struct AcrossNodes {
    /// Over the ranks of this node.
    local: Box<dyn Collective<HostRows>>,
    rank: usize,
    /// Number of ranks of this node.
    num_local: usize,
    barrier: Arc<RankBarrier>,
    nodes: Arc<Nodes>,
    /// The total. Written by the node's first rank before the last barrier of a sum, read by the others until
    /// the first barrier of the next operation.
    total: Arc<RwLock<HostRows>>,
    /// What each other node sent, kept to reuse its memory. Only the node's first rank uses it.
    received: Mutex<Vec<HostRows>>,
}

/// Creates the ends of the `num_local` ranks of this node, which synchronise at `barrier`.
pub(crate) fn across_nodes(
    nodes: &Arc<Nodes>,
    num_local: usize,
    barrier: &Arc<RankBarrier>,
) -> Vec<Box<dyn Collective<HostRows>>> {
    let locals = match num_local {
        1 => vec![Box::new(SingleRank) as Box<dyn Collective<HostRows>>],
        num_local => shared_memory(num_local, barrier),
    };
    let total = Arc::<RwLock<HostRows>>::default();
    let end = |(i, local)| -> Box<dyn Collective<HostRows>> {
        let (nodes, barrier, total) = (Arc::clone(nodes), Arc::clone(barrier), Arc::clone(&total));
        let received = Mutex::new(nodes.peers().iter().map(|_| HostRows::default()).collect());
        Box::new(AcrossNodes { local, rank: barrier.first() + i, num_local, barrier, nodes, total, received })
    };
    locals.into_iter().enumerate().map(end).collect()
}

impl Collective<HostRows> for AcrossNodes {
    fn all_reduce(&self, rows: &mut HostRows) -> Result<(), EngineError> {
        self.local.all_reduce(rows)?;
        if self.is_first_of_node() {
            self.add_other_nodes(rows)?;
        }
        if self.num_local == 1 {
            return Ok(());
        }
        if self.is_first_of_node() {
            let mut total = self.total.write().unwrap_or_else(PoisonError::into_inner);
            total.resize(rows.len());
            total.copy_from_slice(rows);
        }
        self.barrier.wait(self.rank)?;
        if !self.is_first_of_node() {
            rows.copy_from_slice(&self.total.read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }

    fn gather(&self, rows: &mut HostRows, widths: &[usize]) -> Result<(), EngineError> {
        let (first, count) = (self.barrier.first(), self.num_local);
        let num_rows = rows.len() / widths[self.rank];
        self.local.gather(rows, &widths[first..first + count])?;
        if !self.is_first_of_node() {
            return Ok(());
        }
        self.barrier.record_progress();
        if !self.nodes.is_leader() {
            return self.send(&self.nodes.peers()[0], rows);
        }
        let widths: Vec<usize> = widths.chunks_exact(count).map(|node| node.iter().sum()).collect();
        let received = self.receive_from_all(|node| num_rows * widths[node])?;
        let own = std::mem::take(rows);
        join_columns(&own_and_received(&own, &received), &widths, rows);
        Ok(())
    }
}

impl AcrossNodes {
    fn is_first_of_node(&self) -> bool {
        self.rank == self.barrier.first()
    }

    /// Replaces the sum of this node by that of all nodes.
    fn add_other_nodes(&self, rows: &mut HostRows) -> Result<(), EngineError> {
        self.barrier.record_progress();
        let len = rows.len();
        match self.nodes.peers() {
            [other] if self.nodes.count() == 2 => {
                let mut parts = self.buffers();
                parts[0].resize(len);
                let (sent, part) = (bytemuck::cast_slice(rows), bytemuck::cast_slice_mut(&mut parts[0]));
                other.sums.exchange(sent, part).map_err(|error| self.lost(other, &error))?;
                // Of two numbers the order does not change the sum.
                rows.iter_mut().zip(parts[0].iter()).for_each(|(sum, part)| *sum += part);
            }
            [leader] => {
                self.send(leader, rows)?;
                let received = leader.sums.receive_into(bytemuck::cast_slice_mut(rows));
                received.map_err(|error| self.lost(leader, &error))?;
            }
            followers => {
                let received = self.receive_from_all(|_| len)?;
                let own = std::mem::take(rows);
                let parts = own_and_received(&own, &received);
                rows.resize(len);
                rows.iter_mut().enumerate().for_each(|(i, sum)| *sum = tree_sum_over_ranks(&parts, i));
                followers.iter().try_for_each(|follower| self.send(follower, rows))?;
            }
        }
        self.barrier.record_progress();
        Ok(())
    }

    fn send(&self, peer: &NodePeer, rows: &HostRows) -> Result<(), EngineError> {
        let sent = peer.sums.send(bytemuck::cast_slice(rows), &[]);
        sent.map_err(|error| self.lost(peer, &error))
    }

    /// What each follower sends, in order of nodes: `len(node)` numbers.
    fn receive_from_all(
        &self,
        len: impl Fn(usize) -> usize,
    ) -> Result<MutexGuard<'_, Vec<HostRows>>, EngineError> {
        let mut parts = self.buffers();
        for (part, follower) in parts.iter_mut().zip(self.nodes.peers()) {
            part.resize(len(follower.node));
            let received = follower.sums.receive_into(bytemuck::cast_slice_mut(part));
            received.map_err(|error| self.lost(follower, &error))?;
        }
        Ok(parts)
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<HostRows>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the first rank of a node as lost.
    fn lost(&self, peer: &NodePeer, error: &io::Error) -> EngineError {
        peer.mark_lost(&self.barrier, peer.node * self.num_local, error)
    }
}

/// The parts of all nodes in order; the first is the leader's own.
fn own_and_received<'a>(own: &'a HostRows, received: &'a [HostRows]) -> Vec<&'a [f32]> {
    std::iter::once(own).chain(received).map(|part| &part[..]).collect()
}
