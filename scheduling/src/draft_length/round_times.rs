//! Measured times of a round, as plain data.

use std::time::Duration;

/// Measured times of a round of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundTimes {
    /// Number of tokens that the draft worker was asked for; 0: it was not asked.
    pub num_draft_tokens: u32,
    /// Number of committed ids that the request brought to the draft worker.
    pub draft_rows: u32,
    /// Time from the request until verification began.
    pub draft_wait: Duration,
    /// Time from then until the span arrived.
    pub verify: Duration,
    /// Number of committed tokens.
    pub committed: u32,
    /// Number of sibling rows in its verify step.
    pub num_leaves: u32,
    /// Number of sequences in the forward that verified it, and in that of the sequence's round before; 0:
    /// there was none.
    pub forward_sequences: [u32; 2],
    /// Whether the target completed a forward with prompt rows since the round began.
    pub met_prompts: bool,
}
