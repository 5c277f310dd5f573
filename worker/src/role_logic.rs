//! The difference between draft and target workers: what they do with the logits after a step's context, or
//! with tokens drawn from them.

use speculation::acceptance::DrawResult;
use speculation::logits::{DrawError, TokenMask};
use speculation::tree::Candidates;
use speculation::{ReplyBody, TokenLogprobs};

use crate::Task;

/// Result of a role's decision.
#[derive(Debug)]
pub enum StepProgress {
    /// Run the last guess, or the next rows of the task's tree, and decide again.
    Continue,
    /// The step is done; KV from position `keep` on is discarded.
    Done {
        /// The reply.
        body: ReplyBody,
        /// Number of ids whose KV stays; equals the cached sequence's length.
        keep: u32,
    },
}

/// Output rows of a forward: the row of the context's last id and of every id after it in the same forward.
/// After [`StepProgress::Continue`], the row of the last guess, or the rows of the tree that ran.
#[derive(Debug)]
pub enum OutputRows<'a> {
    /// Raw logits, row-major; the role may modify them in place.
    Logits {
        /// All rows.
        values: &'a mut [f32],
        /// Logits per row.
        vocab_size: usize,
        /// For a sequence with a grammar: the allowed tokens per row, for the rows that can be reached.
        masks: &'a [TokenMask],
        /// Number of token tree rows that the sequence still has room for; 0 if none can run.
        max_tree_rows: u32,
    },
    /// Tokens that the device drew, if the sequence needs nothing else.
    DeviceDraws {
        /// One draw per row.
        drawn: &'a [DrawResult],
        /// Log probabilities of the drawn tokens, one entry per row, if the sequence requests them and the
        /// role reports them.
        scores: &'a [TokenLogprobs],
        /// Best tokens of each row, if the role requests them ([`RoleLogic::wants_candidates`]).
        candidates: &'a [Candidates],
        /// As in [`OutputRows::Logits`].
        max_tree_rows: u32,
    },
}

/// Role-specific part of a step.
pub trait RoleLogic: Send + 'static {
    /// Decides from a task's rows. Ids after the context whose KV stays are appended to the task's cached
    /// sequence.
    fn process_rows(&mut self, task: &mut Task, rows: OutputRows<'_>) -> Result<StepProgress, DrawError>;

    /// Whether a device that draws should list the best tokens of the rows from which this task is decided.
    fn wants_candidates(&self, _task: &Task) -> bool {
        false
    }

    /// Decides on a task whose rows were computed ahead of its step; `None` if it needs more rows.
    fn resume(&mut self, _task: &mut Task) -> Option<StepProgress> {
        None
    }
}
