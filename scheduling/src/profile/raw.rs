//! Format of a profile's file before any check. Unknown fields are errors, since a misspelt field would
//! otherwise be ignored silently.

use serde::Deserialize;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawProfile {
    pub(super) name: String,
    pub(super) vocab_size: u32,
    pub(super) max_model_len: u32,
    /// One way.
    pub(super) wire_us: f64,
    #[serde(default)]
    pub(super) noise: f64,
    pub(super) target: RawPool,
    pub(super) draft: RawPool,
    pub(super) acceptance: Vec<RawAcceptance>,
}

/// `[target]` and `[draft]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPool {
    pub(super) device: String,
    #[serde(default = "one")]
    pub(super) workers: u32,
    pub(super) max_batch_rows: u32,
    pub(super) kv_blocks: u64,
    pub(super) kv_block_size: u32,
    pub(super) step: RawStep,
}

/// `[target.step]` and `[draft.step]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawStep {
    /// (rows, microseconds), ascending in both.
    pub(super) micros_by_rows: Vec<(u32, f64)>,
    /// Rows are rounded up to a multiple of this.
    #[serde(default = "one")]
    pub(super) stair_rows: u32,
    /// Per KV token held by the forward's sequences.
    #[serde(default)]
    pub(super) kv_us_per_token: f64,
    /// Per KV token that a row attends to.
    #[serde(default)]
    pub(super) kv_us_per_row_token: f64,
    /// Speed of prompt rows.
    pub(super) prefill_tokens_per_second: f64,
}

/// `[[acceptance]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawAcceptance {
    /// Empty: every task type without a separate entry.
    #[serde(default)]
    pub(super) task_type: String,
    /// Second from which the entry applies.
    #[serde(default)]
    pub(super) from_s: f64,
    pub(super) by_position: Vec<f64>,
}

fn one() -> u32 {
    1
}
