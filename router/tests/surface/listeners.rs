//! Peers that are slow, many, or violate the protocol, each over a real socket; the next request works all
//! the same.

use std::net::SocketAddr;
use std::time::Duration;

use http::StatusCode;
use proto::v1;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use serde_json::json;
use service::accept::ListenerConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::{Code, Request};

use crate::client::{MODEL, TestRouter, eventually, listener_config};
use crate::fake_lanes::Script;

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Only the header timeout is short.
fn short_header_timeout() -> ListenerConfig {
    let mut config = listener_config();
    config.timeouts.header = Duration::from_millis(100);
    config
}

/// Sends bytes and reads until the router closes the connection.
async fn send_until_closed(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut connection = TcpStream::connect(address).await.unwrap();
    // A connection refused early may be reset while the client still sends.
    drop(connection.write_all(bytes).await);
    let mut received = Vec::new();
    drop(connection.read_to_end(&mut received).await);
    received
}

fn completion(extra_head: &str) -> Vec<u8> {
    let body = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{extra_head}\r\n{body}"
    )
    .into_bytes()
}

fn status_of(received: &[u8]) -> Option<StatusCode> {
    let line = String::from_utf8_lossy(received.get(..12)?).into_owned();
    line.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

async fn assert_http_serves(address: SocketAddr, key: &str) {
    let received = send_until_closed(address, &completion(key)).await;
    let text = String::from_utf8_lossy(&received);
    assert!(status_of(&received) == Some(StatusCode::OK) && text.contains("0 fine"), "{text}");
}

async fn assert_grpc_serves(address: SocketAddr) {
    let mut client = InferenceClient::connect(format!("http://{address}")).await.unwrap();
    let mut stream = client.generate(generation("hi")).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
}

fn generation(prompt: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text(prompt.to_owned())),
        ..v1::GenerateRequest::default()
    }
}

