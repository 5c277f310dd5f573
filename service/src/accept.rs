//! A door: a bound port, and how connections through it are spoken with. Every door is opened here, so that two things hold
//! everywhere: each small write leaves at once (without that a token waits for the acknowledgement of the one before, up to
//! 40 ms with a client that delays those; RFC 896 against RFC 1122, 4.2.3.2), and TLS is spoken where it was asked for.

use std::future::IntoFuture as _;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::serve::{Listener, ListenerExt as _};
use futures::{Stream, StreamExt as _};
use tls_listener::TlsListener;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Router as GrpcRouter, TcpIncoming};

use crate::shutdown::Lifetime;
use crate::tls::ServerTls;

/// How long a door rests after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// A port that is bound and not yet served.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    tls: Option<ServerTls>,
}

impl Door {
    /// Plain, or with TLS.
    pub fn new(listener: TcpListener, tls: Option<ServerTls>) -> Self {
        Self { listener, tls }
    }

    /// Serves HTTP until the lifetime is cancelled, as its task `name`.
    pub fn serve_http(
        self,
        name: &'static str,
        app: axum::Router,
        lifetime: &Lifetime,
    ) -> io::Result<JoinHandle<io::Result<()>>> {
        let cancelled = lifetime.cancelled();
        Ok(match self.tls {
            None => {
                let served = axum::serve(http_connections(self.listener), app);
                lifetime.spawn(name, served.with_graceful_shutdown(cancelled).into_future())
            }
            Some(tls) => {
                let address = self.listener.local_addr()?;
                let connections = HttpsConnections { shaken: handshakes(self.listener, &tls), address };
                let served = axum::serve(connections, app);
                lifetime.spawn(name, served.with_graceful_shutdown(cancelled).into_future())
            }
        })
    }

    /// Serves gRPC until the lifetime is cancelled, as its task `name`.
    pub fn serve_grpc(
        self,
        name: &'static str,
        server: GrpcRouter,
        lifetime: &Lifetime,
    ) -> JoinHandle<Result<(), tonic::transport::Error>> {
        let cancelled = lifetime.cancelled();
        match self.tls {
            None => {
                let incoming = grpc_connections(self.listener);
                lifetime.spawn(name, server.serve_with_incoming_shutdown(incoming, cancelled))
            }
            Some(tls) => {
                let incoming =
                    handshakes(self.listener, &tls).map(|(connection, _)| io::Result::Ok(connection));
                lifetime.spawn(name, server.serve_with_incoming_shutdown(incoming, cancelled))
            }
        }
    }
}

/// Plain connections for `axum::serve`.
fn http_connections(listener: TcpListener) -> impl Listener<Io = TcpStream, Addr = SocketAddr> {
    listener.tap_io(|connection| send_at_once(connection))
}

/// Plain connections for a tonic server, which leaves the sockets' options to its caller.
fn grpc_connections(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

type Shaken = (TlsStream<TcpStream>, SocketAddr);

/// Connections that finished their handshake. Whoever is slow at it keeps nobody waiting and is dropped after ten seconds; who
/// fails is dropped at once. Never ends.
fn handshakes(listener: TcpListener, tls: &ServerTls) -> impl Stream<Item = Shaken> + Send + Unpin + use<> {
    let listener = TlsListener::new(tls.acceptor(), listener);
    Box::pin(listener.filter_map(async |shaken| match shaken {
        Ok((connection, peer)) => {
            send_at_once(connection.get_ref().0);
            Some((connection, peer))
        }
        Err(tls_listener::Error::ListenerError(error)) => {
            // Most likely out of file descriptors: asking again at once would only spin.
            tracing::error!(%error, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
        Err(error) => {
            tracing::debug!(peer = ?error.peer_addr(), %error, "no TLS connection came about");
            None
        }
    }))
}

/// The same for `axum::serve`.
struct HttpsConnections<S> {
    shaken: S,
    address: SocketAddr,
}

impl<S: Stream<Item = Shaken> + Send + Unpin + 'static> Listener for HttpsConnections<S> {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Shaken {
        match self.shaken.next().await {
            Some(connection) => connection,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

fn send_at_once(connection: &TcpStream) {
    if let Err(error) = connection.set_nodelay(true) {
        tracing::debug!(%error, "a connection keeps its small writes back");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::ClientConfig;

    use super::*;
    use crate::tls;

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[tokio::test]
    async fn small_writes_leave_at_once() {
        let (plain, address) = listener().await;
        let _client = TcpStream::connect(address).await.unwrap();
        assert!(!plain.accept().await.unwrap().0.nodelay().unwrap(), "what the system does by itself");

        let (http, address) = listener().await;
        let _client = TcpStream::connect(address).await.unwrap();
        assert!(http_connections(http).accept().await.0.nodelay().unwrap());

        let (grpc, address) = listener().await;
        let _client = TcpStream::connect(address).await.unwrap();
        assert!(grpc_connections(grpc).next().await.unwrap().unwrap().nodelay().unwrap());

        let (https, address) = listener().await;
        let files = tls::tests::Files::new();
        let mut shaken = handshakes(https, &files.server());
        let (client, server) = tokio::join!(shake_hands(&files, address), shaken.next());
        assert!(client.is_ok() && server.unwrap().0.get_ref().0.nodelay().unwrap());
    }

    async fn shake_hands(
        files: &tls::tests::Files,
        address: SocketAddr,
    ) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let roots = tls::authority(&files.path("ca.pem")).unwrap();
        let config = ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connection = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config)).connect(address.ip().into(), connection).await
    }

    #[tokio::test]
    async fn who_never_shakes_hands_or_speaks_without_tls_keeps_nobody_waiting() {
        let (files, lifetime) = (tls::tests::Files::new(), Lifetime::new());
        let (https, address) = listener().await;
        let app = axum::Router::new().route("/", get(async || "served"));
        let _server = Door::new(https, Some(files.server())).serve_http("https", app, &lifetime).unwrap();

        let _silent = TcpStream::connect(address).await.unwrap();
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        plain.read_to_end(&mut answer).await.unwrap();
        assert!(!answer.starts_with(b"HTTP"), "served without TLS: {answer:?}");

        let stranger = shake_hands(&tls::tests::Files::new(), address).await;
        assert!(stranger.is_err(), "a client that trusts another authority goes away");

        let mut client = shake_hands(&files, address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("served"), "{answer}");
        lifetime.shut_down(Duration::from_secs(5)).await;
    }
}
