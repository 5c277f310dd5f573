//! What all errors have in common: their size, the ids of their requests, and the shape of their API. Paths
//! and headers that no handler reads are covered, too.

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};

use crate::client::{
    ALIAS, Answer, CHAT, COMPLETIONS, MAX_MODEL_LEN, MESSAGES, MODEL, RESPONSES, TestRouter, demo_encode,
    merged, post,
};

const COUNT: &str = "/v1/messages/count_tokens";

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

/// A valid body of a route.
fn body(path: &str) -> Value {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    match path {
        COMPLETIONS => json!({ "model": MODEL, "prompt": "hi" }),
        RESPONSES => json!({ "model": MODEL, "input": "hi" }),
        MESSAGES => json!({ "model": MODEL, "messages": messages, "max_tokens": 5 }),
        "/detokenize" => json!({ "model": MODEL, "tokens": [5] }),
        _ => json!({ "model": MODEL, "messages": messages }),
    }
}

fn with(path: &str, fields: Value) -> Value {
    merged(body(path), &fields)
}

fn error_of(answer: &Answer) -> Value {
    answer.json()["error"].clone()
}

fn message_of(answer: &Answer) -> String {
    error_of(answer)["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn errors_repeat_only_part_of_a_long_value() {
    let router = TestRouter::start();
    let long = format!("\u{20ac}{}\u{20ac}", "\u{e9}".repeat(50_000));
    for (path, fields, expected) in [
        (CHAT, json!({ "model": long }), "does not exist; GET /v1/models lists"),
        (CHAT, json!({ "messages": [{ "role": long, "content": "x" }] }), "messages[0].role must be one of"),
        (CHAT, json!({ "temperature": long }), "expected f64 at line 1 column"),
        (CHAT, json!({ long.as_str(): 1 }), "is not a field of this endpoint, at line 1 column"),
        (CHAT, json!({ "response_format": { "type": long } }), "response_format.type must be one of"),
        (RESPONSES, json!({ "previous_response_id": long }), "is not stored at this router"),
        (
            RESPONSES,
            json!({ "input": [{ "role": "user", "content": "x", long.as_str(): 1 }] }),
            "not a field",
        ),
        (MESSAGES, json!({ "model": long }), "does not exist; GET /v1/models lists"),
        (MESSAGES, json!({ "messages": [{ "role": "user", "content": [{ "type": long }] }] }), "text block"),
    ] {
        let answer = router.post(path, with(path, fields).to_string()).await;
        assert!(answer.status.is_client_error(), "{path} {expected}: {}", answer.status);
        let (message, error) = (message_of(&answer), error_of(&answer));
        assert!(answer.body.len() < 2_000, "{path} {expected}: {} bytes", answer.body.len());
        assert!(message.len() <= 1_024 && message.contains('\u{2026}'), "{path} {expected}: {message}");
        assert!(message.contains(expected), "{path}: {expected} is not in {message}");
        assert!(error["param"].as_str().is_none_or(|param| param.len() <= 256), "{path}: {error}");
    }
    let media_type = Request::post(CHAT).header("content-type", "x".repeat(9_000));
    let segment = "x".repeat(9_000);
    for request in [
        media_type.body(Body::from("{}")).unwrap(),
        request("GET", &format!("/{segment}"), &[]),
        request("GET", &format!("/v1/models/{segment}"), &[]),
        request("GET", &format!("{RESPONSES}/{segment}"), &[]),
    ] {
        let uri = request.uri().path()[..20.min(request.uri().path().len())].to_owned();
        let answer = router.send(request).await;
        assert!(answer.status.is_client_error() && answer.body.len() < 2_000, "{uri}: {}", answer.body.len());
    }
}

#[tokio::test]
async fn every_response_has_the_id_of_its_request() {
    let router = TestRouter::start().with_reply(" fine");
    let mut ids = Vec::new();
    for (method, path) in [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/nobody"),
        ("GET", "/v1/responses/resp_0"),
        ("DELETE", "/v1/responses/resp_0"),
        ("GET", "/nowhere"),
        ("GET", CHAT),
        ("PUT", MESSAGES),
        ("GET", "/health"),
        ("GET", "/health/live"),
        ("GET", "/version"),
        ("GET", "/metrics"),
    ] {
        let own = router.send(request(method, path, &[])).await;
        ids.push(own.headers["x-request-id"].to_str().unwrap().to_owned());
        let sent = router.send(request(method, path, &[("x-request-id", "mine-1")])).await;
        assert_eq!(sent.headers["x-request-id"], "mine-1", "{path}");
        let bad = router.send(request(method, path, &[("x-request-id", "a b")])).await;
        assert!(bad.headers["x-request-id"].to_str().unwrap().starts_with("req_"), "{path}");
        assert_eq!(bad.headers.get_all("x-request-id").iter().count(), 1, "{path}");
    }
    for path in [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, "/tokenize", "/detokenize"] {
        for body in [body(path).to_string(), "{".to_owned()] {
            let answer = router.post(path, body).await;
            ids.push(answer.headers["x-request-id"].to_str().unwrap().to_owned());
            let own = answer.headers.get("request-id");
            let expected = path.starts_with(MESSAGES).then(|| &answer.headers["x-request-id"]);
            assert_eq!(own, expected, "{path}: Anthropic's header is only on Anthropic's routes");
        }
    }
    let num_ids = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), num_ids, "ids are unique");
}

