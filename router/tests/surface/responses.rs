//! OpenAI's responses: format, streaming, storage and refused input.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::calls_or_json::submitted_schema;
use crate::client::{MAX_MODEL_LEN, MODEL, RESPONSES, TestRouter, demo_encode, demo_text, merged, post};
use crate::fake_lanes::Script;
use crate::tools::router_with;
use router::error::RouterError;

const COUNT: &str = "/v1/responses/input_tokens";

fn request(fields: Value) -> Value {
    merged(json!({ "model": MODEL, "input": "hi", "seed": 7 }), &fields)
}

/// The data of each event; checks its name and number.
pub(crate) async fn events(router: &TestRouter, body: &Value) -> Vec<Value> {
    let answer = router.post_json(RESPONSES, body).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    let mut events = Vec::new();
    for (idx, event) in answer.text().split_terminator("\n\n").enumerate() {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!((data["type"].as_str(), data["sequence_number"].as_u64()), (Some(name), Some(idx as u64)));
        events.push(data);
    }
    events
}

fn text_of(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

/// Removes what differs between runs.
fn redacted(mut response: Value) -> Value {
    for path in ["/id", "/created_at", "/output/0/id"] {
        if let Some(value) = response.pointer_mut(path) {
            *value = json!("[redacted]");
        }
    }
    response
}

#[tokio::test]
async fn a_response() {
    let router = TestRouter::start().with_reply(" shines");
    insta::assert_json_snapshot!(redacted(router.ok(RESPONSES, &request(json!({}))).await));
}

#[tokio::test]
async fn a_streamed_response_equals_the_full_one() {
    let router = TestRouter::start().with_reply(" shines \u{1F600} and more");
    for fields in [json!({}), json!({ "max_output_tokens": 4 }), json!({ "stop": ["shin"] })] {
        let whole = router.ok(RESPONSES, &request(fields.clone())).await;
        let mut streamed = request(fields);
        streamed["stream"] = json!(true);
        let events = events(&router, &streamed).await;
        let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let status = whole["status"].as_str().unwrap();
        let last = format!("response.{status}");
        assert_eq!(
            types[..4],
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added"
            ]
        );
        assert_eq!(
            types[types.len() - 4..],
            [
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                last.as_str()
            ]
        );
        let deltas = &events[4..events.len() - 4];
        assert!(deltas.iter().all(|event| event["type"] == "response.output_text.delta"));
        let text: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(text, text_of(&whole));
        assert_eq!(events[events.len() - 4]["text"], text);
        assert_eq!(redacted(events[events.len() - 1]["response"].clone()), redacted(whole));
    }
}

