//! Requests that must be refused, each with its status and an error in OpenAI's format that names the field
//! and the limit; the next request works.

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, MODEL, TestRouter, merged, post};

/// A valid request with some fields replaced.
fn with(path: &str, fields: Value) -> (String, String) {
    let body = match path {
        CHAT => json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] }),
        _ => json!({ "model": MODEL, "prompt": "hi" }),
    };
    (path.to_owned(), merged(body, &fields).to_string())
}

async fn check(router: &TestRouter, request: Request<Body>, status: u16, param: Value, expected: &str) {
    let description = format!("{} {} -> {expected}", request.method(), request.uri());
    let answer = router.send(request).await;
    assert_eq!(answer.status.as_u16(), status, "{description}: {}", answer.text());
    let error = answer.json()["error"].clone();
    let message = error["message"].as_str().unwrap_or_default();
    assert!(message.contains(expected), "{description}: {message}");
    assert_eq!(error["param"], param, "{description}: {message}");
    assert!(error["type"].is_string() && error.get("code").is_some(), "{description}: {error}");
    assert!(!message.contains('\n'), "{description}: {message}");
    assert!(router.lanes.take_submitted().is_empty(), "{description}: it was submitted");
}

async fn next_request_works(router: &TestRouter) {
    let body = json!({ "model": MODEL, "prompt": "hi" });
    assert_eq!(router.ok(COMPLETIONS, &body).await["choices"][0]["text"], "0 fine");
    router.lanes.take_submitted();
}

/// Sends valid requests, each with these fields replaced; all must be refused.
pub(crate) async fn check_table(rows: Vec<(&str, Value, Value, &str)>) {
    let router = TestRouter::start().with_reply(" fine");
    for (path, fields, param, expected) in rows {
        let (path, body) = with(path, fields);
        check(&router, post(&path, body), 400, param, expected).await;
        next_request_works(&router).await;
    }
}

#[tokio::test]
async fn numbers_out_of_bounds() {
    check_table(vec![
        (
            COMPLETIONS,
            json!({"max_tokens": -2}),
            json!("max_tokens"),
            "max_tokens must be between 0 and 4294967295, not -2",
        ),
        (COMPLETIONS, json!({"max_tokens": 0}), json!("max_tokens"), "at least 1, or 0 together with echo"),
        (
            CHAT,
            json!({"max_completion_tokens": 0}),
            json!("max_completion_tokens"),
            "max_completion_tokens must be at least 1",
        ),
        (
            CHAT,
            json!({"max_completion_tokens": 1, "max_tokens": 2}),
            json!("max_completion_tokens"),
            "send one of them",
        ),
        (
            COMPLETIONS,
            json!({"min_tokens": 17}),
            json!("min_tokens"),
            "min_tokens must be between 0 and 16, not 17",
        ),
        (
            CHAT,
            json!({"temperature": -1}),
            json!("temperature"),
            "temperature must be between 0 and 2, not -1",
        ),
        (CHAT, json!({"temperature": 2.5}), json!("temperature"), "not 2.5"),
        (CHAT, json!({"top_p": 2}), json!("top_p"), "top_p must be between 0 and 1, not 2"),
        (CHAT, json!({"top_k": -2}), json!("top_k"), "top_k must be between -1"),
        (CHAT, json!({"min_p": 1.5}), json!("min_p"), "min_p must be between 0 and 1"),
        (CHAT, json!({"repetition_penalty": 0}), json!("repetition_penalty"), "between 0.01 and 10, not 0"),
        (CHAT, json!({"frequency_penalty": 3}), json!("frequency_penalty"), "between -2 and 2, not 3"),
        (CHAT, json!({"presence_penalty": -3}), json!("presence_penalty"), "between -2 and 2, not -3"),
    ])
    .await;
}

