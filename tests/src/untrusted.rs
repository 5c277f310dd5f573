//! One function for each place where untrusted bytes enter: it must return for any input, using little
//! memory. The fuzzer (`fuzz/`, nightly) and the gate (`tests/tests/suite/untrusted.rs`) call the same
//! functions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::{Engine, LoadOptions, WeightFormat};
use prost::Message as _;
use proto::convert::{
    proposal_ahead_from_wire, proposal_ahead_to_wire, reply_from_wire, reply_to_wire, step_from_wire,
    step_to_wire,
};
use proto::v1;
use router::api::read_openai_body;
use router::config::RawRouter;
use router::request::{Auth, Operation};
use router::workers::worker_info;
use scheduling::profile::Profile;
use serde_json::{Map, json};
use service::config::load as load_config;
use speculation::{
    Draft, Proposal, ProposalAhead, Reply, ReplyBody, Role, SequenceId, SequenceSpec, Step, TokenLogprobs,
    TokenSpan, Work,
};
use tempfile::TempDir;
use text::{ChatTemplate, ConversationMessage, Framing, ModelText, asset};

use crate::pair::{root, target_dir};

/// A place where untrusted bytes enter.
#[derive(Clone, Copy)]
pub struct InputParser {
    /// Name of the fuzzer's target, and of its seed folder.
    pub name: &'static str,
    /// Parses the bytes; returns whether they are valid.
    pub read: fn(&[u8]) -> bool,
    /// Valid inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All places.
pub const INPUT_PARSERS: [InputParser; 9] = [
    InputParser { name: "router_frame", read: router_frame, seeds: router_frames },
    InputParser { name: "worker_frame", read: worker_frame, seeds: worker_frames },
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

/// The first frame of a router, and one with a step of each kind.
fn router_frames() -> Vec<Vec<u8>> {
    let weighed = Draft { q: vec![vec![(8, 1.0), (9, 0.5)]], ..Draft::chain(vec![8]) };
    let works = [
        Work::Feed,
        Work::Propose { num_draft_tokens: 4, num_tree_tokens: 9 },
        Work::Verify { draft: tree() },
        Work::Verify { draft: weighed },
    ];
    let steps = works.map(|work| step_to_wire(step(work))).into();
    let frame = v1::RouterFrame { steps, ..v1::RouterFrame::default() };
    vec![recorded("router_hello_1.bin"), frame.encode_to_vec()]
}

/// The first frame of a worker, and one with a reply of each kind.
fn worker_frames() -> Vec<Vec<u8>> {
    let score = TokenLogprobs { logprob: -0.5, top: vec![(8, -0.5)] };
    let span = TokenSpan {
        start: 2,
        num_accepted: 1,
        token_ids: vec![8, 9],
        logprobs: vec![score; 2],
        ..TokenSpan::default()
    };
    let bodies = [
        ReplyBody::Span(span),
        ReplyBody::Proposal(Proposal { start: 2, draft: tree() }),
        ReplyBody::NeedContext { cached_len: 1, has_spec: true },
        ReplyBody::Fed { cached_len: 2, prompt_logprobs: None },
    ];
    let replies = bodies.map(|body| reply_to_wire(&Reply::to(&step(Work::Feed), body))).into();
    let Step { sequence_id, epoch, step_seq, .. } = step(Work::Feed);
    let ahead = ProposalAhead { sequence_id, epoch, step_seq, committed_ids: vec![8], draft: tree() };
    let ahead = vec![proposal_ahead_to_wire(ahead)];
    let frame = v1::WorkerFrame { replies, ahead, ..v1::WorkerFrame::default() };
    vec![recorded("worker_hello_1.bin"), frame.encode_to_vec()]
}

fn step(work: Work) -> Step {
    let stop_token_ids = vec![3];
    let spec = SequenceSpec { prompt_len: 2, stop_token_ids, max_len: 9, ..SequenceSpec::default() };
    Step {
        sequence_id: SequenceId(7),
        epoch: 1,
        step_seq: 5,
        spec: Some(Arc::new(spec)),
        base_len: 0,
        prefix_hash: 0,
        append_ids: vec![5, 6],
        work,
    }
}

fn tree() -> Draft {
    Draft { token_ids: vec![8, 9], parents: vec![0, 0], ..Draft::default() }
}

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
pub fn router_frame(bytes: &[u8]) -> bool {
    let Ok(frame) = v1::RouterFrame::decode(bytes) else { return false };
    let mut are_valid = true;
    for step in frame.steps {
        for role in [Role::Draft, Role::Target] {
            are_valid &= step_from_wire(step.clone(), role).is_ok();
        }
    }
    are_valid
}

/// A worker's frame, as parsed by a router.
pub fn worker_frame(bytes: &[u8]) -> bool {
    let Ok(frame) = v1::WorkerFrame::decode(bytes) else { return false };
    if let Some(hello) = &frame.hello {
        drop(worker_info(
            Role::Target,
            "http://10.0.0.1:1",
            hello,
            frame.credits.map(|credits| credits.blocks),
        ));
    }
    let mut are_valid = true;
    for reply in frame.replies {
        are_valid &= reply_from_wire(reply).is_ok();
    }
    frame.ahead.into_iter().map(proposal_ahead_from_wire).for_each(drop);
    are_valid
}

/// The body of a client's request.
pub fn http_body(bytes: &[u8]) -> bool {
    let mut is_valid = false;
    for operation in [Operation::Chat, Operation::Completion] {
        match read_openai_body(operation, bytes) {
            Ok(_) => is_valid = true,
            // Error messages for clients must be one line.
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
    is_valid
}

/// The file of API keys.
pub fn keys_file(bytes: &[u8]) -> bool {
    in_file("keys", bytes, |path| Auth::from_file(path).is_ok())
}

/// A TOML file of the operator.
pub fn toml(bytes: &[u8]) -> bool {
    let is_profile = std::str::from_utf8(bytes).is_ok_and(|text| Profile::parse(text).is_ok());
    let is_configuration = in_file("router.toml", bytes, |path| {
        load_config::<RawRouter>(&json!({}), Some(path), "UNTRUSTED_").is_ok()
    });
    is_profile || is_configuration
}

/// A model's tokenizer.json; if it loads, it also encodes and decodes.
pub fn tokenizer(bytes: &[u8]) -> bool {
    let Ok(model) = ModelText::from_assets(|name| (name == asset::TOKENIZER).then_some(bytes)) else {
        return false;
    };
    let ids = model.encode("a few words, \u{e9}\u{20ac}", Framing::Add).unwrap_or_default();
    drop(router::detokenize::decode(&model, &ids));
    drop(router::detokenize::decode(&model, &[0, 1, u32::MAX]));
    true
}

/// A model's chat template; if it compiles, it is also rendered.
pub fn chat_template(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let Ok(template) = ChatTemplate::compile(text, "<s>", "</s>") else { return false };
    let message = ConversationMessage {
        role: "user".into(),
        content: Some("hi".into()),
        ..ConversationMessage::default()
    };
    template.render(&[message], &Map::new()).is_ok()
}

/// A checkpoint's weights.
pub fn safetensors(bytes: &[u8]) -> bool {
    load("model.safetensors", bytes)
}

/// A checkpoint's config.json.
pub fn model_config(bytes: &[u8]) -> bool {
    load("config.json", bytes)
}

/// Loads a checkpoint with one of its files replaced.
fn load(replaced: &str, bytes: &[u8]) -> bool {
    let dir = temporary_directory();
    for name in ["config.json", "model.safetensors"] {
        let content = if name == replaced { bytes.to_vec() } else { golden(name) };
        write(&dir.path().join(name), &content);
    }
    let loaded = Engine::load(&LoadOptions::new(dir.path(), WeightFormat::AsStored, 4 << 20));
    loaded.is_ok()
}

fn in_file(name: &str, bytes: &[u8], read: impl FnOnce(&Path) -> bool) -> bool {
    let dir = temporary_directory();
    let path = dir.path().join(name);
    write(&path, bytes);
    read(&path)
}

fn temporary_directory() -> TempDir {
    TempDir::new().expect("a temporary directory can be created")
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("a temporary file can be written");
}
