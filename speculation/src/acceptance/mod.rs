//! The acceptance rules for drafted tokens (contract B4 to B6): the draft's side in [`guess`], the target's
//! in [`verify`].
//!
//! Below, P is the target's distribution at a position after the whole pipeline of [`crate::logits`], q the
//! draft's, and G(purpose) the noise of [`crate::noise`] at that position. Both workers must use the same
//! mode: a draft drawn with shared noise and verified by the classic rule would be biased. Results must not
//! depend on the draft's length, its source or its timing, unless a mode says so.
//!
//! # Coupled
//!
//! The target's draw is `t = argmax(x + G(draw))` and a drafted token is accepted iff it equals t; either way
//! t is committed.
//!
//! *Exact.* For i.i.d. standard Gumbel noise, `argmax(ln P + G)` is distributed as P, and x differs from ln P
//! by a constant. The draft enters only through the comparison, after t is fixed, so the committed token is
//! the target's draw by construction: for any draft, k, proposer or timing. The ids are the same as without
//! speculation, not only their distribution. The same holds for a tree ([`crate::tree`]): t is fixed before
//! the children are examined, and the walk continues at the child that equals t.
//!
//! *Often accepted.* The draft takes `argmax(ln q + G(draw))` with the same noise. In the exponential form,
//! token v arrives at time `E_v / P(v)` at the target and at `E_v / q(v)` at the draft with a shared
//! exponential clock E_v, and both choose the first arrival. Both choose v if `E_v / min(P(v), q(v))`
//! precedes `E_u / max(P(u), q(u))` of every other u, which has probability
//! `min(P(v), q(v)) / (min(P(v), q(v)) + sum of max(P(u), q(u)) over u != v)`. The denominator is at most
//! `sum of max(P, q) = 1 + TV(P, q)`; summing over v, agreement is at least `(1 - TV) / (1 + TV)`. (Daliri,
//! Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv
//! 2408.07978.)
//!
//! # Rejection
//!
//! The draft draws d from q with separate noise (purpose draft) and sends q. The target accepts iff
//! `U(accept) q(d) < P(d)`, otherwise it draws from `max(P - q, 0)`, normalised, with G(residual).
//!
//! *Exact.* `Pr[commit v] = q(v) min(1, P(v)/q(v)) + Pr[reject] max(P(v) - q(v), 0) / R`, with
//! `R = sum of max(P - q, 0)`. The first term is `min(P(v), q(v))`; `Pr[reject] = 1 - sum of min(P, q) = R`;
//! so the sum is `min(P, q) + max(P - q, 0) = P(v)`. This requires d, U and the residual noise to be
//! independent, hence three purposes, and q to be the distribution that d was really drawn from, hence q is
//! *defined* as the sent, rounded weights. An argmax over `ln max(P - q, 0) + G` needs no explicit
//! normalisation. (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
//! arXiv 2211.17192.) The committed ids depend on draft and k, though their distribution does not; k must be
//! fixed before drawing.
//!
//! # Typical
//!
//! A drafted token is also accepted when `P(d) > min(0.09, 0.3 exp(-H(P)))`, H being the entropy. Lossy: the
//! committed tokens no longer follow P. (Cai et al., "Medusa", arXiv 2401.10774.)

mod best_tokens;
mod coupled;
mod device_draws;
mod draw;
mod rejection;
mod scan;
mod typical;

pub use device_draws::{DrawResult, draw_processed, draw_rows, has_independent_rows, verify_draws};

use crate::logits::{DrawError, Normalizer, TokenCounts, TokenMask, check_row, process, score};
use crate::noise::Noise;
use crate::step::DraftDistribution;
use crate::tree::Candidates;
use crate::{AcceptanceMode, Draft, FinishReason, SamplingParams, SequenceSpec, TokenId, TokenLogprobs};

/// Number of most likely tokens that a draft keeps and sends in rejection mode.
pub const MAX_Q_TOKENS: usize = 64;

/// The result of verifying one draft: the fields of a [`crate::TokenSpan`] that follow from logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Verification {
    /// Number of leading ids that were drafted.
    pub num_accepted: u32,
    /// The accepted ids, then the target's draw unless the sequence finished on an accepted id.
    pub token_ids: Vec<TokenId>,
    /// One entry per id if the spec requests them, otherwise empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Set if a committed id ends the sequence.
    pub finish: Option<FinishReason>,
}

/// One drafted token.
#[derive(Debug, Clone, PartialEq)]
pub struct Guess {
    /// The guessed token.
    pub token_id: TokenId,
    /// The distribution that it was drawn from, sent with it in rejection mode; otherwise empty.
    pub q: DraftDistribution,
}

/// The position, noise and row of a draw; the row went through [`process`].
#[derive(Clone, Copy)]
struct DrawInput<'a> {
    noise: Noise,
    position: u32,
    sampling: &'a SamplingParams,
    logits: &'a [f32],
}

