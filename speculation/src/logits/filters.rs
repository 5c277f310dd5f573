//! Temperature, min-p, top-k and top-p (contract B2): which tokens of a processed row may be drawn.
//!
//! Each filter is defined on all tokens in one order, likeliest first and lowest id first among equals. Only
//! the needed beginning of that order is sorted (`block_max` finds it). The naive version that sorts
//! everything is the reference, in tests/sampling/naive.rs.

use std::cmp::Ordering;

use crate::math::{exp, ln};
use crate::{SamplingParams, TokenId};

use super::DrawError;
use super::block_max::Blocks;
use super::summary::{SUMMARY_BLOCK, Summary};

/// The tokens that passed the filters.
#[derive(Debug, Clone, PartialEq)]
pub struct FilteredTokens {
    /// (id, logit divided by temperature), by ascending id; never empty. A greedy sequence's logit is not
    /// divided.
    pub tokens: Vec<(TokenId, f64)>,
}

impl FilteredTokens {
    /// (id, probability) by ascending id: `exp(x - max x)` over its sum in that order.
    pub fn probabilities(&self) -> Vec<(TokenId, f64)> {
        let max = largest(&self.tokens);
        let mut weights: Vec<(TokenId, f64)> =
            self.tokens.iter().map(|&(id, x)| (id, exp(x - max))).collect();
        let sum: f64 = weights.iter().map(|&(_, weight)| weight).sum();
        for (_, weight) in &mut weights {
            *weight /= sum;
        }
        weights
    }
}

/// Applies temperature, then min-p, top-k and top-p, to a row that went through [`super::process`].
///
/// A greedy sequence keeps only its argmax. `position` is used in errors only.
pub fn apply_filters(
    logits: &[f32],
    sampling: &SamplingParams,
    position: u32,
) -> Result<FilteredTokens, DrawError> {
    let likeliest = check_row(logits, position)?;
    if sampling.is_greedy() {
        return Ok(FilteredTokens { tokens: vec![(likeliest, f64::from(logits[likeliest as usize]))] });
    }

    let temperature = f64::from(sampling.temperature);
    let max = f64::from(logits[likeliest as usize]) / temperature;
    let blocks = Blocks::new(logits, temperature);
    let top_k = sampling.top_k as usize;
    let only_top_p = top_k == 0 && sampling.min_p <= 0.0 && sampling.top_p < 1.0;
    if only_top_p && let Some(tokens) = nucleus(&blocks, max, f64::from(sampling.top_p)) {
        return Ok(FilteredTokens { tokens });
    }
    let mut tokens = blocks.at_least(blocks.floor_of(top_k).unwrap_or(f32::NEG_INFINITY));
    if sampling.min_p > 0.0 {
        let floor = max + ln(f64::from(sampling.min_p));
        // A min_p above 1 would exclude even the likeliest token.
        tokens.retain(|&(_, x)| x >= floor || x == max);
    }
    if top_k > 0 && top_k < tokens.len() {
        tokens.select_nth_unstable_by(top_k - 1, by_likelihood);
        tokens.truncate(top_k);
    }
    if sampling.top_p < 1.0 {
        let kept = shortest_prefix(&mut tokens, max, f64::from(sampling.top_p));
        tokens.truncate(kept);
    }
    tokens.sort_unstable_by_key(|&(id, _)| id);
    Ok(FilteredTokens { tokens })
}

/// Numbers of tokens in which to look for a nucleus before sorting everything.
const NUCLEUS_TOKENS: [usize; 2] = [128, 2048];

/// Result of top-p alone, if it is a small part of a large row and rounding of the sum cannot matter;
/// otherwise `None`.
fn nucleus(blocks: &Blocks<'_>, max: f64, top_p: f64) -> Option<Vec<(TokenId, f64)>> {
    let floors = NUCLEUS_TOKENS.map(|n| blocks.floor_of(n));
    floors[0]?;
    let sum = Bounds::new(top_p, blocks.any_order_sum(max), blocks.len());
    for floor in floors.into_iter().flatten() {
        // Tokens that reach the floor come before all others in the order.
        let mut tokens = blocks.at_least(floor);
        tokens.sort_unstable_by(by_likelihood);
        let mut running = 0.0;
        for (taken, &(_, x)) in tokens.iter().enumerate() {
            running += exp(x - max);
            if running >= sum.surely_enough {
                tokens.truncate(taken + 1);
                tokens.sort_unstable_by_key(|&(id, _)| id);
                return Some(tokens);
            }
            if running > sum.surely_short {
                return None;
            }
        }
    }
    None
}

