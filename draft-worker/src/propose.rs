//! Drafting with a model: one token per forward, drawn from the draft's own logits with the noise that the
//! target will use. If a tree is requested, the likeliest alternatives run as well, several rows per forward
//! ([`speculation::tree::TreeGrowth`]). Otherwise the alternatives are sent as leaves of the chain, without a
//! forward of their own: on devices that cannot run tree rows, if there is no space for the rows, and at
//! workers that draft ahead, whose guesses are chains.

use std::sync::Arc;

use speculation::acceptance::{Guess, effective_mode, ends_draft, guess, guess_candidates, supports_trees};
use speculation::logits::DrawError;
use speculation::tree::{Candidates, MAX_CANDIDATES, TreeGrowth, with_leaves};
use speculation::{AcceptanceMode, Draft, Proposal, ReplyBody, SequenceSpec, Work};
use worker::{OutputRows, RoleLogic, StepProgress, Task};

/// Proposes drafts; see [`speculation::acceptance::guess`].
#[derive(Debug)]
pub struct Propose {
    /// Whether to keep the alternatives of chains as well, for [`worker::ahead`].
    pub keeps_candidates: bool,
}

impl RoleLogic for Propose {
    /// `rows`: one row, after the context or after the last guess.
    fn process_rows(&mut self, task: &mut Task, rows: OutputRows<'_>) -> Result<StepProgress, DrawError> {
        if self.grows_tree(task, &rows) {
            return grow(task, rows);
        }
        // The guess that led to this row is cached now.
        if let Some(&last) = task.guesses.token_ids.last() {
            task.cached.append(&[last]);
        }
        let spec = shared_spec(task);
        if asked(task).0 > 0 {
            let wants_several = self.wants_candidates(task);
            let guessed = match guess_next(task, &spec, wants_several, rows) {
                // A draft with another tokenizer may have none of the allowed tokens.
                Err(DrawError::NothingAllowed { .. }) => return Ok(ended_proposal(task)),
                guessed => guessed?,
            };
            task.guesses.token_ids.push(guessed.token_id);
            if effective_mode(&spec) == AcceptanceMode::Rejection {
                task.guesses.q.push(guessed.q);
            }
        }
        Ok(proposal(task, &spec).unwrap_or(StepProgress::Continue))
    }

    fn wants_candidates(&self, task: &Task) -> bool {
        let (num_draft_tokens, num_tree_tokens) = asked(task);
        let is_tree = self.keeps_candidates || num_tree_tokens > num_draft_tokens;
        num_draft_tokens > 0 && is_tree && supports_trees(task.spec())
    }

    fn resume(&mut self, task: &mut Task) -> Option<StepProgress> {
        let spec = shared_spec(task);
        if task.remaining_context().is_empty() { proposal(task, &spec) } else { None }
    }
}

impl Propose {
    /// Whether the task proposes a tree with branches: its tree has begun to grow, or these are its first
    /// rows and there is room for all rows of the tree.
    fn grows_tree(&self, task: &Task, rows: &OutputRows<'_>) -> bool {
        let max_tree_rows = match rows {
            OutputRows::Logits { max_tree_rows, .. } => *max_tree_rows,
            OutputRows::DeviceDraws { max_tree_rows, candidates, .. } if !candidates.is_empty() => {
                *max_tree_rows
            }
            OutputRows::DeviceDraws { .. } => 0,
        };
        let (num_draft_tokens, _) = asked(task);
        let is_first = task.guesses.token_ids.is_empty() && task.tree_rows > 0;
        let most_rows = || TreeGrowth::max_rows(num_draft_tokens as usize, task.tree_rows);
        let has_room = || most_rows() <= max_tree_rows as usize;
        task.tree.is_some() || (is_first && self.wants_candidates(task) && max_tree_rows > 0 && has_room())
    }
}