#[tokio::test]
async fn excluded_tokens_and_scores_of_prompts_out_of_bounds() {
    check_table(vec![
        (
            CHAT,
            json!({"allowed_token_ids": []}),
            json!("allowed_token_ids"),
            "allowed_token_ids has 0 ids, it must have 1 to 8192",
        ),
        (
            CHAT,
            json!({"allowed_token_ids": vec![5; 8193]}),
            json!("allowed_token_ids"),
            "has 8193 ids, it must have 1 to 8192",
        ),
        (
            CHAT,
            json!({"allowed_token_ids": [5, 4096]}),
            json!("allowed_token_ids"),
            "allowed_token_ids[1] is 4096, but token ids of this model are 0 to 4095",
        ),
        (
            CHAT,
            json!({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
            json!("allowed_token_ids"),
            "allowed_token_ids may leave no token to generate",
        ),
        (CHAT, json!({"bad_words": vec!["x"; 257]}), json!("bad_words"), "257 words, at most 256"),
        (
            CHAT,
            json!({"bad_words": ["x".repeat(8193)]}),
            json!("bad_words"),
            "8193 bytes in all words, at most 8192",
        ),
        (CHAT, json!({"bad_words": ["x", " "]}), json!("bad_words"), "bad_words[1] must not be empty"),
        (CHAT, json!({"prompt_logprobs": 21}), json!("prompt_logprobs"), "between 0 and 20, not 21"),
        (CHAT, json!({"prompt_logprobs": -1}), json!("prompt_logprobs"), "between 0 and 20, not -1"),
        (
            CHAT,
            json!({"prompt_logprobs": 1, "stream": true}),
            json!("prompt_logprobs"),
            "prompt_logprobs is not supported in streams",
        ),
        (
            COMPLETIONS,
            json!({"prompt_logprobs": 1, "logprobs": 2, "echo": true}),
            json!("prompt_logprobs"),
            "prompt_logprobs is 1 but logprobs is 2: with echo they must be equal",
        ),
    ])
    .await;
}

#[tokio::test]
async fn lists_and_counts_out_of_bounds() {
    let long = "x".repeat(513);
    let many = |count: usize| vec!["x"; count];
    let bias =
        |count: u32| (0..count).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    check_table(vec![
        (CHAT, json!({"n": 0}), json!("n"), "n must be between 1 and 128, not 0"),
        (CHAT, json!({"n": 129}), json!("n"), "n must be between 1 and 128, not 129"),
        (COMPLETIONS, json!({"n": 64, "prompt": ["a", "b", "c"]}), json!("n"), "192 sequences, at most 128"),
        (COMPLETIONS, json!({"n": 2, "best_of": 3}), json!("best_of"), "best_of must equal n (2), not 3"),
        (COMPLETIONS, json!({"prompt": many(129)}), json!("prompt"), "129 prompts, at most 128"),
        (CHAT, json!({"stop": many(100)}), json!("stop"), "stop has 100 strings, at most 64"),
        (
            CHAT,
            json!({"stop": vec!["x".repeat(512); 17]}),
            json!("stop"),
            "stop has 8704 bytes in all strings, at most 8192",
        ),
        (CHAT, json!({"stop": ["a", ""]}), json!("stop"), "stop[1] has 0 bytes"),
        (CHAT, json!({"stop": long}), json!("stop"), "513 bytes, a stop string must have 1 to 512"),
        (
            CHAT,
            json!({"stop_token_ids": [4096]}),
            json!("stop_token_ids"),
            "stop_token_ids[0] is 4096, but token ids of this model are 0 to 4095",
        ),
        (CHAT, json!({"stop_token_ids": vec![1; 129]}), json!("stop_token_ids"), "129 ids, at most 128"),
        (CHAT, json!({"logit_bias": {"5000": 1}}), json!("logit_bias"), "logit_bias[5000] is 5000"),
        (CHAT, json!({"logit_bias": {"5": 101}}), json!("logit_bias[5]"), "between -100 and 100, not 101"),
        (CHAT, json!({"logit_bias": {"5": 1, "05": 1}}), json!("logit_bias"), "logit_bias[5] appears twice"),
        (CHAT, json!({"logit_bias": bias(1025)}), json!("logit_bias"), "1025 entries, at most 1024"),
        (
            CHAT,
            json!({"logprobs": true, "top_logprobs": 21}),
            json!("top_logprobs"),
            "between 0 and 20, not 21",
        ),
        (CHAT, json!({"top_logprobs": 2}), json!("top_logprobs"), "only allowed when logprobs is true"),
        (
            COMPLETIONS,
            json!({"logprobs": 21}),
            json!("logprobs"),
            "logprobs must be between 0 and 20, not 21",
        ),
        (CHAT, json!({"priority": 256}), json!("priority"), "priority must be between 0 and 255"),
        (CHAT, json!({"task_type": "Sql!"}), json!("task_type"), "task_type must have 1 to 64"),
        (
            CHAT,
            json!({"speculation": {"acceptance": "hope"}}),
            json!("speculation.acceptance"),
            "one of coupled, rejection, typical, not `hope`",
        ),
        (
            CHAT,
            json!({"speculation": {"num_draft_tokens": 33}}),
            json!("speculation.num_draft_tokens"),
            "between 0 and 32, not 33",
        ),
    ])
    .await;
}

#[tokio::test]
async fn invalid_prompts() {
    let long = "word ".repeat(2_100);
    let long = long.as_str();
    check_table(vec![
        (COMPLETIONS, json!({"prompt": ""}), json!("prompt"), "prompt must not be empty"),
        (COMPLETIONS, json!({"prompt": []}), json!("prompt"), "prompt is required and must not be empty"),
        (COMPLETIONS, json!({"prompt": null}), json!("prompt"), "prompt is required"),
        (COMPLETIONS, json!({"prompt": [[]]}), json!("prompt"), "prompt must not be empty"),
        (COMPLETIONS, json!({"prompt": ["a", ""]}), json!("prompt[1]"), "prompt[1] must not be empty"),
        (COMPLETIONS, json!({"prompt": [5, -1]}), json!("prompt"), "prompt[1] is -1, but token ids"),
        (COMPLETIONS, json!({"prompt": [[1], [4096]]}), json!("prompt[1]"), "prompt[1][0] is 4096"),
        (COMPLETIONS, json!({"prompt": long}), json!("prompt"), "maximum context length is 2048 tokens"),
        (COMPLETIONS, json!({"max_tokens": 2048}), json!("max_tokens"), "2048 output tokens were requested"),
        (CHAT, json!({"messages": []}), json!("messages"), "messages must not be empty"),
        (CHAT, json!({"messages": null}), json!("messages"), "messages is required"),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]}), json!("messages"), "shorten the prompt"),
        (CHAT, json!({"messages": [{"role": "king", "content": "x"}]}), json!("messages[0].role"), "not `king`"),
        (CHAT, json!({"messages": [{"role": "function", "content": "x"}]}), json!("messages[0].role"), "no earlier message has a function_call"),
        (CHAT, json!({"messages": [{"role": "user"}]}), json!("messages[0].content"), "messages[0].content is required"),
        (CHAT, json!({"messages": [{"content": "x"}]}), json!("messages[0]"), "missing field `role`"),
        (CHAT, json!({"messages": [{"role": "user", "content": "x", "name": "a b"}]}), json!("messages[0].name"), "messages[0].name must have"),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}), json!("messages[0].content"), "`image_url` is not supported, only text"),
        (CHAT, json!({"model": "no-template"}), json!("messages"), "no chat template"),
        (CHAT, json!({"model": ""}), json!("model"), "model is required"),
        (CHAT, json!({"model": null}), json!("model"), "model is required"),
    ])
    .await;
}

