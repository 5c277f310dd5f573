//! Explanation of a lane's choice of k, as plain data for operators and tests. It decides nothing.

use serde::Serialize;

use super::{JointChoice, Load};

/// State of a lane's controller.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The present k.
    pub k: u32,
    /// Maximum k.
    pub max_k: u32,
    /// Tokens of its drafts beside the chain, if the target verifies trees.
    pub leaves: u32,
    /// By rank, the probability that a sibling is drawn where the first token was not.
    pub siblings: Vec<f64>,
    /// Acceptance after such a sibling, as a share of a chain's; 0 if trees have no branches.
    pub continuation: f64,
    /// Reason for this k.
    pub why: ChoiceReason,
    /// Load at the lane's latest decision; absent before its first round.
    pub load: Option<Load>,
    /// The lane's choice if all lanes that share its target drafted.
    pub joint: JointChoice,
    /// By position, the probability of acceptance given that all earlier positions were accepted.
    pub acceptance: Vec<f64>,
    /// By position, the probability that it is reached and accepted.
    pub acceptance_by_position: Vec<f64>,
    /// By position, the probability that the draft worker proposes that far in time.
    pub supply: Vec<f64>,
    /// Number of judged positions in the acceptance estimate.
    pub judged: f64,
    /// Prediction for each k at that load, corrected by all rounds measured so far.
    pub outlook: Vec<Outlook>,
    /// Recently measured throughput at this k, to compare with the outlook; 0 before the first round.
    pub measured_tokens_per_second: f64,
    /// Number of lane rounds so far.
    pub lane_rounds: u64,
    /// Number of probes.
    pub probes: u64,
    /// The latest changes of k, oldest first.
    pub changes: Vec<Change>,
}

/// Reason for a lane's k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChoiceReason {
    /// It has the highest predicted throughput.
    Best,
    /// Another k has a higher prediction, but not by the required margin.
    WithinHysteresis,
    /// A longer draft is best beside the present other lanes, but was not in the lane round before.
    Confirming,
    /// It has just changed, and round times have not settled.
    Settling,
    /// It has just changed to the k with the highest prediction.
    Moving,
}

/// Prediction for one k.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Outlook {
    /// The k.
    pub k: u32,
    /// Tokens that drafts of this k get beside the chain.
    pub num_leaves: u32,
    /// Expected number of committed tokens per round, including the target's own.
    pub expected_tokens: f64,
    /// Priced wait for the draft, from table and network time.
    pub table_draft_us: f64,
    /// Priced verify time, from table and network time.
    pub table_verify_us: f64,
    /// Wait for the draft, corrected by measured rounds.
    pub draft_wait_us: f64,
    /// Verify time, corrected by measured rounds.
    pub verify_us: f64,
    /// Committed tokens of the whole lane.
    pub tokens_per_second: f64,
    /// Relative increase in the round time of lanes that share the target, compared with k = 0; 0 if there
    /// are none.
    pub others_delay: f64,
}

impl Outlook {
    /// Whether this k delays other lanes, which did not choose it.
    pub(super) fn delays_others(&self) -> bool {
        self.others_delay > 0.0
    }

    /// The prediction for a lane of `sequences`, with this ratio of measured to priced round times.
    pub(super) fn corrected(self, factor: f64, sequences: u32) -> Self {
        let (draft_wait_us, verify_us) = (self.table_draft_us * factor, self.table_verify_us * factor);
        let tokens = f64::from(sequences.max(1)) * self.expected_tokens;
        let tokens_per_second = tokens * 1e6 / (draft_wait_us + verify_us).max(1.0);
        Self { draft_wait_us, verify_us, tokens_per_second, ..self }
    }
}

/// One change of k.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// Lane round of the change.
    pub lane_round: u64,
    /// Previous k.
    pub from: u32,
    /// New k.
    pub to: u32,
    /// Logarithm of the ratio of the predicted throughputs.
    pub gain: f64,
}
