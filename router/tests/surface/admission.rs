//! The permit travels inside the response: released when the response ends, and when it is dropped.

use std::time::Duration;

use axum::body::Body;
use futures::FutureExt as _;
use http_body_util::BodyExt as _;
use router::admission::{AdmissionLimits, AdmissionRequest};
use router::api::allowed_hosts::AllowedHosts;
use router::api::http::http_app;
use router::request::Auth;
use serde_json::{Value, json};
use service::shutdown::ShutdownOutcome;
use tower::ServiceExt as _;

use crate::client::{MODEL, TestRouter, eventually, merged, post};
use crate::fake_lanes::Script;

fn body(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "prompt": "hi" }), &fields)
}

fn small() -> TestRouter {
    TestRouter::with(Auth::Open, AdmissionLimits { max_sequences: 2, max_waiting_requests: 0 })
}

/// Opens a stream that does not end by itself.
async fn open_stream(router: &TestRouter) -> Body {
    router.lanes.set_script(Script::Hang);
    let request = post("/v1/completions", body(json!({ "n": 2, "stream": true })).to_string());
    let response = http_app(router.state.clone(), AllowedHosts::Any).oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    response.into_body()
}

#[tokio::test]
async fn a_full_router_refuses_before_the_first_byte() {
    let router = small();
    let open = open_stream(&router).await;
    for stream in [false, true] {
        let answer = router.post_json("/v1/completions", &body(json!({ "stream": stream }))).await;
        assert_eq!(answer.status, 429, "{}", answer.text());
        assert_eq!(answer.headers["retry-after"], "1");
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    }
    drop(open);
    assert_eq!(router.state.admission.available(), 2, "dropping a stream releases its permits at once");
    let router = router.with_reply(" fine");
    router.ok("/v1/completions", &body(json!({ "n": 2 }))).await;
}

#[tokio::test]
async fn a_finished_stream_releases_its_permit_before_it_is_dropped() {
    let router = small().with_reply(" fine");
    let request = post("/v1/completions", body(json!({ "n": 2, "stream": true })).to_string());
    let response = http_app(router.state.clone(), AllowedHosts::Any).oneshot(request).await.unwrap();
    let mut response = response.into_body();
    assert_eq!(router.state.admission.available(), 0);
    let mut received = Vec::new();
    while !String::from_utf8_lossy(&received).contains("[DONE]") {
        let frame = response.frame().await.unwrap().unwrap();
        received.extend_from_slice(frame.data_ref().unwrap());
    }
    assert_eq!(router.state.admission.available(), 2);
    drop(response);
}

#[tokio::test]
async fn a_request_larger_than_the_router_is_refused() {
    let answer = small().post_json("/v1/completions", &body(json!({ "n": 3 }))).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!("n")));
}

#[tokio::test]
async fn waiting_requests_are_admitted_when_capacity_is_free() {
    let router = TestRouter::with(Auth::Open, AdmissionLimits { max_sequences: 2, max_waiting_requests: 1 });
    let open = open_stream(&router).await;
    let router = router.with_reply(" fine");
    let body = body(json!({}));
    let waiting = router.ok("/v1/completions", &body);
    let (answer, ()) = tokio::join!(waiting, async {
        one_waits(&router).await;
        drop(open);
    });
    assert_eq!(answer["choices"][0]["text"], "0 fine");
}

/// Waits until one request waits for admission.
async fn one_waits(router: &TestRouter) {
    let page = || router.state.metrics_page.encode(service::metrics::Exposition::Prometheus);
    let gauge = r#"vllm:num_requests_waiting{model_name="org/demo",engine="0"} 1"#;
    eventually("waiting", || page().contains(gauge)).await;
}

#[tokio::test]
async fn a_drain_waits_for_requests_that_wait_for_admission() {
    let limits = AdmissionLimits { max_sequences: 1, max_waiting_requests: 1 };
    let router = TestRouter::with(Auth::Open, limits).with_reply(" fine");
    // Of no request, so that the drain does not wait for its holder.
    let whole = AdmissionRequest { num_sequences: 1, priority: 0, fair_queue_key: 0 };
    let permit = router.state.admission.admit(whole).await.unwrap();
    let body = body(json!({}));
    // Not through `ok`, which repeats the request: the router has stopped by then.
    let waiting = router.post("/v1/completions", body.to_string());
    let (answer, outcome) = tokio::join!(waiting, async {
        one_waits(&router).await;
        let mut drain = Box::pin(router.state.lifetime.drain(Duration::from_secs(60)));
        assert!(drain.as_mut().now_or_never().is_none(), "the drain ends before the request has begun");
        drop(permit);
        drain.await
    });
    let text = &answer.json()["choices"][0]["text"];
    assert_eq!((text, outcome), (&json!("0 fine"), ShutdownOutcome::Clean));
}
