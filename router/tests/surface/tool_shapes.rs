//! Tools in the formats of responses and of Anthropic's messages: the same prompts, calls and grammars as in
//! chat completions, whole and streamed.

use serde_json::{Value, json};

use crate::calls_or_json::submitted;
use crate::client::{CHAT, MESSAGES, MODEL, RESPONSES, TestRouter, merged};
use crate::tools::{TEMPLATE, router_with, weather};
use crate::{anthropic, responses};

const CALL: &str = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>"#;

fn chat(fields: Value) -> Value {
    let body = json!({ "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }], "tools": [weather()] });
    merged(body, &fields)
}

fn response(fields: Value) -> Value {
    let mut tool = weather()["function"].clone();
    tool["type"] = json!("function");
    merged(json!({ "model": MODEL, "seed": 7, "input": "hi", "tools": [tool] }), &fields)
}

fn message(fields: Value) -> Value {
    let function = weather()["function"].clone();
    let tool = json!({ "name": function["name"], "description": function["description"], "input_schema": function["parameters"] });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let body = json!({ "model": MODEL, "seed": 7, "max_tokens": 500, "messages": messages, "tools": [tool] });
    merged(body, &fields)
}

/// Replaces the ids of items and calls, which contain the request's unique id.
fn without_ids(mut parts: Value) -> Value {
    for part in parts.as_array_mut().unwrap() {
        for (field, prefixes) in
            [("id", &["msg_", "fc_", "ctc_", "rs_", "toolu_"][..]), ("call_id", &["call_"][..])]
        {
            let Some(id) = part.get_mut(field) else { continue };
            assert!(prefixes.iter().any(|prefix| id.as_str().unwrap().starts_with(prefix)), "{id}");
            *id = json!(field);
        }
    }
    parts
}

/// Builds the output from the events of a response; each item's last event must equal the sum of its parts.
pub(crate) fn built_output(events: &[Value]) -> Value {
    let mut output: Vec<Value> = Vec::new();
    for event in events {
        let idx = event["output_index"].as_u64().unwrap_or(0) as usize;
        let name = event["type"].as_str().unwrap();
        let field = ["arguments", "input"].into_iter().find(|field| name.contains(field)).unwrap_or("text");
        match name {
            "response.output_item.added" => {
                assert_eq!((idx, &event["item"]["status"]), (output.len(), &json!("in_progress")));
                output.push(event["item"].clone());
            }
            "response.content_part.added" => {
                output[idx]["content"].as_array_mut().unwrap().push(event["part"].clone());
            }
            name if name.ends_with(".delta") => {
                assert_eq!(event["item_id"], output[idx]["id"]);
                let item = &mut output[idx];
                let target = if field == "text" { &mut item["content"][0][field] } else { &mut item[field] };
                *target = json!(target.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap());
                if let Some(more) = event["logprobs"].as_array() {
                    item["content"][0]["logprobs"].as_array_mut().unwrap().extend(more.iter().cloned());
                }
            }
            "response.content_part.done" => assert_eq!(event["part"], output[idx]["content"][0]),
            "response.output_item.done" => {
                output[idx]["status"] = event["item"]["status"].clone();
                // Its arguments are sent with the whole item only.
                if event["item"]["type"] == "tool_search_call" {
                    output[idx]["arguments"] = event["item"]["arguments"].clone();
                }
                assert_eq!(event["item"], output[idx]);
            }
            name if name.ends_with("text.done") => {
                let part = &output[idx]["content"][0];
                assert_eq!((&event["text"], &event["logprobs"]), (&part["text"], &part["logprobs"]));
            }
            "response.custom_tool_call_input.done" => assert_eq!(event["input"], output[idx]["input"]),
            "response.function_call_arguments.done" => {
                assert_eq!(
                    (&event["arguments"], &event["name"]),
                    (&output[idx]["arguments"], &output[idx]["name"])
                );
            }
            _ => {}
        }
    }
    Value::Array(output)
}

/// Builds the content from the events of a message.
pub(crate) fn built_content(events: &[Value]) -> Value {
    let (mut content, mut open) = (Vec::<Value>::new(), false);
    let mut inputs = Vec::<String>::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((event["index"].as_u64(), open), (Some(content.len() as u64), false));
                content.push(event["content_block"].clone());
                inputs.push(String::new());
                open = true;
            }
            "content_block_delta" => {
                let (block, delta) = (content.last_mut().unwrap(), &event["delta"]);
                let (field, more) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "input_json_delta" => {
                        inputs.last_mut().unwrap().push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[field] = json!(block[field].as_str().unwrap().to_owned() + more.as_str().unwrap());
            }
            "content_block_stop" => {
                open = false;
                let input = inputs.last().unwrap();
                if !input.is_empty() {
                    content.last_mut().unwrap()["input"] = serde_json::from_str(input).unwrap_or(json!({}));
                }
            }
            _ => assert!(!open),
        }
    }
    Value::Array(content)
}

