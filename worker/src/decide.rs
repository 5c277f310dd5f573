//! Where draft and target differ: what is done with the logits behind a step's context, or with what was drawn from them.

use speculation::acceptance::RowDraw;
use speculation::logits::{DrawError, TokenMask};
use speculation::{ReplyBody, TokenLogprobs};

use crate::Task;

/// What follows from the rows.
#[derive(Debug)]
pub enum Decision {
    /// Run the last guess, or the next rows of the task's tree, and decide again.
    Continue,
    /// The step is done; KV from `keep` on is of no use.
    Done {
        /// The answer.
        body: ReplyBody,
        /// Ids whose KV stays; equals the cached sequence's length.
        keep: u32,
    },
}

/// The rows of the context's last id and of every id that ran behind it in the same forward; after [`Decision::Continue`], the
/// one row of the last guess, or the rows of the tree that ran.
#[derive(Debug)]
pub enum Rows<'a> {
    /// Raw logits, row-major, which may be changed in place.
    Logits {
        /// All rows.
        values: &'a mut [f32],
        /// Numbers in one.
        vocab_size: usize,
        /// Of a sequence with a grammar: which tokens may be drawn, row by row, as far as rows can be reached.
        masks: &'a [TokenMask],
        /// How many rows of a token tree the sequence has room for behind these; 0 where none can run.
        tree_room: u32,
    },
    /// What the device drew from each, where that is all the sequence needs.
    Drawn {
        /// One a row.
        drawn: &'a [RowDraw],
        /// What it says of the drawn tokens' probabilities: one a row where the sequence asks for them and the role reports them.
        scores: &'a [TokenLogprobs],
    },
}

/// The role's own part of a step.
pub trait Decide: Send + 'static {
    /// Decides from a task's rows. Ids whose KV stays beyond the context are appended to the task's cached sequence.
    fn decide(&mut self, task: &mut Task, rows: Rows<'_>) -> Result<Decision, DrawError>;

    /// Decides on a task that came with rows of its own, which were run ahead of its step; nothing while it needs more of them.
    fn resume(&mut self, _task: &mut Task) -> Option<Decision> {
        None
    }
}
