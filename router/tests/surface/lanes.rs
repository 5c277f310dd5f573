//! How a request's lane is chosen, and the report about lanes.

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use speculation::AcceptanceMode;

use crate::client::{MODEL, TestRouter, merged};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const DEBUG_LANES: &str = "/debug/lanes";

#[tokio::test]
async fn the_task_type_is_guessed_unless_the_request_sets_it() {
    let router = TestRouter::start().with_reply(" fine");
    let code = "Write a Python function that adds two numbers";
    let user = |text: &str| json!([{ "role": "user", "content": text }]);
    for (path, fields, expected) in [
        (COMPLETIONS, json!({ "prompt": code }), "code"),
        (COMPLETIONS, json!({ "prompt": "hello" }), "chat"),
        (COMPLETIONS, json!({ "prompt": code, "task_type": "mine" }), "mine"),
        (CHAT, json!({ "messages": user("Translate to French: good morning") }), "translation"),
    ] {
        router.ok(path, &merged(json!({ "model": MODEL }), &fields)).await;
        assert_eq!(router.lanes.take_one().task_type, expected, "{fields}");
    }
}

#[tokio::test]
async fn the_acceptance_mode_of_the_lane_applies_unless_the_request_sets_one() {
    let router = TestRouter::start().with_reply(" fine");
    for (task_type, requested, expected) in [
        ("code", None, AcceptanceMode::Typical),
        ("code", Some("coupled"), AcceptanceMode::Coupled),
        ("chat", None, AcceptanceMode::Coupled),
    ] {
        let speculation: Value = requested.map_or(json!({}), |mode| json!({ "acceptance": mode }));
        let body =
            json!({ "model": MODEL, "prompt": "hi", "task_type": task_type, "speculation": speculation });
        router.ok(COMPLETIONS, &body).await;
        assert_eq!(router.lanes.take_one().spec.acceptance, expected, "{task_type}, requested {requested:?}");
    }
}

#[tokio::test]
async fn debug_lanes_requires_the_operator_address() {
    let debug_request = || Request::get(DEBUG_LANES).body(Body::empty()).unwrap();
    let router = TestRouter::start();
    assert_eq!(router.get(DEBUG_LANES).await.status, 404, "not on the client address");
    let answer = router.admin(debug_request()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json(),
        json!({
            "lanes": [], "workers": [], "pools": [], "waiting_for_target": 3, "replays_waiting": 0, "drained": [],
            "admission_waits": [], "target_waits": [], "rollout": null,
            "shadows": { "share": 0.0, "dropped": {}, "drafts": [] }
        })
    );
    for (origin, status) in [("http://evil.example", 403), ("http://127.0.0.1:8002", 200)] {
        let mut of_a_page = debug_request();
        for (name, value) in [("origin", origin), ("host", "127.0.0.1:8002")] {
            of_a_page.headers_mut().insert(name, value.parse().unwrap());
        }
        assert_eq!(router.admin(of_a_page).await.status, status, "{origin}");
    }
    let router = TestRouter::with_keys("sk-one\nsk-operator admin=true\n");
    assert_eq!(router.admin(debug_request()).await.status, 401);
    for (key, status) in [("Bearer sk-one", 403), ("Bearer sk-operator", 200)] {
        let mut with_key = debug_request();
        with_key.headers_mut().insert("authorization", key.parse().unwrap());
        assert_eq!(router.admin(with_key).await.status, status, "{key}");
    }
}
