//! `prediction`: accepted values, refused ones, and the reported usage.

use serde_json::{Value, json};

use crate::client::{CHAT, MODEL, TestRouter, chunks, demo_encode};

fn request_with(prediction: Value) -> Value {
    json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": "hi" }],
        "prediction": prediction,
    })
}

#[tokio::test]
async fn a_predicted_text_is_submitted_as_ids() {
    let router = TestRouter::start().with_reply(" fine");
    let parts = json!([{ "type": "text", "text": "def a():" }, { "type": "text", "text": "    return 1" }]);
    for (content, text) in [
        (json!("def a():\n    return 1"), "def a():\n    return 1"),
        (parts, "def a():\n    return 1"),
        (json!(" fine"), " fine"),
    ] {
        router.ok(CHAT, &request_with(json!({ "type": "content", "content": content }))).await;
        let prediction = router.lanes.take_one().prediction.unwrap();
        assert_eq!(prediction.ids(), demo_encode(text), "{text:?}");
    }
    for nothing in [Value::Null, json!({ "type": "content", "content": "" })] {
        router.ok(CHAT, &request_with(nothing)).await;
        assert_eq!(router.lanes.take_one().prediction, None);
    }
}

#[tokio::test]
async fn accepted_and_rejected_prediction_tokens_are_reported() {
    let text = "the cat sat on the mat and the dog lay on the rug";
    let router = TestRouter::start().with_reply(&text.replace("dog", "horse"));
    let body = request_with(json!({ "type": "content", "content": format!("0{text}") }));
    let details = |answer: &Value| {
        let details = &answer["usage"]["completion_tokens_details"];
        let count = |name: &str| details[name].as_u64().unwrap();
        (count("accepted_prediction_tokens"), count("rejected_prediction_tokens"))
    };
    let counts = details(&router.ok(CHAT, &body).await);
    let predicted = demo_encode(&format!("0{text}")).len() as u64;
    assert_eq!(counts.0 + counts.1, predicted);
    assert!(counts.0 > predicted / 2 && counts.1 > 0, "{counts:?}");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let events = router.events(CHAT, &streamed).await;
    assert_eq!(details(chunks(&events).last().unwrap()), counts);
    let mut plain = body;
    plain["prediction"] = Value::Null;
    assert_eq!(details(&router.ok(CHAT, &plain).await), (0, 0));
}

#[tokio::test]
async fn invalid_combinations_are_refused_by_name() {
    let router = TestRouter::start().with_reply(" fine");
    let prediction = json!({ "type": "content", "content": "x" });
    let tool = json!([{ "type": "function", "function": { "name": "f" } }]);
    let rows = [
        ("n", json!(2), "prediction is not supported together with n above 1: leave one of them out"),
        ("tools", tool, "prediction is not supported together with tools: leave one of them out"),
        (
            "logprobs",
            json!(true),
            "prediction is not supported together with logprobs: leave one of them out",
        ),
    ];
    for (field, value, expected) in rows {
        let mut body = request_with(prediction.clone());
        body[field] = value;
        let answer = router.post_json(CHAT, &body).await;
        assert_eq!(answer.status, 400, "{field}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!((&error["param"], &error["message"]), (&json!("prediction"), &json!(expected)));
    }
    for (sent, expected) in [
        (json!({ "type": "text", "content": "x" }), "prediction.type must be content, not `text`"),
        (json!({ "type": "content" }), "missing field `content`"),
        (json!({ "type": "content", "content": 5 }), "a string or a list"),
        (json!({ "type": "content", "content": "x", "more": 1 }), "more is not a field"),
        (json!("x"), "expected an object"),
    ] {
        let answer = router.post_json(CHAT, &request_with(sent.clone())).await;
        assert_eq!(answer.status, 400, "{sent}: {}", answer.text());
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(expected), "{sent}: {message}");
    }
    assert!(router.lanes.take_submitted().is_empty());
}

#[tokio::test]
async fn a_prediction_longer_than_the_window_is_refused() {
    let router = TestRouter::start().with_reply(" fine");
    // Too many tokens, and too many bytes.
    for (text, code) in [
        ("\u{1F600}\u{1F601}".repeat(1_500), Value::Null),
        ("a b ".repeat(400_000), json!("context_length_exceeded")),
    ] {
        let answer =
            router.post_json(CHAT, &request_with(json!({ "type": "content", "content": text }))).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!((&error["param"], &error["code"]), (&json!("prediction"), &code), "{}", error["message"]);
    }
}