#[tokio::test]
async fn fields_that_would_have_no_effect() {
    check_table(vec![
        (COMPLETIONS, json!({"functions": [{}]}), json!("functions"), "a field of /v1/chat/completions"),
        (CHAT, json!({"modalities": ["text", "audio"]}), json!("modalities"), "modalities is not supported"),
        (CHAT, json!({"verbosity": "high"}), json!("verbosity"), "verbosity is not supported"),
        (
            COMPLETIONS,
            json!({"reasoning_effort": "high"}),
            json!("reasoning_effort"),
            "a field of /v1/chat/completions",
        ),
        (COMPLETIONS, json!({"suffix": "end"}), json!("suffix"), "suffix is not supported"),
        (CHAT, json!({"prompt": "x"}), json!("prompt"), "a field of /v1/completions"),
        (CHAT, json!({"echo": true}), json!("echo"), "a field of /v1/completions"),
        (COMPLETIONS, json!({"messages": []}), json!("messages"), "a field of /v1/chat/completions"),
        (COMPLETIONS, json!({"top_logprobs": 1}), json!("top_logprobs"), "a field of /v1/chat/completions"),
        (CHAT, json!({"max_token": 5}), json!("max_token"), "max_token is not a field of this endpoint"),
        (CHAT, json!({"stream_options": {}}), json!("stream_options"), "only allowed when stream is true"),
        (
            CHAT,
            json!({"stream": true, "stream_options": {"usage": true}}),
            json!("stream_options.usage"),
            "usage is not a field",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}),
            json!("messages[0].tool_calls"),
            "only allowed in messages of role assistant",
        ),
    ])
    .await;
}

