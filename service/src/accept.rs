//! What every server accepts connections with: each small write leaves at once. Without that a token waits for the
//! acknowledgement of the one before, up to 40 ms with a client that delays those (RFC 896 against RFC 1122, 4.2.3.2).

use axum::serve::{Listener, ListenerExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::TcpIncoming;

/// Connections for `axum::serve`.
pub fn http_connections(listener: TcpListener) -> impl Listener<Io = TcpStream, Addr = std::net::SocketAddr> {
    listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its small writes back");
        }
    })
}

/// Connections for a tonic server's `serve_with_incoming`, which leaves the sockets' options to its caller.
pub fn grpc_connections(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    async fn listener() -> (TcpListener, std::net::SocketAddr) {
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
    }
}
