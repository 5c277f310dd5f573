//! How a request's lane is chosen, and the report about lanes.

use axum::body::Body;
use http::Request;
use router::request::Auth;
use serde_json::{Value, json};
use speculation::AcceptanceMode;

use crate::client::{MODEL, TestRouter};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const DEBUG_LANES: &str = "/debug/lanes";

#[tokio::test]
async fn where_nobody_says_what_a_prompt_is_its_text_does() {
    let router = TestRouter::start().say(" fine");
    let code = "Write a Python function that adds two numbers";
    let user = |text: &str| json!([{ "role": "user", "content": text }]);
    for (path, fields, expected) in [
        (COMPLETIONS, json!({ "prompt": code }), "code"),
        (COMPLETIONS, json!({ "prompt": "hello" }), "chat"),
        (COMPLETIONS, json!({ "prompt": code, "task_type": "mine" }), "mine"),
        (CHAT, json!({ "messages": user("Translate to French: good morning") }), "translation"),
    ] {
        let mut body = json!({ "model": MODEL });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        router.ok(path, &body).await;
        assert_eq!(router.lanes.take_one().task_type, expected, "{fields}");
    }
}

#[tokio::test]
async fn the_lanes_way_to_judge_drafts_holds_where_the_request_names_none() {
    let router = TestRouter::start().say(" fine");
    for (task_type, asked, expected) in [
        ("code", None, AcceptanceMode::Typical),
        ("code", Some("coupled"), AcceptanceMode::Coupled),
        ("chat", None, AcceptanceMode::Coupled),
    ] {
        let speculation: Value = asked.map_or(json!({}), |mode| json!({ "acceptance": mode }));
        let body =
            json!({ "model": MODEL, "prompt": "hi", "task_type": task_type, "speculation": speculation });
        router.ok(COMPLETIONS, &body).await;
        assert_eq!(router.lanes.take_one().spec.acceptance, expected, "{task_type}, requested {asked:?}");
    }
}

#[tokio::test]
async fn lanes_are_explained_to_operators_only() {
    let ask = || Request::get(DEBUG_LANES).body(Body::empty()).unwrap();
    let router = TestRouter::start();
    assert_eq!(router.get(DEBUG_LANES).await.status, 404, "not on the client address");
    let answer = router.admin(ask()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json(),
        json!({
            "lanes": [], "workers": [], "pools": [], "waiting_for_target": 3, "replays_waiting": 0, "drained": [],
            "admission_waits": [], "target_waits": [], "rollout": null,
            "shadows": { "share": 0.0, "dropped": {}, "drafts": [] }
        })
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, "sk-one\n").unwrap();
    let router = TestRouter::with(Auth::from_file(&path).unwrap(), Default::default());
    assert_eq!(router.admin(ask()).await.status, 401);
}
