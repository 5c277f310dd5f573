//! vLLM's endpoints in addition to OpenAI's.

use std::sync::Arc;

use axum::body::Body;
use http::Request;
use serde_json::{Value, json};
use text::{ModelText, asset};

use crate::calls_or_json::submitted_schema;
use crate::client::{
    ALIAS, COMPLETIONS, END, MAX_MODEL_LEN, MODEL, TestRouter, demo_encode, demo_text, entry, merged,
    model_file,
};
use crate::tools::{TEMPLATE, router_with, weather};

fn message(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

#[tokio::test]
async fn text_is_tokenized_and_detokenized() {
    let router = TestRouter::start();
    for text in ["one two", "", "\u{20ac} and \u{1F600}\n"] {
        let answer = router.ok("/tokenize", &json!({ "model": MODEL, "prompt": text })).await;
        assert_eq!(answer["tokens"], json!(demo_encode(text)));
        assert_eq!(answer["count"], demo_encode(text).len());
        assert_eq!((&answer["max_model_len"], &answer["token_strs"]), (&json!(MAX_MODEL_LEN), &Value::Null));
        let back = router.ok("/detokenize", &json!({ "model": MODEL, "tokens": answer["tokens"] })).await;
        assert_eq!(back, json!({ "prompt": text }));
    }
    let body = json!({ "model": MODEL, "prompt": "one two", "return_token_strs": true });
    let strings = router.ok("/tokenize", &body).await["token_strs"].clone();
    let strings: Vec<&str> =
        strings.as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(strings.concat(), "one two");
}

#[tokio::test]
async fn a_conversation_is_tokenized_as_for_generation() {
    let router = TestRouter::start().with_reply(" fine");
    let body = json!({ "model": MODEL, "messages": message("hi") });
    let count = router.ok("/tokenize", &body).await["count"].clone();
    let answer = router.ok("/v1/chat/completions", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens"], count);
    let tokens = router.ok("/tokenize", &body).await["tokens"].clone();
    router.lanes.take_submitted();
    router.ok("/v1/chat/completions", &body).await;
    assert_eq!(json!(router.lanes.take_one().prompt_ids), tokens);
    let rendered = router.ok("/v1/chat/completions/render", &body).await;
    assert_eq!(rendered["token_ids"], tokens);
    assert!(router.lanes.take_submitted().is_empty(), "rendering runs nothing");
}

#[tokio::test]
async fn tools_are_tokenized_as_for_generation() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let body = json!({ "model": MODEL, "messages": message("hi"), "tools": [weather()] });
    let tokens = router.ok("/tokenize", &body).await["tokens"].clone();
    router.ok("/v1/chat/completions", &body).await;
    assert_eq!(json!(router.lanes.take_one().prompt_ids), tokens);
    let without = json!({ "model": MODEL, "messages": message("hi"), "tools": [] });
    assert_ne!(router.ok("/tokenize", &without).await["tokens"], tokens);
}

/// A text that a client rendered itself has its special tokens.
#[tokio::test]
async fn special_tokens_are_added_to_texts_unless_the_client_declines() {
    let mut tokenizer: Value = serde_json::from_slice(&model_file(asset::TOKENIZER)).unwrap();
    let begin = json!({ "SpecialToken": { "id": "<|system|>", "type_id": 0 } });
    let processor = &mut tokenizer["post_processor"];
    processor["single"].as_array_mut().unwrap().insert(0, begin);
    processor["special_tokens"]["<|system|>"] =
        json!({ "id": "<|system|>", "ids": [3], "tokens": ["<|system|>"] });
    let tokenizer = tokenizer.to_string();
    let text = ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(tokenizer.as_bytes()));
    let router = TestRouter::start().with_reply(" fine");
    router.state.catalog.publish([entry(MODEL, Arc::new(text.unwrap()))]);
    let ids = demo_encode("one two");
    let begun = [vec![3], ids.clone()].concat();
    for (value, expected) in [(Value::Null, &begun), (json!(true), &begun), (json!(false), &ids)] {
        let body = json!({ "model": MODEL, "prompt": "one two", "add_special_tokens": value });
        router.ok(COMPLETIONS, &body).await;
        assert_eq!(&router.lanes.take_one().prompt_ids, expected, "{value}");
        assert_eq!(router.ok("/tokenize", &body).await["tokens"], json!(expected), "{value}");
    }
}

#[tokio::test]
async fn a_format_may_have_its_schema_where_llama_cpp_reads_it() {
    let router = TestRouter::start().with_reply("{}");
    let schema = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    for format in [
        json!({ "type": "json_object", "schema": schema }),
        json!({ "type": "json_schema", "schema": schema }),
        json!({ "type": "json_schema", "json_schema": { "schema": schema } }),
    ] {
        router.ok(COMPLETIONS, &json!({ "model": MODEL, "prompt": "hi", "response_format": format })).await;
        assert_eq!(submitted_schema(&router), schema, "{format}");
    }
}

