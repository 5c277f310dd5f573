//! Over HTTP, in OpenAI's error format.

use anyhow::{Context as _, ensure};
use reqwest::{Method, RequestBuilder};
use serde_json::{Map, Value, json};
use tests::http_client::{CHAT, COMPLETIONS, HttpAnswer};
use tests::pair::MODEL;

use super::{Fixture, PROMPT, valid_request};

/// The expected answer to an invalid request.
struct HttpRow<'a> {
    name: &'a str,
    status: u16,
    param: Option<&'a str>,
    words: &'a str,
}

impl Fixture {
    /// Sends a request that must be rejected in OpenAI's error format.
    async fn check_rejected(&self, request: RequestBuilder, row: &HttpRow<'_>) -> anyhow::Result<()> {
        let HttpRow { name, status, param, words } = row;
        let answer = HttpAnswer::of(request).await.with_context(|| (*name).to_owned())?;
        ensure!(answer.status == *status, "{name}: {} instead of {status}: {}", answer.status, answer.text);
        let error = answer.json()?["error"].take();
        let message =
            error["message"].as_str().with_context(|| format!("{name}: no message in {}", answer.text))?;
        ensure!(message.contains(words) && !message.contains('\n'), "{name}: `{words}` is not in: {message}");
        ensure!(error["param"] == json!(param), "{name}: param is {}: {message}", error["param"]);
        ensure!(error["type"] == "invalid_request_error" && error.get("code").is_some(), "{name}: {error}");
        self.next_request_works(name).await
    }
}

/// A valid request with some fields replaced.
fn with(path: &str, fields: Value) -> Value {
    let mut body = match path {
        CHAT => json!({ "model": MODEL, "messages": [{ "role": "user", "content": PROMPT }] }),
        _ => valid_request(),
    };
    if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
        body.extend(fields);
    }
    body
}

