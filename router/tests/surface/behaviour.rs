//! Effects of a request's fields, on the client's response and on the generation request.

use std::time::Instant;

use axum::body::Body;
use futures::StreamExt as _;
use http::Request;
use router::api::allowed_hosts::AllowedHosts;
use router::api::http::http_app;
use router::error::RouterError;
use serde_json::{Value, json};
use speculation::AcceptanceMode;
use tower::ServiceExt as _;

use crate::client::{
    Answer, CHAT, COMPLETIONS, END, KEEP_ALIVE, MAX_MODEL_LEN, MODEL, TestRouter, chunks, demo_encode,
    eventually, merged, post, streamed_text,
};
use crate::fake_lanes::Script;

fn completion(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "prompt": "hi", "max_tokens": 64 }), &fields)
}

fn text(answer: &Value, idx: usize) -> &str {
    answer["choices"][idx]["text"].as_str().unwrap()
}

#[tokio::test]
async fn a_conversation_is_rendered_and_gets_the_rest_of_the_window() {
    let router = TestRouter::start().with_reply(" fine");
    let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
    let messages =
        json!([{ "role": "developer", "content": "be brief" }, { "role": "user", "content": parts }]);
    let answer = router.ok(CHAT, &json!({ "model": MODEL, "messages": messages })).await;
    let generation = router.lanes.take_one();
    let expected = demo_encode("<|system|>\nbe brief<|end|>\n<|user|>\na\nb<|end|>\n<|assistant|>\n");
    assert_eq!(generation.prompt_ids, expected);
    assert_eq!(generation.spec.max_len, MAX_MODEL_LEN);
    assert_eq!(generation.spec.stop_token_ids, [END]);
    assert_eq!(answer["usage"]["prompt_tokens"], expected.len());
    assert_eq!(answer["id"], generation.request_id);
}

#[tokio::test]
async fn every_sampling_field_is_submitted() {
    let router = TestRouter::start().with_reply(" fine");
    let body = completion(json!({
        "temperature": 0.25, "top_k": 5, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5,
        "frequency_penalty": -1, "presence_penalty": 2, "logit_bias": { "7": -100, "8": 1.5 }, "min_tokens": 3,
        "seed": -2, "logprobs": 4, "stop_token_ids": [9, 0], "priority": 3, "task_type": "sql", "user": "somebody",
        "speculation": { "enabled": true, "num_draft_tokens": 6, "acceptance": "typical" },
        "metadata": { "a": 1 }, "store": false, "tools": [], "tool_choice": "none", "response_format": { "type": "text" },
    }));
    router.ok(COMPLETIONS, &body).await;
    let generation = router.lanes.take_one();
    let sampling = &generation.spec.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.25, 5, 0.5));
    assert_eq!((sampling.min_p, sampling.repetition_penalty), (0.125, 1.5));
    assert_eq!((sampling.frequency_penalty, sampling.presence_penalty, sampling.min_tokens), (-1.0, 2.0, 3));
    assert_eq!(sampling.logit_bias, [(7, -100.0), (8, 1.5)]);
    let spec = &generation.spec;
    assert_eq!((spec.seed, spec.logprobs, spec.prompt_logprobs), (u64::MAX - 1, Some(4), None));
    assert_eq!((spec.stop_token_ids.as_slice(), spec.priority), (&[END, 9][..], 3));
    assert_eq!((spec.prompt_len, spec.max_len), (2, 66));
    assert_eq!(
        (spec.acceptance, generation.speculation.acceptance),
        (AcceptanceMode::Typical, Some(AcceptanceMode::Typical))
    );
    assert_eq!(generation.speculation.enabled, Some(true));
    assert_eq!(generation.speculation.num_draft_tokens, Some(6));
    assert_eq!(generation.task_type, "sql");
}

#[tokio::test]
async fn ignored_eos_does_not_stop() {
    let router = TestRouter::start().with_reply(" fine");
    router.ok(COMPLETIONS, &completion(json!({ "ignore_eos": true, "stop_token_ids": [9] }))).await;
    assert_eq!(router.lanes.take_one().spec.stop_token_ids, [9]);
}

