//! The access log has one line for each request, whether it is answered, refused or fails, if an operator
//! wants it.

use axum::body::Body;
use http::Request;
use router::error::RouterError;
use serde_json::{Value, json};
use tracing_subscriber::EnvFilter;

use crate::client::{Answer, MODEL, TestRouter};
use crate::fake_lanes::Script;
use crate::logs::Lines;

async fn ask(router: &TestRouter, key: &str, body: &Value) -> Answer {
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.header("authorization", format!("Bearer {key}"));
    router.send(request.body(Body::from(body.to_string())).unwrap()).await
}

/// Sends requests that end in different ways to this router, and returns its access log and the first answer.
async fn lines_of(router: TestRouter) -> (Vec<Value>, Value) {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt().json().flatten_event(true);
    let subscriber = subscriber.with_env_filter(EnvFilter::new("info")).with_writer(lines.clone()).finish();
    let _here = tracing::subscriber::set_default(subscriber);
    let completion = json!({ "model": MODEL, "prompt": "one two" });
    router.lanes.set_script(Script::Reply(" fine".to_owned()));
    let answer = ask(&router, "sk-one", &completion).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    for (key, model, status) in [("sk-no", MODEL, 401), ("sk-one", "nobody", 404)] {
        assert_eq!(ask(&router, key, &json!({ "model": model, "prompt": "x" })).await.status, status);
    }
    let unavailable = RouterError::Unavailable { reason: "no target".into() };
    router.lanes.set_script(Script::Refuse(unavailable));
    assert_eq!(ask(&router, "sk-one", &completion).await.status, 503);
    router.lanes.set_script(Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }));
    assert_eq!(ask(&router, "sk-one", &completion).await.status, 500);
    let parsed = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let text = lines.text();
    let lines = text.lines().map(parsed).filter(|line| line["target"] == "router::access").collect();
    (lines, answer.json())
}

#[tokio::test]
async fn every_request_has_one_line() {
    let (lines, answer) = lines_of(TestRouter::with_keys("sk-one alice\n").with_access_log()).await;
    let ended =
        |line: &Value| [&line["status"], &line["outcome"], &line["key"], &line["model"]].map(Value::clone);
    let expected = [
        [json!(200), json!("ok"), json!("alice"), json!(MODEL)],
        [json!(401), json!("unauthenticated"), Value::Null, Value::Null],
        [json!(404), json!("model_not_found"), json!("alice"), Value::Null],
        [json!(503), json!("unavailable"), json!("alice"), json!(MODEL)],
        [json!(500), json!("refused"), json!("alice"), json!(MODEL)],
    ];
    assert_eq!(lines.iter().map(ended).collect::<Vec<_>>(), expected);
    let (first, failed) = (&lines[0], &lines[4]);
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

#[tokio::test]
async fn without_the_setting_there_is_no_line() {
    let (lines, _) = lines_of(TestRouter::with_keys("sk-one alice\n")).await;
    assert_eq!(lines, Vec::<Value>::new());
}
