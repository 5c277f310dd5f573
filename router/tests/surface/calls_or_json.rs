//! Tools that the model may call, together with a format for its answer: the output is either.

use grammar::{Compiler, Grammar, GrammarKind, Vocabulary};
use serde_json::{Value, json};
use text::Framing;

use crate::client::{CHAT, END, MODEL, TestRouter, demo_text, merged};
use crate::tools::{TEMPLATE, router_with, weather};

/// Describes calls as Llama 3's do.
const LLAMA: &str =
    "{% if tools %}<|python_tag|>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}";
/// Describes calls as Mistral's do.
const MISTRAL: &str =
    "{% if tools %}[TOOL_CALLS]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}";

fn body(fields: Value) -> Value {
    let schema = json!({
        "type": "object", "properties": { "sky": { "$ref": "#/$defs/sky" } }, "required": ["sky"],
        "additionalProperties": false, "$defs": { "sky": { "enum": ["blue", "grey"] } }
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "sky", "schema": schema } });
    merged(
        json!({
            "model": MODEL, "seed": 7, "messages": [{ "role": "user", "content": "hi" }], "tools": [weather()],
            "response_format": format
        }),
        &fields,
    )
}

/// Whether a grammar matches this text.
pub(crate) fn matches(grammar: &str, text: &str) -> bool {
    let words = demo_text().vocabulary().marked().unwrap();
    let compiler = Compiler::new(&Vocabulary::from_words(words)).unwrap();
    let mut matcher = compiler.compile(&Grammar::from_wire(grammar).unwrap()).unwrap();
    let ids = demo_text().encode(text, Framing::AsIs).unwrap();
    let masks = matcher.masks(&[], &ids, &[END]).unwrap();
    masks.len() == ids.len() + 1 && masks.last().unwrap().allows(END)
}

/// The grammar of the single generation that was submitted.
pub(crate) fn submitted(router: &TestRouter) -> String {
    router.lanes.take_one().spec.grammar.unwrap().to_string()
}

/// The JSON schema that is the grammar of the single generation that was submitted.
pub(crate) fn submitted_schema(router: &TestRouter) -> Value {
    let grammar = Grammar::from_wire(&submitted(router)).unwrap();
    assert_eq!(grammar.kind, GrammarKind::JsonSchema);
    serde_json::from_str(&grammar.text).unwrap()
}

#[tokio::test]
async fn the_output_is_calls_or_matches_the_format() {
    let sky = r#"{"sky": "blue"}"#;
    let (hermes, llama) = (
        r#"{"name": "get_weather", "arguments": {"city": "x"}}"#,
        r#"{"name": "get_weather", "parameters": {"city": "x"}}"#,
    );
    let tagged = |call: &str| format!("<tool_call>\n{call}\n</tool_call>");
    for (template, call, calls) in [
        (TEMPLATE, tagged(hermes), format!("{}\n{}", tagged(hermes), tagged(hermes))),
        (LLAMA, llama.to_owned(), format!("{llama}; {llama}")),
    ] {
        let router = router_with(template).with_reply(" fine");
        router.ok(CHAT, &body(json!({}))).await;
        let several = submitted(&router);
        router.ok(CHAT, &body(json!({ "parallel_tool_calls": false }))).await;
        let single = submitted(&router);
        for (text, is_several, is_single) in [
            (sky, true, true),
            (r#"{"sky": "green"}"#, false, false),
            (call.as_str(), true, true),
            (calls.as_str(), true, false),
            (call.replace("get_weather", "other").as_str(), false, false),
            (call.replace("city", "town").as_str(), false, false),
            (" fine", false, false),
        ] {
            assert_eq!(matches(&several, text), is_several, "{text}: {several}");
            assert_eq!(matches(&single, text), is_single, "{text}: {single}");
        }
        // Without tools to call, the format alone.
        router.ok(CHAT, &body(json!({ "tool_choice": "none" }))).await;
        let format = submitted(&router);
        assert!(matches(&format, sky) && !matches(&format, &call), "{format}");
    }
}

#[tokio::test]
async fn calls_are_parsed_beside_a_format() {
    let call = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>"#;
    let router = router_with(TEMPLATE).with_reply(call);
    let answer = router.ok(CHAT, &body(json!({}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "get_weather");
    assert_eq!(choice["finish_reason"], "tool_calls");
    let router = router.with_reply(r#"{"sky": "blue"}"#);
    let answer = router.ok(CHAT, &body(json!({ "response_format": { "type": "json_object" } }))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], r#"0{"sky": "blue"}"#);
}

#[tokio::test]
async fn where_a_grammar_cannot_contain_calls_the_error_names_both_fields() {
    let no_format = json!({ "response_format": null, "guided_regex": "a" });
    for (template, fields, field) in [
        (MISTRAL, json!({}), "response_format.json_schema.schema for this model"),
        (MISTRAL, json!({ "response_format": { "type": "json_object" } }), "response_format for this model"),
        (TEMPLATE, no_format, "guided_regex, which is not a JSON schema"),
    ] {
        let router = router_with(template).with_reply(" fine");
        let refused = router.post_json(CHAT, &body(fields.clone())).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("tools")));
        let expected = format!("tools cannot be combined with {field}");
        assert!(refused.text().contains(&expected), "{}", refused.text());
        let mut none = body(fields);
        none["tool_choice"] = json!("none");
        router.ok(CHAT, &none).await;
    }
}
