//! What was counted, and its row of the table.

use std::time::Duration;

use crate::shape::Shape;

/// Head of the table; [`row`] leaves out the first and the last column.
pub(crate) const HEAD: &str = "| T | tokens | draft | tokens per verify step | standard error | drafted \
    | outcome in draft | draft's forwards | draft's rows | CPU ms of a proposal | equal texts |
|---|---|---|---|---|---|---|---|---|---|---|";

/// Sums over the verifications of a text, or of several.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) steps: usize,
    pub(crate) written: usize,
    pub(crate) drafted: usize,
    /// Steps after which the draft holds everything up to the target's first token that is not the chain's.
    pub(crate) covered: usize,
    pub(crate) forwards: usize,
    pub(crate) rows: usize,
    pub(crate) proposing: Duration,
}

impl Counts {
    fn plus(self, other: &Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            written: self.written + other.written,
            drafted: self.drafted + other.drafted,
            covered: self.covered + other.covered,
            forwards: self.forwards + other.forwards,
            rows: self.rows + other.rows,
            proposing: self.proposing + other.proposing,
        }
    }
}

/// The columns of a shape.
pub(crate) fn row(texts: &[Counts], shape: Shape) -> String {
    let sum = texts.iter().fold(Counts::default(), Counts::plus);
    let per_step = |n: usize| n as f64 / sum.steps as f64;
    let (per_verification, drafted) = (per_step(sum.written), per_step(sum.drafted));
    let covered = per_step(sum.covered);
    let (forwards, rows) = (per_step(sum.forwards), per_step(sum.rows));
    let error = standard_error(texts, per_verification);
    let millis = sum.proposing.as_secs_f64() * 1e3 / sum.steps as f64;
    format!(
        "| {} | {} | {per_verification:.3} | {error:.3} | {drafted:.2} | {covered:.3} | {forwards:.2} | {rows:.2} | {millis:.3} |",
        shape.tokens,
        shape.name()
    )
}

/// Standard error, over texts, of the tokens per step: that of a ratio of two sums.
fn standard_error(texts: &[Counts], ratio: f64) -> f64 {
    let (n, steps) = (texts.len() as f64, texts.iter().map(|text| text.steps).sum::<usize>() as f64);
    let residual = |text: &Counts| text.written as f64 - ratio * text.steps as f64;
    let squares: f64 = texts.iter().map(|text| residual(text).powi(2)).sum();
    (squares * n / (n - 1.0)).sqrt() / steps
}
