//! Guessing by a model: one token a forward, drawn from the draft's own logits with the noise that the target will use. Where a tree is
//! asked for, the next best tokens of the same scores go along as leaves, without a forward of their own.

use std::sync::Arc;

use speculation::acceptance::{Guess, guess, guess_several, takes_trees};
use speculation::logits::DrawError;
use speculation::tree::with_leaves;
use speculation::{AcceptanceMode, Draft, Proposal, ReplyBody, SequenceSpec, Work};
use worker::{Decide, Decision, Rows, Task};

/// Tokens of one position in a proposal at most. The target seldom draws what comes behind them.
const MAX_CANDIDATES: usize = 8;

/// See [`speculation::acceptance::guess`].
#[derive(Debug)]
pub struct Propose {
    /// Whether the next best tokens are kept of chains too, for [`worker::ahead`].
    pub keeps_candidates: bool,
}

impl Decide for Propose {
    /// `rows`: one, behind the context or behind the last guess.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError> {
        // The guess that led to this row is held now.
        if let Some(&last) = task.guesses.token_ids.last() {
            task.cached.append(&[last]);
        }
        let spec = shared_spec(task);
        let (num_draft_tokens, num_tree_tokens) = asked(task);
        if num_draft_tokens > 0 {
            let wants_several = self.keeps_candidates || num_tree_tokens > num_draft_tokens;
            let guessed = guess_next(task, &spec, wants_several, rows)?;
            task.guesses.token_ids.push(guessed.token_id);
            if spec.acceptance == AcceptanceMode::Rejection {
                task.guesses.q.push(guessed.q);
            }
        }
        Ok(proposal(task, &spec).unwrap_or(Decision::Continue))
    }

    fn resume(&mut self, task: &mut Task) -> Option<Decision> {
        let spec = shared_spec(task);
        if task.context_left().is_empty() { proposal(task, &spec) } else { None }
    }
}

/// The sequence's settings, to be read while its task changes.
fn shared_spec(task: &Task) -> Arc<SequenceSpec> {
    task.cached.spec().cloned().expect("an admitted step has a spec")
}

/// How many positions the step asks for, and how many tokens.
fn asked(task: &Task) -> (u32, u32) {
    match task.step.work {
        Work::Propose { num_draft_tokens, num_tree_tokens } => (num_draft_tokens, num_tree_tokens),
        Work::Feed | Work::Verify { .. } => {
            unreachable!("the cached refuses other drawing steps at a draft worker")
        }
    }
}

/// The guess behind the row; where several are wanted, the next best ones go to the task's candidates.
fn guess_next(
    task: &mut Task,
    spec: &SequenceSpec,
    wants_several: bool,
    rows: Rows<'_>,
) -> Result<Guess, DrawError> {
    let position = task.cached.len();
    let counts = task.cached.counts_mut();
    match rows {
        Rows::Logits { values, .. } if wants_several && takes_trees(spec) => {
            let several = guess_several(spec, counts, (position, MAX_CANDIDATES), values)?;
            let token_id = several.token_ids[0];
            task.candidates.push(several);
            Ok(Guess { token_id, q: Vec::new() })
        }
        Rows::Logits { values, masks, .. } => {
            masks.iter().take(1).for_each(|mask| mask.apply(values));
            guess(spec, counts, position, values)
        }
        Rows::Drawn { drawn, .. } => Ok(Guess { token_id: drawn[0].token(position)?, q: Vec::new() }),
    }
}

/// The proposal, once it is complete.
fn proposal(task: &Task, spec: &SequenceSpec) -> Option<Decision> {
    let start = task.step.start();
    let (num_draft_tokens, num_tree_tokens) = asked(task);
    let chain = &task.guesses;
    let num_guessed = chain.token_ids.len() as u32;
    // Nothing follows a stop token; in rejection mode k must not depend on what was drawn.
    let stopped = spec.acceptance != AcceptanceMode::Rejection
        && chain.token_ids.last().is_some_and(|id| spec.stop_token_ids.contains(id));
    if num_guessed < num_draft_tokens && !stopped && start + num_guessed < spec.max_len {
        return None;
    }
    let has_candidates = task.candidates.len() == chain.token_ids.len();
    let draft: Draft = match has_candidates && num_tree_tokens > num_draft_tokens {
        true => with_leaves(&task.candidates, num_tree_tokens as usize),
        false => chain.clone(),
    };
    let body = ReplyBody::Proposal(Proposal { start, draft });
    Some(Decision::Done { body, keep: task.cached.len() })
}
