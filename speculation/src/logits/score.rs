//! Log probabilities of the raw logits, as reported to clients: the model's output before mask, bias,
//! penalties or temperature.

use crate::math::{exp_of_at_most_0, ln};
use crate::{TokenId, TokenLogprobs};

use super::block_max::Blocks;
use super::by_likelihood;
use super::summary::Summary;

/// Number of partial sums of a row's weights, assigned by id: a device has as many threads per row.
const LANES: usize = 256;
/// Number of partial sums per group. A group is reduced by halves; the groups' sums are added in order.
const GROUP: usize = 32;

/// Converts a row's logits to log probabilities: `(logit - max) - log_sum` in f64, rounded to f32 at the end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// The row's highest logit.
    pub max: f64,
    /// The logarithm of the sum of all `exp(logit - max)`. NaN if the row has a NaN or a positive infinity,
    /// or only negative infinities: log probabilities are then undefined.
    pub log_sum: f64,
}

impl Normalizer {
    /// Computes the normalizer of a raw row. The order of the sum is fixed so that a device can reproduce it:
    /// lane `id % 256` adds up its tokens in order of id; each group of 32 neighbouring lanes is reduced by
    /// halves (i and i + 16, then i and i + 8, ..), and the eight sums are added in order. Masked tokens
    /// change no bit of it.
    pub fn of(raw_logits: &[f32]) -> Self {
        let Summary { max, all_numbers, .. } = Summary::of(raw_logits);
        if !all_numbers || max == f32::NEG_INFINITY {
            return Self { max: f64::from(max) + 0.0, log_sum: f64::NAN };
        }
        Self::with_max(raw_logits, max)
    }

    /// [`Self::of`] for a row that [`super::check_row`] accepted, with its highest logit: one pass less.
    pub(crate) fn with_max(checked_logits: &[f32], max: f32) -> Self {
        // -0 becomes 0.
        let max = f64::from(max) + 0.0;
        // Weights below e^-700 count as 0, which changes no bit: the sum contains 1.
        let mut lanes = [0.0; LANES];
        pulp::Arch::new().dispatch(|| {
            for row in checked_logits.chunks(LANES) {
                for (lane, &logit) in lanes.iter_mut().zip(row) {
                    *lane += exp_of_at_most_0(f64::from(logit) - max);
                }
            }
        });
        let sum: f64 = lanes.as_chunks::<GROUP>().0.iter().map(pairwise_sum).sum();
        Self { max, log_sum: ln(sum) }
    }

    /// ln p of a token with this logit.
    pub fn logprob(self, logit: f32) -> f32 {
        ((f64::from(logit) - self.max) - self.log_sum) as f32
    }

    /// Whether log probabilities are defined for this row.
    pub fn is_usable(self) -> bool {
        !self.log_sum.is_nan()
    }
}

fn pairwise_sum(lanes: &[f64; GROUP]) -> f64 {
    let mut lanes = *lanes;
    let mut half = GROUP / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// ln p of `token` and of the `top_n` likeliest tokens (lowest id first among equals) under a raw row.
///
/// A token outside the row, or a masked one, has -inf. For an unusable row ([`Normalizer::log_sum`]) the
/// result is NaN without top tokens; nothing can be drawn from such a row anyway.
pub fn score(raw_logits: &[f32], token: TokenId, top_n: u32) -> TokenLogprobs {
    let normalizer = Normalizer::of(raw_logits);
    if !normalizer.is_usable() {
        return TokenLogprobs { logprob: f32::NAN, top: Vec::new() };
    }
    let top = top_tokens(raw_logits, top_n as usize).into_iter();
    let top = top.map(|(id, _)| (id, normalizer.logprob(raw_logits[id as usize]))).collect();
    let logprob =
        raw_logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| normalizer.logprob(logit));
    TokenLogprobs { logprob, top }
}

