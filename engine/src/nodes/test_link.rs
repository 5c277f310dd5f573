//! Links between nodes that are threads of one process, for tests.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use super::{NodeLink, NodePeer, Nodes};

/// One end of a link. A dropped end is lost for the other one.
struct TestLink {
    outbox: SyncSender<Vec<u8>>,
    inbox: Mutex<Receiver<Vec<u8>>>,
}

fn lost<E>(_: E) -> io::Error {
    io::Error::other("it is gone")
}

impl NodeLink for TestLink {
    fn send(&self, head: &[u8], body: &[u8]) -> io::Result<()> {
        self.outbox.send([head, body].concat()).map_err(lost)
    }

    fn receive(&self, message: &mut Vec<u8>) -> io::Result<()> {
        *message = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).recv().map_err(lost)?;
        Ok(())
    }

    fn receive_into(&self, message: &mut [u8]) -> io::Result<()> {
        let mut received = Vec::new();
        self.receive(&mut received)?;
        assert_eq!(received.len(), message.len(), "nodes agree on lengths");
        message.copy_from_slice(&received);
        Ok(())
    }

    fn exchange(&self, sent: &[u8], received: &mut [u8]) -> io::Result<()> {
        self.send(sent, &[])?;
        self.receive_into(received)
    }
}

fn link() -> [Box<dyn NodeLink>; 2] {
    let ((first_outbox, second_inbox), (second_outbox, first_inbox)) = (sync_channel(1), sync_channel(1));
    let end = |outbox, inbox| Box::new(TestLink { outbox, inbox: Mutex::new(inbox) }) as _;
    [end(first_outbox, first_inbox), end(second_outbox, second_inbox)]
}

/// Connects `count` nodes of this process, in order.
pub(crate) fn nodes_of_threads(count: usize) -> Vec<Nodes> {
    let (mut followers, mut peers) = (Vec::new(), Vec::new());
    for node in 1..count {
        let ([operations, of_follower], [sums, sums_of_follower]) = (link(), link());
        peers.push(NodePeer { node, operations, sums });
        let leader = NodePeer { node: 0, operations: of_follower, sums: sums_of_follower };
        followers.push(Nodes::new(node, count, vec![leader]));
    }
    followers.insert(0, Nodes::new(0, count, peers));
    followers
}