#[tokio::test]
async fn errors_of_anthropics_routes_have_its_shape() {
    let router = TestRouter::with_keys("sk-one\n").with_reply(" fine");
    let keyed = |method: &str, path: &str, body: &str, headers: &[(&str, &str)]| {
        let mut request = request(method, path, headers);
        request.headers_mut().insert("x-api-key", "sk-one".parse().unwrap());
        request.headers_mut().insert("content-type", "application/json".parse().unwrap());
        *request.body_mut() = Body::from(body.to_owned());
        request
    };
    let unknown = with(MESSAGES, json!({ "model": "nobody" })).to_string();
    let valid = body(MESSAGES).to_string();
    for (request, status, kind) in [
        (keyed("GET", MESSAGES, "", &[]), 405, "invalid_request_error"),
        (keyed("GET", COUNT, "", &[]), 405, "invalid_request_error"),
        (keyed("POST", "/v1/messages/batches", "{}", &[]), 404, "not_found_error"),
        (keyed("POST", "/v1/messages/", "{}", &[]), 404, "not_found_error"),
        (keyed("POST", MESSAGES, "{", &[]), 400, "invalid_request_error"),
        (keyed("POST", COUNT, "{", &[]), 400, "invalid_request_error"),
        (keyed("POST", MESSAGES, &unknown, &[]), 404, "not_found_error"),
        (keyed("POST", MESSAGES, &unknown, &[("x-request-id", "mine-1")]), 404, "not_found_error"),
        (keyed("POST", MESSAGES, &valid, &[("x-request-id", "a b")]), 400, "invalid_request_error"),
        (keyed("POST", MESSAGES, &valid, &[("content-encoding", "gzip")]), 415, "invalid_request_error"),
        (request("POST", MESSAGES, &[]), 401, "authentication_error"),
    ] {
        let description = format!("{} {} {status}", request.method(), request.uri());
        let is_named = request.headers().get("x-request-id").is_some_and(|id| id == "mine-1");
        let answer = router.send(request).await;
        let body = answer.json();
        assert_eq!((answer.status.as_u16(), &body["type"]), (status, &json!("error")), "{body}");
        assert_eq!(body["error"]["type"], kind, "{description}: {body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        assert_eq!(body["error"].as_object().unwrap().len(), 2, "{description}: {body}");
        assert_eq!(body["request_id"], answer.headers["x-request-id"].to_str().unwrap(), "{description}");
        assert_eq!(answer.headers["request-id"], answer.headers["x-request-id"], "{description}");
        assert_eq!(is_named, answer.headers["request-id"] == "mine-1", "{description}");
        assert_eq!(answer.headers["content-type"], "application/json", "{description}");
    }
    // Other routes keep OpenAI's shape.
    let other = router.send(keyed("GET", "/v1/messages-of-others", "", &[])).await;
    assert_eq!(
        (error_of(&other)["code"].as_str(), &other.json()["request_id"]),
        (Some("route_not_found"), &Value::Null)
    );
}

#[tokio::test]
async fn a_path_with_invalid_encoding_is_refused_in_the_shape_of_the_api() {
    let router = TestRouter::start();
    for (method, path) in [
        ("GET", "/v1/models/%ff"),
        ("GET", "/v1/models/a%2fb%c3"),
        ("GET", "/v1/responses/%ff"),
        ("DELETE", "/v1/responses/%ff"),
    ] {
        let answer = router.send(request(method, path, &[])).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert_eq!(error_of(&answer)["type"], "invalid_request_error", "{path}");
        assert!(message_of(&answer).contains("the path is not valid UTF-8"), "{path}: {}", answer.text());
    }
    for (method, path, param) in [
        ("POST", "/admin/workers/%ff/drain", Value::Null),
        ("DELETE", "/admin/workers/%ff/drain", Value::Null),
        ("POST", "/admin/workers/a:1/drain?moves=true", json!("moves")),
        ("POST", "/admin/workers/a:1/drain?move=perhaps", json!("move")),
    ] {
        let answer = router.admin(request(method, path, &[])).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        let error = error_of(&answer);
        assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &param), "{path}");
    }
    let router = TestRouter::with_keys("sk-one\n");
    assert_eq!(router.get("/v1/models/%ff").await.status, 401, "the key is checked first");
    assert_eq!(router.admin(request("POST", "/admin/workers/%ff/drain", &[])).await.status, 401);
}

