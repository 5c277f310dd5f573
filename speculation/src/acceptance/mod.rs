//! How drafted tokens are judged (contract B4 to B6): the draft's side in [`guess`], the target's in [`verify`].
//!
//! Below, P is the target's distribution at a position after the whole pipeline of [`crate::logits`], q the draft's, and
//! G(purpose) the noise of [`crate::noise`] at that position. Both workers must be in the same mode: a draft drawn with
//! shared noise and judged by the classic rule would be biased. Nothing here may depend on how far a draft reaches, on who
//! made it or on when it came, except where a mode says so.
//!
//! # Coupled
//!
//! The target's draw is `t = argmax(x + G(draw))` and a drafted token is accepted iff it equals t; either way t is
//! committed.
//!
//! *Exact.* For i.i.d. standard Gumbel noise, `argmax(ln P + G)` is distributed as P, and x differs from ln P by a constant.
//! The draft enters only through the comparison, after t is fixed, so that the committed token is the target's draw by
//! construction: for any draft, k, proposer or timing, and the same ids as without speculation, not only the same law.
//!
//! *Often accepted.* The draft takes `argmax(ln q + G(draw))` with the same noise. In the exponential form, token v arrives
//! at time `E_v / P(v)` at the target and at `E_v / q(v)` at the draft with a shared exponential clock E_v, and both choose
//! the first arrival. Both choose v when `E_v / min(P(v), q(v))` precedes `E_u / max(P(u), q(u))` of every other u, which
//! has probability `min(P(v), q(v)) / (min(P(v), q(v)) + sum of max(P(u), q(u)) over u != v)`. The denominator is at most
//! `sum of max(P, q) = 1 + TV(P, q)`; summing over v, agreement is at least `(1 - TV) / (1 + TV)`. (Daliri, Musco, Suresh,
//! "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978.)
//!
//! # Rejection
//!
//! The draft draws d from q with noise of its own (purpose draft) and ships q. The target accepts iff `U(accept) q(d) <
//! P(d)`, otherwise it draws from `max(P - q, 0)`, normalised, with G(residual).
//!
//! *Exact.* `Pr[commit v] = q(v) min(1, P(v)/q(v)) + Pr[reject] max(P(v) - q(v), 0) / R`, with `R = sum of max(P - q, 0)`.
//! The first term is `min(P(v), q(v))`; `Pr[reject] = 1 - sum of min(P, q) = R`; so the sum is `min(P, q) + max(P - q, 0) =
//! P(v)`. It needs d, U and the residual noise to be independent, hence three purposes, and q to be the distribution that d
//! was really drawn from, hence q is *defined* as the shipped, rounded weights. An argmax over `ln max(P - q, 0) + G` needs
//! no explicit normalisation. (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
//! arXiv 2211.17192.) The committed ids depend on draft and k, though their law does not; k must be fixed before drawing.
//!
//! # Typical
//!
//! A drafted token is also accepted when `P(d) > min(0.09, 0.3 exp(-H(P)))`, H being the entropy. Lossy: the committed
//! tokens no longer follow P. (Cai et al., "Medusa", arXiv 2401.10774.)

mod coupled;
mod draw;
mod drawn;
mod rejection;
mod typical;

pub use drawn::{RowDraw, draw_processed, draw_rows, is_drawn_apart, verify_drawn};

use crate::logits::{DrawError, TokenCounts, TokenMask, process, score};
use crate::noise::Noise;
use crate::step::DraftDistribution;
use crate::{AcceptanceMode, Draft, FinishReason, SamplingParams, SequenceSpec, TokenId, TokenLogprobs};

/// How many of its likeliest tokens a draft keeps, and ships, in rejection mode.
pub const MAX_SHIPPED_TOKENS: usize = 64;

