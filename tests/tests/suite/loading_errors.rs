//! Unusable checkpoints and settings: one line that names the problem, an exit code, and never an open port.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use outrider_cli::cluster::{DraftKind, ProcessCluster, free_address};
use serde_json::{Value, json};
use tests::checkpoint_copy::CheckpointCopy;
use tests::http_client::{COMPLETIONS, HttpClient};
use tests::pair::{self, MODEL};
use tests::processes;

const TARGET: &str = "outrider-target-worker";
const DRAFT: &str = "outrider-draft-worker";
const ROUTER: &str = "outrider-router";

/// Time within which a program must exit; only a failing test waits this long.
const SOON: Duration = Duration::from_secs(20);

/// Exit code and error output of a program that should not start.
#[derive(Debug)]
struct Refusal {
    code: Option<i32>,
    stderr: String,
}

/// Runs a program until it exits, and fails if it ever listens on one of `ports`.
fn run(program: &str, arguments: &[&str], ports: &[SocketAddr]) -> anyhow::Result<Refusal> {
    let mut child = Command::new(processes::program(program)?)
        .args(arguments)
        .args(["--log", "error"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let start = Instant::now();
    let mut opened = None;
    while child.try_wait()?.is_none() && opened.is_none() && start.elapsed() < SOON {
        opened =
            ports.iter().find(|port| TcpStream::connect_timeout(port, Duration::from_millis(50)).is_ok());
        std::thread::sleep(Duration::from_millis(1));
    }
    let ended = child.try_wait()?.is_some();
    child.kill().ok();
    let output = child.wait_with_output()?;
    let refusal = Refusal { code: output.status.code(), stderr: String::from_utf8(output.stderr)? };
    ensure!(opened.is_none(), "{program} {arguments:?} listens on {opened:?}: {refusal:?}");
    ensure!(ended, "{program} {arguments:?} still ran after {SOON:?}: {refusal:?}");
    Ok(refusal)
}

/// Starts a worker on a checkpoint that it must reject with one line that contains all of `words`.
fn refused(program: &str, model: &Path, words: &[&str]) -> anyhow::Result<()> {
    let (listen, admin) = (free_address()?, free_address()?);
    let model = model.to_str().context("a temporary path is text")?;
    let (listen_flag, admin_flag) = (listen.to_string(), admin.to_string());
    let arguments = ["--model", model, "--threads", "1", "--listen", &listen_flag, "--admin", &admin_flag];
    let refusal = run(program, &arguments, &[listen, admin])?;
    ensure!(refusal.code == Some(1), "{words:?}: {refusal:?}");
    one_line(&refusal, words)
}

fn one_line(refusal: &Refusal, words: &[&str]) -> anyhow::Result<()> {
    let stderr = &refusal.stderr;
    ensure!(
        stderr.starts_with("error: ") && stderr.lines().count() == 1,
        "one line `error: ..`, not:\n{stderr}"
    );
    let missing: Vec<_> = words.iter().filter(|word| !stderr.contains(**word)).collect();
    ensure!(missing.is_empty(), "{missing:?} not in: {stderr}");
    Ok(())
}

/// A way to damage a checkpoint, and the words that the message must contain.
type Row = (fn(&CheckpointCopy) -> anyhow::Result<()>, &'static [&'static str]);

fn set_config(copy: &CheckpointCopy, field: &str, value: Value) -> anyhow::Result<()> {
    copy.edit_json("config.json", |config| {
        config.insert(field.to_owned(), value);
    })
}

const ROWS: [Row; 16] = [
    (|copy| copy.remove("model.safetensors"), &["model.safetensors", "No such file"]),
    (
        |copy| copy.edit("model.safetensors", |bytes| bytes.truncate(bytes.len() / 2)),
        &["model.safetensors", "truncated"],
    ),
    (|copy| copy.edit("model.safetensors", |bytes| bytes.truncate(5)), &["model.safetensors", "truncated"]),
    (
        |copy| copy.edit("model.safetensors", |bytes| bytes[8..200].fill(b'#')),
        &["model.safetensors", "not a safetensors file"],
    ),
    (|copy| copy.edit("model.safetensors", |bytes| bytes[..8].fill(0xff)), &["model.safetensors"]),
    (
        |copy| set_config(copy, "hidden_size", json!(512)),
        &["tensor `model.embed_tokens.weight`", "[4096, 256]", "[4096, 512]"],
    ),
    (
        |copy| set_config(copy, "num_hidden_layers", json!(7)),
        &["tensor `model.layers.6.", "is missing in", "model.safetensors"],
    ),
    (
        |copy| set_config(copy, "architectures", json!(["GemmaForCausalLM"])),
        &["config.json", "GemmaForCausalLM", "LlamaForCausalLM"],
    ),
    (
        |copy| set_config(copy, "rms_norm_eps", Value::Null),
        &["config.json", "field `rms_norm_eps`", "missing"],
    ),
    (|copy| copy.edit("config.json", |bytes| bytes.truncate(40)), &["config.json", "not valid json"]),
    (|copy| copy.remove("config.json"), &["config.json", "No such file"]),
    (|copy| copy.remove("tokenizer.json"), &["tokenizer.json", "missing"]),
    (|copy| copy.edit("tokenizer.json", |bytes| bytes.truncate(1_000)), &["tokenizer.json"]),
    (|copy| add_token(copy, 4_096), &["tokenizer.json", "needs 4097 embeddings", "has 4096"]),
    (|copy| add_token(copy, 9_999), &["tokenizer.json", "needs 10000 embeddings", "has 4096"]),
    (store_as_integers, &["tensor `", "model.safetensors", "I16", "BF16"]),
];

/// Adds one token to the tokenizer.
fn add_token(copy: &CheckpointCopy, id: u32) -> anyhow::Result<()> {
    copy.edit_json("tokenizer.json", |tokenizer| {
        tokenizer["model"]["vocab"]["one more"] = json!(id);
    })
}

/// Marks every tensor as integers; the header keeps its length.
fn store_as_integers(copy: &CheckpointCopy) -> anyhow::Result<()> {
    copy.edit("model.safetensors", |bytes| {
        let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = String::from_utf8_lossy(&bytes[8..8 + header_len]).replace("\"BF16\"", "\"I16\" ");
        bytes[8..8 + header_len].copy_from_slice(header.as_bytes());
    })
}

#[test]
fn a_target_worker_with_an_invalid_checkpoint_exits_before_it_listens() -> anyhow::Result<()> {
    for (damage, words) in ROWS {
        let copy = CheckpointCopy::of(&pair::target_dir())?;
        damage(&copy)?;
        refused(TARGET, copy.directory(), words)?;
    }
    Ok(())
}

#[test]
fn a_path_that_does_not_exist_is_a_bad_configuration() -> anyhow::Result<()> {
    let (missing, draft) = ("/nowhere/at-all", pair::draft_dir());
    let draft = draft.to_str().context("the repository's path is text")?;
    for (program, arguments, field) in [
        (TARGET, &["--model", missing][..], "model"),
        (DRAFT, &["--model", missing], "model"),
        (DRAFT, &["--model", draft, "--target-tokenizer", missing], "target_tokenizer"),
        (TARGET, &["--engine", "synthetic:/nowhere/at-all"], "engine"),
    ] {
        let refusal = run(program, arguments, &[])?;
        ensure!(refusal.code == Some(64), "{program} {arguments:?}: {refusal:?}");
        one_line(&refusal, &["bad configuration", field, missing])?;
    }
    Ok(())
}

#[test]
fn a_draft_worker_with_an_invalid_checkpoint_exits_before_it_listens() -> anyhow::Result<()> {
    let copy = CheckpointCopy::of(&pair::draft_dir())?;
    set_config(&copy, "hidden_size", json!(256))?;
    refused(DRAFT, copy.directory(), &["tensor `model.embed_tokens.weight`", "[4096, 128]", "[4096, 256]"])?;
    copy.remove("tokenizer.json")?;
    refused(DRAFT, copy.directory(), &["tokenizer.json", "missing"])
}

#[test]
fn the_error_names_a_port_that_is_in_use() -> anyhow::Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let (free, model) = (free_address()?, pair::target_dir());
    let (free_flag, model) = (free.to_string(), model.to_str().context("the repository's path is text")?);
    for (program, arguments) in [
        (TARGET, ["--model", model, "--listen", &address, "--admin", &free_flag]),
        (TARGET, ["--model", model, "--listen", &free_flag, "--admin", &address]),
        (DRAFT, ["--method", "ngram", "--listen", &address, "--admin", &free_flag]),
        (ROUTER, ["--discovery", "memory", "--http", &address, "--grpc", &free_flag]),
        (ROUTER, ["--discovery", "memory", "--http", &free_flag, "--grpc", &address]),
    ] {
        let refusal = run(program, &arguments, &[])?;
        ensure!(refusal.code == Some(1), "{program} {arguments:?}: {refusal:?}");
        one_line(&refusal, &["cannot listen on", &address, "in use"])?;
    }
    Ok(())
}

