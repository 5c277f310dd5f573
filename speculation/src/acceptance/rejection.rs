//! Rejection sampling against the draft's distribution (contract B5): exact for any q that the draft really
//! drew from.
//!
//! The target trusts the draft worker's q, so only authenticated workers may serve sequences in this mode.
//! Noise of one purpose must never be used for another: the three draws of a position must be independent, or
//! the result is biased.

use std::collections::BTreeMap;

use crate::logits::{DrawError, apply_filters, by_likelihood};
use crate::math::{exp, ln};
use crate::noise::Purpose;
use crate::step::DraftDistribution;
use crate::{Draft, TokenId};

use super::{Drafted, DrawInput, Guess, MAX_Q_TOKENS, draw};

/// The draft's side: takes its top tokens with weights rounded as they are sent, and draws from exactly
/// those.
pub(super) fn guess(input: &DrawInput<'_>) -> Result<Guess, DrawError> {
    let mut tokens = apply_filters(input.logits, input.sampling, input.position)?.tokens;
    if tokens.len() > MAX_Q_TOKENS {
        tokens.select_nth_unstable_by(MAX_Q_TOKENS - 1, by_likelihood);
        tokens.truncate(MAX_Q_TOKENS);
    }
    tokens.sort_unstable_by(by_likelihood);
    let max = tokens[0].1;
    let mut q: DraftDistribution = tokens.into_iter().map(|(id, x)| (id, exp(x - max) as f32)).collect();
    // A weight that rounds to 0 can neither be drawn nor be sent as drawable.
    q.retain(|&(_, weight)| weight > 0.0);
    let log_weights = q.iter().map(|&(id, weight)| (id, ln(f64::from(weight))));
    let token_id = draw::from_tokens(input.noise, input.position, Purpose::Draft, log_weights);
    Ok(Guess { token_id, q })
}

/// The target's side: accepts with probability `min(1, P/q)`, otherwise draws from the excess of P over q.
/// Returns the committed token and whether it is the drafted one, accepted.
pub(super) fn choose_token(
    input: &DrawInput<'_>,
    drafted: Drafted<'_>,
) -> Result<(TokenId, bool), DrawError> {
    let probabilities = apply_filters(input.logits, input.sampling, input.position)?.probabilities();
    let q = normalized(drafted.q);
    let p_of_drafted = match probabilities.binary_search_by_key(&drafted.token_id, |&(id, _)| id) {
        Ok(idx) => probabilities[idx].1,
        Err(_) => 0.0,
    };
    let q_of_drafted = q.get(&drafted.token_id).copied().unwrap_or(0.0);
    let uniform = input.noise.uniform(input.position, 0, Purpose::Accept);
    if uniform * q_of_drafted < p_of_drafted {
        return Ok((drafted.token_id, true));
    }
    Ok((recovered(input, &probabilities, &q), false))
}

/// Draws from `max(P - q, 0)`, or from P if that is positive nowhere.
fn recovered(input: &DrawInput<'_>, probabilities: &[(TokenId, f64)], q: &BTreeMap<TokenId, f64>) -> TokenId {
    let excess = |&(id, p): &(TokenId, f64)| (id, p - q.get(&id).copied().unwrap_or(0.0));
    let residual: Vec<(TokenId, f64)> = probabilities.iter().map(excess).filter(|&(_, r)| r > 0.0).collect();
    let weights = if residual.is_empty() { probabilities } else { &residual };
    let log_weights =
        weights.iter().filter(|&&(_, weight)| weight > 0.0).map(|&(id, weight)| (id, ln(weight)));
    draw::from_tokens(input.noise, input.position, Purpose::Residual, log_weights)
}

/// The received weights divided by their sum, which is taken in the order received.
fn normalized(q: &[(TokenId, f32)]) -> BTreeMap<TokenId, f64> {
    let sum: f64 = q.iter().map(|&(_, weight)| f64::from(weight)).sum();
    q.iter().map(|&(id, weight)| (id, f64::from(weight) / sum)).collect()
}

/// Checks that every drafted token has a distribution that it can have been drawn from.
pub(super) fn check_draft(start: u32, draft: &Draft) -> Result<(), DrawError> {
    for (i, &token_id) in draft.token_ids.iter().enumerate() {
        let fault = match draft.q.get(i) {
            Some(q) => invalid_weight(token_id, q),
            None => Some("rejection mode needs the distribution that each token was drawn from".to_owned()),
        };
        if let Some(reason) = fault {
            return Err(DrawError::BadDraft { position: start + i as u32, reason });
        }
    }
    if draft.q.len() > draft.token_ids.len() {
        let (q, tokens) = (draft.q.len(), draft.token_ids.len());
        let reason = format!("q has {q} distributions for {tokens} tokens, send one for each");
        return Err(DrawError::BadDraft { position: start + tokens as u32, reason });
    }
    Ok(())
}

fn invalid_weight(token_id: TokenId, q: &[(TokenId, f32)]) -> Option<String> {
    if q.len() > MAX_Q_TOKENS {
        return Some(format!("q lists {} tokens, at most {MAX_Q_TOKENS} are allowed", q.len()));
    }
    if let Some((id, weight)) = q.iter().find(|(_, weight)| !weight.is_finite() || *weight < 0.0) {
        return Some(format!("q gives token {id} the weight {weight}, weights are finite and not negative"));
    }
    let mut ids: Vec<TokenId> = q.iter().map(|&(id, _)| id).collect();
    ids.sort_unstable();
    if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Some(format!("q lists token {} twice", twice[0]));
    }
    let drawable = q.iter().any(|&(id, weight)| id == token_id && weight > 0.0);
    (!drawable)
        .then(|| format!("token {token_id} has no weight in its own q, so it cannot have been drawn from it"))
}
