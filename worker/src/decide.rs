//! Where draft and target differ: what is done with the logits behind a step's context.

use speculation::ReplyBody;
use speculation::logits::DrawError;

use crate::Task;

/// What follows from the logits.
#[derive(Debug)]
pub enum Decision {
    /// Run the last guess as one more row, and decide again.
    Continue,
    /// The step is done; KV from `keep` on is of no use.
    Done {
        /// The answer.
        body: ReplyBody,
        /// Ids whose KV stays; equals the holding's length.
        keep: u32,
    },
}

/// The role's own part of a step.
pub trait Decide: Send + 'static {
    /// `logits` are the rows (row-major, `vocab_size` each) of the context's last id and of every id that ran behind it in
    /// the same forward; after [`Decision::Continue`], the one row of the last guess. They may be changed in place.
    /// Ids whose KV stays beyond the context are appended to the task's holding.
    fn decide(
        &mut self,
        task: &mut Task,
        logits: &mut [f32],
        vocab_size: usize,
    ) -> Result<Decision, DrawError>;
}