#[tokio::test]
async fn a_missing_seed_is_drawn_and_returned() {
    let router = TestRouter::start().with_reply(" fine");
    let first = router.ok(COMPLETIONS, &completion(json!({}))).await["seed"].as_i64().unwrap();
    assert_eq!(router.lanes.take_one().spec.seed, first as u64);
    assert!((0..1 << 53).contains(&first), "{first}");
    let second = router.ok(COMPLETIONS, &completion(json!({}))).await["seed"].as_i64().unwrap();
    assert_ne!(first, second);
    let random = router.ok(COMPLETIONS, &completion(json!({ "seed": -1 }))).await["seed"].as_i64().unwrap();
    assert!((0..1 << 53).contains(&random) && random != first, "{random}");
    router.lanes.take_submitted();
    let again = router.ok(COMPLETIONS, &completion(json!({ "seed": first }))).await;
    assert_eq!((again["seed"].as_i64().unwrap(), router.lanes.take_one().spec.seed), (first, first as u64));
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_choice() {
    let router = TestRouter::start().with_reply(" one two STOP three four five six seven eight");
    let body = completion(json!({ "stop": ["two ST"] }));
    let answer = router.ok(COMPLETIONS, &body).await;
    assert_eq!(text(&answer, 0), "0 one ");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let whole = demo_encode("0 one two STOP three four five six seven eight").len() as u64;
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < whole);

    let streamed =
        chunks(&router.events(COMPLETIONS, &completion(json!({ "stop": "two ST", "stream": true }))).await);
    assert_eq!(streamed_text(&streamed, 0), "0 one ");
    assert!(streamed.iter().all(|chunk| !chunk["choices"][0]["text"].as_str().unwrap().contains('t')));
}

#[tokio::test]
async fn a_stop_string_is_kept_on_request() {
    let router = TestRouter::start().with_reply(" one two STOP three four five six seven eight");
    let body = completion(json!({ "stop": ["two ST"], "include_stop_str_in_output": true }));
    let answer = router.ok(COMPLETIONS, &body).await;
    assert_eq!(text(&answer, 0), "0 one two ST");
    assert_eq!(answer["choices"][0]["stop_reason"], "two ST");
    let special = completion(json!({ "include_stop_str_in_output": true }));
    let answer = router.ok(COMPLETIONS, &special).await;
    assert_eq!(text(&answer, 0), "0 one two STOP three four five six seven eight", "without the end token");
}

#[tokio::test]
async fn special_tokens_are_spelled_out_on_request() {
    let router = TestRouter::start().with_reply(" one<|user|> two");
    for (fields, expected) in [
        (json!({}), "0 one two"),
        (json!({ "skip_special_tokens": true }), "0 one two"),
        (json!({ "skip_special_tokens": false }), "0 one<|user|> two"),
        (json!({ "skip_special_tokens": false, "stop": "r|> t" }), "0 one<|use"),
        (
            json!({ "skip_special_tokens": false, "include_stop_str_in_output": true }),
            "0 one<|user|> two<|end|>",
        ),
    ] {
        assert_eq!(text(&router.ok(COMPLETIONS, &completion(fields.clone())).await, 0), expected, "{fields}");
        let chat =
            merged(json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] }), &fields);
        let answer = router.ok(CHAT, &chat).await;
        assert_eq!(answer["choices"][0]["message"]["content"], expected, "{fields}");
    }
}

#[tokio::test]
async fn a_partial_stop_string_is_emitted_at_the_end() {
    let router = TestRouter::start().with_reply(" one two ST");
    let answer = router.ok(COMPLETIONS, &completion(json!({ "stop": ["STOP"] }))).await;
    assert_eq!(text(&answer, 0), "0 one two ST");
    let streamed =
        chunks(&router.events(COMPLETIONS, &completion(json!({ "stop": "STOP", "stream": true }))).await);
    assert_eq!(streamed_text(&streamed, 0), "0 one two ST");
}

#[tokio::test]
async fn choices_have_separate_texts() {
    let router = TestRouter::start().with_reply(" of three");
    let answer = router.ok(COMPLETIONS, &completion(json!({ "n": 3 }))).await;
    let texts: Vec<&str> = (0..3).map(|idx| text(&answer, idx)).collect();
    assert_eq!(texts, ["0 of three", "1 of three", "2 of three"]);
    let streamed = chunks(&router.events(COMPLETIONS, &completion(json!({ "n": 3, "stream": true }))).await);
    let streamed: Vec<String> = (0..3).map(|idx| streamed_text(&streamed, idx)).collect();
    assert_eq!(streamed, texts);
    // Every choice ends, and the prompt is counted once.
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
}