/// Thresholds for a running sum when the sum of all weights was added in any order. That sum differs from the
/// sorted one by at most its length times a few rounding errors.
struct Bounds {
    surely_short: f64,
    surely_enough: f64,
}

impl Bounds {
    fn new(top_p: f64, any_order: f64, len: usize) -> Self {
        let slack = 16.0 * (len as f64 + 16.0) * f64::EPSILON;
        Self {
            surely_short: top_p * any_order * (1.0 - slack),
            surely_enough: top_p * any_order * (1.0 + slack),
        }
    }
}

/// Likeliest first, lowest id first among equals.
pub(crate) fn by_likelihood(a: &(TokenId, f64), b: &(TokenId, f64)) -> Ordering {
    // Adding 0 turns -0 into 0; `total_cmp` distinguishes them.
    (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0))
}

/// Returns the likeliest token (lowest id among equals), or the reason why nothing can be drawn from this
/// row.
pub(crate) fn check_row(logits: &[f32], position: u32) -> Result<TokenId, DrawError> {
    let Summary { max, max_block, all_numbers } = Summary::of(logits);
    if !all_numbers {
        let bad = logits.iter().position(|&logit| logit.is_nan() || logit == f32::INFINITY);
        let token_id = bad.expect("the pass above found one") as TokenId;
        return Err(DrawError::NotANumber { position, token_id });
    }
    if max == f32::NEG_INFINITY {
        return Err(DrawError::NothingAllowed { position });
    }
    let before = max_block * SUMMARY_BLOCK;
    let likeliest = logits[before..].iter().position(|&logit| logit == max);
    Ok((before + likeliest.expect("the maximum is one of its block")) as TokenId)
}

fn largest(tokens: &[(TokenId, f64)]) -> f64 {
    tokens.iter().fold(f64::NEG_INFINITY, |max, &(_, x)| if x > max { x } else { max })
}

/// Number of tokens sorted first, and the factor by which the sorted part grows until it contains the prefix.
const FIRST_SORTED: usize = 128;
const GROWTH: usize = 8;

/// Moves the shortest prefix, in order of likelihood, whose running sum reaches `top_p` times the sum of all
/// weights to the front of `tokens` and returns its length.
///
/// Both sums are defined in sorted order. A sum in another order differs by at most its length times one
/// rounding error, which almost always suffices to find the end of the prefix; if not, everything is sorted.
fn shortest_prefix(tokens: &mut [(TokenId, f64)], max: f64, top_p: f64) -> usize {
    let any_order: f64 = tokens.iter().map(|&(_, x)| exp(x - max)).sum();
    let Bounds { surely_short, surely_enough } = Bounds::new(top_p, any_order, tokens.len());

    let mut running = 0.0;
    let mut sorted = 0;
    while sorted < tokens.len() {
        let until = tokens.len().min(sorted * GROWTH + FIRST_SORTED);
        let rest = &mut tokens[sorted..];
        if until - sorted < rest.len() {
            rest.select_nth_unstable_by(until - sorted - 1, by_likelihood);
        }
        rest[..until - sorted].sort_unstable_by(by_likelihood);
        for (taken, &(_, x)) in tokens.iter().enumerate().take(until).skip(sorted) {
            running += exp(x - max);
            if running >= surely_enough {
                return taken + 1;
            }
            if running > surely_short {
                return shortest_prefix_exactly(tokens, max, top_p);
            }
        }
        sorted = until;
    }
    shortest_prefix_exactly(tokens, max, top_p)
}

/// [`shortest_prefix`] as defined.
fn shortest_prefix_exactly(tokens: &mut [(TokenId, f64)], max: f64, top_p: f64) -> usize {
    tokens.sort_unstable_by(by_likelihood);
    let total: f64 = tokens.iter().map(|&(_, x)| exp(x - max)).sum();
    let mut running = 0.0;
    let enough = tokens.iter().position(|&(_, x)| {
        running += exp(x - max);
        running >= top_p * total
    });
    enough.map_or(tokens.len(), |last| last + 1)
}
