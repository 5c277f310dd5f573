//! Several tools become one grammar, in which the references of each tool's schema keep their meaning.

use serde_json::{Value, json};

use crate::calls_or_json::{matches, submitted};
use crate::client::{CHAT, MODEL, TestRouter, merged};
use crate::tools::{TEMPLATE, router_with};

fn tool(name: &str, parameters: Value) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

/// Tools whose schemas refer to the whole schema, to a property, and to two definitions of the same name.
fn tools() -> Value {
    let node = json!({
        "type": "object", "properties": { "child": { "$ref": "#" } }, "additionalProperties": false
    });
    let city = json!({
        "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"],
        "additionalProperties": false
    });
    let travel = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "properties": { "from": city, "to": { "$ref": "#/properties/from" } },
        "required": ["from", "to"], "additionalProperties": false
    });
    let defined = |value: Value| {
        json!({
            "type": "object", "properties": { "x": { "$ref": "#/$defs/value" } }, "required": ["x"],
            "additionalProperties": false, "$defs": { "value": value }
        })
    };
    json!([
        tool("node", node),
        tool("travel", travel),
        tool("paint", defined(json!({ "enum": ["red"] }))),
        tool("count", defined(json!({ "type": "integer" }))),
    ])
}

/// A tool, arguments, and whether they match its schema.
const CALLS: [(&str, &str, bool); 9] = [
    ("node", r#"{"child": {"child": {}}}"#, true),
    ("node", r#"{"child": [{"name": "node", "parameters": {}}]}"#, false),
    ("node", r#"{"child": {"child": 5}}"#, false),
    ("travel", r#"{"from": {"city": "a"}, "to": {"city": "b"}}"#, true),
    ("travel", r#"{"from": {"city": "a"}, "to": {"town": "b"}}"#, false),
    ("paint", r#"{"x": "red"}"#, true),
    ("paint", r#"{"x": 1}"#, false),
    ("count", r#"{"x": 1}"#, true),
    ("count", r#"{"x": "red"}"#, false),
];

fn body(fields: Value) -> Value {
    merged(
        json!({
            "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }], "tools": tools()
        }),
        &fields,
    )
}

#[tokio::test]
async fn references_of_required_calls() {
    let router = TestRouter::start().with_reply(r#"[{"name": "node", "parameters": {}}]"#);
    router.ok(CHAT, &body(json!({ "tool_choice": "required" }))).await;
    let grammar = submitted(&router);
    for (name, arguments, expected) in CALLS {
        let text = format!(r#"[{{"name": "{name}", "parameters": {arguments}}}]"#);
        assert_eq!(matches(&grammar, &text), expected, "{text}: {grammar}");
    }
}

#[tokio::test]
async fn references_of_calls_beside_a_format() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    router.ok(CHAT, &body(json!({ "response_format": { "type": "json_object" } }))).await;
    let grammar = submitted(&router);
    for (name, arguments, expected) in CALLS {
        let text = format!(r#"<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>"#);
        assert_eq!(matches(&grammar, &text), expected, "{text}: {grammar}");
    }
}

/// The schema of a tool that the client names is the whole grammar.
#[tokio::test]
async fn references_of_a_named_call() {
    let router = TestRouter::start().with_reply("{}");
    for (name, arguments, expected) in CALLS {
        let choice = json!({ "type": "function", "function": { "name": name } });
        router.ok(CHAT, &body(json!({ "tool_choice": choice }))).await;
        let grammar = submitted(&router);
        assert_eq!(matches(&grammar, arguments), expected, "{arguments}: {grammar}");
    }
}
