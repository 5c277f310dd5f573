//! Which failed handshakes are logged, and that peers without one keep nobody waiting.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;

use super::super::tests::{HEAD, Server, config, listener};
use super::super::{Connections, Listener};
use super::*;
use crate::metrics::{Exposition, Metrics};
use crate::tls;

#[test]
fn a_peer_is_logged_once_in_a_while_and_the_number_of_peers_is_limited() {
    let (logged, now) = (LoggedPeers::default(), Instant::now());
    let peer = |number: u32| IpAddr::from(number.to_be_bytes());
    assert!(logged.admits(peer(0), now) && !logged.admits(peer(0), now));
    assert!(!logged.admits(peer(0), now + LOGGED_EVERY - Duration::from_secs(1)));
    assert!(logged.admits(peer(0), now + LOGGED_EVERY));
    let num_logged = (1..1_000).filter(|number| logged.admits(peer(*number), now + LOGGED_EVERY)).count();
    assert_eq!(num_logged, PEERS_MAX - 1);
    assert!(logged.admits(peer(999), now + 2 * LOGGED_EVERY), "there is room again");
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
    let (files, server, metrics) = (tls::tests::Files::new(), Server::new(), Metrics::new());
    let (https, address) = listener().await;
    let connections = Connections::new(config(), &metrics);
    let _server = Listener::new(https, Some(files.server()), &connections).serve_http(
        "https",
        server.app(),
        &server.lifetime,
    );

    let _silent = TcpStream::connect(address).await.unwrap();
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(HEAD).await.unwrap();
    let mut alert = Vec::new();
    // Closed, or reset if it had sent more than was read.
    drop(plain.read_to_end(&mut alert).await);
    assert!(!alert.starts_with(b"HTTP"), "served without TLS: {alert:?}");

    let stranger = shake_hands(&tls::tests::Files::new(), address).await;
    assert!(stranger.is_err(), "a client that trusts another authority goes away");
    // The check of a load balancer.
    drop(TcpStream::connect(address).await.unwrap());

    let mut client = shake_hands(&files, address).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("served"), "{answer}");
    // The load balancer is no failed handshake.
    let closed = [("tls", 2), ("finished", 2)].map(|(reason, count)| {
        format!(r#"outrider_connections_closed_total{{listener="https",reason="{reason}"}} {count}"#)
    });
    while !closed.iter().all(|line| metrics.encode(Exposition::Prometheus).contains(line)) {
        tokio::task::yield_now().await;
    }
    server.lifetime.shut_down(Duration::from_secs(5)).await;
}
