//! Tests of tokenizer, token bytes and chat templates, with the bundled model and with small models defined
//! here.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;

/// The text of the bundled target.
fn demo() -> Arc<ModelText> {
    static DEMO: OnceLock<Arc<ModelText>> = OnceLock::new();
    let load = || {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target");
        let assets: Vec<(&str, Vec<u8>)> = [asset::TOKENIZER, asset::TOKENIZER_CONFIG, asset::CHAT_TEMPLATE]
            .into_iter()
            .map(|name| (name, std::fs::read(dir.join(name)).unwrap()))
            .collect();
        Arc::new(ModelText::from_assets(|name| find(&assets, name)).unwrap())
    };
    Arc::clone(DEMO.get_or_init(load))
}

fn find<'a>(assets: &'a [(&str, Vec<u8>)], name: &str) -> Option<&'a [u8]> {
    assets.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.as_slice())
}

/// A small sentencepiece-like model: words with a mark for spaces, byte tokens, and a BOS that the tokenizer
/// adds.
fn sentencepiece() -> Arc<ModelText> {
    let vocab = json!({
        "<s>": 0, "</s>": 1, "<unk>": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<0x0A>": 6,
        "\u{2581}": 7, "h": 8, "i": 9, "\u{2581}h": 10, "\u{2581}hi": 11, "!": 12
    });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [
            { "id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false },
            { "id": 1, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false }
        ],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "\u{2581}" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" }
        ]},
        "pre_tokenizer": null,
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } }
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
        ]},
        "model": { "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": ["\u{2581} h", "\u{2581}h i"] }
    });
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "chat_template": [
        { "name": "tool_use", "template": "no" }, { "name": "default", "template": template }
    ]});
    let assets = [
        (asset::TOKENIZER, tokenizer.to_string().into_bytes()),
        (asset::TOKENIZER_CONFIG, config.to_string().into_bytes()),
    ];
    Arc::new(ModelText::from_assets(|name| find(&assets, name)).unwrap())
}

fn user(content: &str) -> ConversationMessage {
    ConversationMessage {
        role: "user".into(),
        content: Some(content.into()),
        ..ConversationMessage::default()
    }
}

fn render(source: &str, messages: &[ConversationMessage]) -> Result<String, TextError> {
    ChatTemplate::compile(source, "<s>", "</s>").unwrap().render(messages, &Map::new())
}

#[test]
fn the_bundled_template_renders_what_the_pair_was_trained_on() {
    let template = demo();
    let text = template.chat_template().unwrap().render(&[user("hi")], &Map::new()).unwrap();
    assert_eq!(text, "<|user|>\nhi<|end|>\n<|assistant|>\n");
    let ids = demo().encode(&text, Framing::AsIs).unwrap();
    assert_eq!(ids.first(), Some(&1), "the role is one special token");
}

#[test]
fn token_bytes_agree_with_the_tokenizers_own_decoder_for_every_id() {
    let text = demo();
    for id in 0..text.vocabulary().len() as TokenId {
        let decoded = text.tokenizer.decode(&[id], false).unwrap();
        assert_eq!(String::from_utf8_lossy(text.vocabulary().bytes(id)), decoded, "id {id}");
    }
    assert_eq!(text.vocabulary().bytes(1 << 20), b"");
    assert_eq!(text.vocabulary().text_bytes(0), b"", "<|end|> is special");
}

proptest! {
    #[test]
    fn text_survives_encoding_and_decoding(text in "\\PC{0,40}") {
        let model = demo();
        let ids = model.encode(&text, Framing::Add).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| model.vocabulary().bytes(id).to_vec()).collect();
        prop_assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
}

#[test]
fn sentencepiece_tokens_keep_their_spaces_and_bytes() {
    let model = sentencepiece();
    let spelled: Vec<&[u8]> = [11, 10, 3, 4, 5, 6].iter().map(|&id| model.vocabulary().bytes(id)).collect();
    assert_eq!(spelled, [&b" hi"[..], b" h", b"\xe2", b"\x82", b"\xac", b"\n"]);
    assert_eq!(model.vocabulary().spell(3), "bytes:\\xe2");
}

#[test]
fn bos_is_added_to_plain_text_and_never_twice() {
    let model = sentencepiece();
    assert_eq!(model.encode("hi", Framing::Add).unwrap(), [0, 11]);
    let rendered = model.chat_template().unwrap().render(&[user("hi")], &Map::new()).unwrap();
    assert_eq!(rendered, "<s>[user]hi");
    let ids = model.encode(&rendered, Framing::AsIs).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1);
}