#[tokio::test]
async fn values_of_the_wrong_type() {
    check_table(vec![
        (
            CHAT,
            json!({"temperature": "hot"}),
            json!("temperature"),
            "temperature: invalid type: string \"hot\", expected f64 at line 1 column",
        ),
        (
            CHAT,
            json!({"n": 1.5}),
            json!("n"),
            "n: invalid type: floating point `1.5`, expected a whole number",
        ),
        (CHAT, json!({"seed": u64::MAX}), json!("seed"), "expected a whole number from"),
        (CHAT, json!({"stop_token_ids": [1, 2.5]}), json!("stop_token_ids[1]"), "expected a whole number"),
        (COMPLETIONS, json!({"logprobs": 1.5}), json!("logprobs"), "a whole number for a completion"),
        (COMPLETIONS, json!({"prompt": [[1.5]]}), json!("prompt[0][0]"), "expected a token id"),
        (
            CHAT,
            json!({"speculation": {"num_draft_tokens": 0.5}}),
            json!("speculation.num_draft_tokens"),
            "expected a whole number",
        ),
        (CHAT, json!({"stream": "yes"}), json!("stream"), "expected a boolean"),
        (CHAT, json!({"seed": "x"}), json!("seed"), "seed: invalid type"),
        (CHAT, json!({"stop": 5}), json!("stop"), "expected a string or a list of strings"),
        (CHAT, json!({"stop": [5]}), json!("stop[0]"), "stop[0]: invalid type: integer `5`"),
        (
            CHAT,
            json!({"logprobs": 5}),
            json!("logprobs"),
            "a boolean for a chat completion: send the number as top_logprobs",
        ),
        (COMPLETIONS, json!({"logprobs": true}), json!("logprobs"), "a whole number for a completion"),
        (CHAT, json!({"logprobs": "5"}), json!("logprobs"), "expected a boolean for a chat completion"),
        (CHAT, json!({"logit_bias": {"x": 1}}), json!("logit_bias"), "key `x` is not a token id"),
        (CHAT, json!({"messages": "hi"}), json!("messages"), "messages: invalid type: string"),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": 5}]}),
            json!("messages[0].content"),
            "expected a string or a list of text parts",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            json!("messages[0].content"),
            "missing field `text`",
        ),
        (
            COMPLETIONS,
            json!({"prompt": 5}),
            json!("prompt"),
            "expected a string, a list of strings, a list of token ids",
        ),
        (COMPLETIONS, json!({"prompt": ["a", 5]}), json!("prompt"), "must contain items of one type"),
        (COMPLETIONS, json!({"prompt": [[1], "a"]}), json!("prompt"), "must contain items of one type"),
        (COMPLETIONS, json!({"prompt": [[1, "a"]]}), json!("prompt[0][1]"), "expected a token id"),
        (COMPLETIONS, json!({"prompt": [1.5]}), json!("prompt[0]"), "expected a string, a token id"),
        (CHAT, json!({"messages": [["user", "x"]]}), json!("messages[0]"), "expected an object"),
        (COMPLETIONS, json!({"speculation": [true]}), json!("speculation"), "expected an object"),
        (
            COMPLETIONS,
            json!({"speculation": {"enabled": 1}}),
            json!("speculation.enabled"),
            "expected a boolean",
        ),
    ])
    .await;
}

