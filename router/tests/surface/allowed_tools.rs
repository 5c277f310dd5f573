//! `tool_choice` of type `allowed_tools`: the prompt describes all tools, but only some of them may be
//! called.

use serde_json::{Value, json};

use crate::calls_or_json::submitted;
use crate::client::{CHAT, COMPLETIONS, MODEL, RESPONSES, merged};
use crate::tools::{TEMPLATE, router_with};

const NAMES: [&str; 3] = ["read", "write", "delete"];

/// A function; its arguments have one field, of the same name.
fn function(name: &str) -> Value {
    let parameters = json!({
        "type": "object", "properties": { name: { "type": "integer" } }, "required": [name],
        "additionalProperties": false
    });
    json!({ "name": name, "parameters": parameters })
}

/// A chat completion with these tools.
fn chat(names: &[&str], fields: Value) -> Value {
    let tools: Vec<Value> =
        names.iter().map(|name| json!({ "type": "function", "function": function(name) })).collect();
    let messages = json!([{ "role": "user", "content": "hi" }]);
    merged(json!({ "model": MODEL, "seed": 7, "messages": messages, "tools": tools }), &fields)
}

/// A response with these tools.
fn response(names: &[&str], fields: Value) -> Value {
    let tools: Vec<Value> =
        names.iter().map(|name| merged(function(name), &json!({ "type": "function" }))).collect();
    merged(json!({ "model": MODEL, "seed": 7, "input": "hi", "tools": tools }), &fields)
}

/// `tool_choice` of a chat completion.
fn nested(mode: &str, names: &[&str]) -> Value {
    let tools: Vec<Value> =
        names.iter().map(|name| json!({ "type": "function", "function": { "name": name } })).collect();
    json!({ "tool_choice": { "type": "allowed_tools", "allowed_tools": { "mode": mode, "tools": tools } } })
}

/// `tool_choice` of a response.
fn flat(mode: &str, names: &[&str]) -> Value {
    let tools: Vec<Value> = names.iter().map(|name| json!({ "type": "function", "name": name })).collect();
    json!({ "tool_choice": { "type": "allowed_tools", "mode": mode, "tools": tools } })
}

fn call(name: &str) -> String {
    format!(r#"<tool_call>{{"name": "{name}", "arguments": {{"{name}": 1}}}}</tool_call>"#)
}

#[tokio::test]
async fn required_calls_have_the_grammar_of_the_allowed_tools_alone() {
    let router = router_with(TEMPLATE).with_reply(r#"[{"name": "write", "parameters": {"write": 1}}]"#);
    for allowed in [&["write"][..], &["write", "read"], &NAMES] {
        // The order of the tools decides, not that of their names in `tool_choice`.
        let in_order: Vec<&str> = NAMES.into_iter().filter(|name| allowed.contains(name)).collect();
        router.ok(CHAT, &chat(&in_order, json!({ "tool_choice": "required" }))).await;
        let expected = submitted(&router);
        let body = chat(&NAMES, nested("required", allowed));
        let answer = router.ok(CHAT, &body).await;
        assert_eq!(submitted(&router), expected, "{allowed:?}");
        let message = &answer["choices"][0]["message"];
        let written = json!({ "name": "write", "arguments": "{\"write\":1}" });
        assert_eq!(message["tool_calls"][0]["function"], written);
        let body = response(&NAMES, flat("required", allowed));
        let answer = router.ok(RESPONSES, &body).await;
        assert_eq!(submitted(&router), expected, "{allowed:?}");
        assert_eq!(answer["tool_choice"], body["tool_choice"]);
        let item = &answer["output"][0];
        assert_eq!((&item["name"], &item["arguments"]), (&json!("write"), &json!("{\"write\":1}")));
    }
}

#[tokio::test]
async fn the_prompt_describes_all_tools() {
    let router = router_with(TEMPLATE).with_reply(r#"[{"name": "read", "parameters": {"read": 1}}]"#);
    router.ok(CHAT, &chat(&NAMES, json!({}))).await;
    let expected = router.lanes.take_one().prompt_ids;
    for mode in ["auto", "required"] {
        router.ok(CHAT, &chat(&NAMES, nested(mode, &["read"]))).await;
        assert_eq!(router.lanes.take_one().prompt_ids, expected, "{mode}");
        router.ok(RESPONSES, &response(&NAMES, flat(mode, &["read"]))).await;
        assert_eq!(router.lanes.take_one().prompt_ids, expected, "{mode}");
    }
}

/// As with a tool that the request does not have, a call of another tool is text.
#[tokio::test]
async fn with_auto_only_calls_of_allowed_tools_are_calls() {
    let router = router_with(TEMPLATE).with_reply(&format!(" sees{}{}", call("delete"), call("read")));
    let answer = router.ok(CHAT, &chat(&NAMES, nested("auto", &["read", "write"]))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], format!("0 sees{}", call("delete")));
    let functions: Vec<&Value> =
        message["tool_calls"].as_array().unwrap().iter().map(|call| &call["function"]).collect();
    assert_eq!(functions, [&json!({ "name": "read", "arguments": "{\"read\":1}" })]);

    let answer = router.ok(RESPONSES, &response(&NAMES, flat("auto", &["read", "write"]))).await;
    let [text, called] = answer["output"].as_array().unwrap().as_slice() else { panic!("{answer}") };
    assert_eq!(text["content"][0]["text"], message["content"]);
    assert_eq!((&called["type"], &called["name"]), (&json!("function_call"), &json!("read")));
}

/// Together with a format, the grammar has calls of the allowed tools only.
#[tokio::test]
async fn calls_beside_a_format_are_of_allowed_tools() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let format = json!({ "response_format": { "type": "json_object" } });
    router.ok(CHAT, &chat(&["write"], format.clone())).await;
    let expected = submitted(&router);
    router.ok(CHAT, &chat(&NAMES, merged(nested("auto", &["write"]), &format))).await;
    assert_eq!(submitted(&router), expected);
}

/// A grammar of a custom tool is only an obstacle where the tool has to be called.
#[tokio::test]
async fn custom_tools_are_allowed_by_name() {
    let router = router_with(TEMPLATE).with_reply(r#"[{"name": "read", "parameters": {"read": 1}}]"#);
    let format = json!({ "type": "grammar", "syntax": "regex", "definition": "a" });
    let patch = json!({ "type": "custom", "name": "patch", "format": format });
    let read = merged(function("read"), &json!({ "type": "function" }));
    let body = |names: Value| {
        let choice = json!({ "type": "allowed_tools", "mode": "required", "tools": names });
        response(&[], json!({ "tools": [patch, read], "tool_choice": choice }))
    };
    router.ok(RESPONSES, &body(json!([{ "type": "function", "name": "read" }]))).await;
    router.lanes.take_submitted();
    let refused = router.post_json(RESPONSES, &body(json!([{ "type": "custom", "name": "patch" }]))).await;
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!("tools[0].format")), "{error}");
}

