//! The older form of tools in chat completions: `functions`, `function_call` and messages of role function.

use serde_json::{Value, json};

use crate::client::{CHAT, MODEL, chunks, merged};
use crate::tools::{TEMPLATE, router_with, weather};

fn chat(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }] }), &fields)
}

#[tokio::test]
async fn a_function_is_called_like_a_tool() {
    let call = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>"#;
    let router = router_with(TEMPLATE).with_reply(&format!(" sees\n{call}\n{call}"));
    router.ok(CHAT, &chat(json!({ "tools": [weather()] }))).await;
    let expected = router.lanes.take_one().prompt_ids;
    let functions = json!([weather()["function"]]);
    let answer = router.ok(CHAT, &chat(json!({ "functions": functions }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, expected);
    let choice = &answer["choices"][0];
    let call = json!({ "name": "get_weather", "arguments": "{\"city\":\"Bern\"}" });
    let message = json!({ "role": "assistant", "content": "0 sees", "function_call": call, "refusal": null });
    assert_eq!((&choice["message"], &choice["finish_reason"]), (&message, &json!("function_call")));

    let events = router.events(CHAT, &chat(json!({ "functions": functions, "stream": true }))).await;
    let chunks = chunks(&events);
    let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    let calls: Vec<&Value> = deltas.filter_map(|delta| delta.get("function_call")).collect();
    assert_eq!(calls, [&call]);
    assert!(events.iter().all(|event| !event.contains("tool_calls")), "{events:?}");
    router.lanes.take_submitted();

    let none = chat(json!({ "functions": functions, "function_call": "none" }));
    let choice = router.ok(CHAT, &none).await["choices"][0].clone();
    assert_eq!((choice["message"].get("function_call"), &choice["finish_reason"]), (None, &json!("stop")));
    assert!(router.lanes.take_one().prompt_ids.len() < expected.len(), "the model sees no function");
}

#[tokio::test]
async fn a_function_that_must_be_called_is_the_same_grammar_as_a_tool() {
    let router = router_with(TEMPLATE).with_reply("{}");
    let choice = json!({ "type": "function", "function": { "name": "get_weather" } });
    router.ok(CHAT, &chat(json!({ "tools": [weather()], "tool_choice": choice }))).await;
    let expected = router.lanes.take_one().spec.grammar;
    let choice = json!({ "name": "get_weather" });
    let body = chat(json!({ "functions": [weather()["function"]], "function_call": choice }));
    let answer = router.ok(CHAT, &body).await;
    let grammar = router.lanes.take_one().spec.grammar;
    assert!(grammar.is_some() && grammar == expected);
    let call = json!({ "name": "get_weather", "arguments": "0{}" });
    assert_eq!(answer["choices"][0]["message"]["function_call"], call);
}

#[tokio::test]
async fn earlier_calls_are_the_same_prompt_in_both_forms() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let function = json!({ "name": "get_weather", "arguments": "{\"city\": \"Bern\"}" });
    let (user, no_call) = (json!({ "role": "user", "content": "hi" }), json!("none"));
    // A function may return nothing.
    for (result, text) in [(json!("sun"), "sun"), (json!(null), "")] {
        let older = json!([
            user,
            { "role": "assistant", "content": null, "function_call": function },
            { "role": "function", "name": "get_weather", "content": result },
            { "role": "assistant", "content": "It shines.", "function_call": null },
        ]);
        let call = json!({ "id": "call_1", "type": "function", "function": function });
        let newer = json!([
            user,
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "name": "get_weather", "tool_call_id": "call_1", "content": text },
            { "role": "assistant", "content": "It shines." },
        ]);
        router.ok(CHAT, &chat(json!({ "messages": older, "function_call": no_call }))).await;
        let prompt = router.lanes.take_one().prompt_ids;
        router.ok(CHAT, &chat(json!({ "messages": newer }))).await;
        assert_eq!(router.lanes.take_one().prompt_ids, prompt, "{result}");
    }
}

#[tokio::test]
async fn errors_name_the_older_fields() {
    let router = router_with("plain").with_reply(" fine");
    let functions = json!([weather()["function"]]);
    let message = |fields: Value| {
        let message = merged(json!({ "role": "assistant", "content": "x" }), &fields);
        json!({ "messages": [message] })
    };
    let call = json!({ "name": "f", "arguments": "{}" });
    for (fields, param, expected) in [
        (json!({ "functions": [{}] }), "functions[0].name", "must be a string"),
        (json!({ "functions": [5] }), "functions[0]", "must be an object"),
        (json!({ "functions": [{ "name": "a b" }] }), "functions[0].name", "1 to 128 of the characters"),
        (json!({ "functions": functions }), "functions", "require a call with function_call"),
        (
            json!({ "functions": functions, "tools": [weather()] }),
            "functions",
            "cannot be combined with tools",
        ),
        (
            json!({ "functions": functions, "tool_choice": "none" }),
            "functions",
            "cannot be combined with tools or tool_choice",
        ),
        (json!({ "function_call": { "name": "f" } }), "function_call", "is not one of the functions"),
        (
            json!({ "function_call": { "name": "f" }, "tools": [weather()] }),
            "function_call",
            "cannot be combined with tools",
        ),
        (json!({ "function_call": "sometimes" }), "function_call", "must be one of none, auto"),
        (message(json!({ "function_call": 5 })), "messages[0].function_call.name", "must be a string"),
        (
            message(json!({ "function_call": { "name": "f", "arguments": "{" } })),
            "messages[0].function_call.arguments",
            "must be a JSON object",
        ),
        (
            message(json!({ "function_call": call, "tool_calls": [{ "id": "1", "function": call }] })),
            "messages[0].function_call",
            "cannot be combined with tool_calls",
        ),
        (
            message(json!({ "function_call": call, "role": "user" })),
            "messages[0].function_call",
            "only allowed in messages of role assistant",
        ),
        (
            message(json!({ "role": "function" })),
            "messages[0].role",
            "no earlier message has a function_call",
        ),
    ] {
        let refused = router.post_json(CHAT, &chat(fields)).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(expected), "{error}");
    }
}
