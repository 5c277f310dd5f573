//! Listeners: bound ports and the connections they accept. All ports of all processes are served here, so
//! that the same rules apply everywhere: TLS if configured, limits on the number of connections (`limits`),
//! timeouts (`connection`), sockets that send without delay and detect dead peers (`socket`), and a pause
//! when the process runs out of file descriptors.

mod config;
mod connection;
mod limits;
mod metrics;
mod request_body;
mod response;
mod socket;
mod spare;
mod state;
mod write_timeout;

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tonic::service::Routes;

pub use self::config::{ListenerConfig, ListenerFlags, RawListener, Timeouts};
pub use self::limits::Connections;
pub use self::response::ResponseHandle;

use self::connection::{Ending, Protocol, Serving, serve};
use self::spare::Spare;
use crate::shutdown::Lifetime;
use crate::tls::ServerTls;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A bound port that is not served yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    tls: Option<ServerTls>,
    connections: Connections,
    spare: Option<Spare>,
}

impl Listener {
    /// Creates a listener, plain or with TLS, whose connections count towards `connections`.
    pub fn new(socket: TcpListener, tls: Option<ServerTls>, connections: &Connections) -> Self {
        Self { socket, tls, connections: connections.clone(), spare: None }
    }

    /// Reserves a descriptor, so that one connection at a time is accepted even when the process has none
    /// left.
    pub fn with_spare_descriptor(self) -> Self {
        Self { spare: Some(Spare::take()), ..self }
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
        let serving = Serving { protocol, app, timeouts, lifetime: lifetime.clone() };
        lifetime.spawn(name, self.accept_all(name, serving))
    }

    async fn accept_all(self, name: &'static str, serving: Serving) {
        let cancelled = serving.lifetime.cancelled();
        tokio::pin!(cancelled);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut cancelled => return,
                accepted = self.socket.accept() => accepted,
            };
            match accepted {
                Ok((connection, peer)) => match self.connections.admit(peer.ip()) {
                    Ok(place) => self.spawn_connection(name, (connection, place), &serving),
                    Err(full) => {
                        self.connections.metrics.closed(name, full.as_str());
                        tracing::warn!(listener = name, limit = full.as_str(), %peer, "too many connections: refused a new one, raise the limit if this is expected load");
                    }
                },
                // The peer disconnected before the accept.
                Err(error) if is_of_connection(&error) => {}
                Err(error) => {
                    self.connections.metrics.closed(name, "accept_error");
                    tracing::error!(listener = name, %error, "cannot accept a connection");
                    // Most likely out of file descriptors: retrying at once would busy-loop.
                    if !self.spare.as_ref().is_some_and(Spare::give_up) {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    }

    fn spawn_connection(
        &self,
        name: &'static str,
        (connection, place): (TcpStream, limits::Place),
        serving: &Serving,
    ) {
        let (metrics, tls, serving) = (self.connections.metrics.clone(), self.tls.clone(), serving.clone());
        let spare = self.spare.clone();
        let lifetime = serving.lifetime.clone();
        lifetime.spawn("connection", async move {
            let (_place, _open) = (place, metrics.opened(name));
            socket::prepare(&connection, serving.timeouts.write);
            let reason = match tls {
                None => serve(connection, serving).await.as_str(),
                Some(tls) => serve_tls(connection, &tls, serving).await,
            };
            metrics.closed(name, reason);
            if let Some(spare) = spare {
                spare.renew();
            }
        });
    }
}

/// Performs the TLS handshake, then serves the connection; returns why it ended.
async fn serve_tls(connection: TcpStream, tls: &ServerTls, serving: Serving) -> &'static str {
    let shaken = tokio::select! {
        biased;
        () = serving.lifetime.cancelled() => return Ending::Stopped.as_str(),
        shaken = tokio::time::timeout(serving.timeouts.header, tls.acceptor().accept(connection)) => shaken,
    };
    match shaken {
        Ok(Ok(connection)) => serve(connection, serving).await.as_str(),
        Ok(Err(error)) => {
            tracing::debug!(%error, "no TLS connection came about");
            "tls"
        }
        Err(_) => Ending::HeaderTimeout.as_str(),
    }
}

fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::ConnectionRefused | Kind::ConnectionAborted | Kind::ConnectionReset)
}
