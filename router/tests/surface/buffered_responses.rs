//! A whole response counts as buffered until its body has been sent or dropped, in every API.

use axum::body::Body;
use futures::StreamExt as _;
use http::Request;
use router::error::RouterError;
use router::pipeline::buffer_memory::{
    BUFFERED_BYTES_MAX, BufferMemory, MemoryReservation, RESPONSE_BYTES_MAX,
};
use serde_json::{Value, json};

use crate::client::{MODEL, TestRouter};
use crate::fake_lanes::Script;

/// Tries to reserve all memory.
fn all_of(memory: &BufferMemory) -> Result<Vec<MemoryReservation>, RouterError> {
    let reservations = (0..BUFFERED_BYTES_MAX / RESPONSE_BYTES_MAX).map(|_| -> Result<_, RouterError> {
        let mut reservation = memory.reserve();
        reservation.grow(RESPONSE_BYTES_MAX)?;
        Ok(reservation)
    });
    reservations.collect()
}

/// Fails while a response counts as buffered.
fn reserve_all(router: &TestRouter) -> Result<(), RouterError> {
    all_of(&router.state.response_memory).map(drop)
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

/// Choices that are ahead of the prompt's log probabilities wait for them.
#[tokio::test]
async fn events_that_wait_for_the_scored_prompt_count() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::ScoreLate(" fine".to_owned()));
    let body = json!({
        "model": MODEL, "prompt": "one two three", "echo": true, "logprobs": 1, "stream": true, "n": 3,
    });
    let last = async |is_full: bool| {
        let mut stream = router.open("/v1/completions", &body).await;
        let mut others = Vec::new();
        for num_bytes in [1 << 20, 1 << 10, 1 << 4].into_iter().filter(|_| is_full) {
            loop {
                let mut other = router.state.response_memory.reserve();
                if other.grow(num_bytes).is_err() {
                    break;
                }
                others.push(other);
            }
        }
        let mut last = String::new();
        while let Some(event) = stream.next().await {
            last = String::from_utf8(event.unwrap().to_vec()).unwrap();
        }
        last
    };
    let failed = last(true).await;
    assert!(failed.contains("the memory for buffered responses"), "{failed}");
    let complete = last(false).await;
    assert!(complete.contains("[DONE]"), "{complete}");
    assert_eq!(reserve_all(&router), Ok(()));
}

/// The events at the end of a streamed response repeat its log probabilities if there is memory for them. The
/// response ends as its text does in any case.
#[tokio::test]
async fn log_probabilities_are_repeated_while_memory_is_left() {
    let router = TestRouter::start().with_reply(" fine and more");
    let ask = async |max_output_tokens: u32| {
        let include = ["message.output_text.logprobs"];
        let body = json!({
            "model": MODEL, "input": "hi", "seed": 7, "stream": true, "include": include, "top_logprobs": 2,
            "max_output_tokens": max_output_tokens,
        });
        let answer = router.post("/v1/responses", body.to_string()).await;
        let data = answer.text().lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str::<Value>(data).unwrap()).collect::<Vec<Value>>()
    };
    let scores_of_deltas = |events: &[Value]| -> Vec<Value> {
        let lists = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        lists.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect()
    };
    let last_scores = |events: &[Value]| -> Vec<Value> {
        let [.., text, content, item, whole] = events else { panic!("{events:?}") };
        vec![
            text["logprobs"].clone(),
            content["part"]["logprobs"].clone(),
            item["item"]["content"][0]["logprobs"].clone(),
            whole["response"]["output"][0]["content"][0]["logprobs"].clone(),
        ]
    };
    for (max_output_tokens, end) in [(64, "response.completed"), (3, "response.incomplete")] {
        let complete = ask(max_output_tokens).await;
        let scores = scores_of_deltas(&complete);
        assert!(scores.len() >= 3 && scores.iter().all(|entry| entry["token"].is_string()), "{scores:?}");
        assert_eq!(last_scores(&complete), vec![json!(scores); 4]);
        // Too little for the first token, or for a later one.
        for num_free in [0, 1_024, 2_048] {
            let mut held = all_of(&router.state.response_memory).unwrap();
            held.pop();
            let mut rest = router.state.response_memory.reserve();
            rest.grow(RESPONSE_BYTES_MAX - num_free).unwrap();
            let events = ask(max_output_tokens).await;
            assert_eq!(events.last().unwrap()["type"], end, "{num_free}");
            assert_eq!(scores_of_deltas(&events), scores, "{num_free}");
            assert_eq!(last_scores(&events), vec![json!([]); 4], "{num_free}");
            let id = events.last().unwrap()["response"]["id"].as_str().unwrap();
            drop((held, rest));
            let stored = router.get(&format!("/v1/responses/{id}")).await.json();
            assert_eq!(stored, events.last().unwrap()["response"]);
        }
        assert_eq!(reserve_all(&router), Ok(()));
    }
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
    let all = all_of(&router.state.response_memory).unwrap();
    assert_eq!(router.get(&path).await.status, 429);
    drop(all);
    assert_eq!(router.get(&path).await.json(), stored);
}