#[tokio::test]
async fn special_tokens_are_spelled_out_in_detokenized_text() {
    let router = TestRouter::start();
    let ids = router.ok("/tokenize", &json!({ "model": MODEL, "messages": message("hi") })).await;
    let text = router.ok("/detokenize", &json!({ "model": MODEL, "tokens": ids["tokens"] })).await;
    let again = router
        .ok("/tokenize", &json!({ "model": MODEL, "prompt": text["prompt"], "add_special_tokens": false }))
        .await;
    assert_eq!(again["tokens"], ids["tokens"]);
}

#[tokio::test]
async fn tokenizer_info_describes_the_tokenizer() {
    let router = TestRouter::start();
    let refused = router.get("/tokenizer_info").await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let body = json!({ "model": MODEL, "tokens": [END] });
    let end = router.ok("/detokenize", &body).await["prompt"].clone();
    // The alias names the same model.
    router.state.catalog.publish([entry(MODEL, demo_text())]);
    assert_eq!(router.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 2);
    let info = router.get("/tokenizer_info").await.json();
    assert_eq!((&info["eos_token"], &info["model_max_length"]), (&end, &json!(MAX_MODEL_LEN)));
    assert!(info["chat_template"].as_str().unwrap().contains("messages"), "{info}");
}

#[tokio::test]
async fn metrics_are_served_to_clients_only_without_keys() {
    let router = TestRouter::start().with_reply(" fine");
    router.ok(COMPLETIONS, &json!({ "model": MODEL, "prompt": "hi" })).await;
    let page = router.get("/metrics").await;
    assert_eq!((page.status.as_u16(), page.text()), (200, router.metrics().await.as_str()));
    assert!(page.text().contains("vllm:generation_tokens_total"), "{}", page.text());
    let router = TestRouter::with_keys("sk-one\n");
    let request = Request::get("/metrics").header("authorization", "Bearer sk-one").body(Body::empty());
    for answer in [router.get("/metrics").await, router.send(request.unwrap()).await] {
        assert_eq!(answer.status, 404, "{}", answer.text());
    }
}

#[tokio::test]
async fn prompts_are_rendered_with_their_sampling_parameters() {
    let router = TestRouter::start();
    let body = json!({
        "model": MODEL, "prompt": ["one two", "three"], "max_tokens": 7, "seed": 5, "temperature": 0.5, "n": 2,
        "stop": "x", "logit_bias": { "7": 2.5 }, "stream": true, "skip_special_tokens": false,
        "allowed_token_ids": [9, 8], "bad_words": ["one"],
    });
    let rendered = router.ok("/v1/completions/render", &body).await;
    let rendered = rendered.as_array().unwrap();
    assert_eq!(rendered.len(), 2);
    assert_eq!(rendered[0]["token_ids"], json!(demo_encode("one two")));
    assert_eq!(rendered[1]["token_ids"], json!(demo_encode("three")));
    let sampling = &rendered[0]["sampling_params"];
    for (field, value) in [
        ("max_tokens", json!(7)),
        ("seed", json!(5)),
        ("temperature", json!(0.5)),
        ("n", json!(2)),
        ("stop", json!(["x"])),
        ("skip_special_tokens", json!(false)),
        ("include_stop_str_in_output", json!(false)),
        ("logit_bias", json!({ "7": 2.5 })),
        ("allowed_token_ids", json!([8, 9])),
        ("bad_words", json!(["one"])),
        ("logprobs", Value::Null),
        ("prompt_logprobs", Value::Null),
    ] {
        assert_eq!(sampling[field], value, "{field}");
    }
    assert_eq!((&rendered[0]["model"], &rendered[0]["stream"]), (&json!(MODEL), &json!(true)));
    assert_ne!(rendered[0]["request_id"], rendered[1]["request_id"]);
    assert_eq!(router.state.admission.available(), 1_024, "nothing runs");
}

