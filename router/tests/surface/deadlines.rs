//! A client's deadline ends its request with an error, before the first byte and within a stream.

use proto::v1;
use proto::v1::generate_request::Prompt;
use proto::v1::inference_client::InferenceClient;
use router::admission::AdmissionLimits;
use router::request::Auth;
use serde_json::{Value, json};
use tonic::Code;

use crate::client::{Answer, MODEL, TestRouter, chunks, eventually, merged, post};
use crate::fake_lanes::Script;

/// Sends a request with a deadline.
async fn post_with_deadline(router: &TestRouter, fields: Value, milliseconds: &str) -> Answer {
    let body = merged(json!({ "model": MODEL, "prompt": "hi" }), &fields);
    let mut request = post("/v1/completions", body.to_string());
    request.headers_mut().insert("x-request-timeout-ms", milliseconds.parse().unwrap());
    router.send(request).await
}

fn hanging_router() -> TestRouter {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    router
}

#[tokio::test]
async fn a_whole_response_past_its_deadline_is_a_504() {
    let router = hanging_router();
    // Long enough to be submitted on a busy machine.
    let answer = post_with_deadline(&router, json!({}), "1000").await;
    assert_eq!(answer.status, 504, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "deadline_exceeded");
    assert_eq!(answer.headers["x-should-retry"], "false");
    assert!(answer.text().contains("within its time limit of 1000 ms"), "{}", answer.text());
    eventually("cancellation", || router.lanes.cancelled() == [(0, 0)]).await;
    assert_eq!(router.state.admission.available(), 1_024);
}

#[tokio::test]
async fn a_stream_past_its_deadline_ends_with_an_error() {
    let answer = post_with_deadline(&hanging_router(), json!({ "stream": true }), "500").await;
    assert_eq!(answer.status, 200);
    let chunks = chunks(&answer.events());
    assert!(chunks[0]["choices"][0]["text"].as_str().unwrap().starts_with('0'), "text before the deadline");
    assert_eq!(chunks.last().unwrap()["error"]["code"], "deadline_exceeded");
}

#[tokio::test]
async fn the_wait_for_admission_counts_against_the_deadline() {
    let limits = AdmissionLimits { max_sequences: 1, max_waiting_requests: 1 };
    let router = TestRouter::with(Auth::Open, limits);
    router.lanes.set_script(Script::Hang);
    let _first =
        router.open("/v1/completions", &json!({ "model": MODEL, "prompt": "hi", "stream": true })).await;
    assert_eq!(post_with_deadline(&router, json!({}), "20").await.status, 504);
}

#[tokio::test]
async fn the_wait_for_the_tokenizer_counts_against_the_deadline() {
    let router = TestRouter::start();
    let (begin, begun) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let job = move || {
        begin.send(()).unwrap();
        Ok(released.recv().is_err())
    };
    let pool = router.state.tokenize.clone();
    let busy = router.state.lifetime.spawn("a long prompt", async move { pool.run(7, job).await });
    begun.await.unwrap();
    for (path, mut body) in [
        ("/tokenize", json!({ "prompt": "hi" })),
        ("/detokenize", json!({ "tokens": [1] })),
        ("/v1/completions/render", json!({ "prompt": "hi" })),
        ("/v1/messages/count_tokens", json!({ "messages": [{ "role": "user", "content": "hi" }] })),
        ("/v1/responses/input_tokens", json!({ "input": "hi" })),
    ] {
        body["model"] = MODEL.into();
        let mut request = post(path, body.to_string());
        request.headers_mut().insert("x-request-timeout-ms", "20".parse().unwrap());
        let answer = router.send(request).await;
        assert_eq!(answer.status, 504, "{path}: {}", answer.text());
    }
    drop(release);
    assert!(busy.await.unwrap().unwrap());
}

#[tokio::test]
async fn an_invalid_timeout_is_refused_and_a_long_one_has_no_effect() {
    let router = TestRouter::start().with_reply(" fine");
    let answer = post_with_deadline(&router, json!({}), "soon").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["param"]),
        (400, &json!("x-request-timeout-ms"))
    );
    assert_eq!(post_with_deadline(&router, json!({}), "600000").await.json()["choices"][0]["text"], "0 fine");
}

#[tokio::test]
async fn a_grpc_timeout_covers_the_whole_stream() {
    let router = hanging_router();
    let mut client = InferenceClient::connect(router.listen_grpc().await).await.unwrap();
    let mut request = tonic::Request::new(v1::GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text("hi".into())),
        ..v1::GenerateRequest::default()
    });
    request.metadata_mut().insert("grpc-timeout", "1S".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some(), "text before the deadline");
    let status = stream.message().await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(status.message().contains("within its time limit of 1000 ms"), "{status}");
    eventually("cancellation", || router.lanes.cancelled() == [(0, 0)]).await;
}
