//! Templates that restrict conversations more than the APIs do: short ids of calls, a single call per
//! message, or messages of the system only at the beginning.

use serde_json::{Value, json};

use crate::client::{CHAT, MESSAGES, MODEL, RESPONSES, TestRouter, demo_text, merged};
use crate::tools::{router_with, weather};

/// Checks ids as Mistral's do, and writes them between `#`.
const SHORT_IDS: &str = "{% if tools %}[TOOL_CALLS]{% endif %}{% macro id(i) %}\
{% if i | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
#{{ i }}#{% endmacro %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\
{% for c in m.tool_calls %}{{ id(c.id) }}{% endfor %}{% if m.tool_call_id %}{{ id(m.tool_call_id) }}{% endif %}\
<|end|>{% endfor %}<|assistant|>";

/// Refuses several calls as Llama 3's do.
const SINGLE_CALLS: &str = "{% for m in messages %}[{{ m.role }}]\
{% if m.tool_calls and m.tool_calls | length != 1 %}\
{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}\
{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{{ m.tool_call_id }};{% endfor %}[assistant]";

/// Refuses messages of the system behind others, as those of newer Qwen models do.
const SYSTEM_FIRST: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}";

const REPLY: &str = r#" sees [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "a"}}, {"name": "get_weather", "arguments": {"city": "b"}}]"#;

/// The text of the single prompt that was submitted.
fn prompt(router: &TestRouter) -> String {
    router::detokenize::decode(&demo_text(), &router.lanes.take_one().prompt_ids)
}

/// Checks that the calls and results of the last prompt have two short ids, each in both places.
fn check_ids(router: &TestRouter) -> String {
    let prompt = prompt(router);
    let ids: Vec<&str> = prompt.split('#').skip(1).step_by(2).collect();
    let [first, second, first_again, second_again] = ids[..] else { panic!("{prompt}") };
    assert_eq!((first, second), (first_again, second_again), "{prompt}");
    assert_ne!(first, second);
    assert!(ids.iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())));
    prompt
}

#[tokio::test]
async fn a_template_that_requires_short_ids_of_calls_gets_them_in_every_api() {
    let router = router_with(SHORT_IDS).with_reply(REPLY);
    let hi = json!({ "role": "user", "content": "hi" });
    let request =
        |messages: Value| json!({ "model": MODEL, "seed": 7, "messages": messages, "tools": [weather()] });
    let message = router.ok(CHAT, &request(json!([hi]))).await["choices"][0]["message"].clone();
    router.lanes.take_one();
    let calls = message["tool_calls"].as_array().unwrap();
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"), "the client's ids stay as they were");
    let results =
        [0, 1].map(|idx| json!({ "role": "tool", "tool_call_id": calls[idx]["id"], "content": "sun" }));
    router.ok(CHAT, &request(json!([hi, message, results[0], results[1]]))).await;
    check_ids(&router);

    let mut tool = weather()["function"].clone();
    tool["type"] = json!("function");
    let request = |fields: Value| merged(json!({ "model": MODEL, "seed": 7, "tools": [tool] }), &fields);
    let first = router.ok(RESPONSES, &request(json!({ "input": [hi] }))).await;
    router.lanes.take_one();
    let mut input = vec![hi.clone()];
    input.extend(first["output"].as_array().unwrap().clone());
    let calls = first["output"].as_array().unwrap()[1..].iter();
    let result =
        |call: &Value| json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "sun" });
    let results: Vec<Value> = calls.map(result).collect();
    input.extend(results.clone());
    router.ok(RESPONSES, &request(json!({ "input": input }))).await;
    let resent = check_ids(&router);
    let continued = json!({ "input": results, "previous_response_id": first["id"] });
    router.ok(RESPONSES, &request(continued)).await;
    assert_eq!(check_ids(&router), resent);

    let function = &weather()["function"];
    let tool = json!({ "name": function["name"], "input_schema": function["parameters"] });
    let request = |messages: Value| json!({ "model": MODEL, "seed": 7, "max_tokens": 500, "messages": messages, "tools": [tool] });
    let content = router.ok(MESSAGES, &request(json!([hi]))).await["content"].clone();
    router.lanes.take_one();
    let calls = content.as_array().unwrap()[1..].iter();
    let result = |call: &Value| json!({ "type": "tool_result", "tool_use_id": call["id"], "content": "sun" });
    let results: Vec<Value> = calls.map(result).collect();
    let turns =
        json!([hi, { "role": "assistant", "content": content }, { "role": "user", "content": results }]);
    router.ok(MESSAGES, &request(turns)).await;
    check_ids(&router);
}

