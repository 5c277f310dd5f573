//! What a lane's choice of k rests on, as plain data for people and tests. It decides nothing.

use serde::Serialize;

use super::{Joint, Load};

/// A lane's state of mind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The k chosen now.
    pub k: u32,
    /// The largest k that may be chosen.
    pub max_k: u32,
    /// Siblings that its drafts get as leaves, where the target takes trees.
    pub leaves: u32,
    /// By rank, the chance of a sibling to be drawn where the first was not.
    pub siblings: Vec<f64>,
    /// Why this k.
    pub why: Why,
    /// What shared the workers when the lane last decided; nothing before its first round.
    pub load: Option<Load>,
    /// What the lane would do if all lanes that share its target drafted.
    pub joint: Joint,
    /// By position, the chance to be accepted where all before were.
    pub acceptance: Vec<f64>,
    /// By position, the chance to be reached and accepted.
    pub acceptance_by_position: Vec<f64>,
    /// By position, the chance that the draft worker proposes that far in time.
    pub supply: Vec<f64>,
    /// Judged positions that acceptance rests on, decayed.
    pub judged: f64,
    /// What each k promises.
    pub outlook: Vec<Outlook>,
    /// What rounds at this k committed lately, to compare with the outlook; 0 before the first.
    pub measured_tokens_per_second: f64,
    /// Rounds of the whole lane so far.
    pub lane_rounds: u64,
    /// Of these, probes.
    pub probes: u64,
    /// The latest moves of k, oldest first.
    pub changes: Vec<Change>,
}

/// Why a lane is at its k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It promises the most.
    Best,
    /// Another promises more, but not by enough.
    WithinHysteresis,
    /// It has just been moved, and rounds are not yet what they will be.
    Settling,
    /// It has just moved towards the one that promises the most.
    Moving,
}

/// What one k promises.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outlook {
    /// Which k.
    pub k: u32,
    /// Siblings that drafts of this k get as leaves.
    pub num_leaves: u32,
    /// Tokens that a round is expected to commit, the target's own included.
    pub expected_tokens: f64,
    /// The wait for the draft by table and wire alone.
    pub table_draft_us: f64,
    /// The verification by table and wire alone.
    pub table_verify_us: f64,
    /// The wait for the draft, as rounds were lately.
    pub draft_wait_us: f64,
    /// The verification, as rounds were lately.
    pub verify_us: f64,
    /// Committed tokens of the whole lane.
    pub tokens_per_second: f64,
    /// By which part the rounds of lanes that share the target are longer than if this lane drafted nothing; 0 where there are none.
    pub others_delay: f64,
}

/// One move of k.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// In which round of the lane.
    pub lane_round: u64,
    /// From this k.
    pub from: u32,
    /// To this one.
    pub to: u32,
    /// How much more it promised, as a part of what the lane had.
    pub gain: f64,
}
