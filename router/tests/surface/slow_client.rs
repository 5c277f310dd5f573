//! A client that does not read is cut off by its own unread text, over a real socket, and holds up nobody.

use router::generation::MAX_UNREAD_EVENTS_PER_CHOICE;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::client::{MODEL, TestRouter, eventually};
use crate::fake_lanes::Script;

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_and_told_so() {
    let router = TestRouter::start();
    router.lanes.play(Script::Flood);
    let address = router.listen_http().await;
    let body = json!({ "model": MODEL, "prompt": "hi", "max_tokens": 1_000, "stream": true }).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    eventually("the lane is told to stop", || router.lanes.cancelled() == [(0, 0)]).await;
    assert!(router.lanes.num_delivered() >= MAX_UNREAD_EVENTS_PER_CHOICE);
    let mut received = String::new();
    connection.read_to_string(&mut received).await.unwrap();
    let last = received.rsplit("data: ").find(|event| event.contains("error"));
    assert!(last.is_some_and(|event| event.contains("slow_client")), "{last:?}");
    let page = router.state.metrics_page.encode(service::metrics::Exposition::Prometheus);
    let counted = r#"outrider_requests_total{door="http",outcome="slow_client"} 1"#;
    assert!(page.contains(counted), "{counted} is missing from\n{page}");
    assert_eq!(router.state.admission.available(), 1_024);
}