/// What a target commits after judging one draft: the fields of a [`crate::TokenSpan`] that follow from logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Verdict {
    /// How many leading ids were drafted.
    pub num_accepted: u32,
    /// The accepted ids, then the target's draw unless the sequence finished on an accepted id.
    pub token_ids: Vec<TokenId>,
    /// One entry an id where the spec asks for them, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Set where a committed id ends the sequence.
    pub finish: Option<FinishReason>,
}

/// One drafted token.
#[derive(Debug, Clone, PartialEq)]
pub struct Guess {
    /// The guess.
    pub token_id: TokenId,
    /// What it was drawn from, to be shipped with it: rejection mode only, else empty.
    pub q: DraftDistribution,
}

/// Where a token is drawn, and from what: a row of logits that went through [`process`].
#[derive(Clone, Copy)]
struct Place<'a> {
    noise: Noise,
    position: u32,
    sampling: &'a SamplingParams,
    logits: &'a [f32],
}

/// A drafted token with the distribution it came from (empty outside rejection mode).
#[derive(Clone, Copy)]
struct Drafted<'a> {
    token_id: TokenId,
    q: &'a [(TokenId, f32)],
}

/// What one position commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Judgement {
    token_id: TokenId,
    /// Whether `token_id` is the drafted token, so that the next drafted position counts.
    accepted: bool,
}

/// Judges `draft` at `start` and draws one token more, as contract A and B say.
///
/// `logits` holds one raw row of `vocab_size` for each drafted token and one more; row i predicts position `start + i`
/// given the ids before it, the first i drafted ones included. Rows are changed in place. `counts` describes the ids before
/// `start` (unread unless the sequence has penalties) and is on return as it was. The span ends with the first drafted token
/// that is not accepted, replaced by the target's own; with a stop token; or where the sequence reaches `max_len`.
#[expect(clippy::too_many_arguments, reason = "the step's four facts, and its logits with their shape")]
pub fn verify(
    spec: &SequenceSpec,
    counts: &mut TokenCounts,
    start: u32,
    draft: &Draft,
    logits: &mut [f32],
    vocab_size: usize,
) -> Result<Verdict, DrawError> {
    verify_masked(spec, counts, start, draft, (logits, vocab_size), &[])
}

/// [`verify`] for a sequence with a grammar, whose masks come row by row. There may be fewer masks than rows where no later
/// row can be reached: behind a drafted id that a mask bars, or that ends the sequence.
#[expect(clippy::too_many_arguments, reason = "the step's facts, its rows, and their masks")]
pub fn verify_masked(
    spec: &SequenceSpec,
    counts: &mut TokenCounts,
    start: u32,
    draft: &Draft,
    (logits, vocab_size): (&mut [f32], usize),
    masks: &[TokenMask],
) -> Result<Verdict, DrawError> {
    check_draft(spec, start, draft)?;
    let expected = (draft.token_ids.len() + 1) * vocab_size;
    if logits.len() != expected || vocab_size == 0 {
        return Err(DrawError::WrongShape { position: start, expected, got: logits.len() });
    }
    let mut ahead = CountsAhead { counts, pushed: Vec::new() };
    let mut verdict = Verdict::default();
    for (i, row) in logits.chunks_exact_mut(vocab_size).enumerate() {
        let position = start + i as u32;
        let raw = spec.logprobs.map(|top_n| (row.to_vec(), top_n));
        if spec.grammar.is_some() {
            let reason = || "a row was reached that no mask was made for".to_owned();
            let mask = masks.get(i).ok_or_else(|| DrawError::NoMask { position, reason: reason() })?;
            mask.apply(row);
        }
        process(row, spec, ahead.counts, position);
        let judgement = judge(spec, &Place::new(spec, position, row), drafted_at(draft, i))?;
        if let Some((raw, top_n)) = raw {
            verdict.logprobs.push(score(&raw, judgement.token_id, top_n));
        }
        verdict.commit(judgement, finish_reason(spec, position, judgement.token_id));
        if !judgement.accepted || verdict.finish.is_some() {
            break;
        }
        if spec.sampling.has_penalties() {
            ahead.push(judgement.token_id);
        }
    }
    Ok(verdict)
}

