//! Snapshots of responses, whole and streamed.

use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, MODEL, TestRouter, chunks, merged};

/// Replaces what differs between runs.
fn redacted(mut body: Value) -> Value {
    let id = body["id"].as_str().unwrap();
    let (prefix, unique) = id.split_once('-').unwrap();
    assert_eq!(unique.len(), 32, "{id}");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    body["id"] = json!(format!("{prefix}-[unique]"));
    body["created"] = json!("[unix seconds]");
    body
}

fn redacted_chunks(events: &[String]) -> Vec<Value> {
    let chunks = chunks(events);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]), "one id for the whole stream");
    chunks.into_iter().map(redacted).collect()
}

fn chat(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }] }), &fields)
}

fn completion(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "seed": -2, "prompt": "one two" }), &fields)
}

#[tokio::test]
async fn a_chat_completion() {
    let router = TestRouter::start().with_reply(" shines");
    insta::assert_json_snapshot!(redacted(router.ok(CHAT, &chat(json!({}))).await));
}

#[tokio::test]
async fn a_chat_completion_with_logprobs() {
    let router = TestRouter::start().with_reply(" \u{20ac}");
    let body = chat(json!({ "logprobs": true, "top_logprobs": 2, "max_tokens": 4 }));
    insta::assert_json_snapshot!(redacted(router.ok(CHAT, &body).await));
}

#[tokio::test]
async fn a_streamed_chat_completion() {
    let router = TestRouter::start().with_reply(" shines");
    let options = json!({ "include_usage": true, "include_speculation": true });
    let body = chat(json!({ "stream": true, "stream_options": options }));
    insta::assert_json_snapshot!(redacted_chunks(&router.events(CHAT, &body).await));
}

#[tokio::test]
async fn a_completion_of_two_prompts() {
    let router = TestRouter::start().with_reply(" end");
    let body = completion(json!({ "prompt": ["a", "b"], "n": 2 }));
    insta::assert_json_snapshot!(redacted(router.ok(COMPLETIONS, &body).await));
}

#[tokio::test]
async fn a_completion_with_echo_and_logprobs() {
    let router = TestRouter::start().with_reply(" end");
    let body = completion(json!({ "echo": true, "logprobs": 1 }));
    insta::assert_json_snapshot!(redacted(router.ok(COMPLETIONS, &body).await));
}

#[tokio::test]
async fn a_streamed_completion_with_echo_and_logprobs() {
    let router = TestRouter::start().with_reply(" end");
    let body = completion(json!({ "echo": true, "logprobs": 1, "stream": true }));
    insta::assert_json_snapshot!(redacted_chunks(&router.events(COMPLETIONS, &body).await));
}

#[tokio::test]
async fn models() {
    let router = TestRouter::start();
    insta::assert_json_snapshot!(router.get("/v1/models").await.json());
    let one = router.get("/v1/models/org/demo").await.json();
    assert_eq!(one, router.get("/v1/models").await.json()["data"][1]);
}

#[tokio::test]
async fn an_error() {
    let router = TestRouter::start();
    let answer = router.post_json(CHAT, &chat(json!({ "top_p": 2 }))).await;
    insta::assert_json_snapshot!(answer.json());
}

#[tokio::test]
async fn speculation_metrics_have_the_format_of_vllm() {
    let router = TestRouter::start().with_reply(" shines and shines");
    let whole = router.ok(COMPLETIONS, &completion(json!({ "max_tokens": 5 }))).await;
    // Two spans: two of two drafted tokens were accepted, then one of two.
    let expected = json!({ "speculative_decoding": {
        "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.75, "acceptance_histogram": [0, 1, 1],
        "num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 4, "num_spec_tokens": 2,
    }});
    assert_eq!(whole["metrics"], expected);
    let options = json!({ "include_usage": true });
    let body = completion(json!({ "max_tokens": 5, "stream": true, "stream_options": options }));
    let chunks = chunks(&router.events(COMPLETIONS, &body).await);
    let (last, pieces) = chunks.split_last().unwrap();
    assert_eq!((&last["metrics"], &last["usage"]), (&expected, &whole["usage"]));
    assert!(pieces.iter().all(|piece| piece.get("metrics").is_none()));
    let several = router.ok(COMPLETIONS, &completion(json!({ "n": 2 }))).await;
    assert_eq!(several.get("metrics"), None, "for one choice only");
    assert_eq!(several["usage"]["prompt_tokens_details"]["cached_tokens"], 1, "minimum over the choices");
}

#[tokio::test]
async fn every_chunk_reports_the_usage_so_far_on_request() {
    let router = TestRouter::start().with_reply(" shines and shines");
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    for (path, body) in
        [(COMPLETIONS, completion(json!({ "n": 2 }))), (CHAT, chat(json!({ "logprobs": true })))]
    {
        let mut body = body;
        body["stream"] = json!(true);
        body["stream_options"] = options.clone();
        let chunks = chunks(&router.events(path, &body).await);
        let (last, pieces) = chunks.split_last().unwrap();
        let tokens: Vec<u64> =
            pieces.iter().map(|piece| piece["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(tokens.is_sorted() && tokens[0] < tokens[tokens.len() - 1], "{tokens:?}");
        assert_eq!(pieces[pieces.len() - 1]["usage"], last["usage"], "no tokens follow the last piece");
        for piece in pieces {
            let usage = &piece["usage"];
            let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
            assert_eq!(usage["total_tokens"], sum);
        }
    }
    // vLLM only sends it together with the usage of the whole request.
    let options = json!({ "continuous_usage_stats": true });
    let body = completion(json!({ "stream": true, "stream_options": options }));
    let chunks = chunks(&router.events(COMPLETIONS, &body).await);
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn timings_are_reported_on_request() {
    let router = TestRouter::start().with_reply(" shines");
    let whole = router.ok(COMPLETIONS, &completion(json!({ "timings_per_token": true }))).await;
    let body = completion(json!({ "timings_per_token": true, "stream": true }));
    let streamed = chunks(&router.events(COMPLETIONS, &body).await).pop().unwrap();
    assert_eq!((&streamed["choices"], streamed.get("usage")), (&json!([]), None));
    for timings in [&whole["timings"], &streamed["timings"]] {
        let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
        for (name, count) in [
            ("cache_n", 1),
            ("prompt_n", prompt_tokens - 1),
            ("predicted_n", 4),
            ("draft_n", 4),
            ("draft_n_accepted", 2),
        ] {
            assert_eq!(timings[name], count, "{name}");
        }
        assert!(timings["prompt_ms"].as_f64().unwrap() >= 0.0 && timings["predicted_per_second"].is_number());
    }
    assert_eq!(router.ok(COMPLETIONS, &completion(json!({}))).await.get("timings"), None);
}
