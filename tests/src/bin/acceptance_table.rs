//! `acceptance-table`: runs the bundled pair as real processes and prints a Markdown table of what drafting
//! is worth on this machine.

#![forbid(unsafe_code)]

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::Parser;
use engine::ParameterCount;
use outrider_cli::cluster::{DraftKind, TargetKind};
use tests::acceptance::{Measurement, Row};
use tests::case::Case;
use tests::foreign_draft::ForeignDraft;
use tests::pair::{PairText, TASK_TYPES, prompts_dir, read_prompts, target_dir};
use tests::processes;
use tests::tree_shapes::{self, Shape, ShapeRow};

/// Values of `--draft`.
const DRAFTS: [&str; 4] = ["model", "ngram", "renumbered", "foreign"];

/// Prints acceptance and time per token by task type, drafting against k = 0 in the same run
#[derive(Debug, Parser)]
#[command(name = "acceptance-table")]
struct Args {
    /// Another target with the bundled pair's tokenizer [default: the bundled one]
    #[arg(long, value_name = "DIR")]
    target: Option<PathBuf>,
    /// Ballast of the target in memory, in parameters, such as 250M: the same tokens at the speed of a bigger
    /// model
    #[arg(long, value_name = "PARAMS", default_value_t)]
    ballast: ParameterCount,
    /// Weight format of the target [default: as stored in the checkpoint]
    #[arg(long, value_name = "FORMAT")]
    target_weights: Option<String>,
    /// Directory of prompts: TASK_TYPE.jsonl with lines of {"prompt": ..} [default: the bundled ones]
    #[arg(long, value_name = "DIR")]
    prompts: Option<PathBuf>,
    /// Prompts per task type
    #[arg(long, value_name = "N", default_value = "10")]
    num_prompts: NonZeroUsize,
    /// Maximum output tokens per request
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Sampling temperature
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Tokens drafted per round
    #[arg(long, value_name = "K", default_value_t = 4)]
    draft_tokens: u32,
    /// Draft: the bundled one, n-grams, the bundled one with renumbered ids, or with another tokenizer
    #[arg(long, value_name = "DRAFT", default_value = "model", value_parser = DRAFTS)]
    draft: String,
    /// For a draft with another tokenizer: it lacks one in N of the tokens that no merge continues from
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    left_out: u64,
    /// Measure instead tokens per verify step for drafts of these shapes, POSITIONS:TOKENS; equal numbers are
    /// a chain
    #[arg(long, value_name = "K:N,..", value_delimiter = ',', value_parser = shape)]
    shapes: Vec<Shape>,
    /// Compute threads per worker
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroUsize,
}

fn shape(text: &str) -> Result<Shape, String> {
    let parsed = text.split_once(':').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    parsed.filter(|(k, n)| k <= n).ok_or_else(|| format!("`{text}` is not POSITIONS:TOKENS, such as 4:16"))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let measurement = Measurement { cases: cases(&args)? };
    let foreign = match args.draft.as_str() {
        "renumbered" => Some(ForeignDraft::renumbered()?),
        "foreign" => Some(ForeignDraft::leaving_out(args.left_out)?),
        _ => None,
    };
    let cluster = processes::start(|spec| {
        spec.threads = Some(args.threads);
        if let Some(target) = &args.target {
            spec.target = TargetKind::Model(target.clone());
        }
        if let Some(format) = &args.target_weights {
            spec.target_args.extend(["--weights".to_owned(), format.clone()]);
        }
        spec.ballast = args.ballast.0;
        // Chains of up to 32 tokens, to compare with the widest trees.
        if !args.shapes.is_empty() {
            spec.router_args.extend(["--max-draft-tokens".to_owned(), "32".to_owned()]);
        }
        if args.draft == "ngram" {
            spec.draft = DraftKind::Ngram;
        }
        if let Some(draft) = &foreign {
            spec.draft = DraftKind::Model(draft.directory().to_owned());
            spec.target_tokenizer = Some(target_dir());
        }
    })
    .await?;
    let client = processes::client(&cluster).await?;
    if !args.shapes.is_empty() {
        let cases: Vec<Case> = measurement.cases.into_iter().flat_map(|(_, cases)| cases).collect();
        print(ShapeRow::HEAD);
        let rows = tree_shapes::run(&client, &cases, &args.shapes, |row| print(&row.to_markdown())).await?;
        print(&format!("\n{}", facts(&args)?));
        cluster.stop().await;
        ensure!(rows.iter().all(|row| row.drafted_per_step > 0.0), "a shape drafted nothing");
        ensure!(
            rows.iter().all(|row| row.exact == row.texts),
            "drafting changed a text: see the last column"
        );
        return Ok(());
    }
    print(Row::HEAD);
    let rows = measurement.run(&client, |row| print(&row.to_markdown())).await?;
    print(&format!("\n{}", facts(&args)?));
    cluster.stop().await;
    ensure!(rows.iter().all(|row| row.acceptance_rate.is_finite()), "a task type drafted nothing");
    ensure!(rows.iter().all(|row| row.exact == row.prompts), "drafting changed a text: see the last column");
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the table is this program's output")]
fn print(line: &str) {
    println!("{line}");
}

fn cases(args: &Args) -> anyhow::Result<Vec<(String, Vec<Case>)>> {
    let text = PairText::load()?;
    let dir = args.prompts.clone().unwrap_or_else(prompts_dir);
    let mut all = Vec::new();
    for task_type in TASK_TYPES {
        let path = dir.join(task_type).with_extension("jsonl");
        if !path.exists() {
            continue;
        }
        let mut cases = Vec::new();
        for (i, prompt) in read_prompts(&path, args.num_prompts.get())?.iter().enumerate() {
            let mut case = Case::new(format!("{task_type}[{i}]"), text.chat_ids(prompt)?, args.temperature);
            case.task_type = task_type.to_owned();
            case.seed = i as u64;
            case.max_tokens = args.max_tokens;
            case.num_draft_tokens = args.draft_tokens;
            cases.push(case);
        }
        ensure!(!cases.is_empty(), "{} holds no prompt", path.display());
        all.push((task_type.to_owned(), cases));
    }
    ensure!(!all.is_empty(), "{} has no TASK_TYPE.jsonl", dir.display());
    Ok(all)
}

/// Conditions of the run: what, where and when.
fn facts(args: &Args) -> anyhow::Result<String> {
    let cpu = engine::cpu_name();
    let cores = std::thread::available_parallelism().context("the number of cores is unknown")?;
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let Args { temperature, draft_tokens, num_prompts, max_tokens, threads, draft, .. } = args;
    let target = args.target.as_ref().map_or("bundled".to_owned(), |dir| dir.display().to_string());
    let weights = args.target_weights.as_deref().unwrap_or("as stored");
    let today = jiff::Zoned::now().date();
    Ok(format!(
        "Target {target} ({weights}), T = {temperature}, k = {draft_tokens}, draft {draft}, {num_prompts} prompts a task type, up to {max_tokens} tokens; \
         {cpu}, {cores} cores, {threads} thread(s) a worker, {profile} profile, {today}."
    ))
}
