//! Drafting with a model: one token per forward, drawn from the draft's own logits with the noise that the
//! target will use. If a tree is requested, the likeliest alternatives run as well, several rows per forward
//! ([`speculation::tree::TreeGrowth`]). Otherwise the alternatives are sent as leaves of the chain, without a
//! forward of their own: on devices that cannot run tree rows, if there is no space for the rows, and at
//! workers that draft ahead, whose guesses are chains.

use std::sync::Arc;

use speculation::acceptance::{Guess, guess, guess_several, takes_trees};
use speculation::logits::DrawError;
use speculation::tree::{TreeGrowth, with_leaves};
use speculation::{AcceptanceMode, Draft, Proposal, ReplyBody, SequenceSpec, Work};
use worker::{Decide, Decision, Rows, Task};

/// Maximum tokens per position of a proposal. The target rarely draws lower-ranked ones.
const MAX_CANDIDATES: usize = 8;

/// Proposes drafts; see [`speculation::acceptance::guess`].
#[derive(Debug)]
pub struct Propose {
    /// Whether to keep the alternatives of chains as well, for [`worker::ahead`]. Trees then have leaves
    /// only.
    pub keeps_candidates: bool,
}

impl Decide for Propose {
    /// `rows`: one row, after the context or after the last guess.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError> {
        let rows = match self.rows_of_branches(task, rows) {
            Ok(logits) => return grow(task, logits),
            Err(rows) => rows,
        };
        // The guess that led to this row is cached now.
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

impl Propose {
    /// Returns the logits and the row width if the task's tree has branches; otherwise returns `rows`.
    fn rows_of_branches<'a>(&self, task: &Task, rows: Rows<'a>) -> Result<(&'a mut [f32], usize), Rows<'a>> {
        let (num_draft_tokens, num_tree_tokens) = asked(task);
        let is_first = task.guesses.token_ids.is_empty() && !self.keeps_candidates;
        let is_tree = 0 < num_draft_tokens && num_draft_tokens < num_tree_tokens && takes_trees(task.spec());
        match rows {
            Rows::Logits { values, vocab_size, .. } if task.tree.is_some() => Ok((values, vocab_size)),
            Rows::Logits { values, vocab_size, tree_room, .. }
                if is_first
                    && is_tree
                    && TreeGrowth::most_rows(num_draft_tokens as usize) <= tree_room as usize =>
            {
                Ok((values, vocab_size))
            }
            rows => Err(rows),
        }
    }
}

/// Grows the task's tree from its output rows; returns the proposal once the tree is complete.
fn grow(task: &mut Task, (values, vocab_size): (&mut [f32], usize)) -> Result<Decision, DrawError> {
    let spec = shared_spec(task);
    let start = task.step.start();
    let (num_draft_tokens, num_tree_tokens) = asked(task);
    let num_positions = num_draft_tokens.min(spec.max_len.saturating_sub(start).max(1));
    let mut tree = match task.tree.take() {
        Some(tree) => tree,
        None => TreeGrowth::new(num_positions as usize, num_tree_tokens as usize),
    };
    let mut found = Vec::new();
    for (path, row) in tree.next_paths().iter().zip(values.chunks_exact_mut(vocab_size)) {
        task.cached.append(path);
        let position = task.cached.len();
        let several = guess_several(&spec, task.cached.counts_mut(), (position, MAX_CANDIDATES), row);
        task.cached.cut(start);
        found.push(several?);
    }
    tree.observe(&found, |id| spec.stop_token_ids.contains(&id));
    if tree.num_next() > 0 {
        task.tree = Some(tree);
        return Ok(Decision::Continue);
    }
    let draft = tree.draft();
    // As with a chain, all first children but the last are cached.
    let path = draft.first_path();
    task.cached.append(&path[..path.len().saturating_sub(1)]);
    task.tree = Some(tree);
    let body = ReplyBody::Proposal(Proposal { start, draft });
    Ok(Decision::Done { body, keep: task.cached.len() })
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
            unreachable!("the cached refuses other drawing steps at a draft worker")
        }
    }
}

/// Guesses the token after the row. If several are wanted, appends the alternatives to the task's candidates.
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

/// Returns the proposal once it is complete.
fn proposal(task: &Task, spec: &SequenceSpec) -> Option<Decision> {
    let start = task.step.start();
    let (num_draft_tokens, num_tree_tokens) = asked(task);
    let chain = &task.guesses;
    let num_guessed = chain.token_ids.len() as u32;
    // Nothing follows a stop token. In rejection mode the draft length must not depend on the drawn tokens.
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
