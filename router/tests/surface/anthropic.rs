//! Anthropic's messages: format, streaming and refused input.

use axum::body::Body;
use http::Request;
use router::error::RouterError;
use serde_json::{Value, json};

use crate::calls_or_json::submitted_schema;
use crate::client::{ALIAS, Answer, MAX_MODEL_LEN, MESSAGES, MODEL, TestRouter, merged};
use crate::fake_lanes::Script;

const COUNT: &str = "/v1/messages/count_tokens";

fn request(fields: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    merged(json!({ "model": MODEL, "messages": messages, "max_tokens": 64, "seed": 7 }), &fields)
}

pub(crate) async fn events(router: &TestRouter, body: &Value) -> Vec<Value> {
    let answer = router.post_json(MESSAGES, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let read = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    answer.text().split_terminator("\n\n").map(read).collect()
}

#[tokio::test]
async fn a_message() {
    let router = TestRouter::start().with_reply(" shines");
    let mut message = router.ok(MESSAGES, &request(json!({}))).await;
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    message["id"] = json!("msg_[unique]");
    insta::assert_json_snapshot!(message);
}

#[tokio::test]
async fn a_streamed_message_equals_the_full_one() {
    let router = TestRouter::start().with_reply(" shines \u{1F600} and more");
    for (fields, reason, sequence) in [
        (json!({}), "end_turn", Value::Null),
        (json!({ "max_tokens": 3 }), "max_tokens", Value::Null),
        (json!({ "stop_sequences": ["never", "shin"] }), "stop_sequence", json!("shin")),
    ] {
        let whole = router.ok(MESSAGES, &request(fields.clone())).await;
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence));
        let mut streamed = request(fields);
        streamed["stream"] = json!(true);
        let events = events(&router, &streamed).await;
        let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(types[..2], ["message_start", "content_block_start"]);
        assert_eq!(types[types.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
        let deltas = &events[2..events.len() - 3];
        assert!(deltas.iter().all(|event| event["type"] == "content_block_delta"));
        let text: String = deltas.iter().map(|event| event["delta"]["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["content"][0]["text"]);
        let last = &events[events.len() - 2];
        assert_eq!(
            (&last["delta"]["stop_reason"], &last["delta"]["stop_sequence"]),
            (&json!(reason), &sequence)
        );
        assert_eq!(last["usage"], whole["usage"]);
        assert_eq!(events[0]["message"]["content"], json!([]));
    }
}

#[tokio::test]
async fn a_conversation_is_the_same_in_both_apis() {
    let router = TestRouter::start().with_reply(" fine");
    let turns = json!([
        { "role": "user", "content": [{ "type": "text", "text": "a", "cache_control": { "type": "ephemeral" } }, { "type": "text", "text": "b" }] },
        { "role": "assistant", "content": "c" }, { "role": "user", "content": "d" },
        { "role": "system", "content": [{ "type": "text", "text": "e" }] },
    ]);
    let body = request(json!({ "messages": turns, "system": [{ "type": "text", "text": "Be brief." }] }));
    let message = router.ok(MESSAGES, &body).await;
    let prompt = router.lanes.take_one().prompt_ids;
    let turns = json!([
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "a\nb" },
        { "role": "assistant", "content": "c" }, { "role": "user", "content": "d" },
        { "role": "system", "content": "e" },
    ]);
    router.ok("/v1/chat/completions", &json!({ "model": MODEL, "messages": turns })).await;
    assert_eq!(router.lanes.take_one().prompt_ids, prompt);
    let usage = &message["usage"];
    let billed = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(billed, prompt.len() as u64);
    let mut counted = body;
    counted.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(router.ok(COUNT, &counted).await, json!({ "input_tokens": prompt.len() }));
    assert!(router.lanes.take_submitted().is_empty(), "counting runs nothing");
}

/// Additional fields, status, error type and part of the message.
const REFUSED: &str = r#"{"max_tokens": 0} | 400 | invalid_request_error | max_tokens must be at least 1
{"messages": []} | 400 | invalid_request_error | messages must not be empty
{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y "}]} | 400 | invalid_request_error | must not end with whitespace
{"max_tokens": 1.5} | 400 | invalid_request_error | max_tokens: invalid type: floating point
{"messages": [{"role": "developer", "content": "x"}]} | 400 | invalid_request_error | must be one of user, assistant, system, not `developer`
{"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]} | 400 | invalid_request_error | of type `tool_result` is only allowed in messages of role user
{"messages": [{"role": "user", "content": [{"type": "image"}]}]} | 400 | invalid_request_error | must be a text block, not one of type `image`
{"tools": [{"name": "f", "input_schema": {}}]} | 400 | invalid_request_error | chat template has no supported tool call format
{"tools": [{"type": "bash_20250124", "name": "bash"}]} | 400 | invalid_request_error | tools[0].type must be `custom`
{"tools": [5]} | 400 | invalid_request_error | tools[0] must be an object
{"tools": [{"name": "f"}]} | 400 | invalid_request_error | tools[0].input_schema must be a JSON schema
{"tools": [{"input_schema": {}}]} | 400 | invalid_request_error | tools[0].name must be a string
{"tools": [{"name": "", "input_schema": {}}]} | 400 | invalid_request_error | tools[0].name must have 1 to 128 of the characters
{"tool_choice": {"type": "any"}} | 400 | invalid_request_error | there are no tools
{"tool_choice": "auto"} | 400 | invalid_request_error | tool_choice
{"tool_choice": {"type": "perhaps"}} | 400 | invalid_request_error | tool_choice.type must be one of auto, any, tool, none, not `perhaps`
{"tool_choice": {"type": "tool"}} | 400 | invalid_request_error | tool_choice.name is required
{"tool_choice": {"type": "any", "name": "f"}} | 400 | invalid_request_error | tool_choice.name is only allowed
{"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f", "input_schema": {}}]} | 400 | invalid_request_error | names `g`, which is not one of the tools
{"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]} | 400 | invalid_request_error | messages[0].content[0] of type `tool_use` is only allowed in messages of role assistant
{"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]} | 400 | invalid_request_error | of type `tool_result` is only allowed in messages of role user
{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]} | 400 | invalid_request_error | messages[0].content[0].input must be an object
{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}]} | 400 | invalid_request_error | messages[0].content[0].tool_use_id is `1`, which matches no earlier call
{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 5}]}]} | 400 | invalid_request_error | messages[0].content[0].content must be a string or a list of text blocks
{"thinking": {"type": "perhaps"}} | 400 | invalid_request_error | thinking.type must be one of enabled, adaptive, disabled, not `perhaps`
{"messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "f"}]}]} | 400 | invalid_request_error | must be a text block, not one of type `tool_reference`
{"thinking": "enabled"} | 400 | invalid_request_error | thinking
{"output_config": {"format": {"type": "json_schema"}}} | 400 | invalid_request_error | output_config.format.schema is required
{"output_config": {"format": {"type": "xml"}}} | 400 | invalid_request_error | output_config.format.type must be one of text, json_object, json_schema, not `xml`
{"output_config": {"format": {"type": "json_object", "colour": 1}}} | 400 | invalid_request_error | colour is not a field
{"output_config": {"format": {"type": "json_object"}}, "output_format": {"type": "json_object"}} | 400 | invalid_request_error | output_config.format and output_format both constrain the output
{"output_config": {"size": 1}} | 400 | invalid_request_error | size is not a field
{"output_format": {"type": "json_schema", "schema": 5}} | 400 | invalid_request_error | output_format.schema must be a JSON schema: an object
{"top_k": -5} | 400 | invalid_request_error | top_k must be between -1
{"colour": 1} | 400 | invalid_request_error | colour is not a field
{"model": "nobody"} | 404 | not_found_error | does not exist"#;

/// Values that request nothing, or have no effect.
const OFF: &str = r#"{"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "metadata": {"user_id": "x"}}
{"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}}
{"thinking": {"type": "adaptive"}, "output_config": {"effort": null, "format": null}}
{"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {}}
{"container": "", "mcp_servers": [], "output_format": null}
{"diagnostics": {"previous_message_id": null}, "output_config": {"task_budget": {"type": "tokens", "total": 64000}}}
{"speed": "fast", "thinking": null, "output_config": null, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}"#;

#[tokio::test]
async fn bad_input_is_refused_in_the_format_of_anthropic_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    let mut unlimited = request(json!({}));
    unlimited.as_object_mut().unwrap().remove("max_tokens");
    let refused = router.post_json(MESSAGES, &unlimited).await;
    assert!(refused.text().contains("max_tokens is required"), "{}", refused.text());
    for row in REFUSED.lines() {
        let [fields, status, kind, expected] = row.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let fields: Value = serde_json::from_str(fields).unwrap();
        for path in [MESSAGES, COUNT] {
            let answer = router.post_json(path, &request(fields.clone())).await;
            let body = answer.json();
            assert_eq!((answer.status.as_str(), &body["type"]), (status, &json!("error")), "{body}");
            assert_eq!(body["error"]["type"], kind, "{body}");
            assert!(body["error"]["message"].as_str().unwrap().contains(expected), "{body}");
            assert!(router.lanes.take_submitted().is_empty());
        }
        assert_eq!(router.ok(MESSAGES, &request(json!({}))).await["content"][0]["text"], "0 fine");
        router.lanes.take_submitted();
    }
    router.ok(MESSAGES, &request(json!({}))).await;
    let expected = router.lanes.take_submitted().remove(0);
    for row in OFF.lines() {
        router.ok(MESSAGES, &request(serde_json::from_str(row).unwrap())).await;
        let submitted = router.lanes.take_submitted().remove(0);
        assert_eq!(
            (submitted.prompt_ids, submitted.spec),
            (expected.prompt_ids.clone(), expected.spec.clone())
        );
    }
}

/// Clients look for these words and numbers.
#[tokio::test]
async fn a_conversation_that_is_too_long_is_refused_in_anthropics_words() {
    let router = TestRouter::start();
    let long = json!([{ "role": "user", "content": "word ".repeat(2_100) }]);
    let count = async |messages: &Value| {
        let counted = router.ok(COUNT, &json!({ "model": MODEL, "messages": messages })).await;
        counted["input_tokens"].as_u64().unwrap()
    };
    let (num_long, num_short) = (count(&long).await, count(&request(json!({}))["messages"]).await);
    let max = MAX_MODEL_LEN;
    for (fields, expected) in [
        (json!({ "messages": long }), format!("prompt is too long: {num_long} tokens > {} maximum", max - 1)),
        (
            json!({ "max_tokens": max }),
            format!(
                "input length and `max_tokens` exceed context limit: {num_short} + {max} > {max}, decrease input \
                 length or `max_tokens` and try again"
            ),
        ),
    ] {
        let refused = router.post_json(MESSAGES, &request(fields)).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status.as_u16(), &error["message"]), (400, &json!(expected)));
        assert_eq!(error["type"], "invalid_request_error");
    }
    let huge = json!([{ "role": "user", "content": "x".repeat(1 << 20) }]);
    let refused = router.post_json(MESSAGES, &request(json!({ "messages": huge }))).await;
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("prompt is too long: this model's maximum context length is"), "{message}");
}

