//! Custom tools and namespaces of the responses API, and requests of the Codex CLI, which has both.

use serde_json::{Value, json};

use crate::calls_or_json::submitted_schema;
use crate::client::{CHAT, MODEL, RESPONSES, demo_text, merged};
use crate::fake_lanes::Script;
use crate::responses::events;
use crate::tools::{TEMPLATE, router_with, weather};

const PATCH: &str = "*** Begin Patch\n+\"a\" \\ b\n*** End Patch\n";

/// What a model writes to call the tool.
fn reply() -> String {
    let call = json!({ "name": "apply_patch", "arguments": { "input": PATCH } });
    format!("<tool_call>{call}</tool_call>")
}

fn tool() -> Value {
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": "start: /(.|\n)+/" });
    json!({ "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": format })
}

fn request(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "input": "hi", "seed": 7, "tools": [tool()] }), &fields)
}

#[tokio::test]
async fn chat_refuses_custom_tools_with_the_endpoint_that_has_them() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let custom =
        json!({ "type": "custom", "custom": { "name": "apply_patch", "format": { "type": "text" } } });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let refused =
        router.post_json(CHAT, &json!({ "model": MODEL, "messages": messages, "tools": [custom] })).await;
    let error = json!({
        "message": "tools[0].type must be `function`: custom tools are supported by /v1/responses only, other tools \
                    are not",
        "type": "invalid_request_error", "param": "tools[0].type", "code": null,
    });
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]), (400, &error));
}

#[tokio::test]
async fn the_model_sees_a_function_with_a_text() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let parameters = json!({
        "type": "object", "properties": { "input": { "type": "string" } }, "required": ["input"],
        "additionalProperties": false,
    });
    let described = "Edits files.\n\nThe input must match this Lark grammar:\nstart: /(.|\n)+/";
    for (fields, description) in [
        (json!({}), Some(described)),
        (json!({ "description": null }), described.strip_prefix("Edits files.\n\n")),
        (json!({ "format": { "type": "text" } }), Some("Edits files.")),
        (json!({ "format": null, "description": null }), None),
    ] {
        let custom = merged(tool(), &fields);
        router.ok(RESPONSES, &request(json!({ "tools": [custom] }))).await;
        let submitted = router.lanes.take_one();
        assert_eq!(submitted.spec.grammar, None);
        let mut function = json!({ "name": "apply_patch" });
        if let Some(description) = description {
            function["description"] = json!(description);
        }
        function["parameters"] = parameters.clone();
        let tools = json!([{ "type": "function", "function": function }]);
        let messages = json!([{ "role": "user", "content": "hi" }]);
        router.ok(CHAT, &json!({ "model": MODEL, "messages": messages, "tools": tools })).await;
        assert_eq!(router.lanes.take_one().prompt_ids, submitted.prompt_ids, "{fields}");
    }
    let text = json!({ "type": "custom", "name": "apply_patch" });
    let choice = json!({ "tools": [text], "tool_choice": text });
    router.ok(RESPONSES, &request(choice)).await;
    assert_eq!(submitted_schema(&router), parameters);
}

