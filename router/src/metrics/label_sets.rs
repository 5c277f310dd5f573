//! The sets of labels of the router's metrics. Must not count anything.

use scheduling::scheduler::lanes::LaneKey;
use service::metrics::EncodeLabelSet;
use speculation::sequence::Anomaly;

use super::ChoiceOutcome;

/// Ranges of priorities in labels: the last priority of each range, and its name.
pub(super) const PRIORITY_RANGES: [(u8, &str); 4] = [(0, "0"), (7, "1-7"), (63, "8-63"), (u8::MAX, "64-255")];

/// All reasons for dropping part of a round.
pub(super) const ANOMALIES: [Anomaly; 5] = [
    Anomaly::StaleReply,
    Anomaly::UnusableProposal,
    Anomaly::MalformedReply,
    Anomaly::LateDraft,
    Anomaly::TargetResend,
];

/// vLLM numbers its engines; clients see the router as a single one.
pub(super) const ENGINE: &str = "0";

/// The labels of every vLLM series.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ModelLabels {
    pub(super) model_name: String,
    pub(super) engine: &'static str,
}

impl ModelLabels {
    pub(super) fn of(model: &str) -> Self {
        Self { model_name: model.to_owned(), engine: ENGINE }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PositionLabels {
    pub(super) model_name: String,
    pub(super) engine: &'static str,
    pub(super) position: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FinishLabels {
    pub(super) model_name: String,
    pub(super) engine: &'static str,
    pub(super) finished_reason: &'static str,
}

impl FinishLabels {
    pub(super) fn new(model: &ModelLabels, outcome: ChoiceOutcome) -> Self {
        let finished_reason = outcome.as_str();
        Self { model_name: model.model_name.clone(), engine: ENGINE, finished_reason }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct SloLabels {
    pub(super) model_name: String,
    pub(super) engine: &'static str,
    pub(super) slo: &'static str,
    pub(super) met: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLabels {
    pub(super) protocol: &'static str,
    pub(super) outcome: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLogLabels {
    pub(super) outcome: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct AnomalyLabels {
    pub(super) reason: &'static str,
}

impl AnomalyLabels {
    pub(super) fn of(anomaly: Anomaly) -> Self {
        let reason = match anomaly {
            Anomaly::StaleReply => "stale_reply",
            Anomaly::UnusableProposal => "unusable_proposal",
            Anomaly::MalformedReply => "malformed_reply",
            Anomaly::LateDraft => "late_draft",
            Anomaly::TargetResend => "target_resend",
        };
        Self { reason }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LookupLabels {
    pub(super) source: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PriorityLabels {
    pub(super) priority: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LoraLabels {
    pub(super) max_lora: &'static str,
    pub(super) running_lora_adapters: &'static str,
    pub(super) waiting_lora_adapters: &'static str,
}

/// No LoRA adapters are served.
pub(super) const NO_LORA: LoraLabels =
    LoraLabels { max_lora: "0", running_lora_adapters: "", waiting_lora_adapters: "" };

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LaneLabels {
    pub(super) model: String,
    pub(super) task_type: String,
    pub(super) temperature: &'static str,
}

impl LaneLabels {
    pub(super) fn of(lane: &LaneKey) -> Self {
        let LaneKey { model, task_type, temperature } = lane.clone();
        Self { model, task_type, temperature: temperature.as_str() }
    }
}

/// The label `draft` of a round for which a draft was requested or looked up, also if it came too late.
pub(super) const HAD_DRAFT: &str = "drafted";

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RoundLabels {
    pub(super) model: String,
    pub(super) draft: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkerLabels {
    pub(super) role: &'static str,
    pub(super) address: String,
}
