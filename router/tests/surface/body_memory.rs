//! Request bodies take memory while they are read. One client gets at most a share of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use futures::{StreamExt as _, stream};
use http::Request;
use router::pipeline::body_memory::BodyReservation;
use router::pipeline::buffer_memory::BUFFERED_BYTES_MAX;
use serde_json::json;

use crate::client::{Answer, COMPLETIONS, MODEL, TestRouter, post};

/// All that the client with this header gets while no other holds any. Fails while it holds any itself.
fn all_of(router: &TestRouter, authorization: Option<&str>) -> BodyReservation {
    let caller = router.state.auth.authenticate(authorization.map(str::as_bytes)).unwrap();
    let mut all = router.state.body_memory.reserve(caller.fair_queue_key());
    all.grow(BUFFERED_BYTES_MAX / 2).unwrap();
    all
}

#[tokio::test]
async fn bodies_that_are_being_read_have_a_limit_together() {
    let router = TestRouter::start().with_reply(" fine");
    let message = json!({ "role": "user", "content": "hi" });
    let bodies = [
        ("/v1/chat/completions", json!({ "model": MODEL, "messages": [message] })),
        ("/v1/responses", json!({ "model": MODEL, "input": "hi" })),
        ("/v1/messages", json!({ "model": MODEL, "messages": [message], "max_tokens": 9 })),
        ("/tokenize", json!({ "model": MODEL, "prompt": "hi" })),
    ];
    let all = all_of(&router, None);
    for (path, body) in &bodies {
        let refused = router.post_json(path, body).await;
        assert_eq!(refused.status, 429, "{path}");
        assert_eq!(refused.headers["retry-after"], "1", "{path}");
        let full = "this client's share of the memory for request bodies is full: retry after 1 s";
        assert!(refused.text().contains(full), "{}", refused.text());
    }
    drop(all);
    for (path, body) in &bodies {
        assert_eq!(router.post_json(path, body).await.status, 200, "{path}");
        // A body that was read no longer counts.
        drop(all_of(&router, None));
    }
}

/// Asks as the holder of a key, with a user's id if it is a gateway.
async fn ask(router: &TestRouter, key: &str, user: Option<&str>) -> Answer {
    let mut request = post(COMPLETIONS, json!({ "model": MODEL, "prompt": "hi" }).to_string());
    let headers = request.headers_mut();
    headers.insert("authorization", format!("Bearer {key}").parse().unwrap());
    if let Some(user) = user {
        headers.insert("x-llm-d-inference-fairness-id", user.parse().unwrap());
    }
    router.send(request).await
}

#[tokio::test]
async fn a_client_that_takes_all_it_gets_leaves_memory_for_others() {
    let router = TestRouter::with_keys("sk-one alice\nsk-two bob\nsk-three gateway fairness_ids=true\n");
    let router = router.with_reply(" fine");
    let alice = all_of(&router, Some("Bearer sk-one"));
    let refused = ask(&router, "sk-one", None).await;
    let error = json!({
        "message": "this client's share of the memory for request bodies is full: retry after 1 s",
        "type": "rate_limit_error", "param": null, "code": "overloaded",
    });
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]), (429, &error));
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(ask(&router, "sk-two", None).await.status, 200);
    drop(alice);
    assert_eq!(ask(&router, "sk-one", None).await.status, 200);
    // Each user of a gateway has a share.
    let gateway = all_of(&router, Some("Bearer sk-three"));
    for (user, status) in [(None, 429), (Some("carol"), 200)] {
        assert_eq!(ask(&router, "sk-three", user).await.status, status, "{user:?}");
    }
    drop(gateway);
}

/// A client that is still writing when its connection closes would not read the answer.
#[tokio::test]
async fn a_body_that_finds_no_memory_is_still_read_to_its_end() {
    let router = TestRouter::start();
    let all = all_of(&router, None);
    let num_read = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&num_read);
    let parts = stream::iter(["{\"model\": \"m\"", ", \"prompt\"", ": \"x\"}"]).map(move |part| {
        counter.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Infallible>(part)
    });
    let request = Request::post(COMPLETIONS).header("content-type", "application/json");
    let refused = router.send(request.body(Body::from_stream(parts)).unwrap()).await;
    assert_eq!((refused.status.as_u16(), num_read.load(Ordering::Relaxed)), (429, 3), "{}", refused.text());
    drop(all);
    drop(all_of(&router, None));
}
