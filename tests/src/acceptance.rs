//! Measures what a draft is worth, by task type: acceptance, time per token relative to k = 0 in the same
//! run, and whether every text is identical with and without drafts.
//!
//! Each prompt is sent twice in a row, with drafts and without. The order alternates, so that neither
//! benefits from a drift of the machine's speed.

use std::time::{Duration, Instant};

use outrider_cli::load::statistics::median;

use crate::case::Case;
use crate::client::{Answer, Client};

/// Requests of a measurement.
#[derive(Debug, Clone)]
pub struct Measurement {
    /// The requests with drafts, by task type.
    pub cases: Vec<(String, Vec<Case>)>,
}

/// Results of one task type.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The task type.
    pub task_type: String,
    /// Accepted / drafted, over verified tokens.
    pub acceptance_rate: f64,
    /// Tokens per verification.
    pub acceptance_length: f64,
    /// Time per token without drafts divided by time per token with drafts, the median over prompts: above 1
    /// drafting is faster.
    pub speed_up: f64,
    /// Number of prompts with the same ids both ways.
    pub exact: usize,
    /// Number of prompts.
    pub prompts: usize,
}

/// Answers to one prompt, with and without drafts.
struct Pair {
    drafted: Timed,
    plain: Timed,
}

struct Timed {
    answer: Answer,
    /// Time from the request to the last message, per token; `None` without tokens.
    per_token: Option<Duration>,
}

impl Measurement {
    /// Sends all requests, one at a time, and calls `on_row` for each finished task type.
    pub async fn run(&self, client: &Client, mut on_row: impl FnMut(&Row)) -> anyhow::Result<Vec<Row>> {
        if let Some(first) = self.cases.iter().find_map(|(_, cases)| cases.first()) {
            // One request that is not counted warms up caches, connections and the draft wait.
            client.ask(first).await?;
        }
        let mut rows = Vec::new();
        for (task_type, cases) in &self.cases {
            let mut pairs = Vec::new();
            for (i, case) in cases.iter().enumerate() {
                pairs.push(ask_both_ways(client, case, i % 2 == 0).await?);
            }
            let row = Row::of(task_type, &pairs);
            on_row(&row);
            rows.push(row);
        }
        Ok(rows)
    }
}

impl Row {
    /// Head of the table.
    pub const HEAD: &str = "| task type | acceptance rate | acceptance length | time per token, k = 0 : drafting | exact |\n\
                            |---|---|---|---|---|";

    fn of(task_type: &str, pairs: &[Pair]) -> Self {
        let sum = |count: fn(&proto::v1::SpeculationUsage) -> u64| {
            pairs.iter().map(|pair| count(&pair.drafted.answer.speculation())).sum::<u64>() as f64
        };
        let (rounds, drafted, accepted) =
            (sum(|usage| usage.rounds), sum(|usage| usage.draft_tokens), sum(|usage| usage.accepted_tokens));
        let ratios = pairs.iter().filter_map(|pair| {
            Some(pair.plain.per_token?.as_secs_f64() / pair.drafted.per_token?.as_secs_f64())
        });
        let same_ids = |pair: &&Pair| pair.plain.answer.token_ids == pair.drafted.answer.token_ids;
        Self {
            task_type: task_type.to_owned(),
            acceptance_rate: accepted / drafted,
            acceptance_length: 1.0 + accepted / rounds,
            speed_up: median(&mut ratios.collect::<Vec<_>>()),
            exact: pairs.iter().filter(same_ids).count(),
            prompts: pairs.len(),
        }
    }

    /// Formats the row as a line of a Markdown table.
    pub fn to_markdown(&self) -> String {
        let Self { task_type, acceptance_rate, acceptance_length, speed_up, exact, prompts } = self;
        format!(
            "| {task_type} | {acceptance_rate:.2} | {acceptance_length:.2} | {speed_up:.2} | {exact} of {prompts} |"
        )
    }
}

async fn ask_both_ways(client: &Client, case: &Case, plain_first: bool) -> anyhow::Result<Pair> {
    let without = case.with_k(0);
    if plain_first {
        let plain = ask(client, &without).await?;
        return Ok(Pair { plain, drafted: ask(client, case).await? });
    }
    let drafted = ask(client, case).await?;
    Ok(Pair { drafted, plain: ask(client, &without).await? })
}

/// Times the whole request, prompt included. A client that shares the cores with all other processes reads
/// first tokens late, so a time that starts there would be too short, the more so the busier the machine is.
async fn ask(client: &Client, case: &Case) -> anyhow::Result<Timed> {
    let start = Instant::now();
    let answer = client.open(case).await?.rest().await?;
    let tokens = answer.token_ids.len() as u32;
    let elapsed = start.elapsed();
    Ok(Timed { answer, per_token: (tokens > 0).then(|| elapsed / tokens) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::v1;

    fn timed(ids: &[u32], micros: u64, usage: (u64, u64, u64)) -> Timed {
        let (rounds, draft_tokens, accepted_tokens) = usage;
        let speculation =
            v1::SpeculationUsage { rounds, draft_tokens, accepted_tokens, ..Default::default() };
        let usage = v1::Usage { speculation: Some(speculation), ..v1::Usage::default() };
        let answer = Answer { token_ids: ids.to_vec(), usage, ..Answer::default() };
        Timed { answer, per_token: Some(Duration::from_micros(micros)) }
    }

    #[test]
    fn a_row_sums_counts_and_takes_the_median_of_the_ratios() {
        let pairs = [
            Pair { drafted: timed(&[1, 2], 50, (4, 16, 8)), plain: timed(&[1, 2], 100, (12, 0, 0)) },
            Pair { drafted: timed(&[3], 100, (6, 24, 2)), plain: timed(&[4], 100, (8, 0, 0)) },
            Pair { drafted: timed(&[5], 100, (0, 0, 0)), plain: timed(&[5], 50, (0, 0, 0)) },
        ];
        let row = Row::of("sql", &pairs);
        assert_eq!((row.acceptance_rate, row.acceptance_length, row.speed_up), (0.25, 2.0, 1.0));
        assert_eq!(row.to_markdown(), "| sql | 0.25 | 2.00 | 1.00 | 2 of 3 |");
    }
}
