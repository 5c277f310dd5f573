//! The target's part of a step: verifies the drafted ids and draws the next token.

use speculation::acceptance::{RawRows, verify_drawn, verify_masked};
use speculation::logits::DrawError;
use speculation::{ReplyBody, TokenSpan, Work};
use worker::{Decide, Decision, Rows, Task};

/// Verifies drafts; see [`speculation::acceptance`] for the rule and the proof that the text is the target's
/// own.
#[derive(Debug)]
pub struct Verify;

impl Decide for Verify {
    /// `rows`: k + 1 rows; row i predicts position `start + i`.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError> {
        let start = task.step.start();
        let Work::Verify { draft } = &task.step.work else {
            unreachable!("admission refuses propose steps at a target worker")
        };
        let spec = task.cached.spec().cloned().expect("an admitted step has a spec");
        let verdict = match rows {
            Rows::Logits { values, vocab_size, masks, .. } => {
                let rows = RawRows { logits: values, vocab_size, masks };
                verify_masked(&spec, task.cached.counts_mut(), start, draft, rows)?
            }
            Rows::Drawn { drawn, scores, .. } => verify_drawn(&spec, start, draft, (drawn, scores))?,
        };
        let accepted = verdict.num_accepted as usize;
        task.cached.append(&verdict.token_ids[..accepted]);
        let keep = start + verdict.num_accepted;
        task.span.record("outrider.spec.accepted", accepted);
        let span = TokenSpan {
            start,
            num_accepted: verdict.num_accepted,
            token_ids: verdict.token_ids,
            logprobs: verdict.logprobs,
            prompt_logprobs: task.take_scores(),
            finish: verdict.finish,
        };
        Ok(Decision::Done { body: ReplyBody::Span(span), keep })
    }
}
