//! Typical acceptance (contract B6), the lossy mode: tokens that are likely enough for the target pass.

use crate::TokenId;
use crate::logits::{DrawError, apply_filters};
use crate::math::{exp, ln};
use crate::noise::Purpose;

use super::{DrawInput, draw};

/// Tokens above this probability pass for any entropy.
const THRESHOLD: f64 = 0.09;
/// Fraction of `exp(-H)` that is enough, where `exp(-H)` is the probability of a token of average surprise.
const ALPHA: f64 = 0.3;

/// Returns the committed token and whether it is the drafted one.
pub(super) fn choose_token(input: &DrawInput<'_>, drafted: TokenId) -> Result<(TokenId, bool), DrawError> {
    let kept = apply_filters(input.logits, input.sampling, input.position)?;
    let own = draw::from_tokens(input.noise, input.position, Purpose::Draw, kept.tokens.iter().copied());
    if own == drafted || is_typical(&kept.probabilities(), drafted) {
        return Ok((drafted, true));
    }
    Ok((own, false))
}

/// `P(drafted) > min(0.09, 0.3 exp(-H(P)))`; `probabilities` by ascending id.
fn is_typical(probabilities: &[(TokenId, f64)], drafted: TokenId) -> bool {
    let Ok(idx) = probabilities.binary_search_by_key(&drafted, |&(id, _)| id) else { return false };
    let entropy: f64 = probabilities.iter().filter(|&&(_, p)| p > 0.0).map(|&(_, p)| -p * ln(p)).sum();
    probabilities[idx].1 > THRESHOLD.min(ALPHA * exp(-entropy))
}
