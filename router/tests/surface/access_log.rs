//! The access log has one line for each request, whether it is answered, refused or fails, if an operator
//! wants it.

use axum::body::Body;
use futures::stream;
use http::Request;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{self, generate_request::Prompt};
use router::error::RouterError;
use serde_json::{Value, json};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::EnvFilter;

use crate::client::{Answer, MODEL, TestRouter};
use crate::fake_lanes::Script;
use crate::logs::Lines;

async fn ask(router: &TestRouter, key: &str, body: &Value) -> Answer {
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.header("authorization", format!("Bearer {key}"));
    router.send(request.body(Body::from(body.to_string())).unwrap()).await
}

/// Starts to log on this thread, until the guard is dropped.
fn start_log() -> (Lines, DefaultGuard) {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt().json().flatten_event(true);
    let subscriber = subscriber.with_env_filter(EnvFilter::new("info")).with_writer(lines.clone()).finish();
    (lines, tracing::subscriber::set_default(subscriber))
}

/// The lines of the access log.
fn access_lines(lines: &Lines) -> Vec<Value> {
    let parsed = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    lines.text().lines().map(parsed).filter(|line| line["target"] == "router::access").collect()
}

/// How the request of a line ended, and whose it was.
fn ending(line: &Value) -> [Value; 4] {
    ["status", "outcome", "key", "model"].map(|field| line[field].clone())
}

/// Sends requests that end in different ways to this router, and returns its access log and the first answer.
async fn lines_of(router: TestRouter) -> (Vec<Value>, Value) {
    let (lines, _here) = start_log();
    let completion = json!({ "model": MODEL, "prompt": "one two" });
    router.lanes.set_script(Script::Reply(" fine".to_owned()));
    let answer = ask(&router, "sk-one", &completion).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let unknown = json!({ "model": "nobody", "prompt": "x" });
    for (key, body, status) in
        [("sk-no", &completion, 401), ("sk-one", &unknown, 404), ("sk-one", &json!("no object"), 400)]
    {
        assert_eq!(ask(&router, key, body).await.status, status);
    }
    let unavailable = RouterError::Unavailable { reason: "no target".into() };
    router.lanes.set_script(Script::Refuse(unavailable));
    assert_eq!(ask(&router, "sk-one", &completion).await.status, 503);
    router.lanes.set_script(Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }));
    assert_eq!(ask(&router, "sk-one", &completion).await.status, 500);
    (access_lines(&lines), answer.json())
}

#[tokio::test]
async fn every_request_has_one_line() {
    let (lines, answer) = lines_of(TestRouter::with_keys("sk-one alice\n").with_access_log()).await;
    let expected = [
        [json!(200), json!("ok"), json!("alice"), json!(MODEL)],
        [json!(401), json!("unauthenticated"), Value::Null, Value::Null],
        [json!(404), json!("model_not_found"), json!("alice"), Value::Null],
        [json!(400), json!("invalid_request"), json!("alice"), Value::Null],
        [json!(503), json!("unavailable"), json!("alice"), json!(MODEL)],
        [json!(500), json!("refused"), json!("alice"), json!(MODEL)],
    ];
    assert_eq!(lines.iter().map(ending).collect::<Vec<_>>(), expected);
    let (first, failed) = (&lines[0], &lines[5]);
    assert_eq!((&first["request_id"], &first["protocol"]), (&answer["id"], &json!("http")));
    let usage = &answer["usage"];
    for (field, value) in [
        ("prompt_tokens", &usage["prompt_tokens"]),
        ("output_tokens", &usage["completion_tokens"]),
        ("draft_tokens", &usage["speculation"]["draft_tokens"]),
        ("accepted_tokens", &usage["speculation"]["accepted_tokens"]),
    ] {
        assert!(value.is_u64() && first[field] == *value, "{field}: {first}, {usage}");
    }
    let (ttft, duration) =
        (first["ttft_seconds"].as_f64().unwrap(), first["duration_seconds"].as_f64().unwrap());
    assert!((0.0..=duration).contains(&ttft), "{first}");
    // What it received before it failed.
    assert_eq!(failed["prompt_tokens"], first["prompt_tokens"]);
    assert!(failed["output_tokens"].as_u64().unwrap() > 0 && failed["draft_tokens"].is_null(), "{failed}");
}

/// The key is known before the message is understood, or even read.
#[tokio::test]
async fn a_request_that_cannot_be_read_has_the_name_of_its_key() {
    let router = TestRouter::with_keys("sk-one alice\n").with_access_log().with_reply(" fine");
    let (lines, _here) = start_log();
    let parts = stream::iter([Ok(r#"{"model": "#), Err("the connection broke")]);
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.header("authorization", "Bearer sk-one").body(Body::from_stream(parts)).unwrap();
    assert_eq!(router.send(request).await.status.as_u16(), 499);
    let request = Request::post("/v1/messages").header("x-api-key", "sk-one");
    assert_eq!(router.send(request.body(Body::from("{}")).unwrap()).await.status, 415);

    let mut client = InferenceClient::connect(router.listen_grpc().await).await.unwrap();
    let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), name: None };
    for template_kwargs in ["", "["] {
        let chat = v1::Chat { messages: vec![message.clone()], template_kwargs: template_kwargs.into() };
        let mut request = tonic::Request::new(v1::GenerateRequest {
            model: MODEL.into(),
            prompt: Some(Prompt::Chat(chat)),
            ..v1::GenerateRequest::default()
        });
        request.metadata_mut().insert("authorization", "Bearer sk-one".parse().unwrap());
        let Ok(answer) = client.generate(request).await else { continue };
        let mut messages = answer.into_inner();
        while messages.message().await.unwrap().is_some() {}
    }
    let expected = [
        [json!(499), json!("client_gone"), json!("alice"), Value::Null],
        [json!(415), json!("unsupported_media_type"), json!("alice"), Value::Null],
        [json!(200), json!("ok"), json!("alice"), json!(MODEL)],
        [json!(400), json!("invalid_request"), json!("alice"), Value::Null],
    ];
    assert_eq!(access_lines(&lines).iter().map(ending).collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn without_the_setting_there_is_no_line() {
    let (lines, _) = lines_of(TestRouter::with_keys("sk-one alice\n")).await;
    assert_eq!(lines, Vec::<Value>::new());
}

/// Its addresses are all that tells who sends a wrong key.
#[tokio::test]
async fn a_wrong_key_over_grpc_has_the_address_of_its_peer() {
    let router = TestRouter::with_keys("sk-one alice\n").with_access_log();
    let (lines, _here) = start_log();
    let mut client = InferenceClient::connect(router.listen_grpc().await).await.unwrap();
    let mut request = tonic::Request::new(v1::GenerateRequest::default());
    request.metadata_mut().insert("authorization", "Bearer sk-no".parse().unwrap());
    request.metadata_mut().insert("x-forwarded-for", "203.0.113.9".parse().unwrap());
    let refused = client.generate(request).await.err().map(|status| status.code());
    assert_eq!(refused, Some(tonic::Code::Unauthenticated));
    let lines = access_lines(&lines);
    assert_eq!(
        lines.iter().map(ending).collect::<Vec<_>>(),
        [[json!(401), json!("unauthenticated"), Value::Null, Value::Null]]
    );
    let [protocol, peer, forwarded_for] =
        ["protocol", "peer", "forwarded_for"].map(|field| lines[0][field].as_str().unwrap());
    assert_eq!((protocol, forwarded_for), ("grpc", "203.0.113.9"));
    assert!(peer.starts_with("127.0.0.1:"), "{peer}");
}
