//! Connects the nodes of a model: node 0 listens until all others have joined, and the others connect to it
//! until it lets them in. Each of them opens three connections ([`Channel`]), in order; with the last one it
//! has joined.

mod greetings;
mod group;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, bail};
use engine::{NodePeer, Nodes};
use service::health::Health;
use service::secret::Secret;
use service::shutdown::Lifetime;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, timeout, timeout_at};

use self::greetings::{Begun, Greetings};
use self::group::Group;
use super::config::{NodesConfig, is_of_this_machine};
use super::facts::Facts;
use super::handshake::{Channel, Guest, HANDSHAKE_TIMEOUT, HandshakeError, Hello, introduce};
use super::link::{Socket, TcpLink};
use super::pulse::{End, Pulse};

/// Interval between attempts to connect to node 0.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between lines that say what is waited for.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Ends of connections that are not handled yet.
const ENDS: usize = 16;

/// What the connections of this process share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) lifetime: Lifetime,
    pub(super) health: Health,
    /// Set once this process has served.
    pub(super) has_served: Arc<AtomicBool>,
}

/// The end of the connections to a node: its number, its session, and how they ended.
pub(super) type NodeEnd = (usize, u64, End);

/// All nodes, connected.
pub(super) struct Joined {
    pub(super) nodes: Nodes,
    /// Which nodes are gone since.
    pub(super) ends: mpsc::Receiver<NodeEnd>,
}

/// The connections to another node.
struct Connections {
    operations: Socket,
    sums: Socket,
    pulse: Socket,
}

impl Connections {
    /// Starts to watch the other node, and makes its links.
    fn start(
        self,
        (node, session): (usize, u64),
        config: &NodesConfig,
        shared: &Shared,
        ends: mpsc::Sender<NodeEnd>,
    ) -> io::Result<NodePeer> {
        let Self { operations, sums, pulse: socket } = self;
        let Shared { lifetime, health, has_served } = shared;
        let pulse = Pulse {
            peer: format!("node {node}"),
            socket,
            links: [operations.clone(), sums.clone()],
            patience: config.silence,
            health: health.clone(),
            has_served: Arc::clone(has_served),
        };
        // Fails if nobody handles ends any more.
        pulse.start(lifetime, move |end| drop(ends.blocking_send((node, session, end))))?;
        Ok(NodePeer {
            node,
            // A node may take any time to load or to run a forward, while its pulse can be felt.
            operations: Box::new(TcpLink::new(operations, None)),
            sums: Box::new(TcpLink::new(sums, Some(Nodes::SUM_PATIENCE))),
        })
    }
}

/// Waits at node 0 until all other nodes have joined.
pub(super) async fn gather(config: &NodesConfig, facts: Facts, shared: &Shared) -> anyhow::Result<Joined> {
    let listener = listen(&config.leader).await;
    let listener =
        listener.with_context(|| format!("--dist-init-addr: cannot listen on {}", config.leader))?;
    let (sender, mut ends) = mpsc::channel(ENDS);
    let mut group = Group::new(config, facts, shared, sender);
    let deadline = sleep(config.join_timeout);
    tokio::pin!(deadline);
    let mut progress = interval(PROGRESS_INTERVAL);
    let mut greetings = Greetings::new();
    while !group.is_complete() {
        tokio::select! {
            biased;
            // A node that is gone leaves its place to its successor.
            Some((node, session, end)) = ends.recv() => group.remove(node, session, &end),
            // Before what strangers can keep busy.
            () = &mut deadline => bail!(
                "{} did not join within {:?}: start each node with --node-rank and the --dist-init-addr of node 0",
                group.missing(), config.join_timeout
            ),
            _ = progress.tick() => {
                tracing::info!(address = config.leader, "waiting for {} to join", group.missing());
            }
            // Nodes that are known come before connections that may be strangers'.
            greeted = greetings.next() => group.admit(greeted).await,
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    greetings.push(address, |begun| greet((stream, address), &config.secret, begun));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a node");
                    sleep(RETRY_INTERVAL).await;
                }
            },
        }
    }
    let nodes = group.into_nodes()?;
    tracing::info!(nodes = config.count, "all nodes have joined");
    Ok(Joined { nodes, ends })
}

/// Listens on an address of this machine. If it is given by a name, by which this machine may not find
/// itself, on all addresses.
async fn listen(leader: &str) -> io::Result<TcpListener> {
    if is_of_this_machine(leader) || leader.parse::<SocketAddr>().is_ok() {
        return TcpListener::bind(leader).await;
    }
    let port = leader.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default();
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => Ok(listener),
        // A machine without IPv6.
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
    }
}

/// A connection whose handshake has ended, and its address.
type Greeted = (SocketAddr, Result<Guest, HandshakeError>);

async fn greet((stream, address): (TcpStream, SocketAddr), secret: &Secret, begun: Begun) -> Greeted {
    let greeting = timeout(HANDSHAKE_TIMEOUT, Guest::greet(stream, secret, || begun.set())).await;
    let late = || HandshakeError::Foreign(format!("it said nothing for {HANDSHAKE_TIMEOUT:?}"));
    (address, greeting.unwrap_or_else(|_| Err(late())))
}

/// Connects to node 0, again and again until it lets this node in.
pub(super) async fn join(config: &NodesConfig, facts: Facts, shared: &Shared) -> anyhow::Result<Joined> {
    let NodesConfig { count, node, leader, .. } = config;
    let (session, mut attempt) = (rand::random(), 0);
    let deadline = Instant::now() + config.join_timeout;
    let mut next_line = Instant::now();
    let connections = loop {
        let hello = |channel| Hello { node: *node, session, attempt, channel, facts: facts.clone() };
        let error = match connect(config, &hello).await {
            Ok(connections) => break connections,
            Err(HandshakeError::Io(error)) => error,
            Err(error) => bail!("node 0 at {leader} does not let node {node} join: {error}"),
        };
        if Instant::now() >= deadline {
            bail!(
                "node 0 did not answer at {leader} within {:?}: {error}; is it started with --node-rank 0, and is --dist-init-addr \
                 right?",
                config.join_timeout
            );
        }
        if Instant::now() >= next_line {
            tracing::info!(address = leader, %error, "node {node} waits for node 0");
            next_line = Instant::now() + PROGRESS_INTERVAL;
        }
        sleep(RETRY_INTERVAL).await;
        attempt += 1;
    };
    let (sender, ends) = mpsc::channel(ENDS);
    let peer = connections.start((0, session), config, shared, sender)?;
    tracing::info!(address = leader, "node {node} has joined");
    Ok(Joined { nodes: Nodes::new(*node, *count, vec![peer]), ends })
}

/// Opens all connections to node 0.
async fn connect(
    config: &NodesConfig,
    hello: &impl Fn(Channel) -> Hello,
) -> Result<Connections, HandshakeError> {
    let open = async |channel| {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        let opening = async {
            let stream = TcpStream::connect(&config.leader).await?;
            introduce(stream, &hello(channel), &config.secret).await
        };
        let stream = timeout_at(until, opening).await.map_err(io::Error::from)??;
        Ok::<_, HandshakeError>(Socket::new(stream.into_std()?)?)
    };
    let (operations, sums) = (open(Channel::Operations).await?, open(Channel::Sums).await?);
    Ok(Connections { operations, sums, pulse: open(Channel::Pulse).await? })
}
