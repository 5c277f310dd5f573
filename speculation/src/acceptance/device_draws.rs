//! Verification of rows that were drawn on a device: it draws every row of a step as if all drafted ids
//! before it were correct, and returns only ids. The walk over them follows the same rule as
//! [`super::verify`].

use crate::logits::DrawError;
use crate::{AcceptanceMode, Draft, SequenceSpec, TokenId, TokenLogprobs};

use super::{SpeculativeCounts, Verification, coupled, draw, effective_mode, finish_reason};

/// The result of a device's draw from one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrawResult {
    /// The drawn id.
    Token(TokenId),
    /// No draw: the logit of this id is NaN or positive infinity.
    NotANumber(TokenId),
    /// No draw: every token is masked.
    NothingAllowed,
}

impl DrawResult {
    /// Returns the id, or the reason why there is none at `position`.
    pub fn token(self, position: u32) -> Result<TokenId, DrawError> {
        match self {
            Self::Token(token_id) => Ok(token_id),
            Self::NotANumber(token_id) => Err(DrawError::NotANumber { position, token_id }),
            Self::NothingAllowed => Err(DrawError::NothingAllowed { position }),
        }
    }
}

/// Whether a device can draw every row of this sequence: coupled mode, no grammar, no excluded tokens, and no
/// id with two biases. Log probabilities ([`SequenceSpec::logprobs`]), if requested, are needed in addition.
pub fn has_independent_rows(spec: &SequenceSpec) -> bool {
    let mut biased: Vec<TokenId> = spec.sampling.logit_bias.iter().map(|&(id, _)| id).collect();
    biased.sort_unstable();
    effective_mode(spec) == AcceptanceMode::Coupled
        && spec.grammar.is_none()
        && !spec.sampling.has_exclusions()
        && biased.windows(2).all(|pair| pair[0] != pair[1])
}

/// [`super::verify`] for a sequence that [`has_independent_rows`]. `drawn[i]` is the draw of row i, one per
/// drafted id plus one; `scores[i]` is the [`crate::logits::score`] of that draw, if the spec requests
/// scores.
pub fn verify_draws(
    spec: &SequenceSpec,
    start: u32,
    draft: &Draft,
    (drawn, scores): (&[DrawResult], &[TokenLogprobs]),
) -> Result<Verification, DrawError> {
    let expected = draft.token_ids.len() + 1;
    if drawn.len() != expected {
        return Err(DrawError::WrongShape { position: start, expected, got: drawn.len() });
    }
    if spec.logprobs.is_some() && scores.len() != expected {
        return Err(DrawError::WrongShape { position: start, expected, got: scores.len() });
    }
    let mut verification = Verification::default();
    let mut next = Some(0);
    while let Some(row) = next {
        let position = start + verification.num_accepted;
        let committed = coupled::choose_token(draft, row, drawn[row].token(position)?);
        verification.logprobs.extend(spec.logprobs.and_then(|_| scores.get(row)).cloned());
        next = verification.commit(committed, finish_reason(spec, position, committed.token_id));
    }
    Ok(verification)
}

/// The draws that a device must produce, row by row, computed by the host's rule: the naive twin of a drawing
/// device.
///
/// `logits` and `counts` as for [`super::verify`]; all rows are drawn, regardless of the draft.
pub fn draw_rows(
    spec: &SequenceSpec,
    counts: &mut crate::logits::TokenCounts,
    (start, drafted): (u32, &[TokenId]),
    logits: &mut [f32],
) -> Vec<DrawResult> {
    let vocab_size = logits.len() / (drafted.len() + 1);
    let mut speculative = SpeculativeCounts { counts, pushed: Vec::new() };
    let mut drawn = Vec::new();
    for (i, row) in logits.chunks_exact_mut(vocab_size).enumerate() {
        let position = start + i as u32;
        crate::logits::process(row, spec, speculative.counts, position);
        drawn.push(draw_processed(spec, position, row));
        drafted.get(i).into_iter().for_each(|&id| speculative.push(id));
    }
    drawn
}

