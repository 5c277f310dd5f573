//! Tests of what chat templates of transformers use beyond minijinja. Expected values are those of Jinja and
//! Python.

use serde_json::{Map, json};

use super::*;

fn rendered(source: &str) -> Result<String, TextError> {
    let messages = [ConversationMessage::new("user", "Hi there!".to_owned())];
    ChatTemplate::compile(source, "<s>", "</s>").unwrap().render(&messages, &Map::new())
}

#[test]
fn expressions_give_what_python_gives() {
    for (expression, expected) in [
        ("messages[0].content.rsplit('e', 1)", "['Hi ther', '!']"),
        ("'a b  c '.rsplit(none, 1)", "['a b', 'c']"),
        ("' a b'.rsplit()", "['a', 'b']"),
        ("'a,b,c'.rsplit(',', maxsplit=1)", "['a,b', 'c']"),
        ("'a,b,c'.split(',')", "['a', 'b', 'c']"),
        ("'a,b,c'.split(',', 1)", "['a', 'b,c']"),
        ("'a,b,c'.split(sep=',', maxsplit=1)[-1]", "b,c"),
        ("' a  b c '.split(maxsplit=1)", "['a', 'b c ']"),
        ("' a  b '.split()", "['a', 'b']"),
        ("' '.split()", "[]"),
        ("'abc'.partition('b')", "('a', 'b', 'c')"),
        ("'abc'.partition('x')", "('abc', '', '')"),
        ("'a-b-c'.rpartition('-')", "('a-b', '-', 'c')"),
        ("'éabc'.index('c')", "3"),
        ("'abc'.removeprefix('a')", "bc"),
        ("'abc'.removesuffix('c')", "ab"),
        ("'abc'.removesuffix('x')", "abc"),
        ("'Abc'.swapcase()", "aBC"),
        ("'-7'.zfill(4)", "-007"),
        ("'abc'.ljust(5) ~ '|'", "abc  |"),
        ("'abc'.rjust(5, '*')", "**abc"),
        ("'abc'.center(7) ~ '|'", "  abc  |"),
        ("'ab'.center(5) ~ '|'", "  ab |"),
        ("'abc' is sequence and {} is sequence and [] is sequence and 1 is not sequence", "True"),
        (
            r#"{'b': [true, none, 1.0, 1e20, 1e-7, 0.0001, "é<>&'\u2028\x7f\n"]} | tojson"#,
            concat!(r#"{"b": [true, null, 1.0, 1e+20, 1e-07, 0.0001, "é<>&'"#, "\u{2028}\u{7f}", r#"\n"]}"#),
        ),
        (
            "{'b': 1, 'a': 'é😀'} | tojson(ensure_ascii=true, sort_keys=true)",
            r#"{"a": "\u00e9\ud83d\ude00", "b": 1}"#,
        ),
        ("[1, 2] | tojson(separators=(',', ':'))", "[1,2]"),
        (
            "{'a': [], 'b': {}, 'c': [1]} | tojson(indent=2)",
            "{\n  \"a\": [],\n  \"b\": {},\n  \"c\": [\n    1\n  ]\n}",
        ),
        ("{1: 2, none: 4} | tojson", r#"{"1": 2, "null": 4}"#),
    ] {
        assert_eq!(rendered(&format!("{{{{ {expression} }}}}")).unwrap(), expected, "{expression}");
    }
    for (expression, words) in [
        ("'abc'.index('x')", "substring not found"),
        ("[1] | tojson(default=1)", "default"),
        ("'a'.split('')", "empty separator"),
        ("'a'.split(limit=1)", "limit"),
        ("'a'.ljust(99999999)", "at most"),
    ] {
        let error = rendered(&format!("{{{{ {expression} }}}}")).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn statements_give_what_jinja_gives() {
    for (source, expected) in [
        ("{{ nothing | length }} {{ messages[0].tool_calls | count }} {{ messages | length }}", "0 0 1"),
        ("{% if messages[0].tool_calls | length > 0 %}calls{% endif %}", ""),
        (
            "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}{{ n }}{% endfor %}",
            "013",
        ),
        // Lines of a template that was written on Windows.
        ("a\r\n{% if true %}\r\nb\r{% endif %}\r\n{{ '\r\nc\\r' }}\r\n", "a\nb\n\nc\r"),
        (
            "{% if tools is none %}no tools{% endif %}{{ '' if documents else ', no documents' }}",
            "no tools, no documents",
        ),
    ] {
        assert_eq!(rendered(source).unwrap(), expected, "{source}");
    }
}

/// Templates write a tool's schema with a macro that calls itself for each level.
#[test]
fn macros_may_nest_as_deeply_as_schemas() {
    let source = "{% macro type(schema) %}{% if schema.items %}{% for item in [schema.items] %}[{{ type(item) }}]\
                  {% endfor %}{% else %}{{ schema.type }}{% endif %}{% endmacro %}{{ type(schema) }}";
    let levels = 30;
    let schema = (0..levels).fold(json!({ "type": "integer" }), |inner, _| json!({ "items": inner }));
    let variables = Map::from_iter([("schema".to_owned(), schema)]);
    let rendered = ChatTemplate::compile(source, "", "").unwrap().render(&[], &variables).unwrap();
    assert_eq!(rendered, "[".repeat(levels) + "integer" + &"]".repeat(levels));
}

#[test]
fn a_macro_that_never_ends_is_an_error() {
    let nested = "{% if true %}{% for n in [1] %}{{ endless() | trim | upper }}{% endfor %}{% endif %}";
    for body in ["{{ endless() }}", "{{ [endless()] | map('upper') | list }}", nested] {
        let source = format!("{{% macro endless() %}}{body}{{% endmacro %}}{{{{ endless() }}}}");
        let render = move || rendered(&source).unwrap_err().to_string();
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(render).unwrap();
        let error = thread.join().unwrap();
        assert!(error.contains("recursion limit"), "{body}: {error}");
    }
}

#[test]
fn dates_are_written_as_in_python() {
    let time = jiff::civil::date(2025, 7, 1).at(17, 5, 9, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap();
    for (format, expected) in [
        ("%d %b %Y", "01 Jul 2025"),
        ("%A, %B %-d, %Y, %I:%M %p", "Tuesday, July 1, 2025, 05:05 PM"),
        ("%Y-%m-%dT%H:%M:%S, day %j", "2025-07-01T17:05:09, day 182"),
        ("%c|%x|%X", "Tue Jul  1 17:05:09 2025|07/01/25|17:05:09"),
        ("100%% %K %", "100% %K %"),
    ] {
        assert_eq!(strftime(format, &time).unwrap(), expected, "{format}");
    }
}

#[test]
fn a_deep_value_is_refused() {
    let source =
        "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let error = rendered(&format!("{source}{{{{ ns.x | tojson }}}}")).unwrap_err().to_string();
    assert!(error.contains("levels"), "{error}");
}

#[test]
fn tags_of_training_change_no_text() {
    for (source, expected) in [
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("a {%- generation -%} b {%- endgeneration +%} c", "ab c"),
        ("{%generation%}x{%endgeneration%}{% if true %}generation{% endif %}", "xgeneration"),
    ] {
        assert_eq!(rendered(source).unwrap(), expected, "{source}");
    }
}

/// A conversation with a call of `get_weather` in a message without content.
fn call() -> [ConversationMessage; 2] {
    let call = json!({ "function": { "name": "get_weather", "arguments": {} } });
    let message =
        ConversationMessage { role: "assistant".into(), tool_calls: vec![call], ..Default::default() };
    [ConversationMessage::new("user", "Hi".to_owned()), message]
}

#[test]
fn templates_see_null_content_if_they_can_use_it() {
    const NAMES: &str = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}";
    for (body, expected) in [
        // DeepSeek's: calls only without content.
        ("{% if m.content is none %}N{{ m.tool_calls[0].function.name }}{% endif %}", Some("Nget_weather")),
        // A test for truth.
        (&format!("{{% if m.content %}}{{{{ m.content }}}}{{% endif %}}{NAMES}"), Some("Higet_weather")),
        // Templates that fail on null, or write it.
        (&format!("{{{{ m.content.strip() }}}}{NAMES}"), Some("Higet_weather")),
        (&format!("{{{{ m.content + '.' }}}}{NAMES}"), Some("Hi..get_weather")),
        (&format!("{{{{ m.content }}}}{NAMES}"), Some("Higet_weather")),
        (&format!("{{% if m.content is string %}}{NAMES}{{% endif %}}"), Some("get_weather")),
        // Templates that never write calls.
        ("{{ m.content }}", Some("Hi")),
        ("{% if m.content %}{{ m.content }}{% endif %}", Some("Hi")),
        // Calls that are left out.
        (&format!("{{% if m.content %}}{{{{ m.content }}}}{NAMES}{{% endif %}}"), None),
    ] {
        let source = format!("{{% for m in messages %}}{body}{{% endfor %}}");
        let template = ChatTemplate::compile(&source, "", "").unwrap();
        match (template.render_calls(&call(), &Map::new()), expected) {
            (Ok(found), Some(expected)) => assert_eq!(found, expected, "{body}"),
            (Err(TextError::Refused(reason)), None) => assert!(reason.contains("`get_weather`"), "{reason}"),
            (found, _) => panic!("{body}: {found:?}"),
        }
    }
}

#[test]
fn templates_that_need_a_text_see_arguments_as_one() {
    let call = json!({ "function": { "name": "f", "arguments": { "a": [1, "é"] } } });
    let message =
        ConversationMessage { role: "assistant".into(), tool_calls: vec![call], ..Default::default() };
    let render = |expression: &str| {
        let source = format!("{{% for c in messages[0].tool_calls %}}f{{{{ {expression} }}}}{{% endfor %}}");
        let template = ChatTemplate::compile(&source, "", "").unwrap();
        template.render_calls(std::slice::from_ref(&message), &Map::new())
    };
    for (expression, expected) in [
        // DeepSeek's.
        ("': ' + c.function.arguments", r#"f: {"a":[1,"é"]}"#),
        ("c.function.arguments | tojson", r#"f{"a": [1, "é"]}"#),
        ("c.function.arguments.a[0]", "f1"),
    ] {
        assert_eq!(render(expression).unwrap(), expected, "{expression}");
    }
    let error = render("c.nothing.more").unwrap_err();
    assert!(matches!(error, TextError::Conversation(_)), "{error}");
}

#[test]
fn integers_in_arguments_keep_their_digits() {
    let (large, larger) = ("-18446744073709551616", "7".repeat(400));
    let json = format!(r#"{{"a": {large}, "b": [{larger}, 1.50, {{}}, null, "\u00e9"], "c": {{"d": 7}}}}"#);
    let arguments = crate::parse_arguments(&json).unwrap();
    let call = json!({ "function": { "name": "f", "arguments": arguments }, "id": "1" });
    let other = json!({ "function": { "name": "g", "arguments": { "a": 1 } } });
    let message = ConversationMessage {
        tool_calls: vec![call, other],
        ..ConversationMessage::new("assistant", "a".into())
    };
    let render = |expression: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% for c in m.tool_calls %}}{{{{ {expression} }}}}{{% endfor %}}{{% endfor %}}"
        );
        let template = ChatTemplate::compile(&source, "", "").unwrap();
        template.render_calls(&[ConversationMessage::new("user", "Hi".into()), message.clone()], &Map::new())
    };
    for (expression, expected) in [
        (
            "c.function.arguments | tojson",
            format!(r#"{{"a": {large}, "b": [{larger}, 1.5, {{}}, null, "é"], "c": {{"d": 7}}}}{{"a": 1}}"#),
        ),
        (
            "c | tojson",
            format!(
                r#"{{"function": {{"name": "f", "arguments": {{"a": {large}, "b": [{larger}, 1.5, {{}}, null, "é"], "c": {{"d": 7}}}}}}, "id": "1"}}{{"function": {{"name": "g", "arguments": {{"a": 1}}}}}}"#
            ),
        ),
        ("c.function.arguments.a ~ m.role ~ m.content", format!("{large}assistanta1assistanta")),
        ("[c.function.arguments.a]", format!("[{large}][1]")),
        // The whole conversation is rendered with texts.
        (
            "': ' + c.function.arguments",
            format!(r#": {{"a":{large},"b":[{larger},1.50,{{}},null,"é"],"c":{{"d":7}}}}: {{"a":1}}"#),
        ),
    ] {
        assert_eq!(render(expression).unwrap(), expected, "{expression}");
    }
}

/// A rendering that takes too long blocks other prompts for seconds.
#[test]
fn no_other_form_is_tried_after_a_rendering_that_took_too_long() {
    let source = "{% set m = messages[1] %}\
        {% if m.content is none or m.tool_calls[0].function.arguments is mapping %}\
        {% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}{% endif %}get_weather";
    let template = ChatTemplate::compile(source, "", "").unwrap();
    let without_content = call();
    let mut with_content = call();
    with_content[1].content = Some("I look".to_owned());
    // The form that would be tried next.
    let mut with_text = with_content.clone();
    with_text[1].tool_calls[0]["function"]["arguments"] = json!("{}");
    assert_eq!(template.render_calls(&with_text, &Map::new()).unwrap(), "get_weather");
    for messages in [without_content, with_content] {
        let error = template.render_calls(&messages, &Map::new()).unwrap_err();
        assert!(matches!(error, TextError::TooLong(_)), "{error}");
    }
}

/// One name is part of another, and the first one that is left out is named.
#[test]
fn many_calls_without_content_are_searched_at_once() {
    let call = |name: String| json!({ "function": { "name": name, "arguments": {} } });
    let num_calls = 20_000;
    let names = (0..num_calls).rev().map(|number| format!("tool_{number}"));
    let mut message = ConversationMessage {
        role: "assistant".into(),
        tool_calls: names.map(call).collect(),
        ..Default::default()
    };
    let source = "{% for c in messages[0].tool_calls if c.function.name[:5] == 'tool_' %}{{ c.function.name }} {% endfor %}";
    let template = ChatTemplate::compile(source, "", "").unwrap();
    let prompt = template.render_calls(std::slice::from_ref(&message), &Map::new()).unwrap();
    assert_eq!(prompt.split_whitespace().count(), num_calls);
    message.tool_calls.extend(["left", "out"].map(|name| call(name.to_owned())));
    match template.render_calls(&[message], &Map::new()) {
        Err(TextError::Refused(reason)) => assert!(reason.contains("`left`"), "{reason}"),
        found => panic!("{found:?}"),
    }
}

/// Where the text has one name, it has all shorter ones: each byte of it ends as many matches.
#[test]
fn names_longer_than_any_tools_are_not_searched() {
    let call = |len: usize| json!({ "function": { "name": "a".repeat(len), "arguments": {} } });
    let message = |lens: std::ops::RangeInclusive<usize>| ConversationMessage {
        role: "assistant".into(),
        tool_calls: lens.map(call).collect(),
        ..Default::default()
    };
    let user = ConversationMessage::new("user", "a".repeat(128));
    let source = "{% for m in messages %}{{ m.content or '' }}{% endfor %}{# tool_calls #}";
    let template = ChatTemplate::compile(source, "", "").unwrap();
    let prompt = template.render_calls(&[user.clone(), message(1..=1_000)], &Map::new()).unwrap();
    assert_eq!(prompt, user.text());
    // The longest name that a tool may have.
    let short = ConversationMessage::new("user", "a".repeat(127));
    match template.render_calls(&[short, message(127..=128)], &Map::new()) {
        Err(TextError::Refused(reason)) => {
            assert!(reason.contains(&format!("`{}`", "a".repeat(128))), "{reason}");
        }
        found => panic!("{found:?}"),
    }
}