#[tokio::test]
async fn a_stored_response_is_retrieved_whole_and_other_query_parameters_are_refused() {
    let router = TestRouter::start().with_reply(" fine");
    let stored = router.ok(RESPONSES, &body(RESPONSES)).await;
    let path = format!("{RESPONSES}/{}", stored["id"].as_str().unwrap());
    for query in
        ["", "?", "?stream=false", "?include_obfuscation=true", "?stream=false&include_obfuscation=false"]
    {
        let answer = router.get(&format!("{path}{query}")).await;
        assert_eq!((answer.status.as_u16(), answer.json()), (200, stored.clone()), "{query}");
    }
    for (query, param) in [
        ("?stream=true", "stream"),
        ("?stream", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?include[]=reasoning.encrypted_content", "include[]"),
        ("?include%5B%5D=x&stream=false", "include[]"),
        ("?stream=false&colour=1", "colour"),
        ("?%ff=1", "\u{fffd}"),
    ] {
        let answer = router.get(&format!("{path}{query}")).await;
        assert_eq!((answer.status.as_u16(), &error_of(&answer)["param"]), (400, &json!(param)), "{query}");
        assert!(
            message_of(&answer).contains(&format!("query parameter {param} is not supported")),
            "{query}"
        );
    }
    assert_eq!(router.get(&path).await.json(), stored);
}

#[tokio::test]
async fn compressed_bodies_are_refused_by_their_encoding() {
    let router = TestRouter::start().with_reply(" fine");
    for path in [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, "/tokenize", "/detokenize"] {
        let send = async |encodings: &[&str]| {
            let mut request = post(path, body(path).to_string());
            for encoding in encodings {
                request.headers_mut().append("content-encoding", encoding.parse().unwrap());
            }
            router.send(request).await
        };
        for encodings in
            [&["identity"][..], &["Identity"], &[""], &[" identity , identity "], &["identity"; 2]]
        {
            assert_eq!(send(encodings).await.status, 200, "{path} {encodings:?}");
        }
        for (encodings, named) in [
            (&["gzip"][..], "gzip"),
            (&["identity, br"], "identity, br"),
            (&["identity", "zstd"], "zstd"),
            (&["compress"], "compress"),
        ] {
            let answer = send(encodings).await;
            assert_eq!(answer.status, 415, "{path} {encodings:?}: {}", answer.text());
            let expected =
                format!("content-encoding must be identity, not `{named}`: send the body uncompressed");
            assert!(message_of(&answer).contains(&expected), "{path} {encodings:?}: {}", answer.text());
        }
    }
}

#[tokio::test]
async fn a_request_longer_than_the_window_is_told_what_to_change() {
    let router = TestRouter::start();
    let long = "word ".repeat(2_100);
    let long_chat = json!([{ "role": "user", "content": long }]);
    let full = demo_encode("hi")[0];
    let nearly_full = vec![full; MAX_MODEL_LEN as usize - 3];
    let alone = "tokens for prompt and output, but the prompt alone has";
    for (path, fields, param, expected) in [
        (CHAT, json!({ "messages": long_chat }), "messages", alone),
        (CHAT, json!({ "messages": long_chat, "max_tokens": 7 }), "messages", alone),
        (COMPLETIONS, json!({ "prompt": long }), "prompt", alone),
        (RESPONSES, json!({ "input": long }), "input", alone),
        (
            COMPLETIONS,
            json!({ "max_tokens": 2_048 }),
            "max_tokens",
            "and 2048 output tokens were requested: shorten the prompt or lower max_tokens",
        ),
        (
            CHAT,
            json!({ "max_completion_tokens": 2_048 }),
            "max_completion_tokens",
            "shorten the prompt or lower max_completion_tokens",
        ),
        (RESPONSES, json!({ "max_output_tokens": 2_048 }), "max_output_tokens", "or lower max_output_tokens"),
        (
            COMPLETIONS,
            json!({ "prompt": nearly_full }),
            "max_tokens",
            "but 2045 prompt tokens and 16 output tokens (the default of max_tokens) were requested: shorten the \
             prompt or send a lower max_tokens",
        ),
        (
            COMPLETIONS,
            json!({ "prompt": nearly_full, "model": ALIAS }),
            "max_tokens",
            "and 5 output tokens (the default",
        ),
    ] {
        let answer = router.post(path, with(path, fields).to_string()).await;
        let message = message_of(&answer);
        assert!(answer.status == 400 && message.contains(expected), "{path} {expected}: {message}");
        let ends_with_prompt = message.ends_with(": shorten the prompt");
        assert_eq!(ends_with_prompt, expected == alone, "{path}: {message}");
        let error = error_of(&answer);
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("context_length_exceeded")));
    }
}

