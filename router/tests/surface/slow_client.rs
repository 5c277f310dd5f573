//! A client that does not read is disconnected, over real sockets: it loses its unread data, delays no other
//! client, and the resources of its request are released although it never reads a byte.

use proto::v1;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use router::generation::MAX_UNREAD_BYTES;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::Endpoint;

use crate::client::{MODEL, TestRouter, eventually};
use crate::fake_lanes::Script;

async fn check_disconnected(router: &TestRouter, protocol: &str) {
    eventually("cancellation of the generation", || router.lanes.cancelled() == [(0, 0)]).await;
    eventually("the permit's return", || router.state.admission.available() == 1_024).await;
    let counted = format!(r#"outrider_requests_total{{protocol="{protocol}",outcome="slow_client"}} 1"#);
    let page = router.metrics().await;
    assert!(page.contains(&counted), "{counted} is missing from\n{page}");
}

#[tokio::test]
async fn a_slow_http_client_is_disconnected() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Flood);
    let address = router.listen_http().await;
    let body =
        json!({ "model": MODEL, "prompt": "hi", "n": 128, "max_tokens": 1_000, "stream": true }).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    check_disconnected(&router, "http").await;
    assert!(router.lanes.num_delivered() * 512 >= MAX_UNREAD_BYTES);
    let mut received = Vec::new();
    // Closed, or reset if the router had more to send.
    drop(connection.read_to_end(&mut received).await);
    let received = String::from_utf8_lossy(&received);
    assert!(received.contains("200 OK") && !received.contains("[DONE]"));
}

#[tokio::test]
async fn a_slow_grpc_stream_is_reset_and_others_on_the_connection_continue() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Flood);
    let endpoint = Endpoint::from_shared(router.listen_grpc().await).unwrap();
    // A small window, because the client's library abandons a connection with many small unread frames.
    let channel = endpoint.initial_stream_window_size(8 << 10).connect().await.unwrap();
    let mut client = InferenceClient::new(channel);
    let request = v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text("hi".into())),
        ..v1::GenerateRequest::default()
    };
    let unread = client.generate(request.clone()).await.unwrap().into_inner();
    check_disconnected(&router, "grpc").await;
    let router = router.with_reply(" fine");
    let mut read = client.generate(request).await.unwrap().into_inner();
    let mut text = String::new();
    while let Some(message) = read.message().await.unwrap() {
        text.push_str(&message.text);
    }
    assert_eq!((text.as_str(), router.state.admission.available()), ("0 fine", 1_024));
    drop(unread);
}
