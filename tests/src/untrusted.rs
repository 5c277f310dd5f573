//! One function for each place where untrusted bytes enter: it must return for any input, using little
//! memory. The fuzzer (`fuzz/`, nightly) and the gate (`tests/tests/suite/untrusted.rs`) call the same
//! functions.

use std::path::{Path, PathBuf};

use engine::{Engine, LoadOptions, WeightFormat};
use prost::Message as _;
use proto::convert::{reply_from_wire, step_from_wire};
use proto::v1;
use router::api::read_openai_body;
use router::config::RawRouter;
use router::request::{Auth, Operation};
use router::workers::worker_info;
use scheduling::profile::Profile;
use serde_json::{Map, json};
use service::config::load as load_config;
use speculation::Role;
use tempfile::TempDir;
use text::{ChatTemplate, ConversationMessage, Framing, ModelText, asset};

use crate::pair::{root, target_dir};

/// A place where untrusted bytes enter.
#[derive(Clone, Copy)]
pub struct InputParser {
    /// Name of the fuzzer's target, and of its seed folder.
    pub name: &'static str,
    /// Parses the bytes.
    pub read: fn(&[u8]),
    /// Valid inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All places.
pub const INPUT_PARSERS: [InputParser; 9] = [
    InputParser { name: "router_frame", read: router_frame, seeds: || vec![recorded("router_hello_1.bin")] },
    InputParser { name: "worker_frame", read: worker_frame, seeds: || vec![recorded("worker_hello_1.bin")] },
    InputParser { name: "http_body", read: http_body, seeds: http_bodies },
    InputParser { name: "keys_file", read: keys_file, seeds: || vec![KEYS.to_vec()] },
    InputParser {
        name: "toml",
        read: toml,
        seeds: || vec![file(&root().join("deploy/profiles/cpu-pair.toml"))],
    },
    InputParser {
        name: "tokenizer",
        read: tokenizer,
        seeds: || vec![file(&target_dir().join(asset::TOKENIZER))],
    },
    InputParser {
        name: "chat_template",
        read: chat_template,
        seeds: || TEMPLATES.map(|text| text.into()).to_vec(),
    },
    InputParser { name: "safetensors", read: safetensors, seeds: || vec![golden("model.safetensors")] },
    InputParser { name: "model_config", read: model_config, seeds: || vec![golden("config.json")] },
];

const KEYS: &[u8] = b"# keys\nsk-one alice models=demo,org/large priority=3\n\
    sha256:5ca24005b740717ba4f3f6bc48a230700e68c2a4b11ecedb96f169f4efaf1f21 bob tokens_per_minute=100\n";

const TEMPLATES: [&str; 2] = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}{{ range(9) | join(',') }}",
];

fn http_bodies() -> Vec<Vec<u8>> {
    let chat = r#"{"model":"demo","messages":[{"role":"user","content":"hi"}],"temperature":0.5,"stream":true,"n":2}"#;
    let text = r#"{"model":"demo","prompt":["a","b"],"max_tokens":5,"logit_bias":{"7":-1.5},"stop":["x"],"seed":-3}"#;
    vec![chat.into(), text.into()]
}

fn file(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

fn recorded(name: &str) -> Vec<u8> {
    file(&root().join("proto/testdata").join(name))
}

fn golden_dir() -> PathBuf {
    root().join("engine/tests/golden/llama_tied")
}

fn golden(name: &str) -> Vec<u8> {
    file(&golden_dir().join(name))
}

/// A router's frame, as parsed by a worker.
pub fn router_frame(bytes: &[u8]) {
    let Ok(frame) = v1::RouterFrame::decode(bytes) else { return };
    for step in frame.steps {
        for role in [Role::Draft, Role::Target] {
            drop(step_from_wire(step.clone(), role));
        }
    }
}

/// A worker's frame, as parsed by a router.
pub fn worker_frame(bytes: &[u8]) {
    let Ok(frame) = v1::WorkerFrame::decode(bytes) else { return };
    if let Some(hello) = &frame.hello {
        drop(worker_info(
            Role::Target,
            "http://10.0.0.1:1",
            hello,
            frame.credits.map(|credits| credits.blocks),
        ));
    }
    frame.replies.into_iter().for_each(|reply| drop(reply_from_wire(reply)));
}

/// The body of a client's request.
pub fn http_body(bytes: &[u8]) {
    for operation in [Operation::Chat, Operation::Completion] {
        if let Err(error) = read_openai_body(operation, bytes) {
            // Error messages for clients must be one line.
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}

/// The file of API keys.
pub fn keys_file(bytes: &[u8]) {
    in_file("keys", bytes, |path| drop(Auth::from_file(path)));
}

/// A TOML file of the operator.
pub fn toml(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        drop(Profile::parse(text));
    }
    in_file("router.toml", bytes, |path| {
        drop(load_config::<RawRouter>(&json!({}), Some(path), "UNTRUSTED_"))
    });
}

/// A model's tokenizer.json; if it loads, it also encodes and decodes.
pub fn tokenizer(bytes: &[u8]) {
    let Ok(model) = ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(bytes)) else {
        return;
    };
    let ids = model.encode("a few words, \u{e9}\u{20ac}", Framing::Add).unwrap_or_default();
    drop(router::detokenize::decode(&model, &ids));
    drop(router::detokenize::decode(&model, &[0, 1, u32::MAX]));
}

/// A model's chat template; if it compiles, it is also rendered.
pub fn chat_template(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(template) = ChatTemplate::compile(text, "<s>", "</s>") else { return };
    let message = ConversationMessage {
        role: "user".into(),
        content: Some("hi".into()),
        ..ConversationMessage::default()
    };
    drop(template.render(&[message], &Map::new()));
}

/// A checkpoint's weights.
pub fn safetensors(bytes: &[u8]) {
    load("model.safetensors", bytes);
}

/// A checkpoint's config.json.
pub fn model_config(bytes: &[u8]) {
    load("config.json", bytes);
}

/// Loads a checkpoint with one of its files replaced.
fn load(replaced: &str, bytes: &[u8]) {
    let Ok(dir) = TempDir::new() else { return };
    for name in ["config.json", "model.safetensors"] {
        let content = if name == replaced { bytes.to_vec() } else { golden(name) };
        if std::fs::write(dir.path().join(name), content).is_err() {
            return;
        }
    }
    drop(Engine::load(&LoadOptions {
        model_dir: dir.path().to_owned(),
        weights: WeightFormat::AsStored,
        threads: 1,
        tensor_parallel: 1,
        kv_memory_bytes: 4 << 20,
        max_model_len: None,
    }));
}

fn in_file(name: &str, bytes: &[u8], read: impl FnOnce(&Path)) {
    let Ok(dir) = TempDir::new() else { return };
    let path = dir.path().join(name);
    if std::fs::write(&path, bytes).is_ok() {
        read(&path);
    }
}