#[tokio::test]
async fn tokens_are_counted_beyond_the_window() {
    let router = TestRouter::start();
    for num_words in [1, 2_040, 2_100, 5_000] {
        let messages = json!([{ "role": "user", "content": "word ".repeat(num_words) }]);
        let body = json!({ "model": MODEL, "messages": messages });
        let count = router.ok("/tokenize", &body).await["count"].clone();
        assert_eq!(router.ok(COUNT, &body).await, json!({ "input_tokens": count }), "{num_words} words");
    }
    let messages = json!([{ "role": "user", "content": "x".repeat(1 << 20) }]);
    let answer = router.post_json(COUNT, &json!({ "model": MODEL, "messages": messages })).await;
    assert!(answer.status == 400 && answer.text().contains("shorten the prompt"), "{}", answer.text());
}

#[tokio::test]
async fn fields_have_the_names_of_their_api() {
    let router = TestRouter::start();
    let limit = |field: &str| format!("{field} must be at least 1");
    for (path, fields, expected) in [
        (MESSAGES, json!({ "stop_sequences": ["a", ""] }), "stop_sequences[1] has 0 bytes".to_owned()),
        (MESSAGES, json!({ "stop_sequences": vec!["x"; 65] }), "stop_sequences has 65 strings".to_owned()),
        (CHAT, json!({ "stop": ["a", ""] }), "stop[1] has 0 bytes".to_owned()),
        (RESPONSES, json!({ "stop": vec!["x"; 65] }), "stop has 65 strings".to_owned()),
        (MESSAGES, json!({ "max_tokens": 0 }), limit("max_tokens")),
        (CHAT, json!({ "max_tokens": 0 }), limit("max_tokens")),
        (RESPONSES, json!({ "max_output_tokens": 0 }), limit("max_output_tokens")),
        (COMPLETIONS, json!({ "max_tokens": 0 }), limit("max_tokens") + ", or 0 together with echo"),
        (MESSAGES, json!({ "max_tokens": -2 }), "max_tokens must be between 1 and".to_owned()),
        (CHAT, json!({ "max_tokens": -2 }), "max_tokens must be between 1 and".to_owned()),
        (COMPLETIONS, json!({ "max_tokens": -2 }), "max_tokens must be between 0 and".to_owned()),
    ] {
        let message = message_of(&router.post(path, with(path, fields).to_string()).await);
        assert!(message.starts_with(&expected), "{path}: {expected} is not in {message}");
        assert!(message.contains("echo") == expected.contains("echo"), "{path}: {message}");
    }
}

