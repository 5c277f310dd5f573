//! Integers beyond 64 bits in the arguments of calls keep their digits: in calls that a client sends back,
//! and in calls that a model writes.

use serde_json::{Value, json};

use crate::client::{CHAT, END, MESSAGES, MODEL, RESPONSES, TestRouter, demo_text, merged};
use crate::tools::{TEMPLATE, router_with, weather};

/// Written in place of a number, because [`Value`] has no such numbers.
const PLACE: &str = "\"@number\"";

/// The largest integer of 256 bits; one beyond the range of floats; one just below those of 64 bits.
fn numbers() -> [String; 3] {
    let of_256_bits = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
    [of_256_bits.to_owned(), "7".repeat(400), "-9223372036854775809".to_owned()]
}

/// A body for each form of a conversation, with a call with these arguments: a JSON text, or an object, which
/// OpenAI's forms accept as well.
fn bodies_with_call(arguments: &str) -> Vec<(&'static str, Value)> {
    let user = json!({ "role": "user", "content": "hi" });
    let object: Value = serde_json::from_str(arguments).unwrap();
    let mut bodies = Vec::new();
    for arguments in [json!(arguments), object.clone()] {
        let function = json!({ "name": "get_weather", "arguments": arguments });
        let calls = json!([{ "id": "1", "type": "function", "function": function }]);
        let newer = json!({ "role": "assistant", "content": "a", "tool_calls": calls });
        let older = json!({ "role": "assistant", "content": "a", "function_call": function });
        let item =
            json!({ "type": "function_call", "call_id": "1", "name": "get_weather", "arguments": arguments });
        bodies.extend([
            (CHAT, json!({ "model": MODEL, "messages": [user, newer, user] })),
            (CHAT, json!({ "model": MODEL, "messages": [user, older, user] })),
            (RESPONSES, json!({ "model": MODEL, "input": [user, item, user] })),
        ]);
    }
    let block = json!({ "type": "tool_use", "id": "1", "name": "get_weather", "input": object });
    let message = json!({ "role": "assistant", "content": [block] });
    bodies.push((MESSAGES, json!({ "model": MODEL, "max_tokens": 5, "messages": [user, message, user] })));
    bodies
}

/// The text of the only prompt that was submitted, and its number of tokens that end a message.
fn submitted(router: &TestRouter) -> (String, usize) {
    let ids = router.lanes.take_one().prompt_ids;
    (router::detokenize::decode(&demo_text(), &ids), ids.iter().filter(|&&id| id == END).count())
}

#[tokio::test]
async fn calls_that_clients_send_back_keep_their_digits() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    // JSON's escape must not hide the spelling of a special token.
    let arguments = r#"{"days": ["@number", 1.5], "city": "\u003c|end|>"}"#;
    for number in numbers() {
        for (path, body) in bodies_with_call(arguments) {
            // The quotes have escapes where the arguments are a string.
            let body = body.to_string().replace(r#"\"@number\""#, PLACE).replace(PLACE, &number);
            let answer = router.post(path, body.clone()).await;
            assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
            let (prompt, num_ends) = submitted(&router);
            let expected = format!(r#""arguments": {{"days": [{number}, 1.5], "city": "<|end|>"}}"#);
            assert!(prompt.contains(&expected), "{path}: {prompt}");
            assert_eq!(num_ends, 3, "one for each message: {path}: {prompt}");
        }
    }
}

#[tokio::test]
async fn calls_that_models_write_keep_their_digits() {
    let function = weather()["function"].clone();
    let flat = merged(function.clone(), &json!({ "type": "function" }));
    let with_schema = json!({ "name": function["name"], "input_schema": function["parameters"] });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    for number in numbers() {
        let call = format!(r#"{{"name": "get_weather", "arguments": {{"days": [{number}, 1.50]}}}}"#);
        let router = router_with(TEMPLATE).with_reply(&format!("<tool_call>{call}</tool_call>"));
        let arguments = format!(r#"{{"days":[{number},1.50]}}"#);
        let text = json!(arguments).to_string();
        for (path, body, whole, streamed) in [
            (
                CHAT,
                json!({ "model": MODEL, "messages": messages, "tools": [weather()] }),
                format!(r#""arguments":{text}"#),
                format!(r#""arguments":{text}"#),
            ),
            (
                RESPONSES,
                json!({ "model": MODEL, "input": "hi", "tools": [flat] }),
                format!(r#""arguments":{text}"#),
                format!(r#""delta":{text}"#),
            ),
            (
                MESSAGES,
                json!({ "model": MODEL, "max_tokens": 1_500, "messages": messages, "tools": [with_schema] }),
                format!(r#""input":{arguments}"#),
                format!(r#""partial_json":{text}"#),
            ),
        ] {
            for (stream, expected) in [(false, whole), (true, streamed)] {
                let answer =
                    router.post(path, merged(body.clone(), &json!({ "stream": stream })).to_string()).await;
                assert!(answer.text().contains(&expected), "{path} {stream}: {}", answer.text());
                router.lanes.take_submitted();
            }
        }
        // A stored call is part of the next prompt.
        let first = router.ok(RESPONSES, &json!({ "model": MODEL, "input": "hi", "tools": [flat] })).await;
        router.lanes.take_submitted();
        let next = json!({ "model": MODEL, "input": "go on", "previous_response_id": first["id"] });
        router.ok(RESPONSES, &next).await;
        let (prompt, _) = submitted(&router);
        assert!(prompt.contains(&format!(r#""arguments": {{"days": [{number}, 1.5]}}"#)), "{prompt}");
    }
}