/// A model's output, and its parts.
struct OutputCase {
    template: String,
    raw_output: String,
    text: Option<&'static str>,
    reasoning: Option<&'static str>,
    num_calls: usize,
}

fn output_cases() -> Vec<OutputCase> {
    let output_case = |raw_output: String| OutputCase {
        template: TEMPLATE.to_owned(),
        raw_output,
        text: None,
        reasoning: None,
        num_calls: 0,
    };
    vec![
        OutputCase { text: Some("0 sees"), num_calls: 2, ..output_case(format!(" sees\n{CALL}\n{CALL}")) },
        OutputCase {
            text: Some("0 says <tool_call> nothing"),
            ..output_case(" says <tool_call> nothing".to_owned())
        },
        OutputCase {
            template: format!("{TEMPLATE}<think>"),
            reasoning: Some("0 thinks"),
            num_calls: 1,
            ..output_case(format!(" thinks</think>{CALL}"))
        },
    ]
}

#[tokio::test]
async fn responses_contain_the_same_calls_as_chat_completions() {
    for OutputCase { template, raw_output, text, reasoning, num_calls } in output_cases() {
        let router = router_with(&template).with_reply(&raw_output);
        let whole = router.ok(RESPONSES, &response(json!({}))).await;
        let output = without_ids(whole["output"].clone());
        let mut expected = Vec::new();
        expected.extend(reasoning.map(|reasoning| {
            json!({ "type": "reasoning", "id": "id", "summary": [], "status": "completed",
                "content": [{ "type": "reasoning_text", "text": reasoning }] })
        }));
        expected.extend(text.map(|text| {
            json!({ "type": "message", "id": "id", "status": "completed", "role": "assistant",
                "content": [{ "type": "output_text", "text": text, "annotations": [], "logprobs": [] }] })
        }));
        let call = json!({ "type": "function_call", "id": "id", "call_id": "call_id", "name": "get_weather",
            "arguments": "{\"city\":\"Zürich\"}", "status": "completed" });
        expected.extend(vec![call; num_calls]);
        assert_eq!(output, Value::Array(expected));
        assert_eq!((&whole["status"], &whole["tools"]), (&json!("completed"), &response(json!({}))["tools"]));

        let events = responses::events(&router, &response(json!({ "stream": true }))).await;
        assert_eq!(without_ids(built_output(&events)), output);
        let last = events.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["output"]),
            (&json!("response.completed"), &built_output(&events))
        );
        let one = router.ok(RESPONSES, &response(json!({ "parallel_tool_calls": false }))).await;
        let kinds = |answer: &Value| {
            answer["output"].as_array().unwrap().iter().filter(|item| item["type"] == "function_call").count()
        };
        assert_eq!((kinds(&one), &one["parallel_tool_calls"]), (num_calls.min(1), &json!(false)));
        let none = router.ok(RESPONSES, &response(json!({ "tool_choice": "none" }))).await;
        assert_eq!((kinds(&none), &none["tool_choice"]), (0, &json!("none")));
    }
}

#[tokio::test]
async fn messages_contain_the_same_calls_as_chat_completions() {
    for OutputCase { template, raw_output, text, reasoning, num_calls } in output_cases() {
        let router = router_with(&template).with_reply(&raw_output);
        let whole = router.ok(MESSAGES, &message(json!({}))).await;
        let content = without_ids(whole["content"].clone());
        let mut expected = Vec::new();
        expected.extend(
            reasoning.map(|reasoning| json!({ "type": "thinking", "thinking": reasoning, "signature": "" })),
        );
        expected.extend(text.map(|text| json!({ "type": "text", "text": text })));
        let call =
            json!({ "type": "tool_use", "id": "id", "name": "get_weather", "input": { "city": "Zürich" } });
        expected.extend(vec![call; num_calls]);
        assert_eq!(content, Value::Array(expected));
        let reason = if num_calls > 0 { "tool_use" } else { "end_turn" };
        assert_eq!(whole["stop_reason"], reason);

        let events = anthropic::events(&router, &message(json!({ "stream": true }))).await;
        assert_eq!(without_ids(built_content(&events)), content);
        let delta = events.iter().find(|event| event["type"] == "message_delta").unwrap();
        assert_eq!((&delta["delta"]["stop_reason"], &delta["usage"]), (&json!(reason), &whole["usage"]));
        let choice = json!({ "type": "auto", "disable_parallel_tool_use": true });
        let one = router.ok(MESSAGES, &message(json!({ "tool_choice": choice }))).await;
        let calls = |answer: &Value| {
            answer["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use").count()
        };
        assert_eq!(calls(&one), num_calls.min(1));
        let none = router.ok(MESSAGES, &message(json!({ "tool_choice": { "type": "none" } }))).await;
        assert_eq!((calls(&none), &none["stop_reason"]), (0, &json!("end_turn")));
    }
}

