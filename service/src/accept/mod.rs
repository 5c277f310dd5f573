//! Listeners: bound ports and the connections they accept. All ports of all processes are served here, so
//! that the same rules apply everywhere: TLS if configured (`handshake`), limits on the number of connections
//! (`limits`), timeouts (`monitor`), sockets that send without delay and detect dead peers (`socket`), and a
//! pause when the process runs out of file descriptors.

mod config;
mod connection;
mod handshake;
mod limits;
mod metrics;
mod monitor;
mod outage;
mod request_body;
mod reserve_descriptor;
mod response;
mod socket;
mod state;
mod write_timeout;

#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::service::Routes;

pub use self::config::{ListenerConfig, ListenerFlags, RawListener, SECONDS_MAX, Timeouts};
pub use self::limits::Connections;
pub use self::request_body::BodyTimedOut;
pub use self::response::ResponseHandle;

use self::connection::{Accepted, ConnectionSetup, Protocol, serve};
use self::handshake::Handshakes;
use self::outage::AcceptOutage;
use self::reserve_descriptor::ReserveDescriptor;
use crate::descriptors;
use crate::shutdown::Lifetime;
use crate::tls::ServerTls;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Binds a port.
pub async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// The address of the peer that sent a request, in the request's extensions. Behind a proxy it is the
/// proxy's.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddress(pub SocketAddr);

/// A bound port that is not served yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    tls: Option<Handshakes>,
    connections: Connections,
    reserve: Option<ReserveDescriptor>,
}

impl Listener {
    /// Creates a listener, plain or with TLS, whose connections count towards `connections`.
    pub fn new(socket: TcpListener, tls: Option<ServerTls>, connections: &Connections) -> Self {
        Self { socket, tls: tls.map(Handshakes::new), connections: connections.clone(), reserve: None }
    }

    /// Reserves a descriptor, so that one connection at a time is accepted even when the process has none
    /// left.
    pub fn with_reserve_descriptor(self) -> Self {
        Self { reserve: Some(ReserveDescriptor::acquire()), ..self }
    }

    /// Serves HTTP/1 and HTTP/2 until the lifetime is cancelled, in a task called `name`.
    pub fn serve_http(self, name: &'static str, app: axum::Router, lifetime: &Lifetime) -> JoinHandle<()> {
        self.spawn(name, (Protocol::Http, app), lifetime)
    }

    /// Serves gRPC until the lifetime is cancelled, in a task called `name`.
    pub fn serve_grpc(self, name: &'static str, services: Routes, lifetime: &Lifetime) -> JoinHandle<()> {
        self.spawn(name, (Protocol::Grpc, services.into_axum_router()), lifetime)
    }

    fn spawn(
        self,
        name: &'static str,
        (protocol, app): (Protocol, axum::Router),
        lifetime: &Lifetime,
    ) -> JoinHandle<()> {
        let timeouts = self.connections.timeouts();
        let setup = ConnectionSetup { protocol, app, timeouts, lifetime: lifetime.clone() };
        lifetime.spawn_essential(name, self.accept_all(name, setup))
    }

    async fn accept_all(self, name: &'static str, setup: ConnectionSetup) {
        let cancelled = setup.lifetime.cancelled();
        tokio::pin!(cancelled);
        let mut outage = AcceptOutage::default();
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut cancelled => return,
                accepted = self.socket.accept() => accepted,
            };
            match accepted {
                Ok(accepted) => {
                    if let Some(failed) = outage.accepted() {
                        tracing::info!(listener = name, failed, "accepting connections again");
                    }
                    self.admit(name, accepted, &setup);
                }
                // The peer disconnected before the accept.
                Err(error) if is_of_connection(&error) => {}
                Err(error) => {
                    self.connections.metrics.closed(name, "accept_error");
                    if outage.failed() {
                        let open_files_max = descriptors::limit();
                        tracing::error!(listener = name, %error, open_files_max, "cannot accept connections: new ones wait; if too many files are open, raise the limit (ulimit -n) or lower --max-connections");
                    }
                    // Most likely out of file descriptors: retrying at once would busy-loop.
                    if !self.reserve.as_ref().is_some_and(ReserveDescriptor::release) {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    }

    /// Serves a connection in its own task, or closes it if there are too many.
    fn admit(
        &self,
        name: &'static str,
        (connection, peer): (TcpStream, SocketAddr),
        setup: &ConnectionSetup,
    ) {
        let permit = match self.connections.admit(peer.ip()) {
            Ok(permit) => permit,
            Err(full) => {
                self.connections.metrics.closed(name, full.as_str());
                tracing::warn!(listener = name, limit = full.as_str(), %peer, "too many connections: refused a new one, raise the limit if this is expected load");
                return;
            }
        };
        let (metrics, tls, setup) = (self.connections.metrics.clone(), self.tls.clone(), setup.clone());
        let reserve = self.reserve.clone();
        let accepted = Accepted { peer, at: Instant::now() };
        let lifetime = setup.lifetime.clone();
        lifetime.spawn("connection", async move {
            let (_permit, _open) = (permit, metrics.opened(name));
            socket::prepare(&connection, setup.timeouts.write);
            let reason = match tls {
                None => serve(connection, setup, accepted).await.as_str(),
                Some(tls) => tls.serve((connection, accepted), name, setup).await,
            };
            metrics.closed(name, reason);
            if let Some(reserve) = reserve {
                reserve.reacquire();
            }
        });
    }
}

fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::ConnectionRefused | Kind::ConnectionAborted | Kind::ConnectionReset)
}
