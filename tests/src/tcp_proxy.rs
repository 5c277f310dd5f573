//! A TCP proxy in front of one worker, which simulates network failures between a router and that worker:
//! closed connections, permanently silent ones, and ones that forward bytes in one direction only.
//!
//! It does not parse HTTP/2 and never changes, drops or adds a byte: blocked bytes wait, like packets that
//! are resent until the network is back. The proxy lives as long as the lifetime under which it was started.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use outrider_cli::cluster::free_address;
use service::shutdown::Lifetime;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Buffer size per direction of a connection.
const BUFFER_BYTES: usize = 64 << 10;

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the router to the worker.
    ToWorker,
    /// From the worker to the router.
    ToRouter,
}

/// The proxy.
#[derive(Debug)]
pub struct TcpProxy {
    address: SocketAddr,
    accepted: Arc<AtomicU64>,
    state: watch::Sender<WireState>,
}

/// The current state of the wire. Connections are numbered in the order of acceptance.
#[derive(Debug, Clone, Copy, Default)]
struct WireState {
    blocks_to_worker: bool,
    blocks_to_router: bool,
    /// Connections below this number are closed at once.
    cut_below: u64,
    /// Connections below this number forward nothing.
    silent_below: u64,
}

impl WireState {
    fn carries(&self, way: Direction, number: u64) -> bool {
        let is_blocked = match way {
            Direction::ToWorker => self.blocks_to_worker,
            Direction::ToRouter => self.blocks_to_router,
        };
        !is_blocked && number >= self.silent_below
    }
}

impl TcpProxy {
    /// Listens on a free port and forwards to `worker`, which may be down.
    pub async fn start(worker: SocketAddr, lifetime: &Lifetime) -> anyhow::Result<Self> {
        let address = free_address()?;
        let listener = TcpListener::bind(address).await.context("the proxy cannot listen")?;
        let (state, _) = watch::channel(WireState::default());
        let accepted = Arc::new(AtomicU64::new(0));
        let wires = Wires { worker, state: state.clone(), accepted: Arc::clone(&accepted) };
        let (own, cancelled) = (lifetime.clone(), lifetime.cancelled());
        lifetime.spawn("tcp proxy", async move {
            tokio::select! {
                biased;
                // The program ends.
                () = cancelled => {}
                () = wires.accept(&listener, &own) => {}
            }
        });
        Ok(Self { address, accepted, state })
    }

    /// URL for routers.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Closes all open connections; new ones work.
    pub fn cut(&self) {
        let next = self.accepted.load(Ordering::Relaxed);
        self.state.send_modify(|state| state.cut_below = next);
    }

    /// Silences all open connections without either side noticing; new ones work.
    pub fn silence(&self) {
        let next = self.accepted.load(Ordering::Relaxed);
        self.state.send_modify(|state| state.silent_below = next);
    }

    /// Blocks one direction, also on new connections.
    pub fn block(&self, way: Direction) {
        self.state.send_modify(|state| match way {
            Direction::ToWorker => state.blocks_to_worker = true,
            Direction::ToRouter => state.blocks_to_router = true,
        });
    }

    /// Ends all blocks. Silenced connections are closed.
    pub fn heal(&self) {
        self.state.send_modify(|state| {
            state.blocks_to_worker = false;
            state.blocks_to_router = false;
            state.cut_below = state.cut_below.max(state.silent_below);
        });
    }
}

/// State of the accepting task.
struct Wires {
    worker: SocketAddr,
    state: watch::Sender<WireState>,
    accepted: Arc<AtomicU64>,
}

impl Wires {
    async fn accept(&self, listener: &TcpListener, lifetime: &Lifetime) {
        loop {
            let Ok((router, _)) = listener.accept().await else { continue };
            let number = self.accepted.fetch_add(1, Ordering::Relaxed);
            let (worker, state) = (self.worker, self.state.subscribe());
            let cancelled = lifetime.cancelled();
            lifetime.spawn("wire", async move {
                tokio::select! {
                    biased;
                    // The program ends.
                    () = cancelled => {}
                    () = carry_connection(router, worker, (number, state)) => {}
                }
            });
        }
    }
}

