//! A TCP proxy before one worker, by which a network can fail between a router and that worker: connections that are cut, that go
//! silent for good, or that carry bytes one way only.
//!
//! It knows nothing of HTTP/2 and never changes, drops or invents a byte: what may not pass waits, as packets do that are sent again
//! until the network is back. The proxy lives as long as the lifetime that it was started under.

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

/// Bytes on their way in one direction of a connection.
const BUFFER_BYTES: usize = 64 << 10;

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
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

/// What the wire does now. Connections are numbered as they are accepted.
#[derive(Debug, Clone, Copy, Default)]
struct WireState {
    blocks_to_worker: bool,
    blocks_to_router: bool,
    /// Connections below this number end at once.
    cut_below: u64,
    /// Connections below this number carry nothing.
    silent_below: u64,
}

impl WireState {
    fn carries(&self, way: Way, number: u64) -> bool {
        let is_blocked = match way {
            Way::ToWorker => self.blocks_to_worker,
            Way::ToRouter => self.blocks_to_router,
        };
        !is_blocked && number >= self.silent_below
    }
}

impl TcpProxy {
    /// Listens on a free port and forwards to `worker`, which need not be up.
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

    /// Where routers connect.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends every connection that is open; new ones are carried.
    pub fn cut(&self) {
        let next = self.accepted.load(Ordering::Relaxed);
        self.state.send_modify(|state| state.cut_below = next);
    }

    /// Lets every connection that is open go silent, and neither side hear of it; new ones are carried.
    pub fn silence(&self) {
        let next = self.accepted.load(Ordering::Relaxed);
        self.state.send_modify(|state| state.silent_below = next);
    }

    /// Holds up everything in one direction, on new connections too.
    pub fn block(&self, way: Way) {
        self.state.send_modify(|state| match way {
            Way::ToWorker => state.blocks_to_worker = true,
            Way::ToRouter => state.blocks_to_router = true,
        });
    }

    /// Lets everything pass again. Connections that were silenced end.
    pub fn heal(&self) {
        self.state.send_modify(|state| {
            state.blocks_to_worker = false;
            state.blocks_to_router = false;
            state.cut_below = state.cut_below.max(state.silent_below);
        });
    }
}

/// What the accepting task knows.
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

/// One connection, until it is cut or both sides have closed it. A worker that is not there closes it at once.
async fn carry_connection(
    router: TcpStream,
    worker: SocketAddr,
    (number, mut state): (u64, watch::Receiver<WireState>),
) {
    let Ok(worker) = TcpStream::connect(worker).await else { return };
    // Delays of the proxy's own would be taken for the worker's. What fails here fails again at the first byte.
    router.set_nodelay(true).and_then(|()| worker.set_nodelay(true)).ok();
    let (from_router, to_router) = router.into_split();
    let (from_worker, to_worker) = worker.into_split();
    let there = carry(from_router, to_worker, Carried { way: Way::ToWorker, number, state: state.clone() });
    let back = carry(from_worker, to_router, Carried { way: Way::ToRouter, number, state: state.clone() });
    tokio::select! {
        biased;
        // Both sides lose their sockets with this task.
        _ = state.wait_for(|state| number < state.cut_below) => {}
        _ = futures::future::join(there, back) => {}
    }
}

/// One direction of one connection.
struct Carried {
    way: Way,
    number: u64,
    state: watch::Receiver<WireState>,
}

/// Carries bytes until the sender closes, and then says so to the receiver.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut carried: Carried) {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let carries = carried.state.borrow_and_update().carries(carried.way, carried.number);
        let read = tokio::select! {
            biased;
            // What may pass may have changed.
            changed = carried.state.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            // More bytes came. Where none may pass they are left to the kernel, which slows the sender down in the end.
            read = from.read(&mut buffer), if carries => read,
        };
        let Ok(count @ 1..) = read else { break };
        if to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    // A receiver that is gone needs no word.
    to.shutdown().await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A proxy before a server of the test's own, with one connection through it: the proxy, the client's end, the server's end and
    /// the listener.
    async fn connected() -> anyhow::Result<(TcpProxy, TcpStream, TcpStream, TcpListener)> {
        let server = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = TcpProxy::start(server.local_addr()?, &Lifetime::new()).await?;
        let mut client = TcpStream::connect(proxy.address).await?;
        let (mut peer, _) = server.accept().await?;
        round_trip(&mut client, &mut peer).await?;
        Ok((proxy, client, peer, server))
    }

    /// A byte there and another one back.
    async fn round_trip(client: &mut TcpStream, peer: &mut TcpStream) -> anyhow::Result<()> {
        client.write_all(b"a").await?;
        assert_eq!(peer.read_u8().await?, b'a');
        peer.write_all(b"b").await?;
        assert_eq!(client.read_u8().await?, b'b');
        Ok(())
    }

    /// The same connection, which must have nothing to read: asked of the kernel itself.
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
    async fn a_cut_ends_what_is_open_and_nothing_else() -> anyhow::Result<()> {
        let (proxy, mut client, mut peer, server) = connected().await?;
        proxy.cut();
        assert_eq!(client.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert_eq!(peer.read(&mut [0; 1]).await.unwrap_or(0), 0);
        let mut client = TcpStream::connect(proxy.address).await?;
        let (mut peer, _) = server.accept().await?;
        round_trip(&mut client, &mut peer).await
    }

    #[tokio::test]
    async fn a_blocked_way_holds_bytes_until_it_is_healed_and_the_other_way_goes_on() -> anyhow::Result<()> {
        let (proxy, mut client, mut peer, _server) = connected().await?;
        proxy.block(Way::ToWorker);
        client.write_all(b"x").await?;
        // The way back is carried by a task that saw the block before it was asked to carry this.
        peer.write_all(b"y").await?;
        assert_eq!(client.read_u8().await?, b'y');
        let mut peer = without_bytes(peer)?;
        proxy.heal();
        assert_eq!(peer.read_u8().await?, b'x');
        round_trip(&mut client, &mut peer).await
    }

    #[tokio::test]
    async fn a_silent_connection_says_nothing_until_it_ends() -> anyhow::Result<()> {
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
