//! Guessing by a model: one token a forward, drawn from the draft's own logits with the noise that the target will use. Where a tree is
//! asked for, the next best tokens of the same scores go along as leaves, without a forward of their own.

use speculation::acceptance::{Guess, guess, guess_several, takes_trees};
use speculation::logits::DrawError;
use speculation::tree::with_leaves;
use speculation::{AcceptanceMode, Proposal, ReplyBody, Work};
use worker::{Decide, Decision, Rows, Task};

/// Tokens of one position in a proposal at most. The target seldom draws what comes behind them.
const MAX_CANDIDATES: usize = 8;

/// See [`speculation::acceptance::guess`].
#[derive(Debug)]
pub struct Propose;

impl Decide for Propose {
    /// `rows`: one, behind the context or behind the last guess.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError> {
        let start = task.step.start();
        let Work::Propose { num_draft_tokens, num_tree_tokens } = task.step.work else {
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
                Rows::Logits { values, .. } if num_tree_tokens > num_draft_tokens && takes_trees(&spec) => {
                    let most = MAX_CANDIDATES.min(1 + (num_tree_tokens - num_draft_tokens) as usize);
                    let several = guess_several(&spec, task.cached.counts_mut(), (position, most), values)?;
                    let token_id = several.token_ids[0];
                    task.candidates.push(several);
                    Guess { token_id, q: Vec::new() }
                }
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
        let chain = std::mem::take(&mut task.guesses);
        let candidates = std::mem::take(&mut task.candidates);
        let draft = match candidates.is_empty() {
            true => chain,
            false => with_leaves(&candidates, num_tree_tokens as usize),
        };
        let keep = task.cached.len();
        Ok(Decision::Done { body: ReplyBody::Proposal(Proposal { start, draft }), keep })
    }
}