async fn check_refused(path: &str, body: Value, param: &str, expected: &str) {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let refused = router.post_json(path, &body).await;
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!(param)), "{error}");
    assert!(error["message"].as_str().unwrap().contains(expected), "{error}");
    assert!(router.lanes.take_submitted().is_empty());
}

#[tokio::test]
async fn tools_that_the_request_does_not_have_are_named() {
    for (path, body, expected) in [
        (
            CHAT,
            chat(&NAMES, nested("auto", &["x", "read", "w"])),
            "tool_choice names `w`, `x`, which are not among the tools",
        ),
        (
            RESPONSES,
            response(&NAMES, flat("required", &["x"])),
            "tool_choice names `x`, which is not one of the tools",
        ),
        (
            CHAT,
            chat(&[], nested("required", &["read"])),
            "tool_choice names `read`, which is not one of the tools",
        ),
        (
            COMPLETIONS,
            merged(json!({ "model": MODEL, "prompt": "hi" }), &nested("auto", &["read"])),
            "tool_choice names `read`, which is not one of the tools",
        ),
    ] {
        check_refused(path, body, "tool_choice", expected).await;
    }
    let router = router_with(TEMPLATE).with_reply(" fine");
    router.ok(CHAT, &chat(&NAMES, nested("auto", &NAMES))).await;
}

#[tokio::test]
async fn a_malformed_choice_is_refused_with_its_path() {
    let choice = |value: Value| json!({ "tool_choice": merged(json!({ "type": "allowed_tools" }), &value) });
    let inner = |value: Value| choice(json!({ "allowed_tools": value }));
    let read = json!({ "type": "function", "function": { "name": "read" } });
    for (path, body, param, expected) in [
        (
            CHAT,
            chat(&NAMES, choice(json!({}))),
            "tool_choice.allowed_tools.tools",
            "must be a list of at least one tool",
        ),
        (
            CHAT,
            chat(&NAMES, inner(json!({ "mode": "auto", "tools": [] }))),
            "tool_choice.allowed_tools.tools",
            "must be a list of at least one tool",
        ),
        (
            CHAT,
            chat(&NAMES, inner(json!({ "mode": "auto", "tools": [read, { "type": "custom" }] }))),
            "tool_choice.allowed_tools.tools[1].type",
            "must be function",
        ),
        (
            CHAT,
            chat(&NAMES, inner(json!({ "mode": "auto", "tools": [{ "type": "function", "name": "read" }] }))),
            "tool_choice.allowed_tools.tools[0].function.name",
            "must be a string",
        ),
        (
            CHAT,
            chat(&NAMES, inner(json!({ "mode": "none", "tools": [read] }))),
            "tool_choice.allowed_tools.mode",
            "must be auto or required",
        ),
        (
            RESPONSES,
            response(
                &NAMES,
                choice(json!({ "mode": "auto", "tools": [{ "type": "mcp", "server_label": "x" }] })),
            ),
            "tool_choice.tools[0].type",
            "must be function or custom",
        ),
        (
            RESPONSES,
            response(&NAMES, choice(json!({ "tools": [{ "type": "custom", "name": "read" }] }))),
            "tool_choice.mode",
            "must be auto or required",
        ),
    ] {
        check_refused(path, body, param, expected).await;
    }
}
