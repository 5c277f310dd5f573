//! Parses recorded outputs of each format, split at every position and in random spans, always with the same
//! result.

use super::*;

fn names() -> Vec<String> {
    ["get_weather", "send"].map(str::to_owned).into()
}

fn auto(syntax: ToolSyntax, reasoning: ReasoningFormat) -> OutputFormat {
    OutputFormat { calls: CallFormat::Auto { syntax, tools: names() }, reasoning, single_call: false }
}

fn call(name: &str, arguments: &str) -> Piece {
    Piece::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned() })
}

fn content(text: &str) -> Piece {
    Piece::Content(text.to_owned())
}

fn reasoning_piece(text: &str) -> Piece {
    Piece::Reasoning(text.to_owned())
}

/// Parses a text that arrives in these parts.
fn parse<'a>(format: &OutputFormat, parts: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
    let mut parser = OutputParser::new(format);
    let mut pieces: Vec<Piece> = parts.into_iter().flat_map(|part| parser.parse(part, false)).collect();
    pieces.extend(parser.parse("", true));
    merge_adjacent(pieces)
}

/// Checks that the result does not depend on the split: whole, at every position, by character, and in spans
/// of many lengths.
fn check(format: &OutputFormat, text: &str, expected: &[Piece]) {
    assert_eq!(parse(format, [text]), expected, "whole: {text}");
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    for &at in &cuts {
        let (left, right) = text.split_at(at);
        assert_eq!(parse(format, [left, right]), expected, "cut at {at}: {text}");
    }
    assert_eq!(
        parse(format, cuts.windows(2).map(|pair| &text[pair[0]..pair[1]])),
        expected,
        "characters: {text}"
    );
    let mut state = 1_u64;
    for _ in 0..200 {
        let (mut parts, mut from) = (Vec::new(), 0);
        while from + 1 < cuts.len() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let to = (from + 1 + (state >> 33) as usize % 9).min(cuts.len() - 1);
            parts.push(&text[cuts[from]..cuts[to]]);
            from = to;
        }
        assert_eq!(parse(format, parts), expected, "spans: {text}");
    }
}