#[tokio::test]
async fn a_response_continues_an_earlier_one() {
    let router = TestRouter::start().with_reply(" fine");
    let first = router.ok(RESPONSES, &request(json!({ "instructions": "Be brief." }))).await;
    router.lanes.take_submitted();
    let next = request(json!({ "input": "more", "previous_response_id": first["id"] }));
    let second = router.ok(RESPONSES, &next).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let spoken = json!([
        { "role": "user", "content": "hi" }, { "role": "assistant", "content": "0 fine" }, { "role": "user", "content": "more" },
    ]);
    let prompt = router.lanes.take_one().prompt_ids;
    router.ok("/v1/chat/completions", &json!({ "model": MODEL, "messages": spoken })).await;
    assert_eq!(
        router.lanes.take_one().prompt_ids,
        prompt,
        "the same as the whole conversation without instructions"
    );

    // The messages of a conversation are stored once.
    let stored = |response: &Value| router.state.responses.get(0, response["id"].as_str().unwrap()).unwrap();
    let (before, after) = (stored(&first), stored(&second));
    assert_eq!((before.conversation.len(), after.conversation.len()), (2, 4));
    assert!(before.conversation.iter().zip(&after.conversation).all(|(one, other)| Arc::ptr_eq(one, other)));

    let third = request(json!({ "input": "again", "previous_response_id": second["id"], "stream": true }));
    let last = events(&router, &third).await.pop().unwrap();
    assert_eq!(last["response"]["previous_response_id"], second["id"]);
    let path = format!("{RESPONSES}/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(router.get(&path).await.json(), last["response"], "a streamed response is stored as well");
}

#[tokio::test]
async fn input_tokens_are_counted() {
    let router = TestRouter::start().with_reply(" fine");
    let first = router.ok(RESPONSES, &request(json!({}))).await;
    router.lanes.take_submitted();
    for fields in [
        json!({}),
        json!({ "instructions": "Be brief.", "reasoning": { "effort": "high" }, "truncation": "auto" }),
        json!({ "input": "more", "previous_response_id": first["id"] }),
    ] {
        let counted = request(fields);
        let count = router.ok(COUNT, &counted).await;
        assert!(router.lanes.take_submitted().is_empty(), "counting runs nothing");
        router.ok(RESPONSES, &counted).await;
        let num_tokens = router.lanes.take_one().prompt_ids.len();
        let expected = json!({ "object": "response.input_tokens", "input_tokens": num_tokens });
        assert_eq!(count, expected, "{counted}");
    }
    let long = router.ok(COUNT, &request(json!({ "input": "word ".repeat(5_000) }))).await;
    assert!(long["input_tokens"].as_u64() > Some(MAX_MODEL_LEN.into()), "{long}: beyond the window");
    let unknown = router.post_json(COUNT, &request(json!({ "previous_response_id": "resp_0" }))).await;
    assert_eq!(unknown.json()["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn store_false_is_respected() {
    let router = TestRouter::start().with_reply(" fine");
    let stored = router.ok(RESPONSES, &request(json!({}))).await;
    let unstored = router.ok(RESPONSES, &request(json!({ "store": false }))).await;
    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    assert_eq!(router.get(&path(&stored)).await.json(), stored);
    assert_eq!(router.get(&path(&unstored)).await.status, 404);
    let next = request(json!({ "previous_response_id": unstored["id"] }));
    let refused = router.post_json(RESPONSES, &next).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["error"]["code"]),
        (400, &json!("previous_response_not_found"))
    );
    let delete = || http::Request::delete(path(&stored)).body(axum::body::Body::empty()).unwrap();
    assert_eq!(router.send(delete()).await.json()["deleted"], true);
    assert_eq!(router.send(delete()).await.status, 404);
}

#[tokio::test]
async fn the_items_of_a_stored_input_are_listed() {
    let router = TestRouter::start().with_reply(" fine");
    let path = |response: &Value| format!("{RESPONSES}/{}/input_items", response["id"].as_str().unwrap());
    let text = router.ok(RESPONSES, &request(json!({}))).await;
    let listed = router.get(&path(&text)).await.json();
    let id = listed["first_id"].as_str().unwrap();
    assert!(id.starts_with("msg_"), "{id}");
    let item = json!({
        "type": "message", "id": id, "role": "user", "content": [{ "type": "input_text", "text": "hi" }],
    });
    assert_eq!(
        listed,
        json!({ "object": "list", "data": [item], "first_id": id, "last_id": id, "has_more": false })
    );

    let items = json!([
        { "role": "user", "content": "a" },
        { "type": "message", "id": "msg_own", "role": "assistant", "content": "b" },
        { "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "1", "output": "c" },
        { "role": "user", "content": [{ "type": "input_text", "text": "d" }] },
    ]);
    let next = request(json!({ "input": items, "previous_response_id": text["id"] }));
    let path = path(&router.ok(RESPONSES, &next).await);
    let all = router.get(&format!("{path}?order=asc")).await.json();
    let all = all["data"].as_array().unwrap();
    let types: Vec<&str> = all.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["message", "message", "function_call", "function_call_output", "message"]);
    assert_eq!((&all[1]["id"], &all[1]["content"][0]["type"]), (&json!("msg_own"), &json!("output_text")));
    let newest = router.get(&format!("{path}?limit=2")).await.json();
    assert_eq!((&newest["data"], &newest["has_more"]), (&json!([all[4], all[3]]), &json!(true)));
    let rest = router.get(&format!("{path}?limit=9&after={}", all[3]["id"].as_str().unwrap())).await.json();
    assert_eq!((&rest["data"], &rest["has_more"]), (&json!([all[2], all[1], all[0]]), &json!(false)));

    let unstored = router.ok(RESPONSES, &request(json!({ "store": false }))).await;
    let unstored = format!("{RESPONSES}/{}/input_items", unstored["id"].as_str().unwrap());
    for (path, status, param) in [
        (unstored, 404, "response_id"),
        (format!("{path}?limit=101"), 400, "limit"),
        (format!("{path}?order=up"), 400, "order"),
        (format!("{path}?after=msg_x"), 400, "after"),
        (format!("{path}?include=all"), 400, "include"),
    ] {
        let refused = router.get(&path).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status.as_u16(), &error["param"]), (status, &json!(param)), "{path}: {error}");
    }
}

