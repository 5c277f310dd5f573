//! One step in progress, from its admission to its reply.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use scheduling::batch::StepRows;
use scheduling::batch_former::ReadyStep;
use speculation::cached_sequence::CachedSequence;
use speculation::step::PromptLogprobs;
use speculation::tree::{Candidates, TreeGrowth};
use speculation::{Draft, Reply, ReplyBody, SequenceSpec, Step, TokenId, TokenLogprobs, Work};

use crate::ahead::PrecomputedDraft;
use crate::table::SequenceKey;

/// Identifies the KV of one sequence at a [`crate::StepExecutor`].
pub use engine::SlotId as Slot;

/// Progress of a task's lookup in the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixLookup {
    /// Not looked up yet.
    Wanted,
    /// Another task is about to compute the next blocks; look again before the next forward.
    Waiting,
    /// The rest of the context has to be computed.
    Done,
}

/// One step in progress; owns the cached sequence until it is done.
#[derive(Debug)]
pub struct Task {
    /// The step's sequence.
    pub key: SequenceKey,
    /// The slot of the sequence's KV.
    pub slot: Slot,
    /// The step; its context is already in `cached`.
    pub step: Step,
    /// The cached sequence, the step's context included.
    pub cached: CachedSequence,
    /// When the step arrived.
    pub received: Instant,
    /// When the step was admitted.
    pub started: Instant,
    /// Whether a forward has run rows of it. Set by the executor.
    pub has_run: bool,
    /// When its first forward began.
    pub first_forward: Option<Instant>,
    /// Number of context ids whose KV is computed.
    pub context_done: usize,
    /// Number of context ids whose KV came from the prefix cache.
    pub num_cached: u32,
    /// State of the prefix cache lookup.
    pub prefix: PrefixLookup,
    /// Number of guesses that were ready when the step arrived ([`crate::ahead`]).
    pub num_ahead: u32,
    /// The draft worker's guesses so far.
    pub guesses: Draft,
    /// The guesses with the alternatives at each position, if a tree is requested.
    pub candidates: Vec<Candidates>,
    /// Maximum rows per forward of a tree that a draft worker grows; 0: none can run.
    pub tree_rows: usize,
    /// The tree, if a draft worker runs its branches; replaces `guesses`. Ids that ran are not in `cached`
    /// until the tree is grown.
    pub tree: Option<TreeGrowth>,
    /// For the last ids of the context, whether the draft worker would have drawn them itself.
    pub agreed: Vec<bool>,
    /// Scores of prompt ids, if requested.
    pub scores: Vec<TokenLogprobs>,
    /// The step's span in the request's trace.
    pub span: tracing::Span,
}

impl Task {
    /// Creates the task of a step that was just admitted.
    pub fn new(key: SequenceKey, slot: Slot, step: Step, cached: CachedSequence, received: Instant) -> Self {
        Self {
            key,
            slot,
            step,
            cached,
            received,
            started: Instant::now(),
            has_run: false,
            first_forward: None,
            context_done: 0,
            num_cached: 0,
            num_ahead: 0,
            prefix: PrefixLookup::Wanted,
            guesses: Draft::default(),
            candidates: Vec::new(),
            tree_rows: 0,
            tree: None,
            agreed: Vec::new(),
            scores: Vec::new(),
            span: tracing::Span::none(),
        }
    }

    /// Adds the task to its request's trace, if it has one: below the span of its round, or below the
    /// request's span if `span_id` is 0.
    pub fn traced(mut self, span_id: u64) -> Self {
        self.span = trace_span(&self.step, &self.cached, span_id);
        self
    }

    /// Applies the work computed ahead of the step.
    pub fn resumed_from(mut self, found: PrecomputedDraft) -> Self {
        if self.is_comparable() {
            self.agreed = found.agreed;
        }
        let asked = match self.step.work {
            Work::Propose { num_draft_tokens, .. } => num_draft_tokens,
            Work::Feed | Work::Verify { .. } => 0,
        };
        // There may be more guesses than the step requests.
        let PrecomputedDraft { mut guesses, mut candidates, .. } = found;
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

    /// Time until its first forward began, or until its admission if it has run none.
    pub fn queue_time(&self) -> Duration {
        self.first_forward.unwrap_or(self.started).saturating_duration_since(self.received)
    }

    /// The sequence's spec.
    pub fn spec(&self) -> &SequenceSpec {
        self.cached.spec().expect("an admitted step has a spec")
    }

    /// Context ids that still have to run.
    pub fn remaining_context(&self) -> &[TokenId] {
        &self.step.append_ids[self.context_done..]
    }

    /// Drafted ids, which run in the same forward right after the context.
    pub fn drafted(&self) -> &[TokenId] {
        match &self.step.work {
            Work::Verify { draft } => &draft.token_ids,
            Work::Feed | Work::Propose { .. } => &[],
        }
    }

    /// Parents of [`Task::drafted`] if it is a token tree, otherwise empty.
    pub fn parents(&self) -> &[u32] {
        match &self.step.work {
            Work::Verify { draft } => &draft.parents,
            Work::Feed | Work::Propose { .. } => &[],
        }
    }

    /// Number of rows that the role decides on after the forward that ends the context, or after a later one.
    pub fn num_output_rows(&self) -> usize {
        self.tree.as_ref().map_or(1 + self.drafted().len(), TreeGrowth::num_next)
    }

    /// Rows that the task still needs.
    pub fn rows_left(&self) -> StepRows {
        if let Some(tree) = &self.tree {
            return StepRows::of_tree(tree);
        }
        StepRows::remaining(&self.step, self.context_done, self.guesses.token_ids.len())
    }

    /// The same as input of the batch former.
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

    /// Takes the scores for the reply.
    pub fn take_prompt_scores(&mut self) -> Option<PromptLogprobs> {
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

/// Creates the step's span, if the request is traced.
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

/// Removes the tasks at `indices` from the queue; returns them in order of index.
pub(crate) fn take_tasks(tasks: &mut VecDeque<Task>, mut indices: Vec<usize>) -> Vec<Task> {
    indices.sort_unstable();
    // Each removal moves the tasks behind it forward.
    let removals = indices.into_iter().enumerate();
    removals
        .map(|(removed, index)| tasks.remove(index - removed).expect("planned tasks are in the queue"))
        .collect()
}

/// Removes the tasks at these indices from the queue; returns them with their replies in order of index.
pub fn take_finished(
    tasks: &mut VecDeque<Task>,
    mut finished: Vec<(usize, ReplyBody)>,
) -> Vec<(Task, ReplyBody)> {
    finished.sort_unstable_by_key(|(index, _)| *index);
    let (indices, bodies): (Vec<usize>, Vec<ReplyBody>) = finished.into_iter().unzip();
    take_tasks(tasks, indices).into_iter().zip(bodies).collect()
}
