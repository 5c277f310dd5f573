//! Measures what token trees are worth: tokens per verification by the shape of the draft, at an equal number
//! of drafted tokens, regardless of time.

use futures::{StreamExt as _, TryStreamExt as _, stream};

use crate::case::Case;
use crate::client::{Answer, Client};

/// Concurrent requests; no time is measured.
const WIDTH: usize = 4;

/// Number of positions and of tokens of a draft; equal numbers are a chain.
pub type Shape = (u32, u32);

/// Results of one shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShapeRow {
    /// The shape.
    pub shape: Shape,
    /// Tokens per verification, including the target's own.
    pub tokens_per_step: f64,
    /// Drafted tokens per verification.
    pub drafted_per_step: f64,
    /// Number of texts equal to those without drafts.
    pub exact: usize,
    /// Number of texts.
    pub texts: usize,
}

impl ShapeRow {
    /// Head of the table.
    pub const HEAD: &str = "| tokens | positions | tokens per verify step | drafted per verify step | exact |\n|---|---|---|---|---|";

    /// Formats the row as a line of a Markdown table.
    pub fn to_markdown(&self) -> String {
        let Self { shape: (depth, tokens), tokens_per_step, drafted_per_step, exact, texts } = self;
        let chain = if depth == tokens { " (chain)" } else { "" };
        format!(
            "| {tokens} | {depth}{chain} | {tokens_per_step:.3} | {drafted_per_step:.2} | {exact} of {texts} |"
        )
    }

    fn of(shape: Shape, drafted: &[Answer], plain: &[Answer]) -> Self {
        let usages = || drafted.iter().map(Answer::speculation);
        let rounds = usages().map(|usage| usage.rounds).sum::<u64>() as f64;
        let accepted = usages().map(|usage| usage.accepted_tokens).sum::<u64>() as f64;
        let num_drafted = usages().map(|usage| usage.draft_tokens).sum::<u64>() as f64;
        let same = drafted.iter().zip(plain).filter(|(a, b)| a.token_ids == b.token_ids).count();
        Self {
            shape,
            tokens_per_step: 1.0 + accepted / rounds,
            drafted_per_step: num_drafted / rounds,
            exact: same,
            texts: drafted.len(),
        }
    }
}

/// Requests every case without drafts and then in every shape; calls `on_row` for each finished shape.
pub async fn run(
    client: &Client,
    cases: &[Case],
    shapes: &[Shape],
    mut on_row: impl FnMut(&ShapeRow),
) -> anyhow::Result<Vec<ShapeRow>> {
    let plain = ask_all(client, cases.iter().map(|case| case.with_k(0)).collect()).await?;
    let mut rows = Vec::new();
    for &(depth, tokens) in shapes {
        let drafted =
            ask_all(client, cases.iter().map(|case| case.with_tree(depth, tokens)).collect()).await?;
        let row = ShapeRow::of((depth, tokens), &drafted, &plain);
        on_row(&row);
        rows.push(row);
    }
    Ok(rows)
}

async fn ask_all(client: &Client, cases: Vec<Case>) -> anyhow::Result<Vec<Answer>> {
    stream::iter(cases).map(|case| async move { client.ask(&case).await }).buffered(WIDTH).try_collect().await
}

#[cfg(test)]
mod tests {
    use proto::v1;

    use super::*;

    fn answer(ids: &[u32], (rounds, draft_tokens, accepted_tokens): (u64, u64, u64)) -> Answer {
        let speculation =
            v1::SpeculationUsage { rounds, draft_tokens, accepted_tokens, ..Default::default() };
        let usage = v1::Usage { speculation: Some(speculation), ..v1::Usage::default() };
        Answer { token_ids: ids.to_vec(), usage, ..Answer::default() }
    }

    #[test]
    fn a_row_sums_its_counts() {
        let drafted = [answer(&[1, 2], (4, 32, 8)), answer(&[3], (6, 48, 2))];
        let plain = [answer(&[1, 2], (10, 0, 0)), answer(&[4], (10, 0, 0))];
        let row = ShapeRow::of((3, 8), &drafted, &plain);
        assert_eq!((row.tokens_per_step, row.drafted_per_step), (2.0, 8.0));
        assert_eq!(row.to_markdown(), "| 8 | 3 | 2.000 | 8.00 | 1 of 2 |");
    }
}
