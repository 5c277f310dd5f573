//! Constraints of the output that must be refused: formats, grammars and tools.

use serde_json::{Value, json};

use crate::bad_input::check_table;
use crate::client::{CHAT, COMPLETIONS, merged};

#[tokio::test]
async fn invalid_answer_formats() {
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let in_format = json!("response_format.json_schema.schema");
    let long = "a".repeat((128 << 10) + 1);
    check_table(vec![
        (CHAT, json!({"response_format": "json"}), json!("response_format"), "an object"),
        (CHAT, json!({"response_format": {}}), json!("response_format"), "missing field `type`"),
        (
            CHAT,
            json!({"response_format": {"type": "xml"}}),
            json!("response_format.type"),
            "must be one of text, json_object, json_schema, not `xml`",
        ),
        (CHAT, json!({"response_format": {"type": "json_schema"}}), in_format.clone(), "is required"),
        (
            CHAT,
            json!({"response_format": {"type": "text", "json_schema": {"name": "x"}}}),
            json!("response_format.json_schema"),
            "only allowed",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "text", "schema": {}}}),
            json!("response_format.schema"),
            "only allowed",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {}}}),
            json!("response_format.schema"),
            "send one of them",
        ),
        (CHAT, schema(json!(7)), in_format.clone(), "must be a JSON schema"),
        (CHAT, schema(json!({"type": "strong"})), in_format.clone(), "strong"),
        (CHAT, schema(json!({"type": "object", "if": {}})), in_format.clone(), "if"),
        (CHAT, schema(json!({"$ref": "http://example.com/x"})), in_format.clone(), "cannot be used"),
        (CHAT, schema(json!({"enum": [long]})), in_format, "at most 131072 are allowed"),
    ])
    .await;
}

#[tokio::test]
async fn invalid_constraints_of_vllm() {
    check_table(vec![
        (COMPLETIONS, json!({"guided_regex": "("}), json!("guided_regex"), "guided_regex cannot be used"),
        (COMPLETIONS, json!({"guided_regex": 7}), json!("guided_regex"), "a string"),
        (COMPLETIONS, json!({"guided_choice": []}), json!("guided_choice"), "0 texts, 1 to 4096 are allowed"),
        (COMPLETIONS, json!({"guided_grammar": "root ::= x"}), json!("guided_grammar"), "cannot be used"),
        (
            COMPLETIONS,
            json!({"structured_outputs": {"grammar": ""}}),
            json!("structured_outputs.grammar"),
            "cannot be used",
        ),
        (
            COMPLETIONS,
            json!({"structured_outputs": {"structural_tag": {}}}),
            json!("structured_outputs.structural_tag"),
            "not a field of this endpoint",
        ),
        (
            COMPLETIONS,
            json!({"guided_regex": "a", "guided_choice": ["b"]}),
            json!("guided_choice"),
            "guided_regex and guided_choice both constrain the output",
        ),
        (
            COMPLETIONS,
            json!({"guided_regex": "a", "ignore_eos": true}),
            json!("ignore_eos"),
            "ignore_eos cannot be combined with guided_regex",
        ),
        (
            COMPLETIONS,
            json!({"guided_regex": "a", "min_tokens": 1}),
            json!("min_tokens"),
            "min_tokens cannot be combined with guided_regex",
        ),
        (
            COMPLETIONS,
            json!({"guided_regex": "a", "allowed_token_ids": [5]}),
            json!("allowed_token_ids"),
            "allowed_token_ids cannot be combined with guided_regex, which determines the allowed tokens",
        ),
        (
            COMPLETIONS,
            json!({"guided_regex": "a", "bad_words": ["b"]}),
            json!("bad_words"),
            "bad_words cannot be combined with guided_regex",
        ),
    ])
    .await;
}

#[tokio::test]
async fn invalid_tools() {
    let function = |fields: Value| json!({"tools": [{"type": "function", "function": fields}], "tool_choice": "required"});
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let messages = |fields: Value| {
        let message = merged(json!({"role": "assistant", "content": "x"}), &fields);
        json!({"messages": [message]})
    };
    let call = |function: Value| messages(json!({"tool_calls": [{"id": "1", "function": function}]}));
    check_table(vec![
        (CHAT, json!({"tools": {}}), json!("tools"), "a sequence"),
        (CHAT, json!({"tools": [{"type": "web_search"}]}), json!("tools[0].type"), "must be `function`"),
        (CHAT, json!({"tools": [{"type": "function"}]}), json!("tools[0].function"), "must be an object"),
        (CHAT, function(json!({})), json!("tools[0].function.name"), "must be a string"),
        (
            CHAT,
            function(json!({"name": "a b"})),
            json!("tools[0].function.name"),
            "1 to 128 of the characters",
        ),
        (
            CHAT,
            function(json!({"name": "f", "parameters": []})),
            json!("tools[0].function.parameters"),
            "a JSON schema",
        ),
        (
            CHAT,
            function(json!({"name": "f", "parameters": {"type": "strong"}})),
            json!("tools"),
            "tools cannot be used",
        ),
        (CHAT, json!({"tools": vec![&tool; 129]}), json!("tools"), "129 tools, at most 128"),
        (CHAT, json!({"tools": [&tool, &tool]}), json!("tools[1].function.name"), "two tools are named `f`"),
        (CHAT, json!({"tools": [&tool]}), json!("tools"), "chat template has no supported tool call format"),
        (CHAT, json!({"tool_choice": "required"}), json!("tool_choice"), "there are no tools"),
        (CHAT, json!({"tools": [&tool], "tool_choice": "any"}), json!("tool_choice"), "one of none, auto"),
        (
            CHAT,
            json!({"tools": [&tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            json!("tool_choice"),
            "names `g`, which is not one of the tools",
        ),
        (
            CHAT,
            json!({"tools": [&tool], "tool_choice": "required", "response_format": {"type": "json_object"}}),
            json!("tool_choice"),
            "tool_choice and response_format both constrain the output",
        ),
        (COMPLETIONS, json!({"tools": [&tool]}), json!("tools"), "a field of /v1/chat/completions"),
        (CHAT, call(json!({})), json!("messages[0].tool_calls[0].function.name"), "must be a string"),
        (
            CHAT,
            call(json!({"name": "f", "arguments": "{"})),
            json!("messages[0].tool_calls[0].function.arguments"),
            "must be a JSON object, written as a string: EOF while parsing",
        ),
        (
            CHAT,
            call(json!({"name": "f", "arguments": "{\"x\": 1e400}"})),
            json!("messages[0].tool_calls[0].function.arguments"),
            "written as a string: number out of range",
        ),
        (
            CHAT,
            messages(json!({"tool_call_id": "1"})),
            json!("messages[0].tool_call_id"),
            "only allowed in messages of role tool",
        ),
    ])
    .await;
}
