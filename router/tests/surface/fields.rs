//! The table of fields in docs/api.md matches the endpoints.

use std::collections::BTreeSet;

use router::api::openai::body::Body;
use router::api::openai::fields::{FIELDS, Field, Treatment, table};
use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, MODEL, TestRouter};

/// The fields that the type accepts, from its error message.
fn accepted_fields() -> BTreeSet<String> {
    let error = serde_json::from_value::<Body>(json!({ "?": 0 })).unwrap_err().to_string();
    let listed = error.split("expected one of ").nth(1).unwrap();
    listed.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_table_lists_all_accepted_fields() {
    let listed: BTreeSet<String> = FIELDS.iter().map(|field| field.name.to_owned()).collect();
    assert_eq!(listed.len(), FIELDS.len(), "a field is listed twice");
    assert_eq!(listed, accepted_fields());
}

#[test]
fn the_page_shows_the_table() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/api.md")).unwrap();
    assert!(
        page.contains(&table()),
        "docs/api.md is out of date: cargo run -p outrider-router --example api_fields -- docs/api.md"
    );
}

/// A valid request with one additional field.
fn with(path: &str, field: &Field) -> Value {
    let mut body = match path {
        CHAT => json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] }),
        _ => json!({ "model": MODEL, "prompt": "hi" }),
    };
    body[field.name] = serde_json::from_str(field.sample).unwrap();
    match field.name {
        "stream_options" => body["stream"] = json!(true),
        // The bundled template has no tools, so only a grammar can produce calls.
        "tools" => body["tool_choice"] = json!("required"),
        "functions" if path == CHAT => body["function_call"] = json!({ "name": "f" }),
        "function_call" if path == CHAT => body["functions"] = json!([{ "name": "f" }]),
        "top_logprobs" if path == CHAT => body["logprobs"] = json!(true),
        _ => {}
    }
    body
}

#[tokio::test]
async fn each_field_is_treated_as_the_table_says() {
    let router = TestRouter::start().with_reply(" fine");
    for field in FIELDS {
        for (path, treatment) in [(CHAT, field.chat), (COMPLETIONS, field.completions)] {
            let answer = router.post_json(path, &with(path, field)).await;
            if treatment == Treatment::Refused {
                assert_eq!(answer.status, 400, "{path} {}: {}", field.name, answer.text());
                assert_eq!(answer.json()["error"]["param"], field.name, "{path}");
            } else {
                assert_eq!(answer.status, 200, "{path} {}: {}", field.name, answer.text());
            }
        }
    }
}

/// As some clients write them: 5.0 in place of 5.
fn with_floats(value: Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => items.into_iter().map(with_floats).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, with_floats(value))).collect(),
        other => other,
    }
}

#[tokio::test]
async fn whole_numbers_may_be_written_with_a_point() {
    let router = TestRouter::start().with_reply(" fine");
    for field in FIELDS {
        for (path, treatment) in [(CHAT, field.chat), (COMPLETIONS, field.completions)] {
            if treatment == Treatment::Honoured {
                let answer = router.post(path, with_floats(with(path, field)).to_string()).await;
                assert_eq!(answer.status, 200, "{path} {}: {}", field.name, answer.text());
            }
        }
    }
}

/// A value that no field accepts.
#[tokio::test]
async fn invalid_values_are_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    for field in FIELDS {
        for (path, treatment) in [(CHAT, field.chat), (COMPLETIONS, field.completions)] {
            let mut body = with(path, field);
            body[field.name] = json!([[{ "?": [] }]]);
            let answer = router.post_json(path, &body).await;
            if treatment == Treatment::Ignored {
                assert_eq!(answer.status, 200, "{path} {}: {}", field.name, answer.text());
                continue;
            }
            assert_eq!(answer.status, 400, "{path} {}: {}", field.name, answer.text());
            let error = answer.json()["error"].clone();
            let param = error["param"].as_str().unwrap_or_default();
            assert!(param.starts_with(field.name), "{path} {}: {error}", field.name);
            assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{error}");
            let valid = json!({ "model": MODEL, "prompt": "hi" });
            assert_eq!(router.ok(COMPLETIONS, &valid).await["choices"][0]["text"], "0 fine");
        }
    }
}

#[tokio::test]
async fn defaults_of_refused_fields_are_accepted() {
    let router = TestRouter::start().with_reply(" fine");
    for (path, field, value) in [
        (CHAT, "add_generation_prompt", json!(true)),
        (CHAT, "include_reasoning", json!(true)),
        (CHAT, "add_special_tokens", json!(false)),
        (CHAT, "verbosity", json!("medium")),
        (COMPLETIONS, "reasoning_effort", json!("")),
        (COMPLETIONS, "use_beam_search", json!(false)),
        (COMPLETIONS, "length_penalty", json!(1.0)),
        (COMPLETIONS, "prompt_logprobs", Value::Null),
        (COMPLETIONS, "suffix", Value::Null),
    ] {
        let mut body = json!({ "model": MODEL, "prompt": "hi" });
        if path == CHAT {
            body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] });
        }
        body[field] = value;
        router.ok(path, &body).await;
    }
}