#[tokio::test]
async fn max_tokens_ends_the_choice_with_length() {
    let router = TestRouter::start().with_reply(" a long text that is cut somewhere");
    let answer = router.ok(COMPLETIONS, &completion(json!({ "max_tokens": 2 }))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    let default = router.ok(COMPLETIONS, &json!({ "model": MODEL, "prompt": "hi" })).await;
    assert!(default["usage"]["completion_tokens"].as_u64().unwrap() <= 16);
    let [two, default] = &router.lanes.take_submitted()[..] else { panic!("two requests") };
    assert_eq!((two.spec.max_len, default.spec.max_len), (4, 18));
}

#[tokio::test]
async fn an_echo_alone_is_not_submitted() {
    let router = TestRouter::start();
    let answer = router.ok(COMPLETIONS, &completion(json!({ "echo": true, "max_tokens": 0 }))).await;
    assert_eq!((text(&answer, 0), &answer["choices"][0]["finish_reason"]), ("hi", &json!("length")));
    let ids = completion(json!({ "prompt": demo_encode("hi there"), "echo": true, "max_tokens": 0 }));
    assert_eq!(text(&router.ok(COMPLETIONS, &ids).await, 0), "hi there");
    assert!(router.lanes.take_submitted().is_empty());
    let streamed = completion(json!({ "echo": true, "max_tokens": 0, "stream": true }));
    assert_eq!(streamed_text(&chunks(&router.events(COMPLETIONS, &streamed).await), 0), "hi");
}

#[tokio::test]
async fn excluded_tokens_are_submitted_as_ids() {
    let router = TestRouter::start().with_reply(" fine");
    let fields = json!({ "allowed_token_ids": [9, 7, 9, 4095], "bad_words": [" the", "garden fence"] });
    let body = completion(fields);
    router.ok(COMPLETIONS, &body).await;
    let sampling = router.lanes.take_one().spec.sampling;
    assert_eq!(sampling.allowed_token_ids, [7, 9, 4_095]);
    let expected = ["the", " the", "garden fence", " garden fence"].map(demo_encode);
    assert_eq!(sampling.bad_words, expected);
    router.ok(COMPLETIONS, &completion(json!({ "allowed_token_ids": null, "bad_words": [] }))).await;
    assert!(!router.lanes.take_one().spec.sampling.has_exclusions());
}

#[tokio::test]
async fn prompt_logprobs_alone_generate_no_tokens() {
    let router = TestRouter::start().with_reply("");
    let body = completion(
        json!({ "prompt": "one two three", "echo": true, "max_tokens": 0, "logprobs": 1, "n": 2 }),
    );
    let answer = router.ok(COMPLETIONS, &body).await;
    let generation = router.lanes.take_one();
    assert_eq!(generation.spec.max_len, generation.spec.prompt_len);
    assert_eq!(generation.spec.prompt_logprobs, Some(1));
    for idx in 0..2 {
        let logprobs = &answer["choices"][idx]["logprobs"];
        let values: Vec<Option<f64>> = serde_json::from_value(logprobs["token_logprobs"].clone()).unwrap();
        assert_eq!(values.len(), generation.prompt_ids.len());
        assert_eq!((values[0], values[1]), (None, Some(-1.25)));
        assert_eq!(text(&answer, idx), "one two three");
    }
}

#[tokio::test]
async fn the_task_type_comes_from_the_field_then_the_header_then_the_key() {
    let router = TestRouter::with_keys("sk-one alice task_type=chat priority=9\n").with_reply(" fine");
    for (field, header, expected) in
        [(Some("sql"), Some("code"), "sql"), (None, Some("code"), "code"), (None, None, "chat")]
    {
        let mut request = post(COMPLETIONS, completion(json!({ "task_type": field })).to_string());
        request.headers_mut().insert("authorization", "Bearer sk-one".parse().unwrap());
        if let Some(header) = header {
            request.headers_mut().insert("x-task-type", header.parse().unwrap());
        }
        let answer = router.send(request).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let generation = router.lanes.take_one();
        assert_eq!(generation.task_type, expected);
        assert_eq!(generation.spec.priority, 9, "limited by the priority of the key");
        assert_ne!(generation.spec.isolation_key, 0);
    }
}

#[tokio::test]
async fn requests_without_a_valid_key_are_refused() {
    let router = TestRouter::with_keys("sk-one\n").with_reply(" fine");
    for answer in [
        router.post_json(CHAT, &json!({})).await,
        router.post_json(COMPLETIONS, &json!({})).await,
        router.get("/v1/models").await,
        router.get("/v1/models/org/demo").await,
    ] {
        assert_eq!(answer.status, 401);
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    assert_eq!(router.get("/health/live").await.status, 200, "probes need no key");
}

/// Sends a request with a key.
async fn post_as(router: &TestRouter, key: &str, fields: Value) -> Answer {
    let mut request = post(COMPLETIONS, completion(fields).to_string());
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    router.send(request).await
}

#[tokio::test]
async fn a_rate_limited_key_gets_a_retry_delay() {
    let router =
        TestRouter::with_keys("sk-one alice requests_per_minute=60 tokens_per_minute=3\nsk-two bob\n")
            .with_reply(" fine");
    let first = post_as(&router, "sk-one", json!({})).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(first.headers["x-ratelimit-limit-requests"], "60");
    assert_eq!(first.headers["x-ratelimit-remaining-requests"], "59");
    assert_eq!(first.headers["x-ratelimit-limit-tokens"], "3");
    assert_eq!(first.headers["x-ratelimit-remaining-tokens"], "0", "prompt and output are charged");

    let second = post_as(&router, "sk-one", json!({ "stream": true })).await;
    assert_eq!(second.status, 429, "{}", second.text());
    let error = &second.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
    assert!(error["message"].as_str().unwrap().contains("limited to 3 tokens per minute"), "{error}");
    assert!(second.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() > 1);
    assert_eq!(second.headers["x-ratelimit-remaining-requests"], "59", "a refused request is not counted");

    let other = post_as(&router, "sk-two", json!({})).await;
    assert_eq!(other.status, 200, "keys have separate limits");
    assert!(!other.headers.contains_key("x-ratelimit-limit-requests"));
    assert_eq!(router.state.admission.available(), 1_024);
}

#[tokio::test]
async fn concurrent_requests_of_a_key_are_limited() {
    let router = TestRouter::with_keys("sk-one alice max_concurrent_requests=1\n");
    router.lanes.set_script(Script::Hang);
    let mut request = post(COMPLETIONS, completion(json!({ "stream": true })).to_string());
    request.headers_mut().insert("authorization", "Bearer sk-one".parse().unwrap());
    let open = http_app(router.state.clone(), AllowedHosts::Any).oneshot(request).await.unwrap();
    assert_eq!(open.status(), 200);

    let refused = post_as(&router, "sk-one", json!({})).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert_eq!(refused.headers["retry-after"], "1");
    assert!(refused.text().contains("limited to 1 concurrent requests"), "{}", refused.text());
    drop(open);
    let router = router.with_reply(" fine");
    for _ in 0..2 {
        assert_eq!(
            post_as(&router, "sk-one", json!({})).await.status,
            200,
            "a finished request is not counted"
        );
    }
}

#[tokio::test]
async fn a_model_that_a_key_may_not_use_is_not_found() {
    let router = TestRouter::with_keys("sk-one alice models=no-template\n").with_reply(" fine");
    let refused = post_as(&router, "sk-one", json!({})).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(post_as(&router, "sk-one", json!({ "model": "no-template" })).await.status, 200);
    let get = async |path: &str| {
        let request = Request::get(path).header("authorization", "Bearer sk-one");
        router.send(request.body(Body::empty()).unwrap()).await
    };
    let listed = get("/v1/models").await.json();
    assert_eq!(
        (listed["data"].as_array().unwrap().len(), &listed["data"][0]["id"]),
        (1, &json!("no-template"))
    );
    assert_eq!(get("/v1/models/org/demo").await.status, 404);
}

#[tokio::test]
async fn scheduler_errors_keep_their_status() {
    let router = TestRouter::start();
    let unavailable = RouterError::Unavailable { reason: "no target worker is ready".into() };
    let quarantined = RouterError::Quarantined { reason: "4 targets failed".into() };
    for (script, status, expected, is_final) in [
        (Script::Refuse(unavailable), 503, "no target worker is ready: retry after 1 s", false),
        (Script::Refuse(RouterError::Overloaded { what: "the lane" }), 429, "the lane is full", false),
        (
            Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }),
            500,
            "refused the sequence: a NaN",
            true,
        ),
        (Script::FailAfterOneSpan(quarantined), 500, "4 targets failed", true),
        (Script::FailAfterOneSpan(RouterError::SlowClient), 408, "reads too slowly", true),
        (Script::Panic, 500, "the request handler panicked", false),
        (Script::Vanish, 500, "the scheduler closed the stream early", false),
    ] {
        router.lanes.set_script(script);
        let message =
            json!({ "model": MODEL, "max_tokens": 9, "messages": [{ "role": "user", "content": "hi" }] });
        let of_messages = router.post_json("/v1/messages", &message).await;
        assert_eq!(of_messages.status, status, "{}", of_messages.text());
        let answer = router.post_json(COMPLETIONS, &completion(json!({}))).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{message}");
        for headers in [&answer.headers, &of_messages.headers] {
            assert_eq!(headers.contains_key("retry-after"), matches!(status, 429 | 503));
            let should_retry = headers.get("x-should-retry").map(|value| value.to_str().unwrap());
            assert_eq!(should_retry, is_final.then_some("false"), "{expected}");
        }
    }
    let page = router.metrics().await;
    // Two requests per script; the closed stream is an internal error, too.
    for (outcome, count) in [("internal", 4), ("unavailable", 2), ("slow_client", 2)] {
        let counted = format!(r#"outrider_requests_total{{protocol="http",outcome="{outcome}"}} {count}"#);
        assert!(page.contains(&counted), "{page}");
    }
    assert!(!page.contains(r#"outcome="client_gone""#), "a panic is not the client's: {page}");
    let router = router.with_reply(" fine");
    assert_eq!(text(&router.ok(COMPLETIONS, &completion(json!({}))).await, 0), "0 fine");
    assert_eq!(router.state.admission.available(), 1_024, "failed requests return their permits");
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_the_error() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }));
    let events = router.events(COMPLETIONS, &completion(json!({ "stream": true }))).await;
    let chunks = chunks(&events);
    assert!(chunks[0]["choices"][0]["text"].as_str().unwrap().starts_with('0'));
    assert_eq!(chunks.last().unwrap()["error"]["code"], "refused");
}

