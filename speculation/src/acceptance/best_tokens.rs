//! The best few tokens by logit plus noise: the coupled draw and the runners-up, in the order in which a draw
//! is decided (highest score first, lowest id first among equals). The first one always equals
//! [`super::draw::draw_token`].

use crate::TokenId;
use crate::logits::{DrawError, apply_filters, highest};
use crate::noise::{BLOCK, Purpose};

use super::DrawInput;
use super::scan::{Winners, scan_row};

/// Returns at most `count` tokens with their scores, best first, and at least one. The scores of a greedy
/// sequence are its logits. The row must have passed [`check_row`](crate::logits::check_row), which returned
/// `likeliest`.
pub(super) fn best_tokens(
    input: &DrawInput<'_>,
    (likeliest, count): (TokenId, usize),
) -> Result<Vec<(TokenId, f64)>, DrawError> {
    let DrawInput { noise, position, sampling, logits } = *input;
    let mut best_tokens = BestTokens::new(count.max(1));
    if sampling.is_greedy() {
        for (block, row) in logits.chunks(BLOCK).enumerate() {
            if f64::from(highest(row)) < best_tokens.floor() {
                continue;
            }
            let ids = (block * BLOCK) as TokenId..;
            ids.zip(row).for_each(|(id, &logit)| best_tokens.offer(id, f64::from(logit)));
        }
        return Ok(best_tokens.list);
    }
    if sampling.has_filters() {
        for (id, x) in apply_filters(logits, sampling, position)?.tokens {
            best_tokens.offer(id, x + noise.gumbel(position, id, Purpose::Draw));
        }
        return Ok(best_tokens.list);
    }
    scan_row(input, likeliest, &mut best_tokens);
    Ok(best_tokens.list)
}

/// The best tokens so far, best first.
struct BestTokens {
    count: usize,
    list: Vec<(TokenId, f64)>,
    floor: f64,
}

impl BestTokens {
    fn new(count: usize) -> Self {
        Self { count, list: Vec::with_capacity(count + 1), floor: f64::NEG_INFINITY }
    }
}

impl Winners for BestTokens {
    #[inline(always)]
    fn floor(&self) -> f64 {
        self.floor
    }

    fn offer(&mut self, token_id: TokenId, score: f64) {
        if score == f64::NEG_INFINITY {
            // Masked: it can never be drawn.
            return;
        }
        let is_behind = |&(id, other): &(TokenId, f64)| other > score || (other == score && id < token_id);
        let at = self.list.iter().position(|entry| !is_behind(entry)).unwrap_or(self.list.len());
        if at < self.count {
            self.list.insert(at, (token_id, score));
            self.list.truncate(self.count);
            self.floor = self.list.get(self.count - 1).map_or(f64::NEG_INFINITY, |lowest| lowest.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SamplingParams;
    use crate::acceptance::draw::draw_token;
    use crate::logits::check_row;
    use crate::noise::Noise;

    /// The rule as defined: score all kept tokens, sort, truncate.
    fn naive(input: &DrawInput<'_>, count: usize) -> Vec<(TokenId, f64)> {
        let DrawInput { noise, position, sampling, logits } = *input;
        let mut scored: Vec<(TokenId, f64)> = if sampling.is_greedy() {
            (0..).zip(logits.iter().map(|&logit| f64::from(logit))).collect()
        } else {
            let kept = apply_filters(logits, sampling, position).unwrap().tokens;
            kept.into_iter().map(|(id, x)| (id, x + noise.gumbel(position, id, Purpose::Draw))).collect()
        };
        scored.retain(|&(_, score)| score > f64::NEG_INFINITY);
        scored.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        scored.truncate(count);
        scored
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn the_best_of_any_row_are_those_of_a_full_sort(
            row in prop::collection::vec(
                prop_oneof![
                    3 => (-8_i8..8).prop_map(|step| f32::from(step) / 2.0),
                    1 => Just(f32::NEG_INFINITY),
                    2 => -20.0_f32..20.0,
                ],
                1..600,
            ),
            temperature in prop_oneof![Just(0.0_f32), Just(1.0), 0.1_f32..3.0],
            (top_k, count) in (prop_oneof![Just(0_u32), 1_u32..9], 1_usize..7),
            (seed, choice, position) in any::<(u64, u32, u32)>(),
        ) {
            let sampling = SamplingParams { temperature, top_k, ..SamplingParams::default() };
            let input = DrawInput { noise: Noise { seed, choice }, position, sampling: &sampling, logits: &row };
            let likeliest = match check_row(&row, position) {
                Ok(likeliest) => likeliest,
                Err(error) => {
                    prop_assert_eq!(error, DrawError::NothingAllowed { position });
                    prop_assert!(row.iter().all(|&logit| logit == f32::NEG_INFINITY));
                    return Ok(());
                }
            };
            let found = best_tokens(&input, (likeliest, count)).unwrap();
            prop_assert_eq!(&found, &naive(&input, count));
            prop_assert_eq!(Ok(found[0].0), draw_token(&input), "the first is what is drawn");
        }
    }
}
