//! The request log contains finished choices of clients who agree, and of no others.

use std::path::Path;
use std::time::Duration;

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use service::shutdown::ShutdownOutcome;

use crate::client::{MODEL, TestRouter};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const COMPLETIONS: &str = "/v1/completions";

fn request(path: &str, key: Option<&str>, body: &Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    let request = match key {
        Some(key) => request.header("authorization", format!("Bearer {key}")),
        None => request,
    };
    request.body(Body::from(body.to_string())).unwrap()
}

async fn post_ok(router: &TestRouter, path: &str, key: Option<&str>, body: &Value) {
    let answer = router.send(request(path, key, body)).await;
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
}

/// All lines, after the router has shut down and its log is complete.
async fn logged(router: TestRouter, path: &Path) -> Vec<Value> {
    let lifetime = router.state.lifetime.clone();
    drop(router);
    assert_eq!(lifetime.shut_down(Duration::from_secs(20)).await, ShutdownOutcome::Clean);
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn chat(text: &str) -> Value {
    json!({ "model": MODEL, "messages": [{ "role": "user", "content": text }], "max_tokens": 50 })
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

#[tokio::test]
async fn each_choice_is_logged_with_the_ids_of_its_target() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log.jsonl");
    let router = TestRouter::start().with_request_log(&path).with_reply(" fine");
    let two = with(with(chat("Hello"), "n", json!(2)), "task_type", json!("code"));
    post_ok(&router, CHAT, None, &two).await;
    post_ok(&router, CHAT, None, &with(chat("Streamed"), "stream", json!(true))).await;
    let completion = json!({ "model": MODEL, "prompt": ["one", "two"], "max_tokens": 50 });
    post_ok(&router, COMPLETIONS, None, &completion).await;
    let submitted = router.lanes.take_submitted();
    let page = router.metrics().await;
    assert!(page.contains("outrider_request_log_choices_total{outcome=\"left_out\"} 0"), "{page}");

    let lines = logged(router, &path).await;
    assert_eq!(lines.len(), 5, "{lines:?}");
    for (i, line) in lines.iter().enumerate() {
        let generation = &submitted[[0, 0, 1, 2, 3][i]];
        assert_eq!(line["prompt_ids"], json!(generation.prompt_ids), "line {i}");
        assert_eq!(line["task"], generation.task_type, "line {i}");
        assert_eq!((&line["model"], &line["framed"]), (&json!(MODEL), &json!(true)));
        assert!(line["completion"].as_str().unwrap().ends_with(" fine"), "{line}");
        assert!(!line["completion_ids"].as_array().unwrap().is_empty(), "{line}");
    }
    assert_eq!(lines[0]["task"], "code");
    assert_eq!(lines[2]["prompt"], "<|user|>\nStreamed<|end|>\n<|assistant|>\n");
    assert_ne!(lines[0]["completion"], lines[1]["completion"], "choices differ");
    assert_eq!(lines[3]["prompt"], "one");
}

#[tokio::test]
async fn requests_without_store_or_tokens_are_not_logged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log.jsonl");
    let router = TestRouter::start().with_request_log(&path).with_reply(" fine");
    post_ok(&router, CHAT, None, &with(chat("No"), "store", json!(false))).await;
    let response = json!({ "model": MODEL, "input": "No", "store": false });
    post_ok(&router, RESPONSES, None, &response).await;
    post_ok(&router, CHAT, None, &with(chat("Yes"), "store", json!(true))).await;
    post_ok(
        &router,
        COMPLETIONS,
        None,
        &json!({ "model": MODEL, "prompt": "No tokens", "max_tokens": 0, "echo": true }),
    )
    .await;
    let lines = logged(router, &path).await;
    let prompts: Vec<&str> = lines.iter().map(|line| line["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["<|user|>\nYes<|end|>\n<|assistant|>\n"]);
}

#[tokio::test]
async fn only_keys_with_log_requests_are_logged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log.jsonl");
    let keys = "sk-one alice\nsk-two bob log_requests=true\nsk-three log_requests=false\n";
    let router = TestRouter::with_keys(keys).with_request_log(&path).with_reply(" fine");
    for key in ["sk-one", "sk-two", "sk-three"] {
        post_ok(&router, CHAT, Some(key), &chat(key)).await;
    }
    post_ok(&router, CHAT, Some("sk-two"), &with(chat("not this one"), "store", json!(false))).await;
    let lines = logged(router, &path).await;
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0]["prompt"].as_str().unwrap().contains("sk-two"));
    assert!(!lines[0].to_string().contains("bob"), "the name of the key is not in the log");
}
