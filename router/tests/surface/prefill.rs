//! Conversations whose last message is continued, and those that end without the beginning of another one.

use serde_json::{Value, json};

use crate::client::{CHAT, MESSAGES, MODEL, TestRouter, demo_encode, merged};

/// A conversation that ends with the beginning of an answer.
fn begun() -> Value {
    json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "The answer is" }])
}

const PROMPT: &str = "<|user|>\nhi<|end|>\n<|assistant|>\nThe answer is";

#[tokio::test]
async fn a_last_message_of_the_assistant_is_continued_in_anthropics_format() {
    let router = TestRouter::start().with_reply(" fine");
    let body = json!({ "model": MODEL, "messages": begun(), "max_tokens": 64, "seed": 7 });
    let message = router.ok(MESSAGES, &body).await;
    assert_eq!(router.lanes.take_one().prompt_ids, demo_encode(PROMPT));
    assert_eq!(message["content"], json!([{ "type": "text", "text": "0 fine" }]), "only what is new");
    let count = router.ok("/v1/messages/count_tokens", &body).await;
    assert_eq!(count, json!({ "input_tokens": demo_encode(PROMPT).len() }));
    // An empty text is a beginning, too.
    let empty = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "" }]);
    router.ok(MESSAGES, &json!({ "model": MODEL, "messages": empty, "max_tokens": 64 })).await;
    assert_eq!(router.lanes.take_one().prompt_ids, demo_encode("<|user|>\nhi<|end|>\n<|assistant|>\n"));
}

#[tokio::test]
async fn vllms_fields_choose_the_end_of_the_prompt() {
    let router = TestRouter::start().with_reply(" fine");
    let user = "<|user|>\nhi<|end|>\n";
    let ended = format!("{PROMPT}<|end|>\n");
    let asked = format!("{ended}<|assistant|>\n");
    for (fields, expected) in [
        (json!({}), asked.as_str()),
        (json!({ "add_generation_prompt": true, "continue_final_message": false }), &asked),
        (json!({ "add_generation_prompt": false }), &ended),
        (json!({ "continue_final_message": true }), PROMPT),
        (json!({ "add_generation_prompt": false, "continue_final_message": true }), PROMPT),
        (json!({ "add_generation_prompt": false, "messages": [{ "role": "user", "content": "hi" }] }), user),
        (
            json!({ "continue_final_message": true, "messages": [{ "role": "user", "content": "hi" }] }),
            "<|user|>\nhi",
        ),
    ] {
        let body = merged(json!({ "model": MODEL, "messages": begun() }), &fields);
        router.ok(CHAT, &body).await;
        assert_eq!(router.lanes.take_one().prompt_ids, demo_encode(expected), "{fields}");
        assert_eq!(router.ok("/tokenize", &body).await["tokens"], json!(demo_encode(expected)), "{fields}");
    }
}

#[tokio::test]
async fn what_cannot_be_continued_is_refused() {
    let router = TestRouter::start().with_reply(" fine");
    let call = json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    for (fields, param, expected) in [
        (
            json!({ "continue_final_message": true, "add_generation_prompt": true }),
            "continue_final_message",
            "cannot be combined with add_generation_prompt",
        ),
        (
            json!({
                "continue_final_message": true,
                "messages": [{ "role": "assistant", "content": "x", "tool_calls": [call] }],
            }),
            "messages",
            "without tool calls can be continued",
        ),
    ] {
        let body = merged(json!({ "model": MODEL, "messages": begun() }), &fields);
        for path in [CHAT, "/tokenize"] {
            let refused = router.post_json(path, &body).await;
            let error = refused.json()["error"].clone();
            assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!(param)), "{path}: {error}");
            assert!(error["message"].as_str().unwrap().contains(expected), "{path}: {error}");
        }
        assert!(router.lanes.take_submitted().is_empty());
    }
}