#[tokio::test]
async fn a_call_has_the_text_as_its_input() {
    let router = router_with(TEMPLATE).with_reply(&reply());
    let whole = router.ok(RESPONSES, &request(json!({}))).await;
    router.lanes.take_submitted();
    assert_eq!(whole["tools"], json!([tool()]));
    let mut call = whole["output"][1].clone();
    let (id, call_id) = (call["id"].take(), call["call_id"].take());
    assert!(id.as_str().unwrap().starts_with("ctc_") && call_id.as_str().unwrap().starts_with("call_"));
    let expected = json!({
        "type": "custom_tool_call", "id": null, "call_id": null, "name": "apply_patch", "input": PATCH,
        "status": "completed",
    });
    assert_eq!(call, expected);

    let events = events(&router, &request(json!({ "stream": true }))).await;
    let of_call: Vec<&Value> = events.iter().filter(|event| event["output_index"] == 1).collect();
    let types: Vec<&str> = of_call.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ];
    assert_eq!(types, expected);
    assert_eq!((&of_call[1]["delta"], &of_call[2]["input"]), (&json!(PATCH), &json!(PATCH)));
    router.lanes.take_submitted();

    let result = json!({ "type": "custom_tool_call_output", "call_id": call_id, "output": "Done." });
    let continued = json!({ "input": [result], "previous_response_id": whole["id"] });
    router.ok(RESPONSES, &request(continued)).await;
    let prompt = router.lanes.take_one().prompt_ids;
    let resent = json!([{ "role": "user", "content": "hi" }, whole["output"][0], whole["output"][1], result]);
    router.ok(RESPONSES, &request(json!({ "input": resent }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, prompt, "the call is sent back as it was");
}

#[tokio::test]
async fn a_tool_of_a_namespace_is_a_function_with_both_names() {
    let call =
        r#"<tool_call>{"name": "mcp__weather__get_weather", "arguments": {"city": "Bern"}}</tool_call>"#;
    let router = router_with(TEMPLATE).with_reply(call);
    let mut tool = weather()["function"].clone();
    tool["name"] = json!("mcp__weather__get_weather");
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let tools = json!([{ "type": "function", "function": tool }]);
    router.ok(CHAT, &json!({ "model": MODEL, "messages": messages, "tools": tools })).await;
    let expected = router.lanes.take_one().prompt_ids;

    let mut tool = weather()["function"].clone();
    tool["type"] = json!("function");
    let namespace =
        json!({ "type": "namespace", "name": "mcp__weather", "description": "Forecasts.", "tools": [tool] });
    let request = |fields: Value| merged(request(json!({ "tools": [namespace] })), &fields);
    let whole = router.ok(RESPONSES, &request(json!({}))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, expected);
    assert_eq!(whole["tools"], json!([namespace]));
    let item = &whole["output"][1];
    assert_eq!(
        (&item["type"], &item["namespace"], &item["name"], &item["arguments"]),
        (
            &json!("function_call"),
            &json!("mcp__weather"),
            &json!("get_weather"),
            &json!(r#"{"city":"Bern"}"#)
        )
    );
    let events = events(&router, &request(json!({ "stream": true }))).await;
    let named = |kind: &str| events.iter().find(|event| event["type"] == kind).unwrap()["name"].clone();
    assert_eq!(named("response.function_call_arguments.done"), "get_weather");
    router.lanes.take_submitted();

    let result = json!({
        "type": "function_call_output", "call_id": item["call_id"], "namespace": "mcp__weather",
        "name": "get_weather", "output": "sun",
    });
    let continued = json!({ "input": [result], "previous_response_id": whole["id"] });
    router.ok(RESPONSES, &request(continued)).await;
    let prompt = router.lanes.take_one().prompt_ids;
    let resent = json!([{ "role": "user", "content": "hi" }, whole["output"][0], item, result]);
    router.ok(RESPONSES, &request(json!({ "input": resent }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, prompt, "the call is sent back as it was");
}

/// The client runs the search; the model may call what it finds.
#[tokio::test]
async fn a_search_for_tools_makes_them_callable() {
    let call = |name: &str, arguments: &str| {
        Script::Reply(format!(r#"<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>"#))
    };
    let router = router_with(TEMPLATE);
    router.lanes.set_script(call("tool_search", r#"{"query": "files"}"#));
    let parameters = json!({ "type": "object", "properties": { "query": { "type": "string" } } });
    let function = json!({ "name": "tool_search", "description": "Finds tools.", "parameters": parameters });
    let search = merged(function.clone(), &json!({ "type": "tool_search", "execution": "client" }));
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let tools = json!([{ "type": "function", "function": function }]);
    router.ok(CHAT, &json!({ "model": MODEL, "messages": messages, "tools": tools })).await;
    let expected = router.lanes.take_one().prompt_ids;
    let whole = router.ok(RESPONSES, &request(json!({ "tools": [search] }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, expected, "the model sees a function");

    let item = &whole["output"][1];
    assert!(item["id"].as_str().unwrap().starts_with("tsc_"), "{item}");
    assert_eq!(
        (&item["type"], &item["execution"], &item["arguments"], &item["status"]),
        (&json!("tool_search_call"), &json!("client"), &json!({ "query": "files" }), &json!("completed"))
    );
    let events = events(&router, &request(json!({ "tools": [search], "stream": true }))).await;
    let of_call = events.iter().filter(|event| event["output_index"] == 1);
    let types: Vec<&str> = of_call.map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["response.output_item.added", "response.output_item.done"]);
    router.lanes.take_submitted();

    router.lanes.set_script(call("mcp__weather__get_weather", r#"{"city": "Bern"}"#));
    let found = merged(weather()["function"].clone(), &json!({ "type": "function", "defer_loading": true }));
    let namespace =
        json!({ "type": "namespace", "name": "mcp__weather", "description": "", "tools": [found] });
    let output = json!({
        "type": "tool_search_output", "call_id": item["call_id"], "status": "completed", "execution": "client",
        "tools": [namespace, namespace],
    });
    let additional = json!({ "type": "additional_tools", "role": "developer", "tools": [namespace] });
    let user = json!({ "role": "user", "content": "hi" });
    for input in [json!([user, whole["output"][0], item, output]), json!([user, additional])] {
        let answer = router.ok(RESPONSES, &request(json!({ "tools": [search], "input": input }))).await;
        let called = &answer["output"][1];
        assert_eq!(
            (&called["type"], &called["namespace"], &called["name"]),
            (&json!("function_call"), &json!("mcp__weather"), &json!("get_weather"))
        );
        let prompt = router::detokenize::decode(&demo_text(), &router.lanes.take_one().prompt_ids);
        assert_eq!(prompt.matches(r#"{"name": "mcp__weather__get_weather""#).count(), 1, "{prompt}");
        let is_searched = input[3] == output;
        assert_eq!(
            prompt.contains(r#"["mcp__weather__get_weather","mcp__weather__get_weather"]"#),
            is_searched
        );
    }
}

#[tokio::test]
async fn requests_of_the_codex_cli_are_accepted() {
    let router = router_with(TEMPLATE).with_reply(&reply());
    let metadata = json!({ "turn_id": "1" });
    let message = |role: &str, text: &str| {
        json!({
            "type": "message", "role": role, "content": [{ "type": "input_text", "text": text }],
            "internal_chat_message_metadata_passthrough": metadata,
        })
    };
    let shell = json!({
        "type": "function", "name": "exec_command", "description": "Runs a command.", "strict": false,
        "parameters": { "type": "object", "properties": { "cmd": { "type": "string" } }, "required": ["cmd"] },
    });
    let namespace = json!({
        "type": "namespace", "name": "mcp__files", "description": "Tools in the mcp__files namespace.",
        "tools": [shell],
    });
    let web_search = json!({ "type": "web_search", "external_web_access": false });
    let image_generation = json!({ "type": "image_generation", "output_format": "png" });
    let body = json!({
        "model": MODEL, "instructions": "You edit files.",
        "tools": [shell, tool(), web_search, image_generation, namespace],
        "tool_choice": "auto",
        "input": [message("developer", "Be brief."), message("user", "hi")], "parallel_tool_calls": false,
        "reasoning": null, "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1", "client_metadata": { "x-codex-installation-id": "1" },
    });
    let last = events(&router, &body).await.pop().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"][1]["input"], PATCH);
    assert_eq!(last["response"]["tools"], body["tools"]);
    // Tools that only OpenAI's servers run are not in the prompt.
    let prompt_ids = router.lanes.take_one().prompt_ids;
    let without = merged(body, &json!({ "tools": [shell, tool(), namespace] }));
    events(&router, &without).await;
    assert_eq!(router.lanes.take_one().prompt_ids, prompt_ids);
}
