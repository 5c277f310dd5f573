//! Log probabilities of the raw logits, as reported to clients: what the model said, before mask, bias, penalties or
//! temperature.

use crate::math::{exp, ln};
use crate::{TokenId, TokenLogprobs};

use super::{by_likelihood, highest};

/// ln p of `token` and of the `top_n` likeliest tokens (lowest id first among equals) under a raw row.
///
/// Log-softmax with f64 accumulation in id order, rounded to f32 at the end. A token outside the row, or a masked one, has
/// -inf; a row with NaN gives NaN, and no token can be drawn from it anyway.
pub fn score(raw_logits: &[f32], token: TokenId, top_n: u32) -> TokenLogprobs {
    let max = f64::from(highest(raw_logits));
    let sum: f64 = raw_logits.iter().map(|&logit| exp(f64::from(logit) - max)).sum();
    let log_sum = ln(sum);
    let logprob = |logit: f64| ((logit - max) - log_sum) as f32;

    let top =
        likeliest(raw_logits, top_n as usize).into_iter().map(|(id, logit)| (id, logprob(logit))).collect();
    let logprob =
        raw_logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(f64::from(logit)));
    TokenLogprobs { logprob, top }
}

fn likeliest(logits: &[f32], top_n: usize) -> Vec<(TokenId, f64)> {
    let top_n = top_n.min(logits.len());
    if top_n == 0 {
        return Vec::new();
    }
    let mut tokens: Vec<(TokenId, f64)> = (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect();
    tokens.select_nth_unstable_by(top_n - 1, by_likelihood);
    tokens.truncate(top_n);
    tokens.sort_unstable_by(by_likelihood);
    tokens
}
