//! The number of JSON values in schemas, calls, variables and metadata is limited: parsed, they take many
//! times the bytes of their text.

use serde_json::{Value, json};

use crate::client::{CHAT, MESSAGES, MODEL, RESPONSES, TestRouter, merged};

/// One value more than allowed.
fn many() -> Value {
    json!(vec![0; 65_536])
}

/// A valid request with some fields replaced.
fn with(path: &str, fields: Value) -> String {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let body = merged(
        match path {
            RESPONSES => json!({ "model": MODEL, "input": "hi" }),
            MESSAGES => json!({ "model": MODEL, "messages": messages, "max_tokens": 64 }),
            _ => json!({ "model": MODEL, "messages": messages }),
        },
        &fields,
    );
    body.to_string()
}

#[tokio::test]
async fn too_many_values_are_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    let variables = json!({ "chat_template_kwargs": { "x": many() } });
    let function = json!({ "name": "f", "parameters": { "enum": many() } });
    let tools = json!([{ "type": "function", "function": function }]);
    let arguments = json!({ "x": many() });
    let call = json!({ "id": "1", "function": { "name": "f", "arguments": arguments.to_string() } });
    let item =
        json!({ "type": "function_call", "call_id": "1", "name": "f", "arguments": arguments.to_string() });
    // With an integer beyond 64 bits, arguments stay text until they are rendered.
    let large = arguments.to_string().replacen("[0,", "[18446744073709551616,", 1);
    let large = merged(item.clone(), &json!({ "arguments": large }));
    let block = json!({ "type": "tool_use", "id": "1", "name": "f", "input": arguments });
    // Not part of a tool, but kept for the response.
    let flat = json!([{ "type": "function", "name": "f", "x": many() }]);
    for (path, fields, field) in [
        (CHAT, variables.clone(), "chat_template_kwargs"),
        ("/v1/chat/completions/render", variables.clone(), "chat_template_kwargs"),
        ("/tokenize", variables, "chat_template_kwargs"),
        (CHAT, json!({ "tools": tools, "tool_choice": "required" }), "tools"),
        (CHAT, json!({ "tools": tools, "tool_choice": "none" }), "tools"),
        (
            CHAT,
            json!({ "messages": [{ "role": "assistant", "content": "x", "tool_calls": [call] }] }),
            "messages",
        ),
        (RESPONSES, json!({ "tools": flat, "tool_choice": "none" }), "tools"),
        (RESPONSES, json!({ "metadata": { "x": many() } }), "metadata"),
        (RESPONSES, json!({ "input": [item] }), "input"),
        (RESPONSES, json!({ "input": [large] }), "input"),
        (MESSAGES, json!({ "messages": [{ "role": "assistant", "content": [block] }] }), "messages"),
    ] {
        let refused = router.post(path, with(path, fields)).await;
        assert_eq!(refused.status, 400, "{path}: {field}");
        let expected = format!("at most 65536 are allowed: shorten {field}");
        assert!(refused.text().contains(&expected), "{path}: {}", refused.text());
        assert!(router.lanes.take_submitted().is_empty(), "{path}: {field}");
    }
    let fewer = json!({ "chat_template_kwargs": { "x": vec![0; 60_000] } });
    assert_eq!(router.post(CHAT, with(CHAT, fewer)).await.status, 200);
}