/// Path, replaced fields, the parameter named in the error, text in the message.
type FieldRow = (&'static str, Value, &'static str, &'static str);

/// Invalid models and prompts.
fn prompts() -> Vec<FieldRow> {
    let over_window = "word ".repeat(2_100);
    vec![
        (COMPLETIONS, json!({ "prompt": "" }), "prompt", "prompt must not be empty"),
        (COMPLETIONS, json!({ "prompt": [] }), "prompt", "prompt is required and must not be empty"),
        (COMPLETIONS, json!({ "prompt": over_window }), "prompt", "maximum context length is 2048 tokens"),
        (
            COMPLETIONS,
            json!({ "prompt": [5, 4096] }),
            "prompt",
            "prompt[1] is 4096, but token ids of this model are 0 to 4095",
        ),
        (COMPLETIONS, json!({ "prompt": [-1] }), "prompt", "prompt[0] is -1"),
        (COMPLETIONS, json!({ "prompt": 5 }), "prompt", "expected a string, a list of strings"),
        (CHAT, json!({ "messages": [] }), "messages", "messages must not be empty"),
        (CHAT, json!({ "messages": "hi" }), "messages", "invalid type: string"),
        (
            CHAT,
            json!({ "messages": [{ "role": "king", "content": "x" }] }),
            "messages[0].role",
            "must be one of system",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": over_window }] }),
            "messages",
            "maximum context length",
        ),
        (COMPLETIONS, json!({ "model": 5 }), "model", "model: invalid type: integer"),
        (COMPLETIONS, json!({ "model": null }), "model", "model is required"),
    ]
}

/// Invalid sampling parameters.
fn sampling_params() -> Vec<FieldRow> {
    let many_biases: Map<String, Value> = (0..1_025).map(|id| (id.to_string(), json!(1))).collect();
    vec![
        (COMPLETIONS, json!({ "max_tokens": -2 }), "max_tokens", "max_tokens must be between 0 and"),
        (COMPLETIONS, json!({ "max_tokens": 5_000 }), "max_tokens", "maximum context length is 2048 tokens"),
        (COMPLETIONS, json!({ "max_tokens": "5" }), "max_tokens", "max_tokens: invalid type: string"),
        (CHAT, json!({ "max_completion_tokens": 0 }), "max_completion_tokens", "must be at least 1"),
        (COMPLETIONS, json!({ "min_tokens": 9 }), "min_tokens", "min_tokens must be between 0 and 8, not 9"),
        (CHAT, json!({ "temperature": -1 }), "temperature", "temperature must be between 0 and 2, not -1"),
        (CHAT, json!({ "temperature": "hot" }), "temperature", "temperature: invalid type: string \"hot\""),
        (CHAT, json!({ "top_p": 2 }), "top_p", "top_p must be between 0 and 1, not 2"),
        (CHAT, json!({ "top_k": -2 }), "top_k", "top_k must be between -1"),
        (CHAT, json!({ "min_p": -0.1 }), "min_p", "min_p must be between 0 and 1, not -0.1"),
        (CHAT, json!({ "frequency_penalty": 3 }), "frequency_penalty", "between -2 and 2, not 3"),
        (CHAT, json!({ "presence_penalty": -3 }), "presence_penalty", "between -2 and 2, not -3"),
        (CHAT, json!({ "repetition_penalty": 0 }), "repetition_penalty", "between 0.01 and 10, not 0"),
        (CHAT, json!({ "seed": "x" }), "seed", "seed: invalid type"),
        (CHAT, json!({ "logit_bias": { "x": 1 } }), "logit_bias", "key `x` is not a token id"),
        (CHAT, json!({ "logit_bias": { "4096": 1 } }), "logit_bias", "logit_bias[4096] is 4096"),
        (CHAT, json!({ "logit_bias": { "5": 101 } }), "logit_bias[5]", "between -100 and 100, not 101"),
        (CHAT, json!({ "logit_bias": many_biases }), "logit_bias", "1025 entries, at most 1024"),
    ]
}

/// Invalid counts, stop conditions and output options.
fn output_options() -> Vec<FieldRow> {
    let stops = vec!["x"; 100];
    vec![
        (CHAT, json!({ "n": 0 }), "n", "n must be between 1 and 128, not 0"),
        (CHAT, json!({ "n": 1_000 }), "n", "n must be between 1 and 128, not 1000"),
        (CHAT, json!({ "n": 1.5 }), "n", "n: invalid type: floating point"),
        (CHAT, json!({ "stop": stops }), "stop", "stop has 100 strings, at most 64"),
        (CHAT, json!({ "stop": "x".repeat(513) }), "stop", "513 bytes, a stop string must have 1 to 512"),
        (CHAT, json!({ "stop": 5 }), "stop", "expected a string or a list of strings"),
        (CHAT, json!({ "stop_token_ids": [4096] }), "stop_token_ids", "stop_token_ids[0] is 4096"),
        (CHAT, json!({ "stream": "yes" }), "stream", "expected a boolean"),
        (CHAT, json!({ "stream_options": {} }), "stream_options", "only allowed when stream is true"),
        (COMPLETIONS, json!({ "logprobs": 21 }), "logprobs", "logprobs must be between 0 and 20, not 21"),
        (CHAT, json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs", "between 0 and 20, not 21"),
    ]
}

/// Invalid values of outrider's own fields, and unknown fields.
fn own_fields() -> Vec<FieldRow> {
    vec![
        (CHAT, json!({ "task_type": "Sql!" }), "task_type", "task_type must have 1 to 64"),
        (CHAT, json!({ "priority": 256 }), "priority", "priority must be between 0 and 255"),
        (
            CHAT,
            json!({ "speculation": { "acceptance": "hope" } }),
            "speculation.acceptance",
            "one of coupled, rejection, typical, not `hope`",
        ),
        (
            CHAT,
            json!({ "speculation": { "num_draft_tokens": 33 } }),
            "speculation.num_draft_tokens",
            "between 0 and 32, not 33",
        ),
        (CHAT, json!({ "speculation": { "enabled": 1 } }), "speculation.enabled", "expected a boolean"),
        (
            CHAT,
            json!({ "speculation": { "speed": 1 } }),
            "speculation.speed",
            "speculation.speed is not a field of this endpoint",
        ),
        (CHAT, json!({ "max_token": 5 }), "max_token", "max_token is not a field of this endpoint"),
        (CHAT, json!({ "tools": [{ "type": "function" }] }), "tools[0].function", "must be an object"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_name_fields_with_invalid_values() -> anyhow::Result<()> {
    let fixture = Fixture::start().await?;
    for (path, fields, param, words) in
        [prompts(), sampling_params(), output_options(), own_fields()].concat()
    {
        let name = format!("{path} with {param}: {words}");
        let row = HttpRow { name: &name, status: 400, param: Some(param), words };
        let request = fixture.http.request(Method::POST, path).json(&with(path, fields));
        fixture.check_rejected(request, &row).await?;
    }
    fixture.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_bodies_and_routes_are_rejected() -> anyhow::Result<()> {
    let fixture = Fixture::start().await?;
    let http = &fixture.http;
    let post = |body: Vec<u8>| {
        http.request(Method::POST, COMPLETIONS).header("content-type", "application/json").body(body)
    };
    let large = json!({ "model": MODEL, "prompt": "x".repeat(5 << 20) });
    let unknown = with(COMPLETIONS, json!({ "model": "nobody" }));
    let text = http
        .request(Method::POST, COMPLETIONS)
        .header("content-type", "text/plain")
        .body(valid_request().to_string());
    let none = None::<&str>;
    let rows = [
        (post(b"{\"model\": ".to_vec()), "broken JSON", 400, none, "the body is not valid JSON: EOF"),
        (post(Vec::new()), "no body", 400, none, "the body is not valid JSON"),
        (post(b"[]".to_vec()), "a list", 400, none, "the body does not have the expected shape"),
        (post(vec![b'['; 200_000]), "a deep list", 400, none, "the body"),
        (post(b"{\"model\": \"\xff\"}".to_vec()), "invalid UTF-8", 400, none, "invalid sequence at byte 11"),
        (
            post(br#"{"model": "\ud800"}"#.to_vec()),
            "a lone surrogate",
            400,
            none,
            "the body is not valid JSON",
        ),
        (post(large.to_string().into_bytes()), "5 MB", 413, none, "larger than 2097152 bytes"),
        (text, "another type", 415, none, "must be application/json, not `text/plain`"),
        (
            http.request(Method::POST, COMPLETIONS).json(&unknown),
            "unknown model",
            404,
            Some("model"),
            "`nobody` does not exist",
        ),
        (
            http.request(Method::GET, "/v1/models/nobody"),
            "unknown model requested",
            404,
            Some("model"),
            "`nobody` does not exist",
        ),
        (
            http.request(Method::GET, COMPLETIONS),
            "another method",
            405,
            none,
            "method GET is not allowed on /v1/completions",
        ),
        (
            http.request(Method::POST, "/v1/nowhere"),
            "no such route",
            404,
            none,
            "no route for POST /v1/nowhere",
        ),
        (
            http.request(Method::POST, "/v1/embeddings").json(&json!({ "model": MODEL, "input": "x" })),
            "embeddings",
            400,
            Some("model"),
            "does not support embeddings",
        ),
    ];
    for (request, name, status, param, words) in rows {
        fixture.check_rejected(request, &HttpRow { name, status, param, words }).await?;
    }
    fixture.cluster.stop().await;
    Ok(())
}