#[test]
fn all_bad_settings_are_listed_at_once() -> anyhow::Result<()> {
    let worker = [
        "--threads",
        "0",
        "--weights",
        "int3",
        "--device",
        "tpu",
        "--kv-memory",
        "lots",
        "--grace-seconds",
        "9999",
    ];
    let of_worker = ["threads", "weights", "device", "kv_memory", "grace_seconds", "model"];
    let router =
        ["--draft-tokens", "99", "--max-sequences", "0", "--tokenize-threads", "0", "--http", "0.0.0.0:80"];
    let of_router = ["draft_tokens", "max_sequences", "tokenize_threads", "http"];
    for (program, arguments, fields) in [
        (TARGET, &worker[..], &of_worker[..]),
        (DRAFT, &worker[..], &of_worker[..]),
        (ROUTER, &router[..], &of_router[..]),
    ] {
        let Refusal { code, stderr } = run(program, arguments, &[])?;
        ensure!(code == Some(64), "{program} ended with {code:?}: {stderr}");
        ensure!(
            stderr.starts_with(&format!("error: bad configuration, {} faults", fields.len())),
            "{stderr}"
        );
        for field in fields {
            let starts = |line: &str| {
                line.trim_start().starts_with(&format!("{field} ("))
                    || line.trim_start().starts_with(&format!("{field}:"))
            };
            ensure!(
                stderr.lines().filter(|line| starts(line)).count() == 1,
                "{field} is not a line of:\n{stderr}"
            );
        }
    }
    for program in [TARGET, DRAFT, ROUTER] {
        let Refusal { code, stderr } = run(program, &["--lisen", "127.0.0.1:1"], &[])?;
        ensure!(code == Some(64) && stderr.contains("--lisen"), "{program} ended with {code:?}: {stderr}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_worker_with_another_tokenizer_is_not_used_and_the_token_is_named() -> anyhow::Result<()> {
    let draft = CheckpointCopy::of(&pair::draft_dir())?;
    let old = draft.respell_token(2_000, "Unheard-of")?;
    let (cluster, logs) =
        processes::start_logged(|spec| spec.draft = DraftKind::Model(draft.directory().to_owned())).await?;
    let url = cluster.worker_url("draft-0")?;
    let line = logs.line_with("router", &["these workers cannot be paired", "tokenizers differ"]).await?;
    for words in [url.as_str(), "2000", &format!("{old:?}"), "\"Unheard-of\""] {
        ensure!(line.contains(words), "`{words}` is not in: {line}");
    }
    ask_without_draft(&cluster).await?;
    cluster.stop().await;
    Ok(())
}

async fn ask_without_draft(cluster: &ProcessCluster) -> anyhow::Result<()> {
    let http = HttpClient::new(cluster.http_url())?;
    let answer =
        http.ask(COMPLETIONS, &json!({ "model": MODEL, "prompt": "def reverse(", "max_tokens": 16 })).await?;
    let speculation = &answer["usage"]["speculation"];
    ensure!(
        speculation["disabled_reason"] == "no_draft_worker" && speculation["draft_tokens"] == 0,
        "{answer}"
    );
    let steps = processes::metrics(cluster, "draft-0").await?.sum("outrider_worker_steps_total");
    ensure!(steps == 0, "the draft worker got {steps} steps");
    Ok(())
}
