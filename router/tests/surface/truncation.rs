//! `truncation` of the responses API: the oldest items of a conversation that does not fit are left out.

use serde_json::{Value, json};

use crate::client::{MAX_MODEL_LEN, MODEL, RESPONSES, TestRouter, merged};
use crate::tools::{TEMPLATE, router_with};

/// Ids of the tokens with which messages of these roles begin.
const USER: u32 = 1;
const ASSISTANT: u32 = 2;

fn request(input: &[Value], fields: Value) -> Value {
    merged(json!({ "model": MODEL, "input": input, "seed": 7, "max_output_tokens": 16 }), &fields)
}

/// Several times the window.
fn turns() -> Vec<Value> {
    let turn = |idx: usize| {
        let question = format!("{idx} {}", "word ".repeat(200));
        [json!({ "role": "user", "content": question }), json!({ "role": "assistant", "content": "yes" })]
    };
    let mut turns: Vec<Value> = (0..20).flat_map(turn).collect();
    turns.push(json!({ "role": "user", "content": "last" }));
    turns
}

/// One turn with calls, several times the window.
fn calls() -> Vec<Value> {
    let call = |idx: usize| {
        let (id, output) = (format!("call_{idx}"), "word ".repeat(200));
        [
            json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" }),
            json!({ "type": "function_call_output", "call_id": id, "output": output }),
        ]
    };
    let mut items = vec![json!({ "role": "user", "content": "hi" })];
    items.extend((0..20).flat_map(call));
    items
}

async fn is_too_long(router: &TestRouter, body: &Value) -> bool {
    let answer = router.post_json(RESPONSES, body).await;
    answer.status == 400 && answer.json()["error"]["code"] == "context_length_exceeded"
}

#[tokio::test]
async fn as_few_items_as_possible_are_left_out() {
    let router = TestRouter::start().with_reply(" fine");
    let items = turns();
    let instructions = json!({ "role": "system", "content": "Be brief." });
    for fields in [json!({}), json!({ "truncation": null }), json!({ "truncation": "disabled" })] {
        assert!(is_too_long(&router, &request(&items, fields)).await);
    }
    let fields = json!({ "truncation": "auto", "instructions": "Be brief." });
    let answer = router.ok(RESPONSES, &request(&items, fields.clone())).await;
    assert_eq!(answer["truncation"], "auto");
    let prompt = json!(router.lanes.take_one().prompt_ids);
    let mut longest = None;
    for start in 0..items.len() {
        let messages: Vec<&Value> = std::iter::once(&instructions).chain(&items[start..]).collect();
        let tokens = router.ok("/tokenize", &json!({ "model": MODEL, "messages": messages })).await;
        if tokens["count"].as_u64().unwrap() + 16 <= u64::from(MAX_MODEL_LEN) {
            longest = Some((start, tokens["tokens"].clone()));
            break;
        }
    }
    let (start, longest) = longest.unwrap();
    assert!((1..items.len() - 1).contains(&start), "{start}");
    assert_eq!(prompt, longest);

    // The stored conversation is complete: together with another item it is as long as all of them.
    let more = json!({ "role": "user", "content": "more" });
    let all = [items.as_slice(), &[answer["output"][0].clone(), more.clone()]].concat();
    let resent = router.post_json(RESPONSES, &request(&all, json!({}))).await;
    let continued = request(&[more], json!({ "previous_response_id": answer["id"] }));
    let continued = router.post_json(RESPONSES, &continued).await;
    assert_eq!((continued.status.as_u16(), continued.json()), (400, resent.json()));

    // A conversation that fits is not changed.
    router.ok(RESPONSES, &request(&items[..1], fields)).await;
    let short = router.lanes.take_one().prompt_ids;
    router.ok(RESPONSES, &request(&items[..1], json!({ "instructions": "Be brief." }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, short);
    let long = json!({ "role": "user", "content": "word ".repeat(3_000) });
    assert!(is_too_long(&router, &request(&[long], json!({ "truncation": "auto" }))).await);
}

/// Otherwise every answer of a long conversation would end after a few tokens.
#[tokio::test]
async fn without_a_limit_of_the_output_a_quarter_of_the_window_is_left() {
    let router = TestRouter::start().with_reply(" fine");
    let count = async |num_words: usize| {
        let messages = json!([{ "role": "user", "content": "word ".repeat(num_words) }]);
        let tokens = router.ok("/tokenize", &json!({ "model": MODEL, "messages": messages })).await;
        tokens["count"].as_u64().unwrap() as usize
    };
    let tokens_of_100_words = count(200).await - count(100).await;
    // Between three quarters of the window and all of it.
    let num_words = MAX_MODEL_LEN as usize * 7 / 8 * 100 / tokens_of_100_words;
    let long = json!({ "role": "user", "content": "word ".repeat(num_words) });
    let three_quarters = MAX_MODEL_LEN as usize * 3 / 4;
    let prompt_len = async |items: &[Value]| {
        let fields = json!({ "truncation": "auto", "max_output_tokens": null });
        router.ok(RESPONSES, &request(items, fields)).await;
        router.lanes.take_one().prompt_ids.len()
    };
    let shortened = prompt_len(&turns()).await;
    assert!((three_quarters / 2..=three_quarters).contains(&shortened), "{shortened}");
    // What fits is not changed, and what cannot be shortened as much fits.
    for items in [vec![long.clone()], [turns(), vec![long]].concat()] {
        let longer = prompt_len(&items).await;
        assert!(longer > three_quarters, "{longer}");
    }
}

#[tokio::test]
async fn a_result_stays_with_its_call() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    router.ok(RESPONSES, &request(&calls(), json!({ "truncation": "auto" }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids[0], ASSISTANT);
}

#[tokio::test]
async fn a_template_that_wants_the_user_first_gets_whole_turns() {
    let first = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}";
    let router = router_with(&format!("{first}{TEMPLATE}")).with_reply(" fine");
    router.ok(RESPONSES, &request(&turns(), json!({ "truncation": "auto" }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids[0], USER);
    assert!(is_too_long(&router, &request(&calls(), json!({ "truncation": "auto" }))).await);
}
