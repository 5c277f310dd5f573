//! The target's part of a step: judge the drafted ids by the rows behind them, and draw the token that follows.

use speculation::acceptance::verify;
use speculation::logits::DrawError;
use speculation::{ReplyBody, TokenSpan, Work};
use worker::{Decide, Decision, Task};

/// See [`speculation::acceptance`] for the rule, and for why the text is the target's own.
#[derive(Debug)]
pub struct Verify;

impl Decide for Verify {
    /// `logits`: k + 1 rows; row i predicts position `start + i`.
    fn decide(
        &mut self,
        task: &mut Task,
        logits: &mut [f32],
        vocab_size: usize,
    ) -> Result<Decision, DrawError> {
        let start = task.step.start();
        let Work::Verify { draft } = &task.step.work else {
            unreachable!("the holding refuses other drawing steps at a target")
        };
        let spec = task.holding.spec().cloned().expect("an admitted step has a spec");
        let verdict = verify(&spec, task.holding.counts_mut(), start, draft, logits, vocab_size)?;
        let accepted = verdict.num_accepted as usize;
        task.holding.append(&verdict.token_ids[..accepted]);
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
