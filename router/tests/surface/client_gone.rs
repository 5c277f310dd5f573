//! Unwanted work ends: a client that disconnects cancels its work, over real sockets, and a choice whose stop
//! string was found does not affect its lane.

use std::time::Duration;

use http_body_util::BodyExt as _;
use router::api::allowed_hosts::AllowedHosts;
use router::api::http::http_app;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tower::ServiceExt as _;

use crate::client::{MODEL, TestRouter, eventually, post};
use crate::fake_lanes::Script;

/// Sends a request and leaves the connection open.
async fn begin(address: std::net::SocketAddr, stream: bool) -> TcpStream {
    let body = json!({ "model": MODEL, "prompt": "hi", "n": 2, "stream": stream }).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(body.as_bytes()).await.unwrap();
    connection
}

fn page(router: &TestRouter) -> String {
    router.state.metrics_page.encode(service::metrics::Exposition::Prometheus)
}

async fn check(stream: bool) {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let address = router.listen_http().await;
    let mut connection = begin(address, stream).await;
    eventually("submission", || router.state.admission.available() == 1_022).await;
    if stream {
        let mut first = [0; 512];
        let len = connection.read(&mut first).await.unwrap();
        assert!(String::from_utf8_lossy(&first[..len]).contains("200 OK"));
    } else {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(router.lanes.cancelled().is_empty());
    drop(connection);
    eventually("cancellation of both choices", || router.lanes.cancelled().len() == 2).await;
    assert_eq!(router.state.admission.available(), 1_024);
    let aborted = r#"vllm:request_success_total{model_name="org/demo",engine="0",finished_reason="abort"} 2"#;
    let gone = r#"outrider_requests_total{protocol="http",outcome="client_gone"} 1"#;
    let running = r#"vllm:num_requests_running{model_name="org/demo",engine="0"} 0"#;
    for line in [aborted, gone, running] {
        assert!(page(&router).contains(line), "{line} is missing from\n{}", page(&router));
    }
}

#[tokio::test]
async fn a_disconnect_cancels_a_streamed_request() {
    check(true).await;
}

#[tokio::test]
async fn a_disconnect_cancels_a_whole_request() {
    check(false).await;
}

#[tokio::test]
async fn a_stop_string_cancels_only_its_own_choice() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let body = json!({ "model": MODEL, "prompt": "hi", "n": 2, "stream": true, "stop": "0 is" });
    let request = post("/v1/completions", body.to_string());
    let response = http_app(router.state.clone(), AllowedHosts::Any).oneshot(request).await.unwrap();
    let mut response = response.into_body();
    let mut received = String::new();
    while !received.contains(r#""finish_reason":"stop""#) {
        let frame = response.frame().await.unwrap().unwrap();
        received.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    eventually("cancellation of choice 0", || router.lanes.cancelled() == [(0, 0)]).await;
    drop(response);
    eventually("cancellation of choice 1", || router.lanes.cancelled() == [(0, 0), (0, 1)]).await;
}