/// The spelling is split. Only the first part begins with the tokenizer's mark (7).
#[test]
fn a_split_spelling_of_a_special_token_gains_no_space() {
    let model = sentencepiece();
    let template = model.chat_template().unwrap();
    for (content, expected) in [
        // `[user]i<` and `s>i`, whose unknown characters (2) are one token.
        ("i<s>i", &[0, 7, 2, 9, 2, 2, 9][..]),
        ("i</s>!<s>", &[0, 7, 2, 9, 2, 2, 12, 2, 2]),
        ("i<s>i\n!", &[0, 7, 2, 9, 2, 2, 9, 6, 12]),
    ] {
        let rendered = model.render_chat(template, &[user(content)], &Map::new()).unwrap();
        assert_eq!(model.encode_chat(&rendered).unwrap(), expected, "{content}");
    }
}

#[test]
fn templates_may_use_what_checkpoints_use() {
    let messages = [
        user("a"),
        ConversationMessage {
            role: "assistant".into(),
            content: Some("<t>x</t>\n\ny".into()),
            ..ConversationMessage::default()
        },
    ];
    for (source, expected) in [
        (
            "{%- for m in messages %}\n    {%- if loop.first %}first {% endif %}\n    {{- m['role'] }}\n{%- endfor %}",
            "first userassistant",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{{ m.content[0] }}{% endfor %}{{ ns.n }}",
            "<a1",
        ),
        ("{{ messages[1].content.split('</t>')[-1].lstrip('\\n') }}", "y"),
        ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "a"}"#),
        ("{{ {'a': [1, '<']} | tojson(indent=2) }}", "{\n  \"a\": [\n    1,\n    \"<\"\n  ]\n}"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}", "yes"),
        ("{{ bos_token + eos_token }}", "<s></s>"),
        (
            "{% for m in messages %}\n{% if m.role == 'user' %}{% continue %}{% endif %}\n{{ m.role }}\n{% endfor %}",
            "assistant\n",
        ),
        ("{{ strftime_now('%Y-%m-%d') | length }}", "10"),
        ("{{ '%s' % 'x' if false else messages | length }}", "2"),
        ("  {% if true %}\nkept\n  {% endif %}\n", "kept\n"),
    ] {
        assert_eq!(render(source, &messages).unwrap(), expected, "{source}");
    }
}

#[test]
fn a_request_may_set_variables_but_not_the_standard_ones() {
    let template =
        ChatTemplate::compile("{{ style }}{{ messages | length }}{{ bos_token }}", "<s>", "").unwrap();
    let extra = json!({ "style": "terse", "messages": [], "bos_token": "forged" });
    let text = template.render(&[user("a")], extra.as_object().unwrap()).unwrap();
    assert_eq!(text, "terse1<s>");
}

