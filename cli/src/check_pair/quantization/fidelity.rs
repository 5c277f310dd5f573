//! Compares a quantized model's logits with its own in bf16, position by position over given texts.

use serde::Serialize;
use speculation::TokenId;

use crate::check_pair::WeightsArg;
use crate::check_pair::error::CheckPairError;
use crate::check_pair::local::LocalModel;
use crate::output::line;

/// A prompt and its continuation.
pub(super) struct Text {
    /// Prompt and continuation.
    pub(super) ids: Vec<TokenId>,
    /// Length of the prompt.
    pub(super) prompt_len: usize,
}

/// Compares one quantized model with itself in bf16. Each row of logits is compared relative to its mean,
/// because a constant offset does not change the distribution.
#[derive(Debug, Clone, Serialize)]
pub struct Fidelity {
    /// `target` or `draft`.
    pub model: &'static str,
    /// The quantized format.
    pub weights: &'static str,
    /// Positions compared.
    pub positions: u64,
    /// Root mean square of the difference over that of the bf16 logits.
    pub relative_error: f64,
    /// The largest difference of a single logit.
    pub largest_error: f64,
    /// Mean KL divergence between the bf16 and the quantized distribution, KL(bf16 || quantized), at T = 1,
    /// in nats.
    pub mean_kl: f64,
    /// Share of positions at which both have the same most likely token.
    pub greedy_agreement: f64,
}

/// Sums over positions.
#[derive(Default)]
struct Sums {
    positions: u64,
    agreements: u64,
    squared_error: f64,
    squared_logits: f64,
    largest: f64,
    kl: f64,
}

/// Compares two models with the same vocabulary over texts, at every position from the end of the prompt.
pub(super) fn compare(
    (model, weights): (&'static str, WeightsArg),
    (reference, quantized): (&mut LocalModel, &mut LocalModel),
    texts: &[Text],
) -> Result<Fidelity, CheckPairError> {
    let mut sums = Sums::default();
    let vocab_size = reference.vocab_size() as usize;
    for Text { ids, prompt_len } in texts {
        let num_logits = ids.len() - prompt_len + 1;
        let (left, right) = (reference.score(ids, num_logits)?, quantized.score(ids, num_logits)?);
        for row in 0..num_logits {
            sums.add(&left.row(row)[..vocab_size], &right.row(row)[..vocab_size]);
        }
    }
    Ok(Fidelity {
        model,
        weights: weights.as_str(),
        positions: sums.positions,
        relative_error: (sums.squared_error / sums.squared_logits).sqrt(),
        largest_error: sums.largest,
        mean_kl: sums.kl / sums.positions as f64,
        greedy_agreement: sums.agreements as f64 / sums.positions as f64,
    })
}

impl Sums {
    /// Adds one position.
    fn add(&mut self, reference: &[f32], quantized: &[f32]) {
        let mean = |row: &[f32]| row.iter().map(|&x| f64::from(x)).sum::<f64>() / row.len() as f64;
        let (left_mean, right_mean) = (mean(reference), mean(quantized));
        let (left_log, right_log) = (log_sum_exp(reference), log_sum_exp(quantized));
        for (&left, &right) in reference.iter().zip(quantized) {
            let (left, right) = (f64::from(left), f64::from(right));
            let error = (right - right_mean) - (left - left_mean);
            self.squared_error += error * error;
            self.squared_logits += (left - left_mean) * (left - left_mean);
            self.largest = self.largest.max(error.abs());
            let log_ratio = (left - left_log) - (right - right_log);
            self.kl += (left - left_log).exp() * log_ratio;
        }
        self.positions += 1;
        self.agreements += u64::from(likeliest(reference) == likeliest(quantized));
    }
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(max) + row.iter().map(|&x| f64::from(x - max).exp()).sum::<f64>().ln()
}

/// Index of the largest value; the lowest index if several are equal.
fn likeliest(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if x > row[best] {
            best = i;
        }
    }
    best
}

/// Renders the results as a Markdown table.
pub(super) fn table(all: &[Fidelity]) -> String {
    let head = "| model | weights | relative error of logits | largest | mean KL, nats | greedy agreement | positions |";
    let mut text = format!("{head}\n|---|---|---|---|---|---|---|\n");
    for found in all {
        let Fidelity { model, weights, positions, relative_error, largest_error, mean_kl, greedy_agreement } =
            found;
        line!(
            text,
            "| {model} | {weights} | {relative_error:.4} | {largest_error:.2} | {mean_kl:.5} | {greedy_agreement:.4} | {positions} |"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compared_around_their_means() {
        let mut sums = Sums::default();
        sums.add(&[1.0, 2.0, 4.0], &[11.0, 12.0, 14.0]);
        assert!(sums.squared_error < 1e-20 && sums.agreements == 1);
        assert!(sums.kl.abs() < 1e-12);
        sums.add(&[0.0, 1.0], &[1.0, 0.0]);
        assert!((sums.squared_error - 2.0).abs() < 1e-9 && (sums.largest - 1.0).abs() < 1e-9);
        assert_eq!(sums.agreements, 1);
        // P = (1/(1+e), e/(1+e)); KL = (P2 - P1) * 1.
        let expected = (1f64.exp() - 1.0) / (1f64.exp() + 1.0);
        assert!((sums.kl - expected).abs() < 1e-9, "{}", sums.kl);
    }
}