/// The draw at `position` from a row that went through [`crate::logits::process`], filters included.
pub fn draw_processed(spec: &SequenceSpec, position: u32, logits: &[f32]) -> DrawResult {
    match draw::draw_token(&super::DrawInput::new(spec, position, logits)) {
        Ok(token_id) => DrawResult::Token(token_id),
        Err(DrawError::NotANumber { token_id, .. }) => DrawResult::NotANumber(token_id),
        Err(_) => DrawResult::NothingAllowed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplingParams;
    use crate::acceptance::{RawRows, verify};
    use crate::logits::{TokenCounts, score};
    use crate::noise::{Noise, Purpose};

    const VOCAB: usize = 40;

    fn logits(rows: usize, seed: u64) -> Vec<f32> {
        let noise = Noise { seed, choice: 0 };
        (0..rows * VOCAB).map(|i| noise.gumbel(0, i as TokenId, Purpose::Draft) as f32).collect()
    }

    #[test]
    fn ids_alone_lead_to_the_same_verdict_as_rows() {
        let plain = SamplingParams::default();
        let samplings = [
            plain.clone(),
            SamplingParams { temperature: 0.0, top_k: 3, ..plain.clone() },
            SamplingParams { top_k: 12, top_p: 0.8, ..plain.clone() },
            SamplingParams { frequency_penalty: 0.9, logit_bias: vec![(3, 2.0)], min_tokens: 9, ..plain },
        ];
        let mut accepted_counts = Vec::new();
        for (case, sampling) in samplings.into_iter().cycle().take(30).enumerate() {
            let (ids, seed) = (vec![1, 2, 3, 5, 8], case as u64);
            let stop_token_ids = vec![7, 11];
            let max_len = 7 + case as u32 % 5;
            let spec =
                SequenceSpec { seed, prompt_len: 3, sampling, stop_token_ids, max_len, ..Default::default() };
            assert!(has_independent_rows(&spec));
            let mut counts = TokenCounts::new(3);
            ids.iter().for_each(|&id| counts.push(id));
            let rows = logits(5, 100 + seed);
            // The draft is correct up to a position and wrong there, for each position in turn.
            let mut draft = Draft::default();
            for i in 0..4 {
                let mut so_far = rows[..(i + 1) * VOCAB].to_vec();
                let drawn = draw_rows(&spec, &mut counts, (5, &draft.token_ids), &mut so_far);
                let DrawResult::Token(right) = drawn[i] else { panic!("rows of noise can be drawn from") };
                draft.token_ids.push(if i == case % 5 { (right + 1) % VOCAB as u32 } else { right });
            }
            let drawn = draw_rows(&spec, &mut counts, (5, &draft.token_ids), &mut rows.clone());
            let expected =
                verify(&spec, &mut counts, 5, &draft, RawRows::new(&mut rows.clone(), VOCAB)).unwrap();
            assert_eq!(verify_draws(&spec, 5, &draft, (&drawn, &[])), Ok(expected.clone()), "case {case}");
            accepted_counts.push(expected.num_accepted);

            // With log probabilities, which a device reports for every row.
            let spec = SequenceSpec { logprobs: Some(case as u32 % 4), ..spec };
            let of_row =
                |(row, drawn): (&[f32], &DrawResult)| score(row, drawn.token(0).unwrap(), case as u32 % 4);
            let scores: Vec<TokenLogprobs> = rows.chunks_exact(VOCAB).zip(&drawn).map(of_row).collect();
            let expected =
                verify(&spec, &mut counts, 5, &draft, RawRows::new(&mut rows.clone(), VOCAB)).unwrap();
            assert_eq!(expected.logprobs.len(), expected.token_ids.len());
            assert_eq!(verify_draws(&spec, 5, &draft, (&drawn, &scores)), Ok(expected), "case {case}");
            assert!(verify_draws(&spec, 5, &draft, (&drawn, &scores[1..])).is_err(), "one is missing");
        }
        assert!((0..4).all(|n| accepted_counts.contains(&n)), "{accepted_counts:?}");
    }

    #[test]
    fn a_row_that_cannot_be_drawn_from_refuses_only_where_it_is_reached() {
        let spec = SequenceSpec { max_len: 100, ..Default::default() };
        let draft = Draft { token_ids: vec![4, 5], ..Draft::default() };
        let drawn = [DrawResult::Token(4), DrawResult::NotANumber(9), DrawResult::NothingAllowed];
        let refused = DrawError::NotANumber { position: 11, token_id: 9 };
        assert_eq!(verify_draws(&spec, 10, &draft, (&drawn, &[])), Err(refused));
        let unreached = [DrawResult::Token(3), drawn[1], drawn[2]];
        assert_eq!(verify_draws(&spec, 10, &draft, (&unreached, &[])).unwrap().token_ids, [3]);
        assert!(matches!(
            verify_draws(&spec, 10, &draft, (&drawn[..2], &[])),
            Err(DrawError::WrongShape { .. })
        ));
    }

    #[test]
    fn what_needs_more_than_a_row_is_not_drawn_apart() {
        let with = |sampling| SequenceSpec { sampling, ..Default::default() };
        let plain = SamplingParams::default();
        let bias = |list| SamplingParams { logit_bias: list, ..plain.clone() };
        let filtered = SamplingParams { top_p: 0.9, top_k: 5, min_p: 0.1, ..plain.clone() };
        assert!(
            has_independent_rows(&with(bias(vec![(1, 1.0), (2, 1.0)])))
                && has_independent_rows(&with(filtered))
        );
        assert!(has_independent_rows(&SequenceSpec {
            logprobs: Some(3),
            prompt_logprobs: Some(0),
            ..Default::default()
        }));
        for spec in [
            with(bias(vec![(1, 1.0), (2, 1.0), (1, 1.0)])),
            with(SamplingParams { allowed_token_ids: vec![1], ..plain.clone() }),
            with(SamplingParams { bad_words: vec![vec![1]], ..plain.clone() }),
            SequenceSpec { acceptance: AcceptanceMode::Typical, ..Default::default() },
            SequenceSpec { acceptance: AcceptanceMode::Rejection, ..Default::default() },
            SequenceSpec { grammar: Some(String::new()), ..Default::default() },
        ] {
            assert!(!has_independent_rows(&spec), "{spec:?}");
        }
    }
}
