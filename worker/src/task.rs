//! One step under way: from its admission until its reply.

use std::collections::VecDeque;
use std::time::Instant;

use scheduling::batch::StepRows;
use scheduling::batch_former::ReadyStep;
use speculation::cached_sequence::CachedSequence;
use speculation::step::PromptLogprobs;
use speculation::tree::{Candidates, TreeGrowth};
use speculation::{Draft, Reply, ReplyBody, SequenceSpec, Step, TokenId, TokenLogprobs, Work};

use crate::ahead::Found;
use crate::table::SequenceKey;

/// Names the KV of one sequence at a [`crate::Method`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(pub u64);

/// How far a task is with looking for KV that others have computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixLookup {
    /// It has not looked.
    Wanted,
    /// Another one is about to compute what comes next: it looks again before the next forward.
    Waiting,
    /// What is left is computed.
    Done,
}

/// One step under way; it owns the cached sequence for that time.
#[derive(Debug)]
pub struct Task {
    /// Whose step.
    pub key: SequenceKey,
    /// The sequence's KV.
    pub slot: Slot,
    /// The step; its context is in `cached` already.
    pub step: Step,
    /// What is held, the step's context included.
    pub cached: CachedSequence,
    /// When the step came in.
    pub received: Instant,
    /// When it was admitted.
    pub started: Instant,
    /// Context ids whose KV is there.
    pub context_done: usize,
    /// Context ids whose KV was computed for another sequence.
    pub num_cached: u32,
    /// Whether part of the context may have been computed for another sequence.
    pub prefix: PrefixLookup,
    /// Guesses that were there when the step came ([`crate::ahead`]).
    pub num_ahead: u32,
    /// What a draft worker guessed so far.
    pub guesses: Draft,
    /// The same with what came next at each position, where a tree is asked for.
    pub candidates: Vec<Candidates>,
    /// What a draft worker guesses instead, where it runs branches of a tree; the ids that it has run are not in `cached` until it is grown.
    pub tree: Option<TreeGrowth>,
    /// Of the last ids of the context, whether a draft worker would have drawn them itself.
    pub agreed: Vec<bool>,
    /// Scores of prompt ids, when asked for.
    pub scores: Vec<TokenLogprobs>,
    /// The span that the request's trace shows for this step.
    pub span: tracing::Span,
}

impl Task {
    /// A step that was just admitted.
    pub fn new(key: SequenceKey, slot: Slot, step: Step, cached: CachedSequence, received: Instant) -> Self {
        Self {
            key,
            slot,
            step,
            cached,
            received,
            started: Instant::now(),
            context_done: 0,
            num_cached: 0,
            num_ahead: 0,
            prefix: PrefixLookup::Wanted,
            guesses: Draft::default(),
            candidates: Vec::new(),
            tree: None,
            agreed: Vec::new(),
            scores: Vec::new(),
            span: tracing::Span::none(),
        }
    }

    /// The same, in its request's trace, if that has one: below the span of its round, or the request's where
    /// `span_id` is 0.
    pub fn traced(mut self, span_id: u64) -> Self {
        self.span = trace_span(&self.step, &self.cached, span_id);
        self
    }

    /// The same with what was computed ahead of it.
    pub fn begun_by(mut self, found: Found) -> Self {
        if self.is_comparable() {
            self.agreed = found.agreed;
        }
        let asked = match self.step.work {
            Work::Propose { num_draft_tokens, .. } => num_draft_tokens,
            Work::Feed | Work::Verify { .. } => 0,
        };
        // More may have been guessed than is asked for.
        let Found { mut guesses, mut candidates, .. } = found;
        guesses.truncate(asked as usize);
        candidates.truncate(asked as usize);
        self.num_ahead = guesses.len() as u32;
        self.cached.append(&guesses[..guesses.len().saturating_sub(1)]);
        self.slot = found.slot;
        self.context_done = found.context_done;
        self.guesses = Draft::chain(guesses);
        self.candidates = candidates;
        self.prefix = PrefixLookup::Done;
        self
    }

