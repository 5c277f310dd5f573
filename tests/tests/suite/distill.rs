//! A draft is retrained on a router's log: it must agree with the target more often on unseen prompts, and
//! must change no token.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use outrider_cli::cluster::DraftKind;
use serde_json::{Value, json};
use tests::case::Case;
use tests::checkpoint_copy::CheckpointCopy;
use tests::client::check_all_same;
use tests::http_client::{CHAT, HttpClient};
use tests::pair::{self, MODEL, PairText, TASK_TYPES};
use tests::processes;

/// Concurrent requests.
const WIDTH: usize = 4;

/// Number of logged prompts per task type.
const PROMPTS: usize = 8;

/// Output tokens per prompt.
const MAX_TOKENS: usize = 24;

/// Matrices that get noise, to make the bundled draft a bad one.
const SPOILT: [&str; 4] = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
];

/// Files of a test.
struct Workplace {
    directory: tempfile::TempDir,
    /// A copy of the bundled draft that drafts badly.
    draft: CheckpointCopy,
}

impl Workplace {
    fn new() -> anyhow::Result<Self> {
        let draft = CheckpointCopy::of(&pair::draft_dir())?;
        let mut state = 1u32;
        for tensor in SPOILT {
            draft.change_numbers(tensor, |number| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                number + (state as f32 / u32::MAX as f32 - 0.5) * NOISE
            })?;
        }
        Ok(Self { directory: tempfile::tempdir()?, draft })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `outrider distill` on this log with additional arguments.
    fn distill(&self, log: &Path, args: &[&str]) -> anyhow::Result<Output> {
        let mut command = Command::new(processes::program("outrider")?);
        command.arg("distill").arg("--log").arg(log).arg("--target").arg(pair::target_dir());
        Ok(command.args(args).output()?)
    }
}

/// Width of the noise: about ten times the matrices' own values.
const NOISE: f32 = 0.25;

/// Logs the answers of a router; returns the number of answers that should be in the log.
async fn log_requests(draft: &Path, log: &Path) -> anyhow::Result<usize> {
    let log = log.display().to_string();
    let cluster = processes::start(|spec| {
        spec.draft = DraftKind::Model(draft.to_owned());
        spec.router_args.extend(["--request-log".to_owned(), log.clone()]);
    })
    .await?;
    let client = HttpClient::new(cluster.http_url())?;
    let mut requests = Vec::new();
    for task_type in TASK_TYPES {
        let file = pair::prompts_dir().join(task_type).with_extension("jsonl");
        for (seed, prompt) in pair::read_prompts(&file, PROMPTS)?.into_iter().enumerate() {
            requests.push(json!({
                "model": MODEL, "messages": [{"role": "user", "content": prompt}], "task_type": task_type,
                "max_tokens": MAX_TOKENS, "seed": seed, "temperature": 1.0,
            }));
        }
    }
    let responses = stream::iter(&requests).map(|body| client.ask(CHAT, body));
    let answers: Vec<Value> = responses.buffered(WIDTH).try_collect().await?;
    let mut private = requests[0].clone();
    private["store"] = false.into();
    client.ask(CHAT, &private).await?;
    cluster.stop().await;
    Ok(answers.len())
}

/// Acceptance rate over all task types, from a report of `check-pair`.
fn acceptance(report: &Value) -> anyhow::Result<f64> {
    let tasks = report["measured"]["tasks"].as_array().context("no task types are reported")?;
    let all = tasks.iter().find(|task| task["task"] == "all").context("no sum is reported")?;
    all["acceptance_rate"].as_f64().with_context(|| format!("no rate in {all}"))
}

