//! Commands in documents must work: commands on the pages for operators are run against a cluster, and flags
//! named there must exist. The reference of metrics must contain what a cluster exposes.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::{Args as _, CommandFactory as _};
use outrider_cli::{bench, check_pair, completions, distill, engine_bench, plan, up};
use serde_json::json;
use tests::http_client::{COMPLETIONS, HttpClient};
use tests::metrics_reference::{router_metrics, undocumented, worker_metrics};
use tests::pair::{MODEL, root};
use tests::processes;

/// Pages whose `bash` blocks are run, line by line.
const RUN: [&str; 3] = ["docs/operating.md", "docs/runbook.md", "docs/migrating.md"];

/// Flags of the tool `outrider`, which are not in docs/configuration.md, a page about the servers.
const OF_THE_TOOL: [&str; 5] = ["--target", "--draft", "--url", "--concurrency", "--threads"];

/// Maximum length of a line of help that is printed as it is written.
const HELP_WIDTH: usize = 100;

fn read(page: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(root().join(page)).with_context(|| page.to_owned())
}

/// The lines of a page's `bash` blocks.
fn commands(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut is_bash = false;
    for line in text.lines() {
        if line.starts_with("```") {
            is_bash = line == "```bash";
        } else if is_bash && !line.trim().is_empty() {
            lines.push(line);
        }
    }
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_in_documents_for_operators_run() -> anyhow::Result<()> {
    let cluster = processes::start(|_| ()).await?;
    let admin = cluster.admin_url("router")?;
    let mut num_run = 0;
    for page in RUN {
        for line in commands(&read(page)?) {
            let command = line
                .replace("http://127.0.0.1:8000", &cluster.http_url())
                .replace("http://127.0.0.1:8002", &admin)
                .replace("http://ROUTER", &admin)
                .replace("\"model\": \"target\"", &format!("\"model\": \"{MODEL}\""));
            let shell = ["-euo", "pipefail", "-c", &command];
            let output =
                Command::new("bash").args(shell).env("NO_PROXY", "*").current_dir(root()).output()?;
            let printed = String::from_utf8_lossy(&output.stdout);
            let complaint = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{page}: `{command}`: {}: {complaint}{printed}", output.status);
            ensure!(!printed.trim().is_empty(), "{page}: `{command}` prints nothing");
            ensure!(!printed.contains("\"error\":{"), "{page}: `{command}`: {printed}");
            num_run += 1;
        }
    }
    ensure!(num_run >= 7, "only {num_run} commands were found");
    cluster.stop().await;
    Ok(())
}

/// docs/metrics.md is generated from the same descriptions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reference_of_metrics_contains_what_a_cluster_exposes() -> anyhow::Result<()> {
    let cluster = processes::start(|_| ()).await?;
    let request = json!({ "model": MODEL, "prompt": "def reverse(", "max_tokens": 16 });
    HttpClient::new(cluster.http_url())?.ask(COMPLETIONS, &request).await?;
    let (router, worker) = (router_metrics(), worker_metrics());
    for (name, metrics) in [("router", &router), ("draft-0", &worker), ("target-0", &worker)] {
        let scraped = processes::metrics(&cluster, name).await?;
        let num_samples = scraped.samples().count();
        ensure!(num_samples > 20, "{name} exposes only {num_samples} samples");
        let unknown = undocumented(metrics, &scraped);
        ensure!(unknown.is_empty(), "{name} exposes what is not in the reference:\n{}", unknown.join("\n"));
    }
    cluster.stop().await;
    Ok(())
}

#[test]
fn flags_in_the_migration_guide_exist() -> anyhow::Result<()> {
    let settings = read("docs/configuration.md")?;
    let known: BTreeSet<&str> = flags(&settings).chain(OF_THE_TOOL).collect();
    let page = read("docs/migrating.md")?;
    let column = page.lines().filter_map(|line| line.strip_prefix('|')?.split(" | ").nth(1));
    let named: BTreeSet<&str> = column.flat_map(flags).collect();
    ensure!(named.len() > 20, "only {named:?} were found");
    let unknown: Vec<_> = named.difference(&known).collect();
    ensure!(unknown.is_empty(), "docs/migrating.md names flags that do not exist: {unknown:?}");
    Ok(())
}

/// Help is wrapped at 100 columns: a longer line of an example could not be pasted.
#[test]
fn no_line_of_a_help_page_is_broken_by_wrapping() -> anyhow::Result<()> {
    let tool = |name: &'static str| clap::Command::new(name);
    let commands = [
        router::config::Flags::command(),
        target_worker::config::Flags::command(),
        draft_worker::config::Flags::command(),
        up::UpArgs::augment_args(tool("up")),
        bench::BenchArgs::augment_args(tool("bench")),
        engine_bench::EngineBenchArgs::augment_args(tool("engine-bench")),
        check_pair::CheckPairArgs::augment_args(tool("check-pair")),
        completions::CompletionsArgs::augment_args(tool("completions")),
        distill::DistillArgs::augment_args(tool("distill")),
        plan::PlanArgs::augment_args(tool("plan")),
    ];
    let mut findings = Vec::new();
    for command in commands {
        let text = command.get_after_long_help().context("no examples")?.to_string();
        ensure!(text.contains("Examples:"), "{} has no examples", command.get_name());
        let long = text.lines().filter(|line| line.chars().count() > HELP_WIDTH);
        findings.extend(long.map(|line| format!("{}: {line}", command.get_name())));
    }
    ensure!(findings.is_empty(), "lines over {HELP_WIDTH} characters:\n{}", findings.join("\n"));
    Ok(())
}

/// Every `--flag` in a text.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '-';
    text.match_indices("--").filter_map(move |(at, _)| {
        let starts = !text[..at].ends_with(is_name);
        let len = text[at..].find(|c| !is_name(c)).unwrap_or(text.len() - at);
        (starts && len > 2).then(|| &text[at..at + len])
    })
}
