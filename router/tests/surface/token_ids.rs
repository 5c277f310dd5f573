//! vLLM's fields of choices: the ids of prompt and output, and what ended the output.

use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, END, MODEL, TestRouter, chunks, demo_encode, merged};
use crate::tools::{router_with, weather};

fn with(path: &str, fields: Value) -> Value {
    merged(
        match path {
            CHAT => json!({ "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }] }),
            _ => json!({ "model": MODEL, "seed": 7, "prompt": "hi" }),
        },
        &fields,
    )
}

/// The ids that the fake lanes generate for a choice.
fn output_ids(choice: usize, text: &str) -> Vec<u32> {
    [demo_encode(&format!("{choice}{text}")), vec![END]].concat()
}

#[tokio::test]
async fn a_chat_completion_has_the_ids_of_its_prompt_once() {
    let router = TestRouter::start().with_reply(" shines");
    let fields = json!({ "return_token_ids": true, "n": 2 });
    let whole = router.ok(CHAT, &with(CHAT, fields.clone())).await;
    let prompt = json!(router.lanes.take_one().prompt_ids);
    assert_eq!(whole["prompt_token_ids"], prompt);
    for (idx, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["token_ids"], json!(output_ids(idx, " shines")));
        assert_eq!(choice.get("prompt_token_ids"), None);
    }
    let mut streamed = with(CHAT, fields);
    streamed["stream"] = json!(true);
    let mut has_begun = [false; 2];
    for chunk in chunks(&router.events(CHAT, &streamed).await) {
        let idx = chunk["choices"][0]["index"].as_u64().unwrap() as usize;
        let is_first = !std::mem::replace(&mut has_begun[idx], true);
        assert_eq!(chunk.get("prompt_token_ids"), is_first.then_some(&prompt), "{chunk}");
        assert!(chunk["choices"][0]["token_ids"].is_array(), "{chunk}");
    }
    let plain = router.ok(CHAT, &with(CHAT, json!({}))).await;
    assert_eq!((plain.get("prompt_token_ids"), plain["choices"][0].get("token_ids")), (None, None));
}

#[tokio::test]
async fn each_choice_of_a_completion_has_the_ids_of_its_prompt() {
    let router = TestRouter::start().with_reply(" shines");
    let prompts = ["hi", "one two"];
    for echo in [false, true] {
        let fields = json!({ "prompt": prompts, "n": 2, "echo": echo, "return_token_ids": true });
        let whole = router.ok(COMPLETIONS, &with(COMPLETIONS, fields.clone())).await;
        for (idx, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["prompt_token_ids"], json!(demo_encode(prompts[idx / 2])));
            assert_eq!(choice["token_ids"], json!(output_ids(idx % 2, " shines")), "without the echo");
        }
        let mut streamed = with(COMPLETIONS, fields);
        streamed["stream"] = json!(true);
        let mut has_begun = [false; 4];
        for chunk in chunks(&router.events(COMPLETIONS, &streamed).await) {
            let choice = &chunk["choices"][0];
            let idx = choice["index"].as_u64().unwrap() as usize;
            let is_first = !std::mem::replace(&mut has_begun[idx], true);
            assert_eq!(choice.get("prompt_token_ids").is_some(), is_first, "{chunk}");
        }
    }
}

#[tokio::test]
async fn ids_of_calls_are_returned_too() {
    let text = "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"x\"}}</tool_call>";
    let router = router_with(crate::tools::TEMPLATE).with_reply(text);
    let fields = json!({ "tools": [weather()], "return_token_ids": true });
    let whole = router.ok(CHAT, &with(CHAT, fields)).await;
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(whole["choices"][0]["token_ids"], json!(output_ids(0, text)));
}

#[tokio::test]
async fn a_choice_names_what_the_client_asked_to_end_it() {
    let router = TestRouter::start().with_reply(" shines");
    for (fields, finish, expected) in [
        (json!({}), "stop", Value::Null),
        (json!({ "max_tokens": 2 }), "length", Value::Null),
        (json!({ "stop": ["never", "shin"] }), "stop", json!("shin")),
        (json!({ "stop_token_ids": [9] }), "stop", Value::Null),
        (json!({ "stop_token_ids": [9], "ignore_eos": true }), "stop", json!(9)),
        (json!({ "stop_token_ids": [END] }), "stop", Value::Null),
        (json!({ "stop_token_ids": [END], "ignore_eos": true }), "stop", json!(END)),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let whole = router.ok(path, &with(path, fields.clone())).await;
            let choice = &whole["choices"][0];
            assert_eq!(
                (&choice["finish_reason"], choice.get("stop_reason")),
                (&json!(finish), Some(&expected))
            );
            let mut streamed = with(path, fields.clone());
            streamed["stream"] = json!(true);
            let pieces = chunks(&router.events(path, &streamed).await);
            for (idx, piece) in pieces.iter().enumerate() {
                let is_last = idx + 1 == pieces.len();
                let reason = piece["choices"][0].get("stop_reason");
                match is_last {
                    true => assert_eq!(reason, Some(&expected), "{path} {fields}"),
                    // As in vLLM.
                    false => assert_eq!(reason, (path == COMPLETIONS).then_some(&Value::Null)),
                }
            }
        }
    }
}
