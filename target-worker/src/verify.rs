//! The target's part of a step: verifies the drafted ids and draws the next token.

use speculation::acceptance::{RawRows, verify, verify_draws};
use speculation::logits::DrawError;
use speculation::{ReplyBody, TokenSpan, Work};
use worker::{OutputRows, RoleLogic, StepProgress, Task};

/// Verifies drafts; see [`speculation::acceptance`] for the rule and the proof that the text is the target's
/// own.
#[derive(Debug)]
pub struct Verify;

impl RoleLogic for Verify {
    /// `rows`: k + 1 rows; row i predicts position `start + i`.
    fn process_rows(&mut self, task: &mut Task, rows: OutputRows<'_>) -> Result<StepProgress, DrawError> {
        let start = task.step.start();
        let Work::Verify { draft } = &task.step.work else {
            unreachable!("admission refuses propose steps at a target worker")
        };
        let spec = task.cached.spec().cloned().expect("an admitted step has a spec");
        let verification = match rows {
            OutputRows::Logits { values, vocab_size, masks, .. } => {
                let rows = RawRows { logits: values, vocab_size, masks };
                verify(&spec, task.cached.counts_mut(), start, draft, rows)?
            }
            OutputRows::DeviceDraws { drawn, scores, .. } => {
                verify_draws(&spec, start, draft, (drawn, scores))?
            }
        };
        let accepted = verification.num_accepted as usize;
        task.cached.append(&verification.token_ids[..accepted]);
        let keep = start + verification.num_accepted;
        task.span.record("outrider.spec.accepted", accepted);
        let span = TokenSpan {
            start,
            num_accepted: verification.num_accepted,
            token_ids: verification.token_ids,
            logprobs: verification.logprobs,
            prompt_logprobs: task.take_prompt_scores(),
            finish: verification.finish,
        };
        Ok(StepProgress::Done { body: ReplyBody::Span(span), keep })
    }
}