/// As transformers' `continue_final_message` does.
#[test]
fn a_continued_message_ends_the_prompt() {
    let tokenizer = std::fs::read(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").join(asset::TOKENIZER),
    )
    .unwrap();
    let render = |body: &str, last: ConversationMessage| {
        let source = format!(
            "{{% for m in messages %}}<{{{{ m.role }}}}>{body}</m>{{% endfor %}}{{% if add_generation_prompt %}}!{{% endif %}}"
        );
        let assets =
            [(asset::TOKENIZER, tokenizer.clone()), (asset::CHAT_TEMPLATE, source.as_bytes().to_vec())];
        let model = ModelText::from_assets(|name| find(&assets, name)).unwrap();
        let extra = json!({ "continue_final_message": true, "add_generation_prompt": true });
        let template = model.chat_template().unwrap();
        let rendered = model.render_chat(template, &[user("hi"), last], extra.as_object().unwrap());
        rendered.map(|rendered| rendered.text)
    };
    let assistant = |content: &str| ConversationMessage::new("assistant", content.to_owned());
    for (body, content, expected) in [
        ("{{ m.content }}", "a b", "<user>hi</m><assistant>a b"),
        ("{{ m.content }}", "a b \n", "<user>hi</m><assistant>a b \n"),
        ("{{ m.content | trim }}", "a b \n", "<user>hi</m><assistant>a b"),
        ("{{ m.content }}", "", "<user>hi</m><assistant>"),
        ("{{ m.content }}", "a<|end|>b", "<user>hi</m><assistant>a<|end|>b"),
        ("{{ continue_final_message is defined }}{{ m.content }}", "a", "<user>Falsehi</m><assistant>Falsea"),
    ] {
        assert_eq!(render(body, assistant(content)).unwrap(), expected, "{body} {content:?}");
    }
    let call = json!({ "function": { "name": "f", "arguments": {} } });
    let with_call = ConversationMessage { tool_calls: vec![call], ..assistant("a") };
    for (body, last, expected) in [
        ("{{ m.content[:1] }}", assistant("abc"), "leaves out the end of the last message"),
        ("{{ m.content }}", with_call, "without tool calls can be continued"),
        ("{{ m.content }}", ConversationMessage { content: None, ..assistant("") }, "with content"),
    ] {
        let error = render(body, last).unwrap_err();
        assert!(matches!(error, TextError::Refused(_)) && error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_template_that_refuses_says_why_to_the_client() {
    for (source, expected) in [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        (
            "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
            "more than 20000000 steps",
        ),
        ("{{ messages.nothing.more }}", "failed on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed on these messages"),
        (
            "{% for i in range(4000) %}{{ messages[0].content * 4000 }}{% endfor %}",
            "failed on these messages",
        ),
    ] {
        let error = render(source, &[user("0123456789")]).unwrap_err();
        assert!(!matches!(error, TextError::Internal(_)), "{source}: {error}");
        let is_deliberate = source.contains("raise_exception");
        assert_eq!(matches!(error, TextError::Refused(_)), is_deliberate, "{source}: {error}");
        assert!(error.to_string().contains(expected), "{source}: {error}");
    }
}

#[test]
fn conversations_with_tools_may_have_their_own_template() {
    let tokenizer = std::fs::read(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").join(asset::TOKENIZER),
    )
    .unwrap();
    let listed =
        json!([{ "name": "tool_use", "template": "tools" }, { "name": "default", "template": "plain" }]);
    let named = json!({ "default": "plain", "tool_use": "tools" });
    let text = |text: &str| text.as_bytes().to_vec();
    let config = |field: &serde_json::Value| json!({ "chat_template": field }).to_string().into_bytes();
    for (assets, expected) in [
        (vec![(asset::TOKENIZER_CONFIG, config(&listed))], ["plain", "tools"]),
        (vec![(asset::TOKENIZER_CONFIG, config(&named))], ["plain", "tools"]),
        (vec![(asset::TOKENIZER_CONFIG, config(&json!("one")))], ["one", "one"]),
        (
            vec![(asset::CHAT_TEMPLATE, text("file")), (asset::TOOL_TEMPLATE, text("for tools"))],
            ["file", "for tools"],
        ),
        (
            vec![(asset::CHAT_TEMPLATE, text("file")), (asset::TOKENIZER_CONFIG, config(&listed))],
            ["file", "file"],
        ),
    ] {
        let assets = [assets, vec![(asset::TOKENIZER, tokenizer.clone())]].concat();
        let model = ModelText::from_assets(|name| find(&assets, name)).unwrap();
        let sources = [false, true].map(|has_tools| model.chat_template_for(has_tools).unwrap().source());
        assert_eq!(sources, expected);
    }
}

#[test]
fn every_special_token_is_a_variable() {
    let tokenizer = std::fs::read(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").join(asset::TOKENIZER),
    )
    .unwrap();
    let config = json!({
        "bos_token": "<s>", "unk_token": { "content": "<unk>" }, "pad_token": "<pad>", "add_bos_token": true,
        "additional_special_tokens": ["<x>", { "content": "<y>" }], "extra_special_tokens": { "image_token": "<i>" },
        "sep_token": null, "chat_template": "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ image_token }}\
            {{ additional_special_tokens | join }}{{ sep_token is defined }}{{ add_bos_token is defined }}"
    });
    let assets = [(asset::TOKENIZER, tokenizer), (asset::TOKENIZER_CONFIG, config.to_string().into_bytes())];
    let model = ModelText::from_assets(|name| find(&assets, name)).unwrap();
    let text = model.chat_template().unwrap().render(&[user("a")], &Map::new()).unwrap();
    assert_eq!(text, "<s><unk><pad><i><x><y>FalseFalse");
}

#[test]
fn faulty_assets_are_named() {
    let tokenizer = std::fs::read(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo/target").join(asset::TOKENIZER),
    )
    .unwrap();
    let (broken, template) = (b"{".to_vec(), b"{% if %}".to_vec());
    for (assets, expected) in [
        (vec![], "tokenizer.json is missing"),
        (vec![(asset::TOKENIZER, broken.clone())], "tokenizer.json: "),
        (
            vec![(asset::TOKENIZER, tokenizer.clone()), (asset::TOKENIZER_CONFIG, broken)],
            "tokenizer_config.json: ",
        ),
        (vec![(asset::TOKENIZER, tokenizer), (asset::CHAT_TEMPLATE, template)], "chat template: "),
    ] {
        let error = ModelText::from_assets(|name| find(&assets, name)).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}