#[test]
fn hermes() {
    let format = auto(ToolSyntax::Hermes, ReasoningFormat::None);
    let one = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich </tool\", \"days\": [1, 2.5]}}\n</tool_call>";
    let weather = call("get_weather", r#"{"city":"Zürich </tool","days":[1,2.5]}"#);
    let send = call("send", "{}");
    check(&format, one, std::slice::from_ref(&weather));
    check(&format, &format!("Let me see.\n{one}\n"), &[content("Let me see."), weather.clone()]);
    let two = format!("{one}\n<tool_call>\n{{\"name\": \"send\"}}\n</tool_call>");
    check(&format, &two, &[weather.clone(), send.clone()]);
    check(&format, &format!("{two} done"), &[weather.clone(), send, content(" done")]);
    check(&OutputFormat { single_call: true, ..format.clone() }, &two, std::slice::from_ref(&weather));
    // The end marker is missing: a stop token took its place.
    check(&format, one.strip_suffix("\n</tool_call>").unwrap(), &[weather]);
    // Text that is not a call is returned unchanged.
    for text in [
        "<tool_call>\n{\"name\": \"get_weather\", \"arg",
        "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>",
        "<tool_call>nonsense</tool_call> and more\n",
        "a < b <tool and <tool_cal",
        "  spaces stay \n",
        "",
    ] {
        let expected: Vec<Piece> = (!text.is_empty()).then(|| content(text)).into_iter().collect();
        check(&format, text, &expected);
    }
}

#[test]
fn llama() {
    let format = auto(ToolSyntax::Llama, ReasoningFormat::None);
    let one = r#"{"name": "get_weather", "parameters": {"city": "a;b {\"x\": 1}"}}"#;
    let weather = call("get_weather", r#"{"city":"a;b {\"x\": 1}"}"#);
    check(&format, one, std::slice::from_ref(&weather));
    check(&format, &format!("<|python_tag|>{one}"), std::slice::from_ref(&weather));
    let two = format!("{one}; {}", r#"{"name": "send", "parameters": "{\"n\": 1}"}"#);
    check(&format, &two, &[weather, call("send", r#"{"n":1}"#)]);
    for text in [
        r#"{"name": "get_weather", "parameters": {"city""#,
        r#"{"name": "Anna", "age": 3}"#,
        r#"The answer is {"name": "send", "parameters": {}}"#,
        "<|python_tag|>print(1)",
        "<|pyth",
        "[1, 2]",
    ] {
        check(&format, text, &[content(text)]);
    }
}

#[test]
fn mistral() {
    let format = auto(ToolSyntax::Mistral, ReasoningFormat::None);
    let list = r#"[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "[TOOL_CALLS]"}}, {"name": "send", "arguments": {}}]"#;
    let calls = [call("get_weather", r#"{"city":"[TOOL_CALLS]"}"#), call("send", "{}")];
    check(&format, list, &calls);
    let named = r#"[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]send{}"#;
    check(&format, named, &calls);
    let with_ids = r#"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]send[CALL_ID]f5[ARGS]{}"#;
    check(&format, with_ids, &calls);
    check(&format, &format!("Sure. {list}"), &[content("Sure. "), calls[0].clone(), calls[1].clone()]);
    for text in ["[TOOL_CALLS] [{", "[TOOL_CALLS]", "[TOOL_CALL] x", "[[TOOL_CALLS", "[TOOL_CALLS]other{}"] {
        check(&format, text, &[content(text)]);
    }
}

/// A tool may be described in the prompt and yet not be allowed. Its calls, and those listed with them, are
/// text with all of their markers, also if the text ends within them: there is never half a call.
#[test]
fn a_call_of_a_tool_that_is_not_allowed_is_whole_text() {
    let delete = r#"{"name": "delete", "arguments": {"path": "/"}}"#;
    let send = r#"{"name": "send", "arguments": {}}"#;
    for (syntax, text) in [
        (ToolSyntax::Hermes, format!("<tool_call>\n{delete}\n</tool_call>")),
        (ToolSyntax::Hermes, format!("<tool_call>[{send}, {delete}]</tool_call>")),
        (ToolSyntax::Llama, format!("<|python_tag|>{delete}")),
        (ToolSyntax::Llama, format!("{send}; {delete}")),
        (ToolSyntax::Mistral, format!("[TOOL_CALLS][{send}, {delete}]")),
        (ToolSyntax::Mistral, r#"[TOOL_CALLS]delete[ARGS]{"path": "/"}"#.to_owned()),
    ] {
        let format = auto(syntax, ReasoningFormat::None);
        check(&format, &text, &[content(&text)]);
        let cut = text.find("delete").unwrap() + "delete".len();
        check(&format, &text[..cut], &[content(&text[..cut])]);
    }
    let beside = format!("I see.<tool_call>{delete}</tool_call><tool_call>{send}</tool_call>");
    let text = content(&format!("I see.<tool_call>{delete}</tool_call>"));
    check(&auto(ToolSyntax::Hermes, ReasoningFormat::None), &beside, &[text, call("send", "{}")]);
}

/// Numbers beyond 64 bits and beyond the precision of f64 are ids and amounts of the client's.
#[test]
fn numbers_in_arguments_are_as_the_model_wrote_them() {
    let arguments =
        r#"{"id":123456789012345678901234,"at":[31.245270191439438,1e2,-0,0.10],"s":"a \"b\" \u00e9"}"#;
    let written = arguments.replace(',', ", ").replace(':', ": ");
    let expected = [call("send", arguments)];
    let object = |field: &str| format!(r#"{{"name": "send", "{field}": {written}}}"#);
    let hermes = format!("<tool_call>\n{}\n</tool_call>", object("arguments"));
    let as_text = format!(r#"{{"name": "send", "parameters": {}}}"#, serde_json::json!(written));
    for (syntax, text) in [
        (ToolSyntax::Hermes, hermes),
        (ToolSyntax::Llama, object("parameters")),
        (ToolSyntax::Llama, as_text),
        (ToolSyntax::Mistral, format!("[TOOL_CALLS][{}]", object("arguments"))),
        (ToolSyntax::Mistral, format!("[TOOL_CALLS]send[ARGS]{written}")),
    ] {
        check(&auto(syntax, ReasoningFormat::None), &text, &expected);
    }
    let required = OutputFormat { calls: CallFormat::Required, ..OutputFormat::default() };
    check(&required, &format!("[{}]", object("parameters")), &expected);
}

#[test]
fn reasoning_comes_before_everything() {
    let tags = ReasoningSyntax::Tags;
    let optional = auto(ToolSyntax::Hermes, ReasoningFormat::Optional(tags));
    let text = "\n<think>\n2 < 3, so </thin <tool_call>no</tool_call>\n</think>\n\nYes.";
    let inside = reasoning_piece("\n2 < 3, so </thin <tool_call>no</tool_call>\n");
    check(&optional, text, &[inside.clone(), content("\n\nYes.")]);
    let opened = OutputFormat { reasoning: ReasoningFormat::OpenedByPrompt(tags), ..OutputFormat::default() };
    check(&opened, "so be it</think>then", &[reasoning_piece("so be it"), content("then")]);
    check(&opened, "it never ends </thi", &[reasoning_piece("it never ends </thi")]);
    check(&optional, "<thinking> is text", &[content("<thinking> is text")]);
    check(&optional, " <think", &[content(" <think")]);
    let with_calls = "<think>a</think><tool_call>{\"name\": \"send\"}</tool_call>";
    check(&optional, with_calls, &[reasoning_piece("a"), call("send", "{}")]);
    check(&OutputFormat::default(), text, &[content(text)]);
}

#[test]
fn reasoning_of_mistral() {
    let mut format = auto(ToolSyntax::Mistral, ReasoningFormat::Optional(ReasoningSyntax::Brackets));
    let markers = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"];
    assert_eq!(format.special_tokens(), markers);
    let text = "[THINK]a [/THINK yes</think>[/THINK]b[TOOL_CALLS]send[ARGS]{}";
    let expected = [reasoning_piece("a [/THINK yes</think>"), content("b"), call("send", "{}")];
    check(&format, text, &expected);
    check(&format, "<think>a</think>b", &[content("<think>a</think>b")]);
    check(&format, "[THINKING]", &[content("[THINKING]")]);
    format.apply_prompt("[INST]hi[/INST]<think>");
    assert_eq!(format.reasoning, ReasoningFormat::Optional(ReasoningSyntax::Brackets));
    format.apply_prompt("[INST]hi[/INST][THINK]\n");
    assert_eq!(format.reasoning, ReasoningFormat::OpenedByPrompt(ReasoningSyntax::Brackets));
    check(&format, "a[/THINK]b", &[reasoning_piece("a"), content("b")]);
}

#[test]
fn calls_constrained_by_a_grammar() {
    let required = OutputFormat { calls: CallFormat::Required, ..OutputFormat::default() };
    let text =
        r#"[ {"name": "a", "parameters": {"x": "}]\"{", "y": [{}]}}, {"name": "b", "parameters": {}} ]"#;
    let calls = [call("a", r#"{"x":"}]\"{","y":[{}]}"#), call("b", "{}")];
    check(&required, text, &calls);
    check(&required, &text[..text.len() - 4], &calls[..1]);
    let named = OutputFormat { calls: CallFormat::Named("a".to_owned()), ..OutputFormat::default() };
    check(&named, r#"{"x": 1}"#, &[call("a", r#"{"x": 1}"#)]);
    check(&named, "", &[]);
}

#[test]
fn the_syntax_is_detected_from_the_template() {
    for (source, syntax) in [
        ("{% if tools %}<tool_call>{% endif %}", Some(ToolSyntax::Hermes)),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", Some(ToolSyntax::Mistral)),
        ("{% if tools %}Environment: ipython {\"name\": .., \"parameters\": ..}", Some(ToolSyntax::Llama)),
        ("{% if tools %}?{% endif %}", None),
        ("{{ messages }}<tool_call>", None),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=key>{% endif %}", None),
        ("{% if tools %}<tool_call>name\n<arg_key>key</arg_key>{% endif %}", None),
    ] {
        assert_eq!(ToolSyntax::from_template(source), syntax, "{source}");
    }
}

#[test]
fn reasoning_is_detected_from_the_template() {
    let tags = ReasoningFormat::Optional(ReasoningSyntax::Tags);
    let brackets = ReasoningFormat::Optional(ReasoningSyntax::Brackets);
    for (source, format) in [
        ("{% if add_generation_prompt %}<think>{% endif %}", tags),
        ("{{ m.content.split('</think>')[-1] }}", tags),
        ("[THINK]{{ m.thinking }}[/THINK]", brackets),
        ("{{ m.content }} think", ReasoningFormat::None),
    ] {
        assert_eq!(ReasoningFormat::from_template(source), format, "{source}");
    }
}

/// A model in a loop may write nothing but whitespace up to its limit. Work per character that grows with the
/// text would hold a thread of the runtime for minutes.
#[test]
fn a_long_output_of_whitespace_is_parsed_in_linear_time() {
    let text = " ".repeat(4 << 20);
    let tools = vec!["f".to_owned()];
    let calls = CallFormat::Auto { syntax: ToolSyntax::Llama, tools };
    let reasoning = ReasoningFormat::Optional(ReasoningSyntax::Tags);
    for format in [
        OutputFormat { calls, ..OutputFormat::default() },
        OutputFormat { reasoning, ..OutputFormat::default() },
    ] {
        let mut parser = OutputParser::new(&format);
        assert!(parser.push(&text, false).is_empty(), "it may still become something else");
        assert_eq!(parser.push("", true), [OutputDelta::Text(text.clone())]);
    }
}
