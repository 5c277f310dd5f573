//! Every successful request of this suite is repeated in the other mode (full or streamed) at twin routers
//! that generate the same text with equal and with other span lengths: a stream must add up to the full
//! response, whatever the span lengths are.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::client::{Answer, chunks};
use crate::tool_shapes::{built_content, built_output};

/// The routes that generate text.
pub(crate) const ROUTES: [&str; 4] =
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];

/// The same request in the other mode: full or streamed.
pub(crate) fn other_mode(path: &str, body: &Value) -> Value {
    let mut body = body.clone();
    let fields = body.as_object_mut().unwrap();
    if fields.remove("stream") == Some(json!(true)) {
        fields.remove("stream_options");
        return body;
    }
    fields.insert("stream".to_owned(), json!(true));
    if path.ends_with("completions") {
        fields.insert("stream_options".to_owned(), json!({ "include_usage": true }));
    }
    body
}

/// Compares the responses to a request in both modes. Speculation statistics are compared only if the spans
/// were equal.
pub(crate) fn compare((path, body): (&str, &Value), answers: [&Answer; 2], has_equal_spans: bool) {
    let is_streamed = body["stream"] == true;
    let [whole, streamed] = if is_streamed { [answers[1], answers[0]] } else { answers };
    for answer in [whole, streamed] {
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
    }
    let (mut whole, mut assembled) = (whole.json(), assembled(path, streamed));
    // Streams contain these only on request.
    let asked_for_usage = body["stream_options"]["include_usage"] == true;
    if !has_equal_spans || is_streamed && !asked_for_usage && path.ends_with("completions") {
        for answer in [&mut whole, &mut assembled] {
            answer.as_object_mut().unwrap().retain(|name, _| name != "usage" && name != "metrics");
        }
    }
    if body["seed"].is_null() || body["seed"] == -1 {
        whole["seed"] = Value::Null;
        assembled["seed"] = Value::Null;
    }
    redact(&mut whole);
    redact(&mut assembled);
    assert_eq!(assembled, whole, "{path} {body}: the streamed and the full response differ");
}

/// Builds the whole answer from a stream.
fn assembled(path: &str, answer: &Answer) -> Value {
    match path {
        "/v1/responses" => {
            let events = named_events(answer);
            let last = &events.last().unwrap()["response"];
            assert_eq!(built_output(&events), last["output"]);
            last.clone()
        }
        "/v1/messages" => {
            let events = named_events(answer);
            let mut message = events[0]["message"].clone();
            message["content"] = built_content(&events);
            let last = events.iter().find(|event| event["type"] == "message_delta").unwrap();
            let delta = last["delta"].as_object().unwrap().clone();
            message.as_object_mut().unwrap().extend(delta);
            message["usage"] = last["usage"].clone();
            message
        }
        _ => assembled_choices(&chunks(&answer.events())),
    }
}

/// The data of named events.
fn named_events(answer: &Answer) -> Vec<Value> {
    let data = |event: &str| event.lines().find_map(|line| line.strip_prefix("data: ")).map(str::to_owned);
    answer.text().split("\n\n").filter_map(data).map(|data| serde_json::from_str(&data).unwrap()).collect()
}

fn assembled_choices(chunks: &[Value]) -> Value {
    let mut whole = chunks[0].clone();
    let mut choices = BTreeMap::new();
    for chunk in chunks {
        for name in ["usage", "metrics", "timings"] {
            if chunk.get(name).is_some_and(|value| !value.is_null()) {
                whole[name] = chunk[name].clone();
            }
        }
        for piece in chunk["choices"].as_array().unwrap() {
            let choice = choices.entry(piece["index"].as_u64().unwrap()).or_insert_with(|| Choice::of(piece));
            choice.add(piece);
        }
    }
    whole["choices"] = choices.into_values().map(|choice| choice.0).collect();
    whole
}

/// One choice, as received so far.
struct Choice(Value);

impl Choice {
    fn of(piece: &Value) -> Self {
        let mut choice =
            json!({ "index": piece["index"], "logprobs": null, "finish_reason": null, "stop_reason": null });
        if piece.get("delta").is_some() {
            choice["message"] = json!({ "role": "assistant", "content": "", "refusal": null });
        } else {
            choice["text"] = json!("");
        }
        Self(choice)
    }

    fn add(&mut self, piece: &Value) {
        let choice = &mut self.0;
        if let Some(text) = piece["text"].as_str() {
            append(&mut choice["text"], text);
        }
        if let Some(delta) = piece.get("delta") {
            for field in ["content", "reasoning_content"] {
                if let Some(text) = delta[field].as_str() {
                    append(&mut choice["message"][field], text);
                }
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                add_call(&mut choice["message"], call);
            }
            if let Some(part) = delta.get("function_call") {
                match choice["message"].get_mut("function_call") {
                    Some(call) => append(&mut call["arguments"], part["arguments"].as_str().unwrap()),
                    None => choice["message"]["function_call"] = part.clone(),
                }
            }
        }
        add_lists(&mut choice["logprobs"], &piece["logprobs"]);
        if let Some(ids) = piece["token_ids"].as_array() {
            let mut all = choice["token_ids"].as_array().cloned().unwrap_or_default();
            all.extend(ids.iter().cloned());
            choice["token_ids"] = Value::Array(all);
        }
        for field in ["finish_reason", "stop_reason", "prompt_token_ids"] {
            if !piece[field].is_null() {
                choice[field] = piece[field].clone();
            }
        }
    }
}

fn append(text: &mut Value, more: &str) {
    *text = json!(text.as_str().unwrap_or_default().to_owned() + more);
}

fn add_call(message: &mut Value, part: &Value) {
    if message["tool_calls"].is_null() {
        message["tool_calls"] = json!([]);
    }
    let calls = message["tool_calls"].as_array_mut().unwrap();
    let idx = part["index"].as_u64().unwrap() as usize;
    if idx == calls.len() {
        let mut call = part.clone();
        call.as_object_mut().unwrap().remove("index");
        calls.push(call);
    } else {
        append(&mut calls[idx]["function"]["arguments"], part["function"]["arguments"].as_str().unwrap());
    }
}

/// Appends the lists of an object, field by field.
fn add_lists(sum: &mut Value, more: &Value) {
    let Some(more) = more.as_object() else { return };
    if sum.is_null() {
        *sum = Value::Object(Map::new());
    }
    for (name, more) in more {
        match (sum[name].as_array_mut(), more) {
            (Some(list), Value::Array(more)) => list.extend(more.iter().cloned()),
            _ => sum[name] = more.clone(),
        }
    }
}

/// Removes fields that differ between requests or are redundant.
fn redact(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(redact),
        Value::Object(fields) => {
            fields.remove("object");
            fields.remove("timings");
            for (name, value) in fields.iter_mut() {
                let is_id = name == "id" || name.ends_with("_id") || name.starts_with("created");
                if is_id && !value.is_null() || name == "completed_at" {
                    *value = json!("[redacted]");
                } else if (name == "content" || name == "refusal") && *value == json!("") {
                    *value = Value::Null;
                } else {
                    redact(value);
                }
            }
        }
        _ => {}
    }
}