/// A drafted token with the distribution that it was drawn from (empty outside rejection mode).
#[derive(Clone, Copy)]
struct Drafted<'a> {
    token_id: TokenId,
    q: &'a [(TokenId, f32)],
}

/// The token committed at one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CommittedToken {
    token_id: TokenId,
    /// The next row to verify, if `token_id` is a drafted token: the row of that token.
    next: Option<usize>,
}

/// The logits of one verification, as in [`verify`], and the tokens that may be drawn from them.
#[derive(Debug)]
pub struct RawRows<'a> {
    /// Row-major; changed in place.
    pub logits: &'a mut [f32],
    /// Length of a row.
    pub vocab_size: usize,
    /// One mask per row; unread unless the sequence has a grammar. There may be fewer masks than rows if no
    /// later row can be reached: after a drafted id that a mask forbids, or one that ends the sequence.
    pub masks: &'a [TokenMask],
}

impl<'a> RawRows<'a> {
    /// Rows of a sequence without a grammar.
    pub fn new(logits: &'a mut [f32], vocab_size: usize) -> Self {
        Self { logits, vocab_size, masks: &[] }
    }
}

/// Verifies `draft` at `start` and draws one more token, as defined in contract A and B.
///
/// `rows` has one row for each drafted token plus one: row 0 predicts position `start`, row i + 1 predicts
/// the position after drafted token i, given the ids before `start` and the path to that token. Rows are
/// modified in place. `counts` describes the ids before `start` (unread unless draws depend on them)
/// and is unchanged on return. The walk begins at row 0 and continues at the accepted child. The span ends
/// with the first draw that matches no child, with a stop token, or at `max_len`.
pub fn verify(
    spec: &SequenceSpec,
    counts: &mut TokenCounts,
    start: u32,
    draft: &Draft,
    rows: RawRows<'_>,
) -> Result<Verification, DrawError> {
    let RawRows { logits, vocab_size, masks } = rows;
    check_draft(spec, start, draft)?;
    let expected = (draft.token_ids.len() + 1) * vocab_size;
    if logits.len() != expected || vocab_size == 0 {
        return Err(DrawError::WrongShape { position: start, expected, got: logits.len() });
    }
    let mut speculative = SpeculativeCounts { counts, pushed: Vec::new() };
    let mut verification = Verification::default();
    let mut next = Some(0);
    while let Some(row) = next {
        let position = start + verification.num_accepted;
        let logits = &mut logits[row * vocab_size..(row + 1) * vocab_size];
        let raw = spec.logprobs.map(|top_n| (logits.to_vec(), top_n));
        if spec.grammar.is_some() {
            let reason = || "no mask was computed for a row that was reached".to_owned();
            let mask = masks.get(row).ok_or_else(|| DrawError::NoMask { position, reason: reason() })?;
            mask.apply(logits);
        }
        process(logits, spec, speculative.counts, position);
        let committed = choose_token(spec, &DrawInput::new(spec, position, logits), (draft, row))?;
        if let Some((raw, top_n)) = raw {
            verification.logprobs.push(score(&raw, committed.token_id, top_n));
        }
        next = verification.commit(committed, finish_reason(spec, position, committed.token_id));
        if next.is_some() && spec.sampling.depends_on_context() {
            speculative.push(committed.token_id);
        }
    }
    Ok(verification)
}

/// Guesses the token at `position` from the draft's own raw row, which is modified in place. `counts`
/// describes the ids before it, earlier guesses included (unread unless draws depend on them). The
/// caller must apply a grammar's mask first.
pub fn guess(
    spec: &SequenceSpec,
    counts: &TokenCounts,
    position: u32,
    logits: &mut [f32],
) -> Result<Guess, DrawError> {
    process(logits, spec, counts, position);
    let input = DrawInput::new(spec, position, logits);
    match effective_mode(spec) {
        // The token that a typical target recovers is the coupled draw, so guessing it is best in both modes.
        AcceptanceMode::Coupled | AcceptanceMode::Typical => {
            Ok(Guess { token_id: draw::draw_token(&input)?, q: Vec::new() })
        }
        AcceptanceMode::Rejection => rejection::guess(&input),
    }
}

/// Returns the guess of [`guess`] and the next best tokens by the same scores, at most `num_candidates` in
/// all: children of one row of a tree. For sequences that [`supports_trees`].
pub fn guess_candidates(
    spec: &SequenceSpec,
    counts: &TokenCounts,
    (position, num_candidates): (u32, usize),
    logits: &mut [f32],
) -> Result<Candidates, DrawError> {
    process(logits, spec, counts, position);
    candidates_from_processed(spec, (position, num_candidates), logits)
}

/// [`guess_candidates`] for a row that [`process`] has edited.
pub fn candidates_from_processed(
    spec: &SequenceSpec,
    (position, num_candidates): (u32, usize),
    logits: &[f32],
) -> Result<Candidates, DrawError> {
    let likeliest = check_row(logits, position)?;
    let input = DrawInput::new(spec, position, logits);
    let best = best_tokens::best_tokens(&input, (likeliest, num_candidates))?;
    let normalizer = Normalizer::with_max(logits, logits[likeliest as usize]);
    let surprise = -normalizer.logprob(logits[best[0].0 as usize]);
    Ok(Candidates::from_scores(&spec.sampling, &best, surprise))
}