/// Adds the candidates of these rows to the task's tree. Returns the proposal once the tree is complete.
fn grow(task: &mut Task, mut rows: OutputRows<'_>) -> Result<StepProgress, DrawError> {
    let spec = shared_spec(task);
    let start = task.step.start();
    let (num_draft_tokens, num_tree_tokens) = asked(task);
    let num_positions = num_draft_tokens.min(spec.max_len.saturating_sub(start).max(1));
    let mut tree = match task.tree.take() {
        Some(tree) => tree,
        None => TreeGrowth::new(num_positions as usize, num_tree_tokens as usize, task.tree_rows),
    };
    let mut found = Vec::new();
    for (row, path) in tree.next_paths().iter().enumerate() {
        task.cached.append(path);
        let several = candidates(task, &spec, (&mut rows, row));
        task.cached.truncate(start);
        found.push(several?);
    }
    tree.add_candidates(&found, |id| spec.stop_token_ids.contains(&id));
    if tree.num_next() > 0 {
        task.tree = Some(tree);
        return Ok(StepProgress::Continue);
    }
    let draft = tree.draft();
    // As with a chain, all first children but the last are cached.
    let path = draft.first_path();
    task.cached.append(&path[..path.len().saturating_sub(1)]);
    task.tree = Some(tree);
    let body = ReplyBody::Proposal(Proposal { start, draft });
    Ok(StepProgress::Done { body, keep: task.cached.len() })
}

/// Best tokens of a row, given the ids that the task holds.
fn candidates(
    task: &mut Task,
    spec: &SequenceSpec,
    (rows, row): (&mut OutputRows<'_>, usize),
) -> Result<Candidates, DrawError> {
    let position = task.cached.len();
    match rows {
        OutputRows::Logits { values, vocab_size, .. } => {
            let logits = &mut values[row * *vocab_size..(row + 1) * *vocab_size];
            guess_candidates(spec, task.cached.counts_mut(), (position, MAX_CANDIDATES), logits)
        }
        OutputRows::DeviceDraws { drawn, candidates, .. } => {
            drawn[row].token(position)?;
            Ok(candidates[row].clone())
        }
    }
}

/// Clones the spec's `Arc`, so that the task can be modified while it is read.
fn shared_spec(task: &Task) -> Arc<SequenceSpec> {
    task.cached.spec().cloned().expect("an admitted step has a spec")
}

/// Requested number of positions and of tokens.
fn asked(task: &Task) -> (u32, u32) {
    match task.step.work {
        Work::Propose { num_draft_tokens, num_tree_tokens } => (num_draft_tokens, num_tree_tokens),
        Work::Feed | Work::Verify { .. } => {
            unreachable!("admission refuses verify steps at a draft worker")
        }
    }
}

/// Guesses the token after the row. If several are wanted, appends the alternatives to the task's candidates.
fn guess_next(
    task: &mut Task,
    spec: &SequenceSpec,
    wants_several: bool,
    mut rows: OutputRows<'_>,
) -> Result<Guess, DrawError> {
    if wants_several {
        let several = candidates(task, spec, (&mut rows, 0))?;
        let token_id = several.token_ids[0];
        task.candidates.push(several);
        return Ok(Guess { token_id, q: Vec::new() });
    }
    let position = task.cached.len();
    match rows {
        OutputRows::Logits { values, masks, .. } => {
            masks.iter().take(1).for_each(|mask| mask.apply(values));
            guess(spec, task.cached.counts_mut(), position, values)
        }
        OutputRows::DeviceDraws { drawn, .. } => {
            Ok(Guess { token_id: drawn[0].token(position)?, q: Vec::new() })
        }
    }
}

/// The guesses so far, where no token can follow them. The last one has run, but is not kept, as in any
/// proposal.
fn ended_proposal(task: &mut Task) -> StepProgress {
    let (start, draft) = (task.step.start(), task.guesses.clone());
    task.cached.truncate(start + (draft.token_ids.len() as u32).saturating_sub(1));
    let body = ReplyBody::Proposal(Proposal { start, draft });
    StepProgress::Done { body, keep: task.cached.len() }
}

/// Returns the proposal once it is complete.
fn proposal(task: &Task, spec: &SequenceSpec) -> Option<StepProgress> {
    let start = task.step.start();
    let (num_draft_tokens, num_tree_tokens) = asked(task);
    let chain = &task.guesses;
    let num_guessed = chain.token_ids.len() as u32;
    let stopped = chain.token_ids.last().is_some_and(|id| ends_draft(spec, *id));
    if num_guessed < num_draft_tokens && !stopped && start + num_guessed < spec.max_len {
        return None;
    }
    let has_candidates = task.candidates.len() == chain.token_ids.len();
    let draft: Draft = match has_candidates && num_tree_tokens > num_draft_tokens {
        true => with_leaves(&task.candidates, num_tree_tokens as usize),
        false => chain.clone(),
    };
    let body = ReplyBody::Proposal(Proposal { start, draft });
    Some(StepProgress::Done { body, keep: task.cached.len() })
}
