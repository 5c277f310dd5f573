//! Log probabilities in responses: the numbers of chat completions, in the texts and in their events.

use serde_json::{Value, json};

use crate::client::{CHAT, END, MODEL, RESPONSES, TestRouter, demo_encode, demo_text, merged};
use crate::responses::events;
use crate::tools::{TEMPLATE, router_with, weather};

fn include(fields: Value) -> Value {
    merged(json!({ "include": ["message.output_text.logprobs"] }), &fields)
}

fn response(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "input": "hi", "seed": 7 }), &fields)
}

fn chat(fields: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    merged(json!({ "model": MODEL, "messages": messages, "seed": 7, "logprobs": true }), &fields)
}

/// The log probabilities of a chat completion.
async fn in_chat(router: &TestRouter, fields: Value) -> Value {
    router.ok(CHAT, &chat(fields)).await["choices"][0]["logprobs"]["content"].clone()
}

fn of_text(item: &Value) -> &Value {
    &item["content"][0]["logprobs"]
}

/// The tokens, joined.
fn joined(logprobs: &Value) -> String {
    logprobs.as_array().unwrap().iter().map(|entry| entry["token"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn they_are_those_of_a_chat_completion() {
    let router = TestRouter::start().with_reply(" shines \u{1F600} and more");
    for fields in [json!({}), json!({ "top_logprobs": 0 }), json!({ "top_logprobs": 20 })] {
        let expected = in_chat(&router, fields.clone()).await;
        // This also compares the sum of the events with the whole response, for several lengths of spans.
        let whole = router.ok(RESPONSES, &response(include(fields.clone()))).await;
        assert_eq!(of_text(&whole["output"][0]), &expected, "{fields}");
        assert_eq!(whole["top_logprobs"], fields.get("top_logprobs").cloned().unwrap_or(json!(0)));
        let stored = router.get(&format!("{RESPONSES}/{}", whole["id"].as_str().unwrap())).await;
        assert_eq!(stored.json(), whole);
    }
    for cut in [json!({ "stop": "and" }), json!({ "stop": "\u{1F600}" })] {
        let expected = in_chat(&router, cut.clone()).await;
        let whole = router.ok(RESPONSES, &response(include(cut.clone()))).await;
        assert_eq!(of_text(&whole["output"][0]), &expected, "{cut}");
    }
    let expected = in_chat(&router, json!({ "max_tokens": 3 })).await;
    let whole = router.ok(RESPONSES, &response(include(json!({ "max_output_tokens": 3 })))).await;
    assert_eq!((of_text(&whole["output"][0]), &whole["status"]), (&expected, &json!("incomplete")));
}

#[tokio::test]
async fn their_json() {
    let router = TestRouter::start().with_reply("");
    let vocabulary = demo_text();
    let vocabulary = vocabulary.vocabulary();
    let scored = |id: u32, logprob: f64| {
        let (token, bytes) = (vocabulary.spell(id), vocabulary.bytes(id));
        json!({ "token": token, "logprob": logprob, "bytes": bytes })
    };
    let entry =
        |id: u32, logprob: f64, top: Value| merged(scored(id, logprob), &json!({ "top_logprobs": top }));
    let top = json!([scored(36, -0.5), scored(37, -1.5)]);
    let [zero] = demo_encode("0")[..] else { panic!("the text is one token") };
    let (first, end) = (entry(zero, -0.25, top.clone()), entry(END, -1.25, top));
    let body = response(include(json!({ "top_logprobs": 2 })));
    let whole = router.ok(RESPONSES, &body).await;
    let part = json!({
        "type": "output_text", "text": "0", "annotations": [], "logprobs": [first, end]
    });
    assert_eq!(whole["output"][0]["content"], json!([part]));
    // The order of the fields, too.
    let text = of_text(&whole["output"][0]).to_string();
    assert_eq!(text, json!([first, end]).to_string());

    let events = events(&router, &merged(body, &json!({ "stream": true }))).await;
    let id = &events[2]["item"]["id"];
    let base = json!({ "item_id": id, "output_index": 0, "content_index": 0 });
    let event = |number: u64, name: &str, fields: Value| {
        let named = json!({ "type": format!("response.{name}"), "sequence_number": number });
        merged(named, &merged(base.clone(), &fields))
    };
    let empty = merged(part.clone(), &json!({ "text": "", "logprobs": [] }));
    assert_eq!(events[3], event(3, "content_part.added", json!({ "part": empty })));
    // The stop token may arrive with the text or after it.
    let num_deltas = events.len() - 8;
    let mut in_deltas = Vec::new();
    for delta in &events[4..4 + num_deltas] {
        let number = delta["sequence_number"].as_u64().unwrap();
        let (more, logprobs) = (&delta["delta"], &delta["logprobs"]);
        let expected = event(number, "output_text.delta", json!({ "delta": more, "logprobs": logprobs }));
        assert_eq!(delta, &expected);
        in_deltas.extend(logprobs.as_array().unwrap().iter().cloned());
    }
    assert_eq!(in_deltas, [first.clone(), end.clone()]);
    let last = &events[4 + num_deltas..];
    let number = 4 + num_deltas as u64;
    let done = json!({ "text": "0", "logprobs": [first, end] });
    assert_eq!(last[0], event(number, "output_text.done", done));
    assert_eq!(last[1], event(number + 1, "content_part.done", json!({ "part": part })));
    assert_eq!(last[2]["item"]["content"], json!([part]));
    assert_eq!(last[3]["response"]["output"][0]["content"], json!([part]));
}

#[tokio::test]
async fn without_include_nothing_changes() {
    let router = TestRouter::start().with_reply(" shines");
    for fields in
        [json!({}), json!({ "include": ["reasoning.encrypted_content", "web_search_call.results"] })]
    {
        let whole = router.ok(RESPONSES, &response(fields.clone())).await;
        assert_eq!((of_text(&whole["output"][0]), &whole["top_logprobs"]), (&json!([]), &json!(0)));
        assert!(router.lanes.take_submitted().iter().all(|submitted| submitted.spec.logprobs.is_none()));
        let events = events(&router, &response(merged(fields, &json!({ "stream": true })))).await;
        let deltas: Vec<&Value> =
            events.iter().filter(|event| event["type"] == "response.output_text.delta").collect();
        assert!(
            deltas.iter().all(|delta| delta["logprobs"] == json!([]) && delta["delta"] != ""),
            "{deltas:?}"
        );
    }
}

/// Reasoning and calls have none; what a text has is part of what a chat completion has for the whole output.
#[tokio::test]
async fn only_texts_have_them() {
    let call = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>"#;
    let router = router_with(&format!("{TEMPLATE}<think>"))
        .with_reply(&format!(" thinks</think> sees <b> {call} and {call} goes on"));
    let expected = in_chat(&router, json!({ "tools": [weather()], "top_logprobs": 1 })).await;
    let expected = expected.as_array().unwrap();
    let tool = merged(weather()["function"].clone(), &json!({ "type": "function" }));
    let whole = router.ok(RESPONSES, &response(include(json!({ "tools": [tool], "top_logprobs": 1 })))).await;
    let output = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    let [text, function] = ["message", "function_call"];
    assert_eq!(kinds, ["reasoning", text, function, text, function, text]);
    let texts = output.iter().filter(|item| item["type"] == text);
    for (item, in_text) in texts.zip([" sees <b>", " and", " goes on"]) {
        assert_eq!(item["content"][0]["text"], in_text);
        let found = of_text(item).as_array().unwrap();
        assert!(expected.windows(found.len()).any(|part| part == found), "{item}");
        assert!(joined(of_text(item)).contains(in_text), "{item}");
    }
    let last = of_text(&output[5]).as_array().unwrap().last();
    assert_eq!(last, expected.last(), "the stop token");
    for without in [&output[0], &output[2]] {
        assert!(!without.to_string().contains("logprob"), "{without}");
    }
}
