//! Whole numbers as clients write them: -1 as `max_tokens`, and numbers with a point.

use serde_json::{Value, json};

use crate::client::{ALIAS, CHAT, COMPLETIONS, MAX_MODEL_LEN, MESSAGES, MODEL, RESPONSES, TestRouter};

/// A valid body with one more field.
fn with(path: &str, model: &str, field: &str, value: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let mut body = match path {
        COMPLETIONS => json!({ "model": model, "prompt": "hi" }),
        RESPONSES => json!({ "model": model, "input": "hi" }),
        MESSAGES => json!({ "model": model, "messages": messages, "max_tokens": 5 }),
        _ => json!({ "model": model, "messages": messages }),
    };
    body[field] = value;
    body
}

#[tokio::test]
async fn a_maximum_of_minus_one_is_the_rest_of_the_window() {
    let router = TestRouter::start().with_reply(" fine");
    for (path, field) in [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ] {
        // The alias has a default of 5.
        for model in [MODEL, ALIAS] {
            for value in [json!(-1), json!(-1.0)] {
                let answer = router.ok(path, &with(path, model, field, value)).await;
                assert_eq!(router.lanes.take_one().spec.max_len, MAX_MODEL_LEN, "{path} {field} {model}");
                assert_eq!(answer["max_output_tokens"], Value::Null);
            }
        }
        let refused = router.post_json(path, &with(path, MODEL, field, json!(-2))).await;
        let error = refused.json()["error"].clone();
        assert_eq!(refused.status, 400, "{path} {field}: {error}");
        assert!(error["message"].as_str().unwrap().contains("not -2"), "{path} {field}: {error}");
    }
}

#[tokio::test]
async fn whole_numbers_with_a_point_have_their_value() {
    let router = TestRouter::start().with_reply(" fine");
    for (path, field) in [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ] {
        router.ok(path, &with(path, MODEL, field, json!(7.0))).await;
        let spec = router.lanes.take_one().spec;
        assert_eq!(spec.max_len - spec.prompt_len, 7, "{path}");
    }
    router.ok(COMPLETIONS, &with(COMPLETIONS, MODEL, "seed", json!(11.0))).await;
    assert_eq!(router.lanes.take_one().spec.seed, 11);
    router.ok(COMPLETIONS, &with(COMPLETIONS, MODEL, "prompt", json!([[5.0, 6]]))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, [5, 6]);
    let body = json!({ "model": MODEL, "tokens": [5.0, 6] });
    let ids = json!({ "model": MODEL, "tokens": [5, 6] });
    assert_eq!(router.ok("/detokenize", &body).await, router.ok("/detokenize", &ids).await);
}
