//! A whole response counts as buffered until its body has been sent or dropped, in every API.

use axum::body::Body;
use futures::StreamExt as _;
use http::Request;
use router::error::RouterError;
use router::pipeline::response_memory::{BUFFERED_BYTES_MAX, MemoryReservation, RESPONSE_BYTES_MAX};
use serde_json::{Value, json};

use crate::client::{MODEL, TestRouter};
use crate::fake_lanes::Script;

/// Tries to reserve all memory for responses that are not streamed.
fn all_memory(router: &TestRouter) -> Result<Vec<MemoryReservation>, RouterError> {
    let reservations = (0..BUFFERED_BYTES_MAX / RESPONSE_BYTES_MAX).map(|_| -> Result<_, RouterError> {
        let mut reservation = router.state.response_memory.reserve();
        reservation.grow(RESPONSE_BYTES_MAX)?;
        Ok(reservation)
    });
    reservations.collect()
}

/// Fails while a response counts as buffered.
fn reserve_all(router: &TestRouter) -> Result<(), RouterError> {
    all_memory(router).map(drop)
}

#[tokio::test]
async fn an_unread_response_counts_until_it_is_dropped() {
    let router = TestRouter::start().with_reply(" fine");
    let messages = json!([{ "role": "user", "content": "hi" }]);
    for (path, body) in [
        ("/v1/completions", json!({ "model": MODEL, "prompt": "hi" })),
        ("/v1/chat/completions", json!({ "model": MODEL, "messages": messages })),
        ("/v1/responses", json!({ "model": MODEL, "input": "hi" })),
        ("/v1/messages", json!({ "model": MODEL, "messages": messages, "max_tokens": 64 })),
    ] {
        let unread = router.open(path, &body).await;
        assert!(matches!(reserve_all(&router), Err(RouterError::Overloaded { .. })), "{path}");
        drop(unread);
        assert_eq!(reserve_all(&router), Ok(()), "{path}");
    }
}

/// Its choices share the prompt's log probabilities until the client has taken them.
#[tokio::test]
async fn an_echoed_prompt_counts_also_in_a_stream() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let body = |logprobs: Value| {
        let prompt = "one two three";
        json!({ "model": MODEL, "prompt": prompt, "echo": true, "logprobs": logprobs, "stream": true, "n": 2 })
    };
    let mut unread = router.open("/v1/completions", &body(json!(1))).await;
    assert!(unread.next().await.unwrap().unwrap().starts_with(b"data: "));
    assert!(matches!(reserve_all(&router), Err(RouterError::Overloaded { .. })));
    drop(unread);
    assert_eq!(reserve_all(&router), Ok(()));
    // Without log probabilities, an echo is no longer than the request.
    let mut unread = router.open("/v1/completions", &body(Value::Null)).await;
    assert!(unread.next().await.unwrap().unwrap().starts_with(b"data: "));
    assert_eq!(reserve_all(&router), Ok(()));
    drop(unread);
}

#[tokio::test]
async fn an_echo_beyond_the_limit_is_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    let body = |num_prompts: usize| {
        json!({
            "model": MODEL, "prompt": vec![vec![5; 1_400]; num_prompts], "echo": true, "logprobs": 20,
            "max_tokens": 0, "stream": true,
        })
    };
    let refused = router.post("/v1/completions", body(128).to_string()).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("echo")));
    assert!(refused.text().contains("179200 prompt tokens"), "{}", refused.text());
    assert!(router.lanes.take_submitted().is_empty());
    assert_eq!(router.post("/v1/completions", body(1).to_string()).await.status, 200);
    assert_eq!(reserve_all(&router), Ok(()));
}

#[tokio::test]
async fn a_stored_response_counts_while_it_is_read() {
    let router = TestRouter::start().with_reply(" fine");
    let stored = router.ok("/v1/responses", &json!({ "model": MODEL, "input": "hi" })).await;
    let path = format!("/v1/responses/{}", stored["id"].as_str().unwrap());
    let unread = router.open_request(Request::get(&path).body(Body::empty()).unwrap()).await;
    assert!(matches!(reserve_all(&router), Err(RouterError::Overloaded { .. })));
    drop(unread);
    let all = all_memory(&router).unwrap();
    assert_eq!(router.get(&path).await.status, 429);
    drop(all);
    assert_eq!(router.get(&path).await.json(), stored);
}