#[tokio::test]
async fn a_name_of_a_tool_may_have_128_characters() {
    let router = TestRouter::start().with_reply("{}");
    let named = |num_characters: usize| {
        let name = "n".repeat(num_characters);
        let tool = json!({ "name": name, "input_schema": { "type": "object" } });
        request(json!({ "tools": [tool], "tool_choice": { "type": "tool", "name": name } }))
    };
    let answer = router.ok(MESSAGES, &named(128)).await;
    assert_eq!(answer["content"][0]["name"], "n".repeat(128));
    assert_eq!(router.post_json(MESSAGES, &named(129)).await.status, 400);
}

#[tokio::test]
async fn a_format_becomes_a_grammar() {
    let router = TestRouter::start().with_reply("{}");
    let schema = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let format = json!({ "type": "json_schema", "schema": schema });
    for fields in [json!({ "output_config": { "format": format } }), json!({ "output_format": format })] {
        router.ok(MESSAGES, &request(fields.clone())).await;
        assert_eq!(submitted_schema(&router), schema, "{fields}");
    }
}

/// Sends a request as Anthropic's clients do.
async fn get(router: &TestRouter, path: &str) -> Answer {
    let request = Request::get(path).header("anthropic-version", "2023-06-01").body(Body::empty());
    router.send(request.unwrap()).await
}

