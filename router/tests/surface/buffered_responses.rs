//! A whole response counts as buffered until its body has been sent or dropped, in every API.

use axum::body::Body;
use http::Request;
use router::error::RouterError;
use router::pipeline::response_memory::{BUFFERED_BYTES_MAX, MemoryReservation, RESPONSE_BYTES_MAX};
use serde_json::json;

use crate::client::{MODEL, TestRouter};

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