#[tokio::test]
async fn a_truncated_prompt_keeps_its_end() {
    let router = TestRouter::start().with_reply(" fine");
    let ids = demo_encode("one two three four");
    let body = json!({ "model": MODEL, "prompt": "one two three four", "truncate_prompt_tokens": 2 });
    router.ok(COMPLETIONS, &body).await;
    assert_eq!(router.lanes.take_one().prompt_ids, ids[ids.len() - 2..]);
    let whole = json!({ "model": MODEL, "prompt": "one two three four", "truncate_prompt_tokens": 900 });
    router.ok(COMPLETIONS, &whole).await;
    assert_eq!(router.lanes.take_one().prompt_ids, ids);
    let long = "word ".repeat(2_100);
    let most = json!({ "model": MODEL, "prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 1 });
    router.ok(COMPLETIONS, &most).await;
    assert_eq!(router.lanes.take_one().prompt_ids.len(), MAX_MODEL_LEN as usize - 1);
}

#[tokio::test]
async fn salts_isolate_prefixes() {
    let router = TestRouter::start().with_reply(" fine");
    let messages = json!([{ "role": "user", "content": "hi" }]);
    for (path, body) in [
        (COMPLETIONS, json!({ "prompt": "hi" })),
        ("/v1/responses", json!({ "input": "hi" })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 64 })),
    ] {
        let mut keys = Vec::new();
        for salt in [Value::Null, json!("a"), json!("b"), json!("a")] {
            let salted = json!({ "model": MODEL, "cache_salt": salt });
            router.ok(path, &merged(body.clone(), &salted)).await;
            keys.push(router.lanes.take_one().spec.isolation_key);
        }
        assert_eq!(keys[1], keys[3], "{path}");
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2], "{path}: {keys:?}");
    }
}

#[tokio::test]
async fn field_names_of_other_servers_disable_speculation() {
    let router = TestRouter::start().with_reply(" fine");
    for field in ["disable_spec_decode", "disable_speculative_decoding"] {
        for (value, enabled) in [(json!(true), Some(false)), (json!(false), None), (Value::Null, None)] {
            router.ok(COMPLETIONS, &json!({ "model": MODEL, "prompt": "hi", field: value })).await;
            assert_eq!(router.lanes.take_one().speculation.enabled, enabled, "{field}: {value}");
        }
        let both = json!({ "model": MODEL, "prompt": "hi", field: true, "speculation": { "enabled": true } });
        let refused = router.post_json(COMPLETIONS, &both).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!(field)));
    }
}

/// Path, body, status, `param` and part of the message.
const REFUSED: &str = r#"/tokenize | {} | 400 | model | model is required
/tokenize | {"model": "org/demo"} | 400 | prompt | prompt is required, or messages
/tokenize | {"model": "nobody", "prompt": "x"} | 404 | model | does not exist
/tokenize | {"model": "org/demo", "prompt": "x", "messages": []} | 400 | messages | send one of them
/tokenize | {"model": "org/demo", "messages": []} | 400 | messages | must not be empty
/tokenize | {"model": "org/demo", "messages": [], "continue_final_message": true, "add_generation_prompt": true} | 400 | continue_final_message | cannot be combined
/tokenize | {"model": "org/demo", "messages": [], "add_special_tokens": true} | 400 | add_special_tokens | not supported for conversations
/tokenize | {"model": "org/demo", "messages": [], "tools": [5]} | 400 | tools[0].type | must be `function`
/tokenize | {"model": "org/demo", "prompt": "x", "tools": [{}]} | 400 | tools | only allowed together with messages
/tokenize | {"model": "org/demo", "prompts": "x"} | 400 | prompts | not a field
/tokenize | {"model": "org/demo", "prompt": 5} | 400 | prompt | expected a string
/detokenize | {"model": "org/demo"} | 400 | tokens | tokens is required
/detokenize | {"model": "org/demo", "tokens": [1, -2]} | 400 | tokens | tokens[1] is -2
/v1/completions/render | {"model": "org/demo"} | 400 | prompt | prompt is required
/v1/completions/render | {"model": "org/demo", "prompt": "x", "max_tokens": 4096} | 400 | max_tokens | maximum context length
/v1/embeddings | {"model": "org/demo", "input": "x"} | 400 | model | does not support embeddings
/v1/embeddings | {"model": "nobody", "input": "x"} | 404 | model | does not exist
/v1/completions | {"model": "org/demo", "prompt": "x", "cache_salt": ""} | 400 | cache_salt | it must have 1 to 1024
/v1/completions | {"model": "org/demo", "prompt": "x", "truncate_prompt_tokens": 0} | 400 | truncate_prompt_tokens | must not be 0
/v1/completions | {"model": "org/demo", "prompt": "x", "truncate_prompt_tokens": 2048} | 400 | truncate_prompt_tokens | between -1 and 2047"#;

#[tokio::test]
async fn bad_input_is_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start();
    let long = json!({ "model": MODEL, "prompt": "x".repeat(1 << 20) });
    let long = format!("/tokenize | {long} | 400 | prompt | shorten the prompt");
    for row in REFUSED.lines().chain([long.as_str()]) {
        let [path, body, status, param, expected] = row.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let answer = router.post(path, body.to_owned()).await;
        assert_eq!(answer.status.as_str(), status, "{path}: {}", answer.text());
        let error = answer.json()["error"].clone();
        assert!(error["message"].as_str().unwrap().contains(expected), "{path}: {error}");
        assert_eq!(error["param"], param, "{path}: {error}");
        let next = router.ok("/tokenize", &json!({ "model": MODEL, "prompt": "hi" })).await;
        assert_eq!(next["tokens"], json!(demo_encode("hi")));
    }
}

