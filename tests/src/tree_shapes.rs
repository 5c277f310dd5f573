//! What trees of candidates are worth: tokens of each verification by the shape of its draft, at equal drafted tokens, whatever they take.

use futures::{StreamExt as _, TryStreamExt as _, stream};

use crate::case::Case;
use crate::client::{Answer, Client};

/// Requests that run at once: no time is measured.
const WIDTH: usize = 4;

/// Positions and tokens of a draft; as many tokens as positions are a chain.
pub type Shape = (u32, u32);

/// What one shape showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShapeRow {
    /// Which.
    pub shape: Shape,
    /// Tokens of a verification, the target's own included.
    pub tokens_per_step: f64,
    /// Drafted tokens of a verification.
    pub drafted_per_step: f64,
    /// Texts that are equal to those without drafts.
    pub exact: usize,
    /// Texts.
    pub texts: usize,
}

impl ShapeRow {
    /// The table's head.
    pub const HEAD: &str = "| tokens | positions | tokens per verify step | drafted per verify step | exact |\n|---|---|---|---|---|";

    /// As a line of a Markdown table.
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

/// Asks every case without drafts and then in every shape; tells `on_row` of each shape as it is done.
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
    fn a_row_pools_its_counts() {
        let drafted = [answer(&[1, 2], (4, 32, 8)), answer(&[3], (6, 48, 2))];
        let plain = [answer(&[1, 2], (10, 0, 0)), answer(&[4], (10, 0, 0))];
        let row = ShapeRow::of((3, 8), &drafted, &plain);
        assert_eq!((row.tokens_per_step, row.drafted_per_step), (2.0, 8.0));
        assert_eq!(row.to_markdown(), "| 8 | 3 | 2.000 | 8.00 | 1 of 2 |");
    }
}