/// Whether a draft for this sequence may be a tree: in coupled mode, where a committed token is the target's
/// own draw regardless of the draft. With a grammar it may not, because masks are computed for chains.
pub fn supports_trees(spec: &SequenceSpec) -> bool {
    effective_mode(spec) == AcceptanceMode::Coupled && spec.grammar.is_none()
}

/// Checks whether a target can verify this draft. [`verify`] calls it first; a server may call it before the
/// forward pass.
///
/// Outside rejection mode every chain is valid and q is ignored; trees are valid only in coupled mode.
pub fn check_draft(spec: &SequenceSpec, start: u32, draft: &Draft) -> Result<(), DrawError> {
    let bad = |reason| DrawError::BadDraft { position: start, reason };
    if draft.is_tree() && !supports_trees(spec) {
        return Err(bad("token trees need coupled mode and no grammar: send a chain".to_owned()));
    }
    draft.check_shape().map_err(bad)?;
    match effective_mode(spec) {
        AcceptanceMode::Coupled | AcceptanceMode::Typical => Ok(()),
        AcceptanceMode::Rejection => rejection::check_draft(start, draft),
    }
}

/// The mode that applies: a greedy sequence has nothing to sample, so all modes equal coupled mode (contract
/// B5). Its drafts have no distributions.
pub fn effective_mode(spec: &SequenceSpec) -> AcceptanceMode {
    if spec.sampling.is_greedy() { AcceptanceMode::Coupled } else { spec.acceptance }
}

/// Whether a draft ends with this token: nothing follows a stop token. In rejection mode the draft goes on
/// nevertheless: the time of a proposal must not depend on the drawn tokens, because a deadline drops what is
/// late (contract B5).
pub fn ends_draft(spec: &SequenceSpec, token_id: TokenId) -> bool {
    effective_mode(spec) != AcceptanceMode::Rejection && spec.stop_token_ids.contains(&token_id)
}

/// Decides the token that the target commits at the position that `row` predicts.
fn choose_token(
    spec: &SequenceSpec,
    input: &DrawInput<'_>,
    (draft, row): (&Draft, usize),
) -> Result<CommittedToken, DrawError> {
    let mode = effective_mode(spec);
    let drafted = drafted_at(draft, row).filter(|_| mode != AcceptanceMode::Coupled);
    let Some(drafted) = drafted else {
        // Coupled mode, the bonus position, or an ordinary decode step.
        return Ok(coupled::choose_token(draft, row, draw::draw_token(input)?));
    };
    let (token_id, accepted) = match mode {
        AcceptanceMode::Rejection => rejection::choose_token(input, drafted)?,
        AcceptanceMode::Coupled | AcceptanceMode::Typical => typical::choose_token(input, drafted.token_id)?,
    };
    Ok(CommittedToken { token_id, next: accepted.then_some(row + 1) })
}

/// The drafted token after a row of a chain.
fn drafted_at(draft: &Draft, row: usize) -> Option<Drafted<'_>> {
    let token_id = *draft.token_ids.get(row)?;
    Some(Drafted { token_id, q: draft.q.get(row).map_or(&[], Vec::as_slice) })
}

/// Why `token_id` at `position` ends the sequence, if it does. Targets end spans by this rule, and routers
/// check them by it.
pub fn finish_reason(spec: &SequenceSpec, position: u32, token_id: TokenId) -> Option<FinishReason> {
    if spec.stop_token_ids.contains(&token_id) {
        Some(FinishReason::Stop)
    } else if position.saturating_add(1) >= spec.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}

impl Verification {
    /// Commits a token; returns the next row to verify, if there is one.
    fn commit(&mut self, committed: CommittedToken, finish: Option<FinishReason>) -> Option<usize> {
        self.token_ids.push(committed.token_id);
        self.num_accepted += u32::from(committed.next.is_some());
        self.finish = finish;
        committed.next.filter(|_| finish.is_none())
    }
}

impl<'a> DrawInput<'a> {
    fn new(spec: &'a SequenceSpec, position: u32, logits: &'a [f32]) -> Self {
        let noise = Noise { seed: spec.seed, choice: spec.choice };
        Self { noise, position, sampling: &spec.sampling, logits }
    }
}

/// Counts with accepted ids pushed on top; dropping it pops them, on errors too.
struct SpeculativeCounts<'a> {
    counts: &'a mut TokenCounts,
    pushed: Vec<TokenId>,
}

impl SpeculativeCounts<'_> {
    fn push(&mut self, id: TokenId) {
        self.counts.push(id);
        self.pushed.push(id);
    }
}

impl Drop for SpeculativeCounts<'_> {
    fn drop(&mut self) {
        for &id in self.pushed.iter().rev() {
            self.counts.pop(id);
        }
    }
}