    /// The sequence's spec.
    pub fn spec(&self) -> &SequenceSpec {
        self.cached.spec().expect("an admitted step has a spec")
    }

    /// Ids still to be run before the work begins.
    pub fn context_left(&self) -> &[TokenId] {
        &self.step.append_ids[self.context_done..]
    }

    /// Ids to run in the same forward, right behind the context.
    pub fn drafted(&self) -> &[TokenId] {
        match &self.step.work {
            Work::Verify { draft } => &draft.token_ids,
            Work::Feed | Work::Propose { .. } => &[],
        }
    }

    /// The parents of [`Task::drafted`], where these are a token tree.
    pub fn parents(&self) -> &[u32] {
        match &self.step.work {
            Work::Verify { draft } => &draft.parents,
            Work::Feed | Work::Propose { .. } => &[],
        }
    }

    /// How many rows the role decides on behind the forward that ends the context, or one of those behind it.
    pub fn num_decided(&self) -> usize {
        self.tree.as_ref().map_or(1 + self.drafted().len(), TreeGrowth::num_next)
    }

    /// Rows that it still wants of the next forwards.
    pub fn rows_left(&self) -> StepRows {
        if let Some(tree) = &self.tree {
            return StepRows { context: 0, tail: tree.num_next() as u32 };
        }
        StepRows::left(&self.step, self.context_done, self.guesses.token_ids.len())
    }

    /// The same as the batch former sees it.
    pub fn ready_step(&self) -> ReadyStep<SequenceKey> {
        ReadyStep::new(self.key, &self.step, &self.cached, self.rows_left())
    }

    /// See [`Step::is_scoring`].
    pub fn is_scoring(&self) -> bool {
        self.step.is_scoring(self.spec())
    }

    /// See [`Step::is_comparable`].
    pub fn is_comparable(&self) -> bool {
        self.step.is_comparable(self.spec())
    }

    /// The scores, as the reply carries them.
    pub fn take_scores(&mut self) -> Option<PromptLogprobs> {
        let start = self.step.base_len + 1;
        self.spec().prompt_logprobs?;
        Some(PromptLogprobs { start, entries: std::mem::take(&mut self.scores) })
    }

    /// The reply to this step.
    pub fn reply(&self, body: ReplyBody) -> Reply {
        let (num_cached, num_ahead) = (self.num_cached, self.num_ahead);
        Reply { agreed: self.agreed.clone(), num_cached, num_ahead, ..Reply::to(&self.step, body) }
    }
}

/// The step's own span, where the request is traced.
fn trace_span(step: &Step, cached: &CachedSequence, span_id: u64) -> tracing::Span {
    let traceparent = cached.spec().map_or("", |spec| spec.traceparent.as_str());
    if traceparent.is_empty() {
        return tracing::Span::none();
    }
    let (step_seq, rows) = (step.step_seq, step.append_ids.len());
    let span = match &step.work {
        Work::Feed => tracing::info_span!("feed", outrider.spec.step_seq = step_seq, outrider.rows = rows),
        Work::Propose { num_draft_tokens, .. } => {
            tracing::info_span!(
                "draft",
                outrider.spec.step_seq = step_seq,
                outrider.rows = rows,
                outrider.spec.k = num_draft_tokens
            )
        }
        Work::Verify { draft } => {
            let (k, num_tokens) = (draft.depth(), draft.token_ids.len());
            let accepted = tracing::field::Empty;
            tracing::info_span!(
                "verify",
                outrider.spec.step_seq = step_seq,
                outrider.rows = rows + num_tokens,
                outrider.spec.k = k,
                outrider.spec.accepted = accepted
            )
        }
    };
    service::telemetry::set_parent_in_trace(&span, traceparent, span_id);
    span
}

/// Takes tasks out of the queue, in order of index.
pub fn take_tasks(tasks: &mut VecDeque<Task>, mut indices: Vec<usize>) -> Vec<Task> {
    indices.sort_unstable();
    let mut taken: Vec<Task> =
        indices.into_iter().rev().map(|i| tasks.remove(i).expect("planned tasks are in the queue")).collect();
    taken.reverse();
    taken
}
