//! Finds the likeliest tokens of a long row without sorting it. One pass computes the highest logit of each
//! block of tokens; the n-th highest of those is a floor that at least n tokens reach. Only blocks that reach
//! a floor are scanned.
//!
//! Division by one positive temperature keeps the order of logits (two different f32 differ by far more than
//! the rounding error of f64), so floors can be logits. The result is a superset of the kept tokens; the
//! filters decide which to keep.

use crate::TokenId;
use crate::math::exp_of_at_most_0;

/// Tokens per block.
const BLOCK: usize = 32;

/// A row without NaN, and the highest logit of each block.
pub(super) struct Blocks<'a> {
    logits: &'a [f32],
    temperature: f64,
    highest: Vec<f32>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(logits: &'a [f32], temperature: f64) -> Self {
        let mut highest = vec![f32::NEG_INFINITY; logits.len().div_ceil(BLOCK)];
        pulp::Arch::new().dispatch(|| {
            for (highest, block) in highest.iter_mut().zip(logits.chunks(BLOCK)) {
                *highest = super::highest(block);
            }
        });
        Self { logits, temperature, highest }
    }

    /// Number of tokens in the row.
    pub(super) fn len(&self) -> usize {
        self.logits.len()
    }

    /// A logit that at least `n` tokens reach, or `None` if there are too few blocks.
    pub(super) fn floor_of(&self, n: usize) -> Option<f32> {
        if n == 0 || n >= self.highest.len() {
            return None;
        }
        let mut highest = self.highest.clone();
        let (_, floor, _) = highest.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a));
        Some(*floor)
    }

    /// All tokens that reach `floor`, by ascending id, as (id, logit divided by temperature); excludes masked
    /// tokens.
    pub(super) fn at_least(&self, floor: f32) -> Vec<(TokenId, f64)> {
        let mut tokens = Vec::new();
        for (index, highest) in self.highest.iter().enumerate() {
            if *highest >= floor {
                let block = self.logits.iter().enumerate().skip(index * BLOCK).take(BLOCK);
                let reach = block.filter(|&(_, &logit)| logit >= floor && logit > f32::NEG_INFINITY);
                tokens.extend(reach.map(|(id, &logit)| (id as TokenId, f64::from(logit) / self.temperature)));
            }
        }
        tokens
    }

    /// The sum of `exp(x - max)` over all tokens, where `max` is the largest x, in an unspecified order. Within
    /// 16 (n + 16) rounding errors of the true sum.
    pub(super) fn any_order_sum(&self, max: f64) -> f64 {
        let Self { logits, temperature, .. } = *self;
        pulp::Arch::new().dispatch(|| {
            const LANES: usize = 16;
            let (chunks, rest) = logits.as_chunks::<LANES>();
            let mut sums = [0.0; LANES];
            for chunk in chunks {
                for (sum, logit) in sums.iter_mut().zip(chunk) {
                    *sum += exp_of_at_most_0(f64::from(*logit) / temperature - max);
                }
            }
            let rest = rest.iter().map(|logit| exp_of_at_most_0(f64::from(*logit) / temperature - max));
            sums.iter().sum::<f64>() + rest.sum::<f64>()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_tokens_reach_a_floor() {
        let logits: Vec<f32> = (0..1_000).map(|i| ((i * 7919) % 613) as f32).collect();
        let blocks = Blocks::new(&logits, 1.0);
        for n in [1, 5, 31] {
            let floor = blocks.floor_of(n).unwrap();
            let tokens = blocks.at_least(floor);
            assert!(tokens.len() >= n);
            let reach = logits.iter().filter(|&&logit| logit >= floor).count();
            assert_eq!(tokens.len(), reach);
        }
        assert_eq!((blocks.floor_of(0), blocks.floor_of(32)), (None, None));
        assert_eq!(blocks.at_least(f32::NEG_INFINITY).len(), 1_000);
    }
}