/// Checks that some cases have the same text with and without this draft.
async fn check_same_text(draft: &Path) -> anyhow::Result<()> {
    let cluster = processes::start(|spec| spec.draft = DraftKind::Model(draft.to_owned())).await?;
    let client = processes::client(&cluster).await?;
    let text = PairText::load()?;
    let mut cases = Vec::new();
    for (temperature, task_type) in [(0.0, "sql"), (0.7, "chat"), (1.0, "code")] {
        let prompt = text.bundled(task_type)?.swap_remove(9);
        cases.push(Case::new(format!("{task_type} at {temperature}"), prompt, temperature));
    }
    let expected = client.ask_plain(&cases, WIDTH).await?;
    let got = client.ask_all(&cases, WIDTH).await?;
    check_all_same(&cases, (&expected, &got), "the new draft")?;
    let accepted: u64 = got.iter().map(|answer| answer.speculation().accepted_tokens).sum();
    ensure!(accepted > 0, "no token of the new draft was accepted");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn distilling_a_routers_log_improves_the_draft() -> anyhow::Result<()> {
    let workplace = Workplace::new()?;
    let (log, out) = (workplace.path("log.jsonl"), workplace.path("new"));
    let answered = log_requests(workplace.draft.directory(), &log).await?;
    let mut lines = std::fs::read_to_string(&log)?;
    ensure!(lines.lines().count() == answered, "{} lines for {answered} answers", lines.lines().count());
    let mode = std::fs::metadata(&log)?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "others can read the log: {mode:o}");

    lines.insert_str(0, "{\"task\": \"chat\"}\n");
    lines.push_str("half a li");
    std::fs::write(&log, lines)?;
    let directories = [workplace.draft.directory(), &out].map(|path| path.display().to_string());
    let output = workplace.distill(
        &log,
        &[
            "--draft",
            &directories[0],
            "--out",
            &directories[1],
            "--json",
            "--steps=30",
            "--batch=6",
            "--context=128",
            "--learning-rate=0.003",
            "--min-tokens=500",
            "--num-prompts=1",
            "--max-tokens=16",
        ],
    )?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    for expected in ["2 lines cannot be used", "log.jsonl:1: missing field", "step 30 of 30 (100%)"] {
        ensure!(said.contains(expected), "{expected:?} is not in {said}");
    }
    let found: Value = serde_json::from_slice(&output.stdout)?;
    let kl = |when: &str| found[when]["kl"].as_f64().with_context(|| format!("no loss {when} in {found}"));
    let rates = [acceptance(&found["reports"][0])?, acceptance(&found["reports"][1])?];
    println!(
        "KL {:.3} -> {:.3}, acceptance {:.3} -> {:.3}; rows {}",
        kl("before")?,
        kl("after")?,
        rates[0],
        rates[1],
        found["rows"]
    );
    ensure!(found["unusable_lines"] == 2, "{found}");
    ensure!(kl("after")? < 0.9 * kl("before")?, "held-out rows: {found}");
    ensure!(rates[1] > rates[0] + 0.02, "acceptance went from {} to {}", rates[0], rates[1]);
    check_same_text(&out).await
}

#[test]
fn errors_name_inputs_that_cannot_be_distilled() -> anyhow::Result<()> {
    let workplace = Workplace::new()?;
    let (log, out) = (workplace.path("log.jsonl"), workplace.path("new"));
    let line = json!({
        "task": "chat", "model": MODEL, "prompt_ids": [1, 6], "completion_ids": [7, 8, 9],
    });
    std::fs::write(&log, format!("{line}\n"))?;
    let out = out.display().to_string();
    let check = |draft: &Path, args: &[&str], code: i32, expected: &str| {
        let draft = draft.display().to_string();
        let output = workplace.distill(&log, &[&["--draft", &draft, "--out", &out], args].concat())?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code), "{:?}: {error}", output.status);
        ensure!(error.contains(expected), "{expected:?} is not in {error}");
        ensure!(!Path::new(&out).exists(), "something was written");
        Ok(())
    };
    let draft = workplace.draft.directory();
    check(
        draft,
        &[],
        1,
        "the log has 3 answer tokens in 1 rows to train on, fewer than the 20000 of --min-tokens",
    )?;
    check(draft, &["--min-tokens=1"], 1, "no row of the log is held out for evaluation")?;
    check(draft, &["--steps=0"], 64, "--steps is 0, expected 1 or more")?;
    let other = CheckpointCopy::of(&pair::draft_dir())?;
    other.respell_token(777, "another")?;
    check(other.directory(), &[], 1, "cannot draft for")?;
    check(other.directory(), &[], 1, "token 777 is")?;
    let rows: String = (0..40)
        .map(|first| {
            let ids =
                json!({ "task": "chat", "model": MODEL, "prompt_ids": [first, 6], "completion_ids": [7, 8] });
            format!("{ids}\n")
        })
        .collect();
    std::fs::write(&log, rows)?;
    // Faults that would come to light only after the training.
    check(
        draft,
        &["--min-tokens=1", "--steps=1", "--max-tokens=5000"],
        1,
        "no prompt fits the models' window",
    )?;
    let draft = draft.display().to_string();
    let below_a_file = log.join("new").display().to_string();
    let output = workplace.distill(&log, &["--draft", &draft, "--out", &below_a_file])?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(error.contains(&format!("cannot write {below_a_file}")), "{error}");
    std::fs::create_dir(&out)?;
    let output = workplace.distill(&log, &["--draft", &draft, "--out", &out])?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(64), "{error}");
    ensure!(error.contains("expected a directory that does not exist"), "{error}");
    Ok(())
}