fn top_tokens(logits: &[f32], top_n: usize) -> Vec<(TokenId, f64)> {
    let top_n = top_n.min(logits.len());
    if top_n == 0 {
        return Vec::new();
    }
    let blocks = Blocks::new(logits, 1.0);
    let mut tokens = match blocks.floor_of(top_n) {
        Some(floor) if floor > f32::NEG_INFINITY => blocks.at_least(floor),
        // Few blocks, or so few tokens that masked ones are among the likeliest.
        _ => (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect(),
    };
    tokens.select_nth_unstable_by(top_n - 1, by_likelihood);
    tokens.truncate(top_n);
    tokens.sort_unstable_by(by_likelihood);
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logits::{check_row, highest};
    use crate::math::exp;
    use crate::noise::{Noise, Purpose};

    fn row(len: u32) -> Vec<f32> {
        let noise = Noise { seed: 5, choice: 0 };
        (0..len).map(|id| (2.0 * noise.gumbel(0, id, Purpose::Draft)) as f32).collect()
    }

    #[test]
    fn probabilities_add_up_to_one_and_are_those_of_a_sum_in_order() {
        for len in [1, 2, 31, 255, 256, 257, 5_000] {
            let row = row(len);
            let max = f64::from(highest(&row));
            let in_order = ln(row.iter().map(|&logit| exp(f64::from(logit) - max)).sum::<f64>());
            let found = Normalizer::of(&row);
            assert!((found.log_sum - in_order).abs() <= 1e-13 * in_order.abs().max(1.0), "{len}");
            let all: f64 = row.iter().map(|&logit| exp(f64::from(found.logprob(logit)))).sum();
            assert!((all - 1.0).abs() < 1e-6, "{len}: {all}");
        }
    }

    /// The sum as defined, one `exp` after the other.
    #[test]
    fn the_sum_has_the_bits_of_scalar_arithmetic() {
        for len in [1, 16, 255, 256, 257, 4_096] {
            let mut row = row(len);
            // Masked tokens, and tokens whose weights are subnormal, or 0.
            for (i, low) in [f32::NEG_INFINITY, -705.0, -744.0, -1e4].into_iter().enumerate() {
                row.iter_mut().skip(i + 1).step_by(9).for_each(|logit| *logit = low);
            }
            let found = Normalizer::of(&row);
            let mut lanes = [0.0; LANES];
            for (id, &logit) in row.iter().enumerate() {
                lanes[id % LANES] += exp(f64::from(logit) - found.max);
            }
            let sum: f64 = lanes.as_chunks::<GROUP>().0.iter().map(pairwise_sum).sum();
            assert_eq!(found.log_sum.to_bits(), ln(sum).to_bits(), "{len}");
        }
    }

    #[test]
    fn a_known_maximum_changes_no_bit() {
        let zeros = [[-0.0_f32, 0.0], [0.0, -0.0], [-0.0, -0.0]].map(|row| row.to_vec());
        for row in zeros.into_iter().chain([row(1), row(300), row(5_000)]) {
            let max = row[check_row(&row, 0).unwrap() as usize];
            let bits = |normalizer: Normalizer| [normalizer.max, normalizer.log_sum].map(f64::to_bits);
            assert_eq!(bits(Normalizer::with_max(&row, max)), bits(Normalizer::of(&row)), "{}", row.len());
        }
    }

    #[test]
    fn masked_tokens_and_padding_change_no_bit() {
        let row = row(1_000);
        let mut padded = row.clone();
        padded.extend([f32::NEG_INFINITY; 333]);
        assert_eq!(Normalizer::of(&padded), Normalizer::of(&row));
        assert_eq!(score(&padded, 7, 20), score(&row, 7, 20));
        assert_eq!(score(&padded, 1_200, 0).logprob, f32::NEG_INFINITY);
    }

    #[test]
    fn the_likeliest_of_a_long_row_are_those_of_a_full_sort() {
        // Some logits of `ties` are equal. `masked` has ten tokens that are not masked.
        let ties = row(3_000).iter().map(|logit| logit.round()).collect::<Vec<_>>();
        let mut masked = row(3_000);
        masked
            .iter_mut()
            .enumerate()
            .filter(|(id, _)| id % 300 != 7)
            .for_each(|(_, x)| *x = f32::NEG_INFINITY);
        for row in [row(3_000), ties, masked] {
            let mut all: Vec<(TokenId, f64)> = (0..).zip(row.iter().map(|&logit| f64::from(logit))).collect();
            all.sort_by(by_likelihood);
            for n in [1, 2, 20, 93, 94, 2_999] {
                assert_eq!(top_tokens(&row, n), all[..n], "{n}");
            }
        }
    }

    #[test]
    fn the_likeliest_stand_in_order_and_equals_by_id() {
        let mut row = vec![0.0, -0.0, 3.0, 3.0, -1.0, 0.0];
        let ids = |row: &[f32], n| score(row, 0, n).top.iter().map(|&(id, _)| id).collect::<Vec<_>>();
        assert_eq!(ids(&row, 6), [2, 3, 0, 1, 5, 4]);
        assert_eq!(ids(&row, 9), [2, 3, 0, 1, 5, 4], "a row has no more");
        assert_eq!(score(&row, 3, 1).logprob, score(&row, 3, 1).top[0].1);
        row[4] = f32::NAN;
        for bad in [row, vec![f32::INFINITY, 1.0], vec![f32::NEG_INFINITY; 3]] {
            let said = score(&bad, 0, 2);
            assert!(said.logprob.is_nan() && said.top.is_empty(), "{bad:?}: {said:?}");
        }
    }
}