/// A conversation with calls of these ids in one message, and results in this order.
fn with_calls(calls: &[&str], results: &[&str]) -> Value {
    let call =
        |id: &&str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let calls: Vec<Value> = calls.iter().map(call).collect();
    let mut messages = vec![
        json!({ "role": "user", "content": "hi" }),
        json!({ "role": "assistant", "content": "sees", "tool_calls": calls }),
    ];
    let result = |id: &&str| json!({ "role": "tool", "tool_call_id": id, "content": "sun" });
    messages.extend(results.iter().map(result));
    messages.push(json!({ "role": "user", "content": "go on" }));
    json!({ "model": MODEL, "messages": messages })
}

#[tokio::test]
async fn an_id_that_the_template_accepts_is_kept() {
    let router = router_with(SHORT_IDS).with_reply(" fine");
    router.ok(CHAT, &with_calls(&["abcDEF123", "2"], &["abcDEF123", "2"])).await;
    assert!(check_ids(&router).contains("#abcDEF123#"));
}

#[tokio::test]
async fn several_calls_are_split_where_the_template_allows_one_per_message() {
    let router = router_with(SINGLE_CALLS).with_reply(" fine");
    for (calls, results, expected) in [
        (&["1"][..], &["1"][..], "[assistant]sees1;[tool]sun1;"),
        (&["1", "2"], &["1", "2"], "[assistant]sees1;[tool]sun1;[assistant]2;[tool]sun2;"),
        (&["1", "2"], &["2", "1"], "[assistant]sees1;[tool]sun1;[assistant]2;[tool]sun2;"),
        (&["1", "2"], &["3", "2"], "[assistant]sees1;[assistant]2;[tool]sun2;[tool]sun3;"),
        (&["1", "2"], &[], "[assistant]sees1;[assistant]2;"),
    ] {
        router.ok(CHAT, &with_calls(calls, results)).await;
        assert_eq!(prompt(&router), format!("[user]hi;{expected}[user]go on;[assistant]"));
    }
}

#[tokio::test]
async fn a_template_that_refuses_split_calls_too_says_why() {
    let router =
        router_with(&format!("{SINGLE_CALLS}{{{{ raise_exception('no calls') }}}}")).with_reply(" fine");
    for (calls, expected) in [(&["1"][..], "no calls"), (&["1", "2"], "single tool-calls at once")] {
        let refused = router.post_json(CHAT, &with_calls(calls, calls)).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("messages")));
        assert!(refused.text().contains(expected), "{}", refused.text());
    }
}

#[tokio::test]
async fn messages_of_the_system_move_to_the_beginning_where_the_template_allows_them_only_there() {
    let strict = router_with(&format!("{SYSTEM_FIRST}{SINGLE_CALLS}")).with_reply(" fine");
    let lenient = router_with(SINGLE_CALLS).with_reply(" fine");
    let (a, b) = (json!({ "role": "system", "content": "a" }), json!({ "role": "system", "content": "b" }));
    let hi = json!({ "role": "user", "content": "hi" });
    for (messages, moved, in_place) in [
        (json!([a, hi, b]), "[system]a\n\nb;[user]hi;", "[system]a;[user]hi;[system]b;"),
        (json!([hi, b]), "[system]b;[user]hi;", "[user]hi;[system]b;"),
        (json!([a, hi]), "[system]a;[user]hi;", "[system]a;[user]hi;"),
    ] {
        let body = json!({ "model": MODEL, "max_tokens": 5, "messages": messages });
        let input = json!({ "model": MODEL, "input": messages });
        for (path, body) in [(CHAT, &body), (MESSAGES, &body), (RESPONSES, &input)] {
            strict.ok(path, body).await;
            assert_eq!(prompt(&strict), format!("{moved}[assistant]"), "{path}");
            lenient.ok(path, body).await;
            assert_eq!(prompt(&lenient), format!("{in_place}[assistant]"), "{path}");
        }
    }
    let mut with_calls = with_calls(&["1", "2"], &["1", "2"]);
    with_calls["messages"].as_array_mut().unwrap().insert(1, b.clone());
    strict.ok(CHAT, &with_calls).await;
    let calls = "[assistant]sees1;[tool]sun1;[assistant]2;[tool]sun2;";
    assert_eq!(prompt(&strict), format!("[system]b;[user]hi;{calls}[user]go on;[assistant]"));
    let continued = json!({ "model": MODEL, "messages": [hi, b], "continue_final_message": true });
    let refused = strict.post_json(CHAT, &continued).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("messages")));
    assert!(refused.text().contains("must be at the beginning"), "{}", refused.text());
}