#[tokio::test]
async fn fields_of_other_servers_are_refused_with_the_name_to_send() {
    let router = TestRouter::start();
    for (path, field, expected) in [
        (CHAT, "enable_thinking", Some("chat_template_kwargs.enable_thinking (chat only)")),
        (CHAT, "max_new_tokens", Some("max_tokens")),
        (COMPLETIONS, "n_predict", Some("max_tokens")),
        (COMPLETIONS, "top_n_tokens", Some("logprobs")),
        (COMPLETIONS, "repeat_penalty", Some("repetition_penalty")),
        (CHAT, "stop_sequences", Some("stop")),
        (RESPONSES, "n_predict", Some("max_output_tokens")),
        (RESPONSES, "response_format", Some("text.format")),
        (MESSAGES, "response_format", Some("output_config.format")),
        (MESSAGES, "stop", Some("stop_sequences")),
        (RESPONSES, "repeat_penalty", None),
        (MESSAGES, "enable_thinking", None),
    ] {
        let answer = router.post(path, with(path, json!({ field: 1 })).to_string()).await;
        let message = message_of(&answer);
        let start = format!("{field} is not a field of this endpoint, at line 1 column");
        assert!(answer.status == 400 && message.starts_with(&start), "{path}: {message}");
        let name = message.split_once(": send ").map(|(_, name)| name);
        assert_eq!(name, expected, "{path}: {message}");
    }
}

#[tokio::test]
async fn variables_of_the_router_are_refused_in_chat_template_kwargs() {
    let router = TestRouter::start().with_reply(" fine");
    let field = "chat_template_kwargs";
    for path in [CHAT, "/v1/chat/completions/render", "/tokenize"] {
        for (name, value) in [
            ("messages", json!([])),
            ("add_generation_prompt", json!(false)),
            ("continue_final_message", json!(true)),
            ("bos_token", json!("x")),
            ("eos_token", json!("x")),
            ("tools", json!([{ "type": "function" }])),
            ("documents", json!([{ "title": "x" }])),
        ] {
            let answer = router.post(path, with(path, json!({ field: { name: value } })).to_string()).await;
            let error = error_of(&answer);
            let param = format!("{field}.{name}");
            assert_eq!((answer.status.as_u16(), &error["param"]), (400, &json!(param)), "{path}: {error}");
            assert!(message_of(&answer).starts_with(&format!("{param} ")), "{path}: {error}");
        }
        let off = json!({ "add_generation_prompt": true, "tools": null, "documents": [], "enable_thinking": false });
        let answer = router.post(path, with(path, json!({ field: off })).to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
}

#[tokio::test]
async fn nested_and_repeated_fields_are_named_with_their_path() {
    let router = TestRouter::start();
    for (body, param) in [
        (r#"{"model": "org/demo", "speculation": {"speed": 1}}"#, "speculation.speed"),
        (r#"{"messages": [{"role": "user", "content": "x", "colour": 1}]}"#, "messages[0].colour"),
        (r#"{"messages": [{"role": "assistant", "content": "x", "prefix": true}]}"#, "messages[0].prefix"),
        (r#"{"messages": [{"role": "assistant", "content": "x", "partial": true}]}"#, "messages[0].partial"),
        (r#"{"colour": 1}"#, "colour"),
        (r#"{"model": "a", "model": "b"}"#, "model"),
        (
            r#"{"stream_options": {"include_usage": true, "include_usage": true}}"#,
            "stream_options.include_usage",
        ),
    ] {
        let answer = router.post(CHAT, body).await;
        let error = error_of(&answer);
        assert_eq!((answer.status.as_u16(), &error["param"]), (400, &json!(param)), "{body}: {error}");
        assert!(message_of(&answer).contains(param), "{body}: {error}");
    }
}