#[tokio::test]
async fn a_response_cannot_be_cancelled() {
    let router = TestRouter::start().with_reply(" fine");
    let stored = router.ok(RESPONSES, &request(json!({}))).await;
    let cancel = |id: &str| post(&format!("{RESPONSES}/{id}/cancel"), "{}");
    let refused = router.send(cancel(stored["id"].as_str().unwrap())).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("response_id")));
    assert!(refused.text().contains("was not created with background"), "{}", refused.text());
    assert_eq!(router.send(cancel("resp_0")).await.status, 404);
}

#[tokio::test]
async fn items_are_read_like_messages() {
    let router = TestRouter::start().with_reply(" fine");
    let items = json!([
        { "role": "developer", "content": "Be brief." },
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "hi" }] },
        { "type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{ "type": "output_text", "text": "ho", "annotations": [] }] },
        { "role": "user", "content": "more" },
    ]);
    router.ok(RESPONSES, &request(json!({ "input": items }))).await;
    let prompt = router.lanes.take_one().prompt_ids;
    let messages = json!([
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "hi" },
        { "role": "assistant", "content": "ho" }, { "role": "user", "content": "more" },
    ]);
    router.ok("/v1/chat/completions", &json!({ "model": MODEL, "messages": messages })).await;
    assert_eq!(router.lanes.take_one().prompt_ids, prompt);
}

/// The Codex CLI has a second name for the parts of reasoning.
#[tokio::test]
async fn reasoning_is_read_by_both_names_of_its_parts() {
    const TEMPLATE: &str = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}";
    let router = router_with(TEMPLATE).with_reply(" fine");
    for kind in ["reasoning_text", "text"] {
        let items = json!([
            { "role": "user", "content": "hi" },
            { "type": "reasoning", "summary": [], "encrypted_content": null, "content": [{ "type": kind, "text": "hm" }] },
            { "role": "assistant", "content": "ho" },
            { "role": "user", "content": "more" },
        ]);
        router.ok(RESPONSES, &request(json!({ "input": items }))).await;
        let prompt = router::detokenize::decode(&demo_text(), &router.lanes.take_one().prompt_ids);
        assert!(prompt.contains("[hm]ho"), "{kind}: {prompt}");
    }
}

#[tokio::test]
async fn items_of_stored_responses_may_be_referenced() {
    let router = TestRouter::start().with_reply(" fine");
    let first = router.ok(RESPONSES, &request(json!({}))).await;
    router.lanes.take_submitted();
    let item = &first["output"][0];
    let reference = json!({ "type": "item_reference", "id": item["id"] });
    let user = json!({ "role": "user", "content": "more" });
    router.ok(RESPONSES, &request(json!({ "input": [item, user] }))).await;
    let expected = router.lanes.take_one().prompt_ids;
    router.ok(RESPONSES, &request(json!({ "input": [reference, user] }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, expected);

    let unstored = router.ok(RESPONSES, &request(json!({ "store": false }))).await;
    router.lanes.take_submitted();
    let unstored = json!({ "type": "item_reference", "id": unstored["output"][0]["id"] });
    for (input, param) in [
        (json!([reference, reference]), "input[1].id"),
        (json!([user, unstored]), "input[1].id"),
        (json!([{ "type": "item_reference", "id": "msg" }]), "input[0].id"),
        (json!([{ "type": "item_reference" }]), "input[0].id"),
    ] {
        let refused = router.post_json(RESPONSES, &request(json!({ "input": input }))).await;
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!(param)), "{error}");
        assert!(router.lanes.take_submitted().is_empty());
    }
}

