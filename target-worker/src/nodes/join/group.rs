//! The nodes that have joined node 0 so far.

use std::io;

use engine::{NodePeer, Nodes};
use tokio::sync::mpsc;

use super::{Connections, Greeted, NodeEnd, Shared};
use crate::nodes::config::NodesConfig;
use crate::nodes::facts::{Facts, difference};
use crate::nodes::handshake::{Channel, Guest, Hello, Verdict};
use crate::nodes::link::Socket;
use crate::nodes::pulse::End;

/// See the module documentation.
pub(super) struct Group<'a> {
    config: &'a NodesConfig,
    facts: Facts,
    shared: &'a Shared,
    ends: mpsc::Sender<NodeEnd>,
    /// One for each node but this one, in order.
    places: Vec<Place>,
}

/// A node's place.
#[derive(Default)]
enum Place {
    #[default]
    Free,
    /// The first connections of an attempt to join, named by its process and its number.
    Opening {
        attempt: (u64, u32),
        operations: Socket,
        sums: Option<Socket>,
    },
    Taken {
        session: u64,
        address: String,
        peer: NodePeer,
    },
}

impl<'a> Group<'a> {
    pub(super) fn new(
        config: &'a NodesConfig,
        facts: Facts,
        shared: &'a Shared,
        ends: mpsc::Sender<NodeEnd>,
    ) -> Self {
        let places = (1..config.count).map(|_| Place::Free).collect();
        Self { config, facts, shared, ends, places }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.places.iter().all(|place| matches!(place, Place::Taken { .. }))
    }

    /// The nodes that have not joined yet, for people.
    pub(super) fn missing(&self) -> String {
        let free = self.places.iter().enumerate().filter(|(_, place)| !matches!(place, Place::Taken { .. }));
        let numbers: Vec<String> = free.map(|(i, _)| (i + 1).to_string()).collect();
        let noun = if numbers.len() == 1 { "node" } else { "nodes" };
        format!("{noun} {}", numbers.join(", "))
    }

    /// Lets a connection in or refuses it, with the reason at both ends.
    pub(super) async fn admit(&mut self, (address, guest): Greeted) {
        let guest = match guest {
            Ok(guest) => guest,
            Err(error) => return tracing::warn!(%address, %error, "a connection was refused"),
        };
        let node = guest.hello.node;
        let verdict = self.verdict(&guest.hello);
        match &verdict {
            Verdict::Joined => {
                if let Err(error) = self.take(guest, address.to_string()).await {
                    tracing::warn!(%address, %error, "node {node} could not join");
                }
                return;
            }
            Verdict::Refused(reason) => tracing::warn!(%address, reason, "node {node} was refused"),
            Verdict::Again(reason) => tracing::info!(%address, reason, "node {node} has to try again"),
        }
        // The other end may be gone.
        drop(guest.answer(&verdict).await);
    }

    /// Whether this connection is accepted. For a cause that may be temporary the node may try again.
    fn verdict(&self, hello: &Hello) -> Verdict {
        let Hello { node, session, attempt, channel, facts } = hello;
        if !(1..self.config.count).contains(node) {
            return Verdict::Refused(format!(
                "node {node} is not one of 1 to {}: check --node-rank",
                self.config.count - 1
            ));
        }
        if let Some(difference) = difference(&self.facts, *node, facts) {
            return Verdict::Refused(difference);
        }
        let own = (*session, *attempt);
        match (&self.places[node - 1], channel) {
            (Place::Taken { session: other, address, .. }, _) if other != session => {
                Verdict::Refused(format!(
                    "node {node} has joined already, from {address}: give every node another --node-rank"
                ))
            }
            // It did not hear in time that it has joined. Its place is free once its pulse has ended.
            (Place::Taken { .. }, _) => Verdict::Again("its last connections are not closed yet".to_owned()),
            // A process that begins anew takes the place of one that has not joined.
            (Place::Free | Place::Opening { .. }, Channel::Operations) => Verdict::Joined,
            (Place::Opening { attempt, sums: None, .. }, Channel::Sums) if *attempt == own => Verdict::Joined,
            (Place::Opening { attempt, sums: Some(_), .. }, Channel::Pulse) if *attempt == own => {
                Verdict::Joined
            }
            _ => Verdict::Again("another connection came between its own".to_owned()),
        }
    }

    /// Accepts a connection that is not refused.
    async fn take(&mut self, guest: Guest, address: String) -> anyhow::Result<()> {
        let Hello { node, session, attempt, channel, .. } = guest.hello;
        let stream = guest.answer(&Verdict::Joined).await?;
        let socket = Socket::new(stream.into_std()?)?;
        let place = &mut self.places[node - 1];
        *place = match (std::mem::take(place), channel) {
            (_, Channel::Operations) => {
                Place::Opening { attempt: (session, attempt), operations: socket, sums: None }
            }
            (Place::Opening { attempt, operations, .. }, Channel::Sums) => {
                Place::Opening { attempt, operations, sums: Some(socket) }
            }
            (Place::Opening { operations, sums: Some(sums), .. }, Channel::Pulse) => {
                let connections = Connections { operations, sums, pulse: socket };
                let peer = connections.start((node, session), self.config, self.shared, self.ends.clone())?;
                tracing::info!(address, "node {node} has joined");
                Place::Taken { session, address, peer }
            }
            (other, _) => other,
        };
        Ok(())
    }

    /// Frees the place of a node that is gone.
    pub(super) fn remove(&mut self, node: usize, session: u64, end: &End) {
        let place = &mut self.places[node - 1];
        if matches!(place, Place::Taken { session: own, .. } if *own == session) {
            tracing::warn!(?end, "node {node} is gone before all nodes have joined: waiting for it again");
            *place = Place::Free;
        }
    }

    /// The nodes, once all have joined.
    pub(super) fn into_nodes(self) -> io::Result<Nodes> {
        let peer = |place| match place {
            Place::Taken { peer, .. } => Ok(peer),
            _ => Err(io::Error::other("a node has not joined")),
        };
        let peers = self.places.into_iter().map(peer).collect::<io::Result<_>>()?;
        Ok(Nodes::new(0, self.config.count, peers))
    }
}