#[tokio::test]
async fn exclusions_of_the_wrong_type() {
    check_table(vec![
        (CHAT, json!({"bad_words": "x"}), json!("bad_words"), "expected a sequence"),
        (CHAT, json!({"bad_words": [5]}), json!("bad_words[0]"), "expected a string"),
        (CHAT, json!({"allowed_token_ids": [1.5]}), json!("allowed_token_ids[0]"), "expected a whole number"),
    ])
    .await;
}

#[tokio::test]
async fn invalid_bodies() {
    let router = TestRouter::start().with_reply(" fine");
    let valid = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    for (body, expected) in [
        (
            b"{\"model\": ".to_vec(),
            "the body is not valid JSON: EOF while parsing a value at line 1 column 10",
        ),
        (b"".to_vec(), "the body is not valid JSON"),
        (b"{\"model\": \"a\"} x".to_vec(), "the body is not valid JSON: trailing characters"),
        (
            b"[]".to_vec(),
            "the body does not have the expected shape: invalid type: sequence, expected an object",
        ),
        (b"\"text\"".to_vec(), "the body does not have the expected shape"),
        (b"{\"model\": \"\xff\"}".to_vec(), "the body is not valid UTF-8: invalid sequence at byte 11"),
        ([b"[".repeat(100_000)].concat(), "the body"),
        (b"{\"temperature\": 1e400}".to_vec(), "the body has a number that no 64-bit float can hold"),
        (valid.replace("\"hi\"", "\"hi\", \"prompt\": \"ho\"").into_bytes(), "duplicate field `prompt`"),
    ] {
        let answer = router.post(COMPLETIONS, body).await;
        assert_eq!(answer.status, 400, "{expected}: {}", answer.text());
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{message}");
        next_request_works(&router).await;
    }
}

#[tokio::test]
async fn wrong_routes_methods_and_content_types() {
    let router = TestRouter::start().with_reply(" fine");
    let valid = json!({ "model": MODEL, "prompt": "hi" }).to_string();
    let untyped = Request::post(COMPLETIONS).body(Body::from(valid.clone())).unwrap();
    check(&router, untyped, 415, Value::Null, "must be application/json, not ``").await;
    let form =
        Request::post(COMPLETIONS).header("content-type", "text/plain").body(Body::from(valid.clone()));
    check(&router, form.unwrap(), 415, Value::Null, "not `text/plain`").await;
    let get = Request::get(COMPLETIONS).body(Body::empty()).unwrap();
    check(&router, get, 405, Value::Null, "method GET is not allowed on /v1/completions").await;
    check(&router, post("/v1/audio/speech", "{}"), 404, Value::Null, "no route for POST /v1/audio/speech")
        .await;
    let unknown = with(COMPLETIONS, json!({ "model": "nobody" }));
    check(&router, post(COMPLETIONS, unknown.1), 404, json!("model"), "the model `nobody` does not exist")
        .await;
    let model = Request::get("/v1/models/nobody").body(Body::empty()).unwrap();
    check(&router, model, 404, json!("model"), "the model `nobody` does not exist").await;
    let header = Request::post(COMPLETIONS)
        .header("content-type", "application/json; charset=utf-8")
        .header("x-task-type", "Caf\u{e9}")
        .body(Body::from(valid));
    check(&router, header.unwrap(), 400, json!("x-task-type"), "must be plain ASCII").await;
    next_request_works(&router).await;
}

#[tokio::test]
async fn an_oversized_body_is_answered_on_a_real_socket() {
    let router = TestRouter::start().with_reply(" fine");
    let address = router.listen_http().await;
    let client = reqwest::Client::new();
    let url = format!("http://{address}{COMPLETIONS}");
    let huge = json!({ "model": MODEL, "prompt": "x".repeat(5 << 20) }).to_string();
    let request = client.post(&url).header("content-type", "application/json").body(huge);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 413);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["message"], "the request body is larger than 2097152 bytes");
    let valid = json!({ "model": MODEL, "prompt": "hi" });
    assert_eq!(client.post(&url).json(&valid).send().await.unwrap().status(), 200);
}
