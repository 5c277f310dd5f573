//! Guessing by a model: one token a forward, drawn from the draft's own logits with the noise that the target will use.

use speculation::acceptance::{Guess, guess};
use speculation::logits::DrawError;
use speculation::{AcceptanceMode, Proposal, ReplyBody, Work};
use worker::{Decide, Decision, Rows, Task};

/// See [`speculation::acceptance::guess`].
#[derive(Debug)]
pub struct Propose;

impl Decide for Propose {
    /// `rows`: one, behind the context or behind the last guess.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError> {
        let start = task.step.start();
        let Work::Propose { num_draft_tokens } = task.step.work else {
            unreachable!("the cached refuses other drawing steps at a draft worker")
        };
        // The guess that led to this row is held now.
        if let Some(&last) = task.guesses.token_ids.last() {
            task.cached.append(&[last]);
        }
        let spec = task.cached.spec().cloned().expect("an admitted step has a spec");
        let position = task.cached.len();
        if num_draft_tokens > 0 {
            let guessed = match rows {
                Rows::Logits { values, masks, .. } => {
                    masks.iter().take(1).for_each(|mask| mask.apply(values));
                    guess(&spec, task.cached.counts_mut(), position, values)?
                }
                Rows::Drawn { drawn, .. } => Guess { token_id: drawn[0].token(position)?, q: Vec::new() },
            };
            task.guesses.token_ids.push(guessed.token_id);
            if spec.acceptance == AcceptanceMode::Rejection {
                task.guesses.q.push(guessed.q);
            }
        }
        let num_guessed = task.guesses.token_ids.len() as u32;
        // Nothing follows a stop token; in rejection mode k must not depend on what was drawn.
        let stopped = spec.acceptance != AcceptanceMode::Rejection
            && task.guesses.token_ids.last().is_some_and(|id| spec.stop_token_ids.contains(id));
        if num_guessed < num_draft_tokens && !stopped && start + num_guessed < spec.max_len {
            return Ok(Decision::Continue);
        }
        let draft = std::mem::take(&mut task.guesses);
        let keep = task.cached.len();
        Ok(Decision::Done { body: ReplyBody::Proposal(Proposal { start, draft }), keep })
    }
}