/// Additional fields, `param` and part of the message.
const REFUSED: &str = r#"{"input": null} | input | input is required
{"input": 5} | input | input: invalid type: integer `5`, expected a string or a list of items
{"input": ["hi"]} | input[0] | expected an item, which is an object
{"input": []} | input | input must not be empty
{"input": [{"type": "computer_call"}]} | input[0] | must be of type message, function_call, custom_tool_call, tool_search_call, their outputs (function_call_output, custom_tool_call_output, tool_search_output), additional_tools, reasoning or item_reference, not `computer_call`
{"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]} | input[0].call_id | input[0].call_id is required
{"input": [{"type": "function_call", "call_id": 1, "name": "f"}]} | input[0].call_id | input[0].call_id must be a string
{"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1"}]} | input[0].arguments | must be a JSON object, written as a string
{"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]} | input[0].call_id | is `1`, which matches no earlier call
{"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]} | input[0].output | a string or a list of text parts
{"input": [{"type": "reasoning", "content": [{"type": "output_text", "text": "x"}]}]} | input[0].content[0] | not one of type `output_text`
{"input": [{"content": "x"}]} | input[0].role | input[0].role is required
{"input": [{"role": "king", "content": "x"}]} | input[0].role | not `king`
{"input": [{"role": "user", "content": [{"type": "input_image"}]}]} | input[0].content[0] | not one of type `input_image`
{"input": [{"role": "user", "content": "x", "colour": 1}]} | input[0].colour | not a field
{"tools": [{"type": "function", "name": "f"}]} | tools | chat template has no supported tool call format
{"tools": 5} | tools | invalid type
{"tools": [5]} | tools[0].type | must be `function`
{"tools": [{"type": "code_interpreter"}]} | tools[0].type | must be `function`, `custom` or
{"tools": [{"type": "web_search"}], "tool_choice": "required"} | tools[0].type | must be `function`, `custom` or
{"tools": [{"type": "tool_search"}]} | tools[0].execution | must be client
{"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "tool_search", "execution": "client", "name": "s"}]}]} | tools[0].tools[0].type | must be `function`
{"input": [{"type": "tool_search_call", "call_id": "1", "arguments": "x"}]} | input[0].arguments | must be a JSON object
{"input": [{"type": "tool_search_call", "call_id": "1"}, {"type": "tool_search_output", "call_id": "1", "tools": 5}]} | input[1].tools | must be a list of tools
{"input": [{"type": "tool_search_output", "call_id": "1", "tools": []}]} | input[0].call_id | is `1`, which matches no earlier call
{"input": [{"role": "user", "content": "x"}, {"type": "additional_tools", "role": "developer"}]} | input[1].tools | must be a list of tools
{"input": [{"role": "user", "content": "x"}, {"type": "additional_tools", "tools": [{"type": "web_search"}]}]} | input[1].tools[0].type | must be `function`
{"tools": [{"type": "custom"}]} | tools[0].name | tools[0].name must be a string
{"tools": [{"type": "custom", "name": "f", "description": 5}]} | tools[0].description | must be a string
{"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]} | tools[0].format.type | must be text or grammar
{"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "ebnf"}}]} | tools[0].format.syntax | must be lark or regex
{"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]} | tools[0].format.definition | must be a string
{"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}], "tool_choice": "required"} | tools[0].format | set tool_choice to auto
{"tools": [{"type": "namespace", "tools": []}]} | tools[0].name | tools[0].name must be a string
{"tools": [{"type": "namespace", "name": "n"}]} | tools[0].tools | must be a list of tools
{"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]} | tools[0].tools[0].type | tools that a server runs are not supported
{"tools": [{"type": "function", "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]} | tools[1].tools[0].name | two tools are named `n__f`
{"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}]} | tools[0].tools[0].format.type | must be text or grammar
{"input": [{"type": "function_call", "call_id": "1", "namespace": 1, "name": "f", "arguments": "{}"}]} | input[0].namespace | input[0].namespace must be a string
{"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]} | input[0].input | input[0].input is required
{"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": "x"}]} | input[0].call_id | is `1`, which matches no earlier call
{"tools": [{"type": "function", "function": {"name": "f"}}]} | tools[0].name | tools[0].name must be a string
{"tools": [{"type": "function", "name": "a b"}]} | tools[0].name | 1 to 128 of the characters
{"tools": [{"type": "function", "name": "f", "parameters": []}]} | tools[0].parameters | a JSON schema
{"tools": [{"type": "function", "name": "f", "description": 5}]} | tools[0].description | must be a string
{"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]} | tools[1].name | two tools are named `f`
{"tool_choice": "required"} | tool_choice | there are no tools
{"tool_choice": "sometimes"} | tool_choice | none, auto, required
{"tool_choice": {"type": "function", "function": {"name": "f"}}} | tool_choice.name | must be a string
{"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}} | tool_choice | names `g`, which is not one of the tools
{"parallel_tool_calls": "yes"} | parallel_tool_calls | expected a boolean
{"max_tool_calls": 3} | max_tool_calls | max_tool_calls is not supported
{"text": {"format": {"type": "json_object"}}, "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"} | tool_choice | tool_choice and text.format both constrain the output
{"text": {"format": {"type": "xml"}}} | text.format.type | not `xml`
{"text": {"format": {"type": "json_schema", "schema": 5}}} | text.format.schema | an object
{"text": {"format": {"type": "json_object", "schema": {}}}} | text.format.schema | only allowed where text.format.type is json_schema
{"text": {"format": {"colour": 1}}} | text.format | unknown field `colour`
{"text": {"verbosity": "high"}} | text.verbosity | is not supported
{"reasoning": "high"} | reasoning | expected an object
{"reasoning": {"effort": 5}} | reasoning.effort | expected a string
{"reasoning": {"summary": "long"}} | reasoning.summary | must be one of auto, concise, detailed, not `long`
{"reasoning": {"generate_summary": ""}} | reasoning.generate_summary | must be one of auto, concise, detailed
{"reasoning": {"context": "all_turns"}} | reasoning.context | reasoning.context is not supported
{"reasoning": {"mode": "pro"}} | reasoning.mode | reasoning.mode is not supported
{"include": ["reasoning.encrypted_content", "x"]} | include[1] | `x` is not supported: leave it out
{"include": "x"} | include | expected a sequence
{"top_logprobs": 1} | top_logprobs | only allowed when include has message.output_text.logprobs
{"top_logprobs": 21, "include": ["message.output_text.logprobs"]} | top_logprobs | between 0 and 20, not 21
{"background": true} | background | background is not supported
{"truncation": "often"} | truncation | truncation must be one of auto, disabled, not `often`
{"text": {"format": {"type": "json_schema"}}} | text.format.schema | text.format.schema is required
{"max_output_tokens": 0} | max_output_tokens | must be at least 1
{"temperature": 3} | temperature | between 0 and 2, not 3
{"colour": 1} | colour | not a field of this endpoint
{"previous_response_id": "resp_0"} | previous_response_id | send the whole conversation as `input`"#;

/// Values that request nothing, or that clients send by default and that have no effect.
const OFF: &str = r#"{"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"}, "parallel_tool_calls": false, "truncation": "disabled",
    "prompt_cache_options": {"mode": "explicit"}, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": null, "summary": "auto", "generate_summary": "detailed"}, "top_logprobs": 0, "stream_options": {"include_obfuscation": true}, "background": false, "conversation": ""}"#;

#[tokio::test]
async fn bad_input_is_refused_by_name_and_the_next_request_works() {
    let router = TestRouter::start().with_reply(" fine");
    for row in REFUSED.lines() {
        let [fields, param, expected] = row.split(" | ").collect::<Vec<_>>()[..] else { panic!("{row}") };
        let answer = router.post_json(RESPONSES, &request(serde_json::from_str(fields).unwrap())).await;
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status.as_u16(), &error["param"]), (400, &json!(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(expected), "{error}");
        assert!(router.lanes.take_submitted().is_empty());
        assert_eq!(text_of(&router.ok(RESPONSES, &request(json!({}))).await), "0 fine");
        router.lanes.take_submitted();
    }
    router.ok(RESPONSES, &request(serde_json::from_str(OFF).unwrap())).await;
    assert!(router.lanes.take_one().prompt_ids.len() > demo_encode("hi").len());
}

#[tokio::test]
async fn a_format_becomes_a_grammar() {
    let router = TestRouter::start().with_reply("{}");
    let schema = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let format = json!({ "type": "json_schema", "name": "empty", "strict": true, "schema": schema });
    let answer = router.ok(RESPONSES, &request(json!({ "text": { "format": format } }))).await;
    assert_eq!(answer["text"]["format"], format);
    assert_eq!(submitted_schema(&router), schema);
}

#[tokio::test]
async fn a_failed_stream_ends_with_an_error_and_is_not_stored() {
    let router = TestRouter::start();
    router.lanes.set_script(Script::FailAfterOneSpan(RouterError::Refused { reason: "a NaN".into() }));
    let last = events(&router, &request(json!({ "stream": true }))).await.pop().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("a NaN"), "{last}");
    let path = format!("{RESPONSES}/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(router.get(&path).await.status, 404);
}
