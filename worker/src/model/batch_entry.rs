//! A task's part of a forward: the ids that run as rows, the rows that need logits, and whether draws suffice
//! instead.

use engine::{DrawRequest, PromptRows};
use scheduling::batch::StepChunk;
use speculation::{Role, TokenId, Work};

use super::ModelExecutor;
use crate::role_logic::RoleLogic;
use crate::task::Task;

/// The part of one task in a forward.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BatchEntry {
    /// Index of the task in the queue.
    pub(super) task: usize,
    /// Number of context ids in the entry.
    pub(super) num_context: usize,
    /// Whether the context ends here, so that the role decides after this forward.
    pub(super) ends_context: bool,
    pub(super) token_ids: Vec<TokenId>,
    pub(super) num_logits: usize,
    /// If the last ids are a token tree: number of its rows that already ran.
    pub(super) num_stored: usize,
    /// Parents of all rows of the tree.
    pub(super) parents: Vec<u32>,
    /// Ids of all rows of the token tree that a draft is growing.
    pub(super) tree_ids: Vec<TokenId>,
}

/// Returns the ids of `task` that run next and the number of logits rows that they need.
pub(super) fn batch_entry(task: &Task, share: &StepChunk, role: Role) -> BatchEntry {
    let (num_context, ends_context) = (share.context as usize, share.ends_context);
    let mut token_ids = task.remaining_context()[..num_context].to_vec();
    let (mut num_logits, mut num_stored, mut parents, mut tree_ids) = (0, 0, Vec::new(), Vec::new());
    if ends_context && task.step.work != Work::Feed {
        // A draft in progress has no context left: its last guess is the row.
        token_ids.extend(task.guesses.token_ids.last().filter(|_| num_context == 0));
        token_ids.extend_from_slice(task.drafted());
        parents.extend_from_slice(task.parents());
        num_logits = task.num_output_rows();
        if let Some(tree) = &task.tree {
            (token_ids, tree_ids) = (tree.next_ids(), tree.row_ids());
            (num_stored, parents) = (tree.num_stored(), tree.row_parents());
        }
    }
    if task.is_scoring() || (role == Role::Draft && task.is_comparable()) {
        num_logits = token_ids.len();
    }
    BatchEntry {
        task: share.index,
        num_context,
        ends_context,
        token_ids,
        num_logits,
        num_stored,
        parents,
        tree_ids,
    }
}

impl<D: RoleLogic> ModelExecutor<D> {
    /// Whether this entry's context is compared with what this draft worker would have drawn.
    pub(super) fn compares(&self, task: &Task, entry: &BatchEntry) -> bool {
        self.role == Role::Draft && task.is_comparable() && entry.num_context > 0
    }

    /// Returns a draw request if draws are all that the task needs from its rows.
    pub(super) fn draw_request<'a>(&self, task: &'a Task, entry: &'a BatchEntry) -> Option<DrawRequest<'a>> {
        let compares = self.compares(task, entry);
        let decides = entry.ends_context && task.step.work != Work::Feed;
        let scores = task.is_scoring() && entry.num_context > 0;
        // A request has one list of ids. It can hold both scored and decided rows only if no ids are drafted
        // and the decided row lies after the prompt.
        let is_behind = task.drafted().is_empty() && task.step.start() >= task.spec().prompt_len;
        let is_one_list = !(scores && decides) || is_behind;
        if !(decides || compares || scores) || !is_one_list || !self.engine.draws(task.spec()) {
            return None;
        }
        let (prefix, suffix) = if compares || scores {
            // Every context row is drawn or scored, each after one more id.
            let first = task.step.base_len as usize + task.context_done;
            task.cached.ids()[..first + entry.num_context].split_at(first + 1)
        } else if !entry.tree_ids.is_empty() {
            (task.cached.ids(), &entry.tree_ids[..])
        } else {
            let last_guess = task.guesses.token_ids.last().filter(|_| entry.num_context == 0);
            (task.cached.ids(), last_guess.map_or(task.drafted(), std::slice::from_ref))
        };
        // A draft's log probabilities of its guesses are not used.
        let logprobs = task.spec().logprobs.filter(|_| decides && self.role == Role::Target);
        let next = task.step.append_ids.get(task.context_done + entry.num_context).copied();
        let top_n = task.spec().prompt_logprobs.filter(|_| scores);
        let prompt = top_n.map(|top_n| PromptRows { top_n, next });
        let wants_candidates = decides && self.role_logic.wants_candidates(task);
        Some(DrawRequest {
            spec: task.spec(),
            prefix,
            suffix,
            vocab_size: self.vocab_size,
            logprobs,
            prompt,
            candidate_rows: if wants_candidates { task.num_output_rows() } else { 0 },
        })
    }
}
