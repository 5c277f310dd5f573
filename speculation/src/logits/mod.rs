//! The logit pipeline (contract B1 and B2): from a model's raw logits to the tokens that may be drawn and
//! their weights.
//!
//! Draft and target workers run it over their own logits, in this order: [`process`] modifies the row in
//! place (masks, bias, penalties; every operation rounded to f32), [`apply_filters`] applies temperature and
//! filters, [`crate::acceptance`] draws. [`mod@score`] reports log probabilities of the raw row. Code in this
//! module must not depend on noise, drafts or other rows.

mod block_max;
mod counts;
mod error;
mod exclusions;
mod filters;
mod mask;
mod score;
mod summary;

pub use counts::TokenCounts;
pub use error::DrawError;
pub(crate) use exclusions::is_allowed;
pub use filters::{FilteredTokens, apply_filters};
pub(crate) use filters::{by_likelihood, check_row};
pub use mask::TokenMask;
pub use score::{Normalizer, score};
pub(crate) use summary::highest;

use crate::{SequenceSpec, TokenId};

/// Applies the sequence-dependent steps of contract B1 to one row of logits, in place, in vLLM's order:
/// excluded tokens, stop tokens masked under `min_tokens`, logit bias, repetition penalty, frequency and
/// presence penalty.
///
/// `position` is the position of the token to draw, and `counts` describes the ids before it (unread unless
/// draws [depend on them](crate::SamplingParams::depends_on_context)). Ids outside the row are ignored. The
/// caller must first mask the columns beyond the tokenizer's vocabulary and the tokens that a grammar forbids
/// ([`TokenMask`]).
pub fn process(logits: &mut [f32], spec: &SequenceSpec, counts: &TokenCounts, position: u32) {
    let sampling = &spec.sampling;
    debug_assert!(
        !sampling.depends_on_context() || counts.len() == position,
        "penalties and bad words need counts of all {position} ids before the position, not of {}",
        counts.len()
    );
    exclusions::exclude(logits, sampling, counts.output());
    if position.saturating_sub(spec.prompt_len) < sampling.min_tokens {
        for &id in &spec.stop_token_ids {
            edit_logit(logits, id, |_| f32::NEG_INFINITY);
        }
    }
    for &(id, bias) in &sampling.logit_bias {
        edit_logit(logits, id, |logit| logit + bias);
    }
    if !sampling.has_penalties() {
        return;
    }
    for (id, occurrences) in counts.iter() {
        edit_logit(logits, id, |logit| {
            let repetition = sampling.repetition_penalty;
            let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
            let logit = logit - sampling.frequency_penalty * occurrences.in_output as f32;
            if occurrences.in_output > 0 { logit - sampling.presence_penalty } else { logit }
        });
    }
}

fn edit_logit(logits: &mut [f32], id: TokenId, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = to(*logit);
    }
}
