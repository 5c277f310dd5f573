//! Why a round has no draft.

/// Why the latest round of a sequence has no draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisabledReason {
    /// The request refuses drafts.
    Request,
    /// The operator's maximum draft length for the task type is 0, or the draft length is fixed at 0.
    Policy,
    /// The draft worker refused the sequence.
    DraftRefused,
    /// No draft worker fits the sequence or has capacity.
    NoDraftWorker,
    /// The draft worker does not answer.
    DraftSilent,
    /// Drafts would not make the lane faster, or this round may not probe.
    DoesNotPay,
    /// The target has more sequences than the lane's policy allows for drafts.
    LaneMaxBatch,
    /// The lane's acceptance is below the minimum of its policy.
    LaneMinAcceptance,
}

impl DisabledReason {
    /// All variants.
    pub const ALL: [Self; 8] = [
        Self::Request,
        Self::Policy,
        Self::DraftRefused,
        Self::NoDraftWorker,
        Self::DraftSilent,
        Self::DoesNotPay,
        Self::LaneMaxBatch,
        Self::LaneMinAcceptance,
    ];

    /// Name in usage, traces, metrics and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Policy => "policy",
            Self::DraftRefused => "draft_refused",
            Self::NoDraftWorker => "no_draft_worker",
            Self::DraftSilent => "draft_silent",
            Self::DoesNotPay => "does_not_pay",
            Self::LaneMaxBatch => "lane_max_batch",
            Self::LaneMinAcceptance => "lane_min_acceptance",
        }
    }
}