#[tokio::test]
async fn bad_http_peers_are_answered_or_closed_and_the_next_is_served() {
    let router = TestRouter::with_keys("sk-one\n").with_reply(" fine");
    let address = router.listen_http_with(short_header_timeout()).await;
    let key = "authorization: Bearer sk-one\r\n";
    let many_headers: String = (0..10_000).map(|idx| format!("x-{idx}: y\r\n")).collect();
    let long_header = format!("x-long: {}\r\n", "y".repeat(1 << 20));
    let mut too_large = completion(key);
    let at = too_large.windows(18).position(|bytes| bytes.starts_with(b"content-length: ")).unwrap();
    too_large.splice(at..at, b"content-length: 99999999\r\nx-was-".iter().copied());
    let rows: Vec<(&str, Vec<u8>, Option<u16>)> = vec![
        ("no key", completion(""), Some(401)),
        ("a wrong key", completion("authorization: Bearer sk-two\r\n"), Some(401)),
        ("10,000 headers", completion(&format!("{key}{many_headers}")), Some(431)),
        ("a header of 1 MiB", completion(&format!("{key}{long_header}")), Some(431)),
        ("a body of 100 MB", too_large, Some(413)),
        ("no HTTP at all", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03 and more\r\n\r\n".to_vec(), Some(400)),
        ("nothing", Vec::new(), None),
        ("half a head", b"POST /v1/completions HTTP/1.1\r\nhost: ".to_vec(), None),
        ("a preface of HTTP/2 and then nothing", HTTP2_PREFACE.to_vec(), None),
    ];
    for (what, bytes, expected) in rows {
        let received = send_until_closed(address, &bytes).await;
        let status = status_of(&received).map(|status| status.as_u16());
        assert_eq!(status, expected, "{what}: {}", String::from_utf8_lossy(&received));
        assert_http_serves(address, key).await;
    }
}

#[tokio::test]
async fn bad_grpc_peers_are_answered_or_closed_and_the_next_is_served() {
    let router = TestRouter::start().with_reply(" fine");
    let address = router.listen_grpc_with(short_header_timeout()).await;
    // DATA of 16 MiB less one byte on stream 1: larger than any allowed frame.
    let oversized = [HTTP2_PREFACE, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    for (what, bytes) in [
        ("nothing", Vec::new()),
        ("half a preface", b"PRI * HTTP/2.0\r\n".to_vec()),
        ("a preface and then nothing", HTTP2_PREFACE.to_vec()),
        ("an oversized frame", oversized),
        ("HTTP/1", completion("")),
    ] {
        let received = send_until_closed(address, &bytes).await;
        assert_eq!(status_of(&received), None, "{what}");
        assert_grpc_serves(address).await;
    }
    let mut client = InferenceClient::connect(format!("http://{address}")).await.unwrap();
    let mut request = Request::new(generation("hi"));
    for idx in 0..10_000 {
        let name = tonic::metadata::MetadataKey::from_bytes(format!("x-{idx}").as_bytes()).unwrap();
        request.metadata_mut().insert(name, "y".parse().unwrap());
    }
    assert!(client.generate(request).await.is_err(), "10,000 headers");
    assert_grpc_serves(address).await;
    let huge = client.generate(generation(&"x".repeat(5 << 20))).await.unwrap_err();
    assert_eq!(huge.code(), Code::OutOfRange);
    assert_grpc_serves(address).await;
}

#[tokio::test]
async fn idle_connections_are_closed_at_the_limit_and_after_a_timeout() {
    let router = TestRouter::start().with_reply(" fine");
    let config =
        ListenerConfig { max_connections: 8, max_connections_per_address: 8, ..short_header_timeout() };
    let address = router.listen_http_with(config).await;
    let mut idle = Vec::new();
    for _ in 0..64 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    // Each is closed, at once or after its timeout.
    for connection in &mut idle {
        drop(connection.read_to_end(&mut Vec::new()).await);
    }
    assert_http_serves(address, "").await;
}

#[tokio::test]
async fn a_draining_router_notifies_clients_and_finishes_their_streams() {
    let router = TestRouter::start().with_reply(" fine");
    let (http, grpc) = (router.listen_http().await, router.listen_grpc_with(listener_config()).await);
    let mut pooled = TcpStream::connect(http).await.unwrap();
    let keep_alive = String::from_utf8(completion("")).unwrap().replace("connection: close\r\n", "");
    let mut answer = [0; 4_096];
    pooled.write_all(keep_alive.as_bytes()).await.unwrap();
    let len = pooled.read(&mut answer).await.unwrap();
    assert!(!String::from_utf8_lossy(&answer[..len]).contains("connection: close"));
    router.lanes.set_script(Script::Hang);
    let mut client = InferenceClient::connect(format!("http://{grpc}")).await.unwrap();
    let mut stream = client.generate(generation("hi")).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());

    router.state.lifetime.leave();
    let router = router.with_reply(" fine");
    pooled.write_all(keep_alive.as_bytes()).await.unwrap();
    let mut rest = Vec::new();
    pooled.read_to_end(&mut rest).await.unwrap();
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("connection: close") && rest.contains("0 fine"), "{rest}");
    assert_http_serves(http, "").await;
    assert_grpc_serves(grpc).await;

    let draining = router.state.lifetime.clone();
    let drained =
        router.state.lifetime.spawn("drain", async move { draining.drain(Duration::from_secs(60)).await });
    eventually("the drain", || router.state.lifetime.is_draining()).await;
    let late = send_until_closed(http, &completion("")).await;
    assert_eq!(status_of(&late), Some(StatusCode::SERVICE_UNAVAILABLE));
    assert!(!drained.is_finished(), "the drain waits for the stream");
    drop(stream);
    assert_eq!(drained.await.unwrap(), service::shutdown::ShutdownOutcome::Clean);
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_answered_with_a_timeout() {
    let router = TestRouter::start().with_reply(" fine");
    let mut config = listener_config();
    config.timeouts.body = Duration::from_millis(50);
    let address = router.listen_http_with(config).await;
    let mut request = completion("");
    request.truncate(request.len() - 1);
    let received = send_until_closed(address, &request).await;
    let text = String::from_utf8_lossy(&received);
    assert_eq!(status_of(&received), Some(StatusCode::REQUEST_TIMEOUT), "{text}");
    assert!(text.contains("the request body did not arrive within 0.05 seconds"), "{text}");
    assert!(text.contains(r#""code":"body_timeout""#), "{text}");
    let counted = r#"outrider_requests_total{protocol="http",outcome="body_timeout"} 1"#;
    let page = router.metrics().await;
    assert!(page.contains(counted), "{counted} is missing from\n{page}");
    assert!(router.lanes.take_submitted().is_empty());
    assert_http_serves(address, "").await;
}

/// A client that is still connected is told what is wrong with its body.
#[tokio::test]
async fn a_body_with_invalid_chunks_is_a_bad_request() {
    let router = TestRouter::start().with_reply(" fine");
    let address = router.listen_http().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                transfer-encoding: chunked\r\n\r\n";
    let body = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    for (what, chunks) in [
        ("a size that is no number", format!("zz\r\n{body}\r\n0\r\n\r\n")),
        ("a size that is too small", format!("5\r\n{body}\r\n0\r\n\r\n")),
        ("a size beyond 64 bits", format!("ffffffffffffffffff\r\n{body}\r\n0\r\n\r\n")),
        ("no size", format!("\r\n{body}\r\n0\r\n\r\n")),
    ] {
        let received = send_until_closed(address, format!("{head}{chunks}").as_bytes()).await;
        let text = String::from_utf8_lossy(&received);
        assert_eq!(status_of(&received), Some(StatusCode::BAD_REQUEST), "{what}: {text}");
        assert!(text.contains("the body's transfer encoding is invalid: "), "{what}: {text}");
        assert!(text.contains(r#""type":"invalid_request_error""#), "{what}: {text}");
        assert_http_serves(address, "").await;
    }
    let counted = r#"outrider_requests_total{protocol="http",outcome="invalid_request"} 4"#;
    let page = router.metrics().await;
    assert!(page.contains(counted), "{counted} is missing from\n{page}");
}