#[tokio::test]
async fn a_router_without_models_or_draining_is_unavailable() {
    let router = TestRouter::start().with_reply(" fine");
    router.state.catalog.publish([]);
    let answer = router.post_json(COMPLETIONS, &completion(json!({}))).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (503, &json!("unavailable")));
    assert_eq!(answer.headers["retry-after"], "1");

    let router = TestRouter::start().with_reply(" fine");
    router.state.lifetime.drain(std::time::Duration::ZERO).await;
    let answer = router.post_json(COMPLETIONS, &completion(json!({}))).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (503, &json!("draining")));
}

#[tokio::test]
async fn streams_end_with_an_error_after_the_grace_period() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let streaming = completion(json!({ "stream": true }));
    let (events, ()) = tokio::join!(router.events(COMPLETIONS, &streaming), async {
        eventually("submission", || router.state.admission.available() < 1_024).await;
        let outcome = router.state.lifetime.drain(std::time::Duration::from_millis(20)).await;
        assert_eq!(outcome, service::shutdown::ShutdownOutcome::TimedOut, "a drain waits for streams");
        router.state.lifetime.shut_down(std::time::Duration::from_secs(5)).await;
    });
    assert_eq!(chunks(&events).last().unwrap()["error"]["code"], "draining");
}

/// The scheduler ends with the process, and a stream may see that first.
#[tokio::test]
async fn a_stream_that_the_scheduler_closes_at_the_end_of_the_process_says_so() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Vanish);
    let mut stream = router.open(COMPLETIONS, &completion(json!({ "stream": true }))).await;
    router.state.lifetime.shut_down(std::time::Duration::ZERO).await;
    let mut last = String::new();
    while let Some(event) = stream.next().await {
        last = String::from_utf8(event.unwrap().to_vec()).unwrap();
    }
    assert!(last.contains(r#""code":"draining""#), "{last}");
}

#[tokio::test]
async fn an_idle_stream_is_kept_alive() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::Hang);
    let mut events = router.open(COMPLETIONS, &completion(json!({ "stream": true }))).await;
    let first = events.next().await.unwrap().unwrap();
    assert!(first.starts_with(b"data: {"), "{first:?}");
    for _ in 0..3 {
        let previous_at = Instant::now();
        assert_eq!(events.next().await.unwrap().unwrap(), ": keep-alive\n\n");
        // Half of the interval: this task may have read the previous event late.
        assert!(previous_at.elapsed() > KEEP_ALIVE / 2, "received after {:?}", previous_at.elapsed());
    }
}