#[tokio::test]
async fn only_probes_need_no_key() {
    let router = TestRouter::with_keys("sk-one alice models=no-template\n");
    for (path, status) in [("/health", 503), ("/ping", 503), ("/version", 401), ("/v1/models", 401)] {
        assert_eq!(router.get(path).await.status, status, "{path}");
    }
    router.state.health.set_ready();
    for path in ["/health", "/ping"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
    }
    for path in [
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/completions/render",
        "/v1/chat/completions/render",
    ] {
        assert_eq!(router.post_json(path, &json!({ "model": MODEL })).await.status, 401, "{path}");
    }
    for (name, value) in [("authorization", "Bearer sk-one"), ("x-api-key", "sk-one")] {
        let get = |path: &str| Request::get(path).header(name, value).body(Body::empty()).unwrap();
        assert_eq!(router.send(get("/version")).await.json()["version"], service::release::version());
        let body = |model: &str| json!({ "model": model, "prompt": "x" }).to_string();
        let post = |model: &str| {
            let request =
                Request::post("/tokenize").header(name, value).header("content-type", "application/json");
            request.body(Body::from(body(model))).unwrap()
        };
        assert_eq!(router.send(post("no-template")).await.status, 200);
        assert_eq!(router.send(post(MODEL)).await.status, 404, "a model that the key may not use");
    }
    // If the key may use only one model, the request need not name it.
    let request =
        Request::post("/tokenize").header("x-api-key", "sk-one").header("content-type", "application/json");
    let request = request.body(Body::from(r#"{"prompt": "x"}"#)).unwrap();
    assert_eq!(router.send(request).await.status, 200);
}

#[tokio::test]
async fn aliases_have_their_own_defaults() {
    let router = TestRouter::start().with_reply(" fine");
    let listed = router.get("/v1/models").await.json();
    let ids: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["no-template", MODEL, ALIAS]);
    assert_eq!(router.get("/v1/models/short").await.json()["root"], MODEL);
    let answer = router.ok(COMPLETIONS, &json!({ "model": ALIAS, "prompt": "hi" })).await;
    assert_eq!(answer["model"], ALIAS, "the response uses the requested name");
    let generation = router.lanes.take_one();
    assert_eq!((generation.model.as_str(), generation.spec.sampling.temperature), (MODEL, 0.25));
    assert_eq!(generation.spec.max_len - generation.spec.prompt_len, 5);
    router
        .ok(COMPLETIONS, &json!({ "model": ALIAS, "prompt": "hi", "temperature": 1, "max_tokens": 9 }))
        .await;
    let spec = router.lanes.take_one().spec;
    assert_eq!(
        (spec.sampling.temperature, spec.max_len - spec.prompt_len),
        (1.0, 9),
        "the request overrides the defaults"
    );
    router.ok(COMPLETIONS, &json!({ "model": MODEL, "prompt": "hi" })).await;
    assert_eq!(router.lanes.take_one().spec.sampling.temperature, 1.0);
    let prompt_tokens = 3 * demo_encode("hi").len();
    let counted = format!(r#"vllm:prompt_tokens_total{{model_name="org/demo",engine="0"}} {prompt_tokens}"#);
    assert!(
        router.metrics().await.lines().any(|line| line == counted),
        "counted under the model, not the alias"
    );
}

#[tokio::test]
async fn a_client_can_set_the_request_id() {
    let router = TestRouter::start().with_reply(" fine");
    let post_with_header = async |name: &str, value: &str| {
        let request =
            Request::post(COMPLETIONS).header("content-type", "application/json").header(name, value);
        let body = json!({ "model": MODEL, "prompt": "hi" }).to_string();
        router.send(request.body(Body::from(body)).unwrap()).await
    };
    let named = post_with_header("x-request-id", "mine-1").await;
    assert_eq!((named.status.as_u16(), &named.headers["x-request-id"]), (200, &"mine-1".parse().unwrap()));
    assert!(
        named.json()["id"].as_str().unwrap().starts_with("cmpl-"),
        "the response id is generated by the router"
    );
    let unnamed = post_with_header("x-session-id", "session-1").await;
    assert_eq!(unnamed.headers["x-request-id"], unnamed.json()["id"].as_str().unwrap());
    for (name, value) in [("x-request-id", "a b"), ("x-session-id", &"x".repeat(257)), ("x-request-id", "")] {
        let refused = post_with_header(name, value).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.json()["error"]["param"]),
            (400, &json!(name)),
            "{value}"
        );
        assert_ne!(refused.headers["x-request-id"], value);
    }
}
