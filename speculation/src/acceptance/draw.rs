//! The argmax of logit plus Gumbel noise, which is a draw from the softmax: over a row of logits, or over listed tokens.
//!
//! The rule is "highest score, lowest id among equals", with scores in f64. Scanning is fast because the bits of a token's
//! noise bound it cheaply from above, so that only tokens that might win are scored; the plain loop that scores all of
//! them is the judge in the tests below. Nothing here may change which token the plain loop would pick.

use crate::logits::{DrawError, check_row, highest, keep};
use crate::noise::{BLOCK, GUMBEL_MAX, Noise, Purpose, gumbel_bound, gumbel_from_bits};
use crate::{SamplingParams, TokenId};

use super::Place;

/// The draw of contract B4 from a processed row: what the target commits and, with its own logits, what the draft guesses.
pub(super) fn ordinary(place: &Place<'_>) -> Result<TokenId, DrawError> {
    let Place { noise, position, sampling, logits } = *place;
    if sampling.is_greedy() {
        return check_row(logits, position);
    }
    if has_filters(sampling) {
        let kept = keep(logits, sampling, position)?;
        return Ok(from_tokens(noise, position, Purpose::Draw, kept.tokens.iter().copied()));
    }
    let likeliest = check_row(logits, position)?;
    Ok(from_row(place, likeliest))
}

fn has_filters(sampling: &SamplingParams) -> bool {
    sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0
}

/// The best token so far.
struct Best {
    token_id: TokenId,
    score: f64,
}

impl Best {
    fn offer(&mut self, token_id: TokenId, score: f64) {
        if score > self.score || (score == self.score && token_id < self.token_id) {
            *self = Self { token_id, score };
        }
    }
}

/// Argmax of `x + noise` over listed tokens, in any order; the list must not be empty.
pub(super) fn from_tokens(
    noise: Noise,
    position: u32,
    purpose: Purpose,
    tokens: impl Iterator<Item = (TokenId, f64)>,
) -> TokenId {
    let mut best = Best { token_id: TokenId::MAX, score: f64::NEG_INFINITY };
    for (token_id, x) in tokens {
        if x + GUMBEL_MAX < best.score {
            continue;
        }
        let bits = noise.bits(position, token_id, purpose);
        if x + gumbel_bound(bits) < best.score {
            continue;
        }
        best.offer(token_id, x + gumbel_from_bits(bits));
    }
    best.token_id
}

/// Argmax of `logit / temperature + noise` over a whole row that has passed [`check_row`].
fn from_row(place: &Place<'_>, likeliest: TokenId) -> TokenId {
    let Place { noise, position, sampling, logits } = *place;
    let temperature = f64::from(sampling.temperature);
    let x_of = |logit: f32| f64::from(logit) / temperature;
    // Starting from the likeliest token gives a score that most others cannot reach.
    let start = x_of(logits[likeliest as usize]) + noise.gumbel(position, likeliest, Purpose::Draw);
    let mut best = Best { token_id: likeliest, score: start };
    for (block, row) in logits.chunks(BLOCK).enumerate() {
        if x_of(highest(row)) + GUMBEL_MAX < best.score {
            continue;
        }
        let first = (block * BLOCK) as TokenId;
        let bits = noise.bits_block(position, first, Purpose::Draw);
        for (token_id, (&logit, &bits)) in (first..).zip(row.iter().zip(&bits)) {
            let x = x_of(logit);
            if x + gumbel_bound(bits) >= best.score {
                best.offer(token_id, x + gumbel_from_bits(bits));
            }
        }
    }
    best.token_id
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule as it is written: score everything, keep the first best.
    fn naive(place: &Place<'_>) -> TokenId {
        let temperature = f64::from(place.sampling.temperature);
        let mut best = (0, f64::NEG_INFINITY);
        for (token_id, &logit) in (0..).zip(place.logits) {
            let gumbel = place.noise.gumbel(place.position, token_id, Purpose::Draw);
            let score = f64::from(logit) / temperature + gumbel;
            if score > best.1 {
                best = (token_id, score);
            }
        }
        best.0
    }

    fn check(logits: &[f32], temperature: f32, seeds: std::ops::Range<u64>) {
        let sampling = SamplingParams { temperature, ..SamplingParams::default() };
        for seed in seeds {
            let noise = Noise { seed, choice: 0 };
            let place = Place { noise, position: 3, sampling: &sampling, logits };
            let expected = naive(&place);
            assert_eq!(ordinary(&place), Ok(expected), "seed {seed}, temperature {temperature}");
            // The list version, from the far end so that order cannot matter.
            let x_of = |&logit: &f32| f64::from(logit) / f64::from(temperature);
            let tokens = (0..).zip(logits.iter().map(x_of)).collect::<Vec<_>>().into_iter().rev();
            assert_eq!(from_tokens(noise, 3, Purpose::Draw, tokens), expected, "seed {seed}, list");
        }
    }

    /// Rows like a language model's: Gumbel-tailed, so that few tokens lead.
    fn row(vocab_size: u32, spread: f64) -> Vec<f32> {
        let source = Noise { seed: 99, choice: 9 };
        (0..vocab_size).map(|id| (spread * source.gumbel(0, id, Purpose::Draft)) as f32).collect()
    }

    #[test]
    fn the_fast_scan_draws_what_the_plain_loop_draws() {
        for vocab_size in [1, 2, 15, 16, 17, 1_000, 4_096] {
            for spread in [0.0, 0.5, 2.0, 30.0] {
                for temperature in [1e-5, 0.3, 1.0, 50.0] {
                    check(&row(vocab_size, spread), temperature, 0..8);
                }
            }
        }
        check(&row(152_000, 2.0), 1.0, 0..8);
    }

    #[test]
    fn masked_and_huge_logits_change_nothing() {
        let mut logits = row(300, 1.0);
        for (i, logit) in logits.iter_mut().enumerate() {
            if i % 3 != 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
        check(&logits, 1.0, 0..50);
        // So large that noise is lost in rounding: scores tie, and the lowest id wins.
        check(&[-f32::MAX, 1e30, 1e30, 3e29, 1e30], 1.0, 0..50);
        check(&[f32::NEG_INFINITY; 40].map(|_| -1e30), 1.0, 0..50);
    }
}
