//! A whole response counts as buffered until its body has been sent or dropped, in every API.

use router::error::RouterError;
use router::pipeline::response_memory::{BUFFERED_BYTES_MAX, RESPONSE_BYTES_MAX};
use serde_json::json;

use crate::client::{MODEL, TestRouter};

/// Tries to reserve all memory for responses that are not streamed.
fn reserve_all(router: &TestRouter) -> Result<(), RouterError> {
    let reservations = (0..BUFFERED_BYTES_MAX / RESPONSE_BYTES_MAX).map(|_| -> Result<_, RouterError> {
        let mut reservation = router.state.response_memory.reserve();
        reservation.grow(RESPONSE_BYTES_MAX)?;
        Ok(reservation)
    });
    reservations.collect::<Result<Vec<_>, _>>().map(drop)
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