#[tokio::test]
async fn models_have_the_format_of_the_client() {
    let router = TestRouter::start();
    let model = |id: &str| {
        json!({
            "type": "model", "id": id, "display_name": id, "created_at": "2023-11-14T22:13:20Z", "lifecycle": "active",
            "max_input_tokens": MAX_MODEL_LEN, "max_tokens": MAX_MODEL_LEN - 1,
        })
    };
    let page = |ids: &[&str], has_more: bool| {
        let models: Vec<Value> = ids.iter().map(|id| model(id)).collect();
        json!({ "data": models, "has_more": has_more, "first_id": ids.first(), "last_id": ids.last() })
    };
    for (query, ids, has_more) in [
        ("", &["no-template", MODEL, ALIAS][..], false),
        ("?limit=2", &["no-template", MODEL], true),
        ("?limit=2&after_id=org/demo", &[ALIAS], false),
        ("?before_id=org/demo", &["no-template"], false),
        ("?after_id=short", &[], false),
    ] {
        assert_eq!(get(&router, &format!("/v1/models{query}")).await.json(), page(ids, has_more), "{query}");
    }
    assert_eq!(get(&router, "/v1/models/org/demo").await.json(), model(MODEL));
    for (path, status, kind, expected) in [
        ("/v1/models?limit=0", 400, "invalid_request_error", "limit must be between 1 and 1000, not `0`"),
        ("/v1/models?after_id=x", 400, "invalid_request_error", "after_id is `x`"),
        ("/v1/models/nobody", 404, "not_found_error", "does not exist"),
    ] {
        let refused = get(&router, path).await;
        let error = refused.json();
        assert_eq!((refused.status.as_u16(), &error["type"]), (status, &json!("error")), "{error}");
        assert_eq!(
            (&error["error"]["type"], error["request_id"].is_string()),
            (&json!(kind), true),
            "{error}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(expected), "{error}");
    }
    assert_eq!(router.get("/v1/models").await.json()["object"], "list", "without the header");
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_the_error() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }));
    let last = events(&router, &request(json!({ "stream": true }))).await.pop().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
}