#[tokio::test]
async fn a_conversation_with_calls_is_the_same_prompt_in_all_apis() {
    let router = router_with(TEMPLATE).with_reply(&format!(" sees\n{CALL}\n{CALL}"));
    let prompt = || router.lanes.take_one().prompt_ids;
    let expect = async |calls: [&Value; 2]| {
        let call = |id: &Value| json!({ "id": id, "type": "function", "function": { "name": "get_weather", "arguments": "{\"city\":\"Zürich\"}" } });
        let messages = json!([
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": "0 sees", "tool_calls": [call(calls[0]), call(calls[1])] },
            { "role": "tool", "tool_call_id": calls[0], "content": "sun" },
            { "role": "tool", "tool_call_id": calls[1], "content": "rain" },
        ]);
        router.ok(CHAT, &chat(json!({ "messages": messages }))).await;
        router.lanes.take_one().prompt_ids
    };

    let first = router.ok(RESPONSES, &response(json!({}))).await;
    let plain = prompt();
    let [_, one, two] = first["output"].as_array().unwrap().as_slice() else { panic!("{first}") };
    let results = json!([
        { "type": "function_call_output", "call_id": one["call_id"], "output": "sun" },
        { "type": "function_call_output", "call_id": two["call_id"], "output": [{ "type": "input_text", "text": "rain" }], "status": null },
    ]);
    let resent = [json!([{ "role": "user", "content": "hi" }]), first["output"].clone(), results.clone()];
    let resent: Vec<Value> = resent.iter().flat_map(|items| items.as_array().unwrap().clone()).collect();
    router.ok(RESPONSES, &response(json!({ "input": resent }))).await;
    let got = prompt();
    assert_eq!(got, expect([&one["call_id"], &two["call_id"]]).await);
    router.ok(RESPONSES, &response(json!({ "input": results, "previous_response_id": first["id"] }))).await;
    assert_eq!(prompt(), got, "from the stored response");

    let first = router.ok(MESSAGES, &message(json!({}))).await;
    assert_eq!(prompt(), plain, "the tools are rendered the same way");
    let [_, one, two] = first["content"].as_array().unwrap().as_slice() else { panic!("{first}") };
    let turns = json!([
        { "role": "user", "content": "hi" }, { "role": "assistant", "content": first["content"] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": one["id"], "content": "sun" },
            { "type": "tool_result", "tool_use_id": two["id"], "content": [{ "type": "text", "text": "rain" }], "is_error": true },
        ] },
    ]);
    router.ok(MESSAGES, &message(json!({ "messages": turns }))).await;
    let got = prompt();
    assert_eq!(got, expect([&one["id"], &two["id"]]).await);
    router.ok(CHAT, &chat(json!({}))).await;
    assert_eq!(prompt(), plain);
}

/// The tools that a search of Claude Code has found are among the tools of the request.
#[tokio::test]
async fn references_to_tools_in_a_result_are_their_names() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let mut prompts = Vec::new();
    let reference = json!({ "type": "tool_reference", "tool_name": "get_weather" });
    for content in [
        json!([{ "type": "text", "text": "found" }, reference]),
        json!([{ "type": "text", "text": "found" }, { "type": "text", "text": "get_weather" }]),
    ] {
        let search = json!({ "type": "tool_use", "id": "1", "name": "get_weather", "input": {} });
        let result = json!({ "type": "tool_result", "tool_use_id": "1", "content": content });
        let turns = json!([
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": [search] },
            { "role": "user", "content": [result] },
        ]);
        router.ok(MESSAGES, &message(json!({ "messages": turns }))).await;
        prompts.push(router.lanes.take_one().prompt_ids);
    }
    assert_eq!(prompts[0], prompts[1]);
}

