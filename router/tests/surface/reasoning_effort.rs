//! The requested effort of reasoning is a variable of the chat template.

use serde_json::{Value, json};

use crate::client::{CHAT, MODEL, RESPONSES, demo_text, merged};
use crate::tools::router_with;

const TEMPLATE: &str = "{{ reasoning_effort }}|{% for m in messages %}{{ m.content }}{% endfor %}";

#[tokio::test]
async fn the_effort_reaches_the_template() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let kwargs = json!({ "reasoning_effort": "low" });
    for (path, fields, effort) in [
        (CHAT, json!({}), ""),
        (CHAT, json!({ "reasoning_effort": "" }), ""),
        (CHAT, json!({ "reasoning_effort": "high" }), "high"),
        (CHAT, json!({ "reasoning_effort": "high", "chat_template_kwargs": kwargs }), "low"),
        (RESPONSES, json!({ "reasoning": null }), ""),
        (RESPONSES, json!({ "reasoning": { "effort": "high", "summary": "auto" } }), "high"),
        (
            RESPONSES,
            json!({ "reasoning": { "effort": "low", "context": "auto", "mode": "standard" } }),
            "low",
        ),
    ] {
        let body = merged(
            match path {
                CHAT => json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }] }),
                _ => json!({ "model": MODEL, "input": "hi" }),
            },
            &fields,
        );
        let answer = router.ok(path, &body).await;
        let prompt = router::detokenize::decode(&demo_text(), &router.lanes.take_one().prompt_ids);
        assert_eq!(prompt, format!("{effort}|hi"), "{body}");
        if path == RESPONSES {
            let sent = if effort.is_empty() { Value::Null } else { json!(effort) };
            assert_eq!(answer["reasoning"], json!({ "effort": sent, "summary": null }));
        }
    }
}