/// Forwards one connection until it is cut or both sides have closed it. If the worker is down, the
/// connection is closed at once.
async fn carry_connection(
    router: TcpStream,
    worker: SocketAddr,
    (number, mut state): (u64, watch::Receiver<WireState>),
) {
    let Ok(worker) = TcpStream::connect(worker).await else { return };
    // Delays in the proxy would be attributed to the worker. If this fails, the first byte fails too.
    router.set_nodelay(true).and_then(|()| worker.set_nodelay(true)).ok();
    let (from_router, to_router) = router.into_split();
    let (from_worker, to_worker) = worker.into_split();
    let to_worker_done =
        forward(from_router, to_worker, Carried { way: Direction::ToWorker, number, state: state.clone() });
    let to_router_done =
        forward(from_worker, to_router, Carried { way: Direction::ToRouter, number, state: state.clone() });
    tokio::select! {
        biased;
        // Both sockets are closed when this task ends.
        _ = state.wait_for(|state| number < state.cut_below) => {}
        _ = futures::future::join(to_worker_done, to_router_done) => {}
    }
}

/// One direction of one connection.
struct Carried {
    way: Direction,
    number: u64,
    state: watch::Receiver<WireState>,
}

/// Forwards bytes until the sender closes, then closes the receiver's side.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut carried: Carried) {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let carries = carried.state.borrow_and_update().carries(carried.way, carried.number);
        let read = tokio::select! {
            biased;
            // The set of blocked directions may have changed.
            changed = carried.state.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            // More bytes arrived. Blocked bytes stay in the kernel's buffer, whose flow control eventually
            // stops the sender.
            read = from.read(&mut buffer), if carries => read,
        };
        let Ok(count @ 1..) = read else { break };
        if to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    // An error means that the receiver is gone already.
    to.shutdown().await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A proxy in front of a test server, with one connection through it: the proxy, the client's end, the
    /// server's end and the listener.
    async fn connected() -> anyhow::Result<(TcpProxy, TcpStream, TcpStream, TcpListener)> {
        let server = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = TcpProxy::start(server.local_addr()?, &Lifetime::new()).await?;
        let mut client = TcpStream::connect(proxy.address).await?;
        let (mut peer, _) = server.accept().await?;
        round_trip(&mut client, &mut peer).await?;
        Ok((proxy, client, peer, server))
    }

    /// Sends a byte in each direction.
    async fn round_trip(client: &mut TcpStream, peer: &mut TcpStream) -> anyhow::Result<()> {
        client.write_all(b"a").await?;
        assert_eq!(peer.read_u8().await?, b'a');
        peer.write_all(b"b").await?;
        assert_eq!(client.read_u8().await?, b'b');
        Ok(())
    }

    /// Returns the connection after checking, directly with the kernel, that it has nothing to read.
    fn without_bytes(stream: TcpStream) -> anyhow::Result<TcpStream> {
        let mut stream = stream.into_std()?;
        let read = std::io::Read::read(&mut stream, &mut [0; 1]);
        assert!(
            read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
            "something came through: {read:?}"
        );
        Ok(TcpStream::from_std(stream)?)
    }

    #[tokio::test]
    async fn cutting_closes_open_connections_and_allows_new_ones() -> anyhow::Result<()> {
        let (proxy, mut client, mut peer, server) = connected().await?;
        proxy.cut();
        assert_eq!(client.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert_eq!(peer.read(&mut [0; 1]).await.unwrap_or(0), 0);
        let mut client = TcpStream::connect(proxy.address).await?;
        let (mut peer, _) = server.accept().await?;
        round_trip(&mut client, &mut peer).await
    }

    #[tokio::test]
    async fn a_blocked_direction_holds_bytes_while_the_other_one_continues() -> anyhow::Result<()> {
        let (proxy, mut client, mut peer, _server) = connected().await?;
        proxy.block(Direction::ToWorker);
        client.write_all(b"x").await?;
        // The way back is carried by a task that observes the block before it carries this byte.
        peer.write_all(b"y").await?;
        assert_eq!(client.read_u8().await?, b'y');
        let mut peer = without_bytes(peer)?;
        proxy.heal();
        assert_eq!(peer.read_u8().await?, b'x');
        round_trip(&mut client, &mut peer).await
    }

    #[tokio::test]
    async fn a_silent_connection_carries_nothing_until_it_ends() -> anyhow::Result<()> {
        let (proxy, mut client, peer, server) = connected().await?;
        proxy.silence();
        client.write_all(b"x").await?;
        let mut second = TcpStream::connect(proxy.address).await?;
        let (mut second_peer, _) = server.accept().await?;
        round_trip(&mut second, &mut second_peer).await?;
        let mut peer = without_bytes(peer)?;
        proxy.heal();
        assert_eq!(client.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert_eq!(peer.read(&mut [0; 1]).await.unwrap_or(0), 0);
        round_trip(&mut second, &mut second_peer).await
    }
}