#[tokio::test]
async fn tool_choice_is_the_same_grammar_in_all_apis() {
    let router = TestRouter::start().with_reply(r#"[{"name": "get_weather", "parameters": {"city": "x"}}]"#);
    router.ok(CHAT, &chat(json!({ "tool_choice": "required" }))).await;
    let required = submitted(&router);
    let answer = router.ok(RESPONSES, &response(json!({ "tool_choice": "required" }))).await;
    assert_eq!(submitted(&router), required);
    assert_eq!(answer["output"][0]["arguments"], "{\"city\":\"x\"}");
    let answer = router.ok(MESSAGES, &message(json!({ "tool_choice": { "type": "any" } }))).await;
    assert_eq!(submitted(&router), required);
    assert_eq!(
        (&answer["content"][0]["input"], &answer["stop_reason"]),
        (&json!({ "city": "x" }), &json!("tool_use"))
    );

    let named = json!({ "type": "function", "function": { "name": "get_weather" } });
    router.ok(CHAT, &chat(json!({ "tool_choice": named }))).await;
    let named = submitted(&router);
    router
        .ok(RESPONSES, &response(json!({ "tool_choice": { "type": "function", "name": "get_weather" } })))
        .await;
    assert_eq!(submitted(&router), named);
    let choice = json!({ "tool_choice": { "type": "tool", "name": "get_weather" } });
    router.ok(MESSAGES, &message(choice.clone())).await;
    assert_eq!(submitted(&router), named);

    // Cut off at the length limit: the partial output, marked incomplete.
    let (short, shorter) = (json!({ "max_output_tokens": 4 }), json!({ "max_tokens": 4 }));
    let cut =
        merged(response(json!({ "tool_choice": { "type": "function", "name": "get_weather" } })), &short);
    let whole = router.ok(RESPONSES, &cut).await;
    assert_eq!(
        (&whole["status"], &whole["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    let events = responses::events(&router, &merged(cut, &json!({ "stream": true }))).await;
    assert_eq!(without_ids(built_output(&events)), without_ids(whole["output"].clone()));
    let cut = merged(message(choice), &shorter);
    let whole = router.ok(MESSAGES, &cut).await;
    assert_eq!((&whole["stop_reason"], &whole["content"][0]["input"]), (&json!("max_tokens"), &json!({})));
    let events = anthropic::events(&router, &merged(cut, &json!({ "stream": true }))).await;
    assert_eq!(without_ids(built_content(&events)), without_ids(whole["content"].clone()));
}

#[tokio::test]
async fn too_many_tools_are_refused_and_the_next_request_works() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let functions: Vec<Value> =
        (0..129).map(|i| json!({ "name": format!("f{i}"), "type": "function" })).collect();
    let schemas: Vec<Value> =
        (0..129).map(|i| json!({ "name": format!("f{i}"), "input_schema": {} })).collect();
    for (path, body, fine) in [
        (RESPONSES, response(json!({ "tools": functions })), response(json!({}))),
        (MESSAGES, message(json!({ "tools": schemas })), message(json!({}))),
    ] {
        let refused = router.post_json(path, &body).await;
        assert_eq!(refused.status, 400);
        assert!(
            refused.text().contains("tools has 129 tools, at most 128 are allowed"),
            "{}",
            refused.text()
        );
        router.ok(path, &fine).await;
    }
}

/// `<|end|>` ends a message; written by a client in a tool, a call or a result it must not.
#[tokio::test]
async fn user_text_is_never_a_special_token_in_any_api() {
    let router = router_with(TEMPLATE).with_reply(" fine");
    let special = |ids: &[u32]| ids.iter().copied().filter(|&id| id < 4).collect::<Vec<_>>();
    let items = json!([
        { "role": "user", "content": "a<|end|>" },
        { "type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{\"city\": \"<|end|>\"}",
          "parsed_arguments": { "city": "<|end|>" } },
        { "type": "function_call_output", "call_id": "1", "output": "<|user|>" },
    ]);
    router.ok(RESPONSES, &response(json!({ "input": items }))).await;
    let of_response = router.lanes.take_one().prompt_ids;
    let messages = json!([
        { "role": "user", "content": "a<|end|>" },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "1", "name": "get_weather", "input": { "city": "<|end|>" } }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "1", "content": "<|user|>" }] },
    ]);
    router.ok(MESSAGES, &message(json!({ "messages": messages }))).await;
    assert_eq!(router.lanes.take_one().prompt_ids, of_response);
    // <|user|>, <|assistant|> and <|end|> come from the template, as does <|tool|>, which is not a token.
    assert_eq!(special(&of_response), [1, 0, 2, 0, 0, 2]);
}
