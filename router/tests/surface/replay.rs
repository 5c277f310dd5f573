//! Answers that clients send back as part of the conversation, with the fields that client libraries add.

use serde_json::{Value, json};

use crate::client::{CHAT, MODEL, TestRouter, merged};
use crate::tools::{assembled, router_with};

/// Shows reasoning, content and calls; the answer begins inside its reasoning.
const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>\
{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}\
{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|><think>";

fn body(assistant: &Value) -> Value {
    let messages = json!([
        { "role": "user", "content": "hi" }, assistant, { "role": "user", "content": "go on" }
    ]);
    json!({ "model": MODEL, "seed": 7, "messages": messages })
}

async fn prompt(router: &TestRouter, body: &Value) -> Vec<u32> {
    router.ok(CHAT, body).await;
    router.lanes.take_one().prompt_ids
}

#[tokio::test]
async fn fields_that_client_libraries_add_to_an_answer_change_nothing() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let function = json!({ "name": "f", "arguments": "{\"a\":1}" });
    let call = |function: &Value| json!({ "id": "1", "type": "function", "function": function });
    let plain = json!({
        "role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": [call(&function)],
    });
    let expected = prompt(&router, &body(&plain)).await;
    let parsed_function = json!({ "name": "f", "parsed_arguments": { "a": 1 }, "arguments": "{\"a\":1}" });
    for fields in [
        json!({ "refusal": null, "annotations": null, "audio": null, "function_call": null }),
        json!({ "annotations": [], "parsed": null, "provider_specific_fields": null, "reasoning": null }),
        json!({ "parsed": { "a": 1 }, "tool_calls": [call(&parsed_function)] }),
        json!({ "provider_specific_fields": { "refusal": null } }),
        json!({ "reasoning_details": [{ "type": "reasoning.text", "text": "hm" }], "thinking_blocks": [{}] }),
        json!({ "cache_control": { "type": "ephemeral" } }),
        json!({ "type": "text" }),
        json!({ "reasoning": "hm" }),
        json!({ "reasoning": "another" }),
        json!({ "reasoning": "hm", "reasoning_content": null }),
    ] {
        assert_eq!(prompt(&router, &body(&merged(plain.clone(), &fields))).await, expected, "{fields}");
    }
}

#[tokio::test]
async fn fields_of_an_answer_are_refused_in_messages_of_other_roles() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    for (field, value) in [
        ("annotations", json!([])),
        ("parsed", json!({})),
        ("provider_specific_fields", json!({})),
        ("reasoning_details", json!([])),
        ("thinking_blocks", json!([])),
        ("reasoning", json!("hm")),
    ] {
        let message = merged(json!({ "role": "user", "content": "x" }), &json!({ field: value }));
        let refused = router.post_json(CHAT, &body(&message)).await;
        assert_eq!(refused.json()["error"]["param"], format!("messages[1].{field}"), "{}", refused.text());
        let absent = merged(json!({ "role": "user", "content": "x" }), &json!({ field: null }));
        router.ok(CHAT, &body(&absent)).await;
    }
}

#[tokio::test]
async fn an_answer_with_only_reasoning_is_the_same_prompt_whole_and_streamed() {
    let router = router_with(TEMPLATE).with_reply(" thinks");
    let request = json!({ "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }] });
    let whole = router.ok(CHAT, &request).await["choices"][0]["message"].clone();
    assert_eq!((&whole["content"], &whole["reasoning_content"]), (&json!(""), &json!("0 thinks")));
    let events = router.events(CHAT, &merged(request, &json!({ "stream": true }))).await;
    let (streamed, _) = assembled(&events);
    assert_eq!(streamed["content"], Value::Null);
    router.lanes.take_submitted();
    let expected = prompt(&router, &body(&whole)).await;
    assert_eq!(prompt(&router, &body(&streamed)).await, expected);
    let without_content = json!({ "role": "assistant", "reasoning_content": "0 thinks" });
    assert_eq!(prompt(&router, &body(&without_content)).await, expected);
    let empty = json!({ "role": "assistant", "content": "", "reasoning": "0 thinks" });
    assert_eq!(prompt(&router, &body(&empty)).await, expected);
}
