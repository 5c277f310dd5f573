//! Typical acceptance (contract B6), the lossy mode: what is likely enough for the target passes.

use crate::TokenId;
use crate::logits::{DrawError, keep};
use crate::math::{exp, ln};
use crate::noise::Purpose;

use super::{Place, draw};

/// A token above this probability passes whatever the entropy.
const THRESHOLD: f64 = 0.09;
/// How much of `exp(-H)`, the probability of a token that is exactly as surprising as the average one, is enough.
const ALPHA: f64 = 0.3;

/// Returns the committed token and whether it is the drafted one.
pub(super) fn judge(place: &Place<'_>, drafted: TokenId) -> Result<(TokenId, bool), DrawError> {
    let kept = keep(place.logits, place.sampling, place.position)?;
    let own = draw::from_tokens(place.noise, place.position, Purpose::Draw, kept.tokens.iter().copied());
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