/// Guesses the token at `position` from the draft's own raw row, which is changed in place; `counts` describes the ids
/// before it, earlier guesses included (unread unless the sequence has penalties). A grammar's mask is the caller's to apply,
/// before this.
pub fn guess(
    spec: &SequenceSpec,
    counts: &TokenCounts,
    position: u32,
    logits: &mut [f32],
) -> Result<Guess, DrawError> {
    process(logits, spec, counts, position);
    let place = Place::new(spec, position, logits);
    match mode_in_force(spec) {
        // A typical target's recovered token is the coupled draw, so guessing that one pays in both modes.
        AcceptanceMode::Coupled | AcceptanceMode::Typical => {
            Ok(Guess { token_id: draw::ordinary(&place)?, q: Vec::new() })
        }
        AcceptanceMode::Rejection => rejection::guess(&place),
    }
}

/// Whether a target can judge this draft at all; [`verify`] starts with it, a server may ask before the forward pass.
///
/// Outside rejection mode every draft can be judged and a shipped q is not looked at.
pub fn check_draft(spec: &SequenceSpec, start: u32, draft: &Draft) -> Result<(), DrawError> {
    match mode_in_force(spec) {
        AcceptanceMode::Coupled | AcceptanceMode::Typical => Ok(()),
        AcceptanceMode::Rejection => rejection::check_draft(start, draft),
    }
}

/// A greedy sequence has nothing to sample: all modes are the coupled one (contract B5).
fn mode_in_force(spec: &SequenceSpec) -> AcceptanceMode {
    if spec.sampling.is_greedy() { AcceptanceMode::Coupled } else { spec.acceptance }
}

fn judge(
    spec: &SequenceSpec,
    place: &Place<'_>,
    drafted: Option<Drafted<'_>>,
) -> Result<Judgement, DrawError> {
    let Some(drafted) = drafted else {
        // The bonus position, and an ordinary decode step.
        return Ok(Judgement { token_id: draw::ordinary(place)?, accepted: false });
    };
    match mode_in_force(spec) {
        AcceptanceMode::Coupled => coupled::judge(place, drafted.token_id),
        AcceptanceMode::Rejection => rejection::judge(place, drafted),
        AcceptanceMode::Typical => typical::judge(place, drafted.token_id),
    }
}

fn drafted_at(draft: &Draft, i: usize) -> Option<Drafted<'_>> {
    let token_id = *draft.token_ids.get(i)?;
    Some(Drafted { token_id, q: draft.q.get(i).map_or(&[], Vec::as_slice) })
}

/// Whether `token_id` at `position` is the sequence's last.
fn finish_reason(spec: &SequenceSpec, position: u32, token_id: TokenId) -> Option<FinishReason> {
    if spec.stop_token_ids.contains(&token_id) {
        Some(FinishReason::Stop)
    } else if position.saturating_add(1) >= spec.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}

impl Verdict {
    fn commit(&mut self, judgement: Judgement, finish: Option<FinishReason>) {
        self.token_ids.push(judgement.token_id);
        self.num_accepted += u32::from(judgement.accepted);
        self.finish = finish;
    }
}

impl<'a> Place<'a> {
    fn new(spec: &'a SequenceSpec, position: u32, logits: &'a [f32]) -> Self {
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        Self { noise, position, sampling: &spec.sampling, logits }
    }
}

/// Counts with accepted ids on top, which are taken back however the judging ends.
struct CountsAhead<'a> {
    counts: &'a mut TokenCounts,
    pushed: Vec<TokenId>,
}

impl CountsAhead<'_> {
    fn push(&mut self, id: TokenId) {
        self.counts.push(id);
        self.pushed.push(id);
    }
}

impl Drop for CountsAhead<'_> {
    fn drop(&mut self) {
        for &id in self.pushed.iter().rev() {
            self.counts.pop(id);
        }
    }
}
