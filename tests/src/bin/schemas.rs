//! `schemas`: generated JSON schemas on the bundled pair. With a range, each schema's answers are compared
//! with and without drafts and validated by another library. With `--pairs`, the cost of a grammar is
//! measured with equal requests with and without one, alternating.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::Parser;
use outrider_cli::load::statistics::{mean_interval, median};
use serde_json::{Value, json};
use tests::case::Case;
use tests::client::Client;
use tests::cluster::{Cluster, RunningWorker, WorkerKind};
use tests::schemas::schema;
use tests::structured::{ask_at_every_k, cases, check_valid};

/// Schemas per progress line, so that an interrupted run has printed partial results.
const PART: u64 = 50;

/// Seed of the first schema: the test gate uses the ones before it.
const FIRST_SEED: u64 = 1_000;

/// Maximum output tokens of a timed request.
const TIMED_TOKENS: u32 = 60;

/// Checks generated JSON schemas on the bundled pair, or measures the cost of a grammar
#[derive(Debug, Parser)]
#[command(name = "schemas")]
struct Args {
    /// Number of the first schema
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u64,
    /// Number after the last schema
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    to: u64,
    /// Measure instead N pairs (2 or more) of requests that differ only in the grammar, at k = 0 and k = 4,
    /// one request at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pairs: Option<u64>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let (cluster, target, draft) = Cluster::of_pair(WorkerKind::Draft).await?;
    let client = cluster.client().await?;
    match args.pairs {
        Some(pairs) => {
            measure(&client, pairs).await?;
            print_mask_cost("target", &target).await?;
            print_mask_cost("draft", &draft).await?;
        }
        None => check(&client, args.from, args.to).await?,
    }
    cluster.stop().await
}

async fn check(client: &Client, from: u64, to: u64) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    let mut sum = [0; 4];
    let mut first = from;
    while first < to {
        let end = to.min(first + PART);
        let schemas: Vec<Value> = (first..end).map(|i| schema(FIRST_SEED + i)).collect();
        let part = cases(first as usize, &schemas, &[0.0, 1.0])?;
        let (answers, drafted) = ask_at_every_k(client, &part).await?;
        let finished = check_valid(&part, &answers).await?;
        let counts = [answers.len() as u64, finished as u64, drafted.drafted, drafted.accepted];
        for (sum, count) in sum.iter_mut().zip(counts) {
            *sum += count;
        }
        let [requested, complete, drafted, accepted] = sum;
        writeln!(
            out,
            "schemas {from} to {}: {complete} of {requested} answers are complete, all of them valid; ids equal at k = 0, 4, 8 and with trees; \
             {accepted} of {drafted} drafted tokens accepted",
            end - 1
        )?;
        first = end;
    }
    Ok(())
}

/// Time of a request with a grammar divided by that of the same request without one, as a mean of pairs with
/// its 95% interval (Student's t on logarithms).
async fn measure(client: &Client, pairs: u64) -> anyhow::Result<()> {
    let schemas: Vec<Value> = (0..pairs)
        .map(|i| json!({ "type": "array", "items": schema(FIRST_SEED + i), "minItems": 10, "maxItems": 20 }))
        .collect();
    let cases = cases(0, &schemas, &[1.0])?;
    let mut out = std::io::stdout();
    for k in [0, 4] {
        let mut logs = Vec::new();
        let mut micros = [Vec::new(), Vec::new()];
        for (i, (_, case)) in cases.iter().enumerate() {
            let constrained = Case { logprobs: None, max_tokens: TIMED_TOKENS, ..case.with_k(k) };
            // Determines the length of the text under the grammar, and warms both workers' caches for the
            // prompt.
            let num_tokens = client.ask(&constrained).await?.token_ids.len() as u32;
            let unconstrained =
                Case { grammar: None, ignore_eos: true, max_tokens: num_tokens, ..constrained.clone() };
            client.ask(&unconstrained).await?;
            let (with_grammar, without_grammar) = if i % 2 == 0 {
                let with_grammar = micros_per_token(client, &constrained).await?;
                (with_grammar, micros_per_token(client, &unconstrained).await?)
            } else {
                let without_grammar = micros_per_token(client, &unconstrained).await?;
                (micros_per_token(client, &constrained).await?, without_grammar)
            };
            logs.push((with_grammar / without_grammar).ln());
            micros[0].push(with_grammar);
            micros[1].push(without_grammar);
        }
        let log_ratio = mean_interval(&logs, 0.95).context("there are at least 2 pairs")?;
        writeln!(
            out,
            "k = {k}, {pairs} pairs: {:.0} us per token under a grammar, {:.0} unrestricted (medians); ratio {:.3} [{:.3}, {:.3}]",
            median(&mut micros[0]),
            median(&mut micros[1]),
            log_ratio.value.exp(),
            log_ratio.low.exp(),
            log_ratio.high.exp()
        )?;
    }
    Ok(())
}

async fn micros_per_token(client: &Client, case: &Case) -> anyhow::Result<f64> {
    let start = Instant::now();
    let answer = client.ask(case).await?;
    let elapsed = start.elapsed();
    ensure!(!answer.token_ids.is_empty(), "{}: an empty answer has no time per token", case.name);
    Ok(elapsed.as_secs_f64() * 1e6 / answer.token_ids.len() as f64)
}

/// Prints the rows that a worker masked, and microseconds per row for masking and for waiting for the mask.
async fn print_mask_cost(role: &str, worker: &RunningWorker) -> anyhow::Result<()> {
    let page = worker.metrics().await?;
    let rows = page.sum("outrider_worker_grammar_rows_total");
    let per_row = |name| page.sum(name) as f64 / rows.max(1) as f64;
    writeln!(
        std::io::stdout(),
        "{role}: {rows} masked rows, {:.0} us of masking per row, {:.0} us of waiting for the mask per row",
        per_row("outrider_worker_grammar_mask_microseconds_total"),
        per_row("outrider_worker_grammar_wait_microseconds_total")
    )?;
    Ok(())
}
