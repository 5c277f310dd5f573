//! Values of the labels of the router's metrics, for the reference of metrics. Must not count anything.

use scheduling::lookup_rates::LookupSource;
use scheduling::scheduler::DisabledReason;
use scheduling::scheduler::lanes::TemperatureBand;
use scheduling::scheduler::shadows::ShadowEnd;
use service::metrics::{Label, LabelValues};
use speculation::Role;

use super::label_sets::{ANOMALIES, AnomalyLabels, HAD_DRAFT, PRIORITY_RANGES};
use super::{ChoiceOutcome, Protocol};

pub(super) const ADDRESS: Label = ("address", LabelValues::Described("URL of the worker"));
pub(super) const ANOMALY_REASON: Label =
    ("reason", LabelValues::Listed(|| ANOMALIES.map(|anomaly| AnomalyLabels::of(anomaly).reason).to_vec()));
pub(super) const BLOCK_SIZE: Label = ("block_size", LabelValues::Described("tokens per block"));
pub(super) const DRAFT: Label = ("draft", LabelValues::Listed(drafts));
pub(super) const FINISHED_REASON: Label =
    ("finished_reason", LabelValues::Listed(|| ChoiceOutcome::ALL.map(ChoiceOutcome::as_str).to_vec()));
pub(super) const MET: Label = ("met", LabelValues::Listed(|| vec!["true", "false"]));
pub(super) const NUM_BLOCKS: Label = ("num_gpu_blocks", LabelValues::Described("blocks, also on CPUs"));
pub(super) const OF: Label = ("of", LabelValues::Listed(|| vec!["shadow", "serving"]));
pub(super) const POSITION: Label = ("position", LabelValues::Described("index in the draft, from 0"));
pub(super) const PRIORITY: Label =
    ("priority", LabelValues::Listed(|| PRIORITY_RANGES.map(|(_, name)| name).to_vec()));
pub(super) const PROTOCOL: Label =
    ("protocol", LabelValues::Listed(|| [Protocol::Http, Protocol::Grpc].map(Protocol::as_str).to_vec()));
pub(super) const REQUEST_LOG_OUTCOME: Label =
    ("outcome", LabelValues::Listed(|| vec!["written", "left_out", "failed"]));
pub(super) const REQUEST_OUTCOME: Label =
    ("outcome", LabelValues::Described("`ok`, or the [kind of error](api.md#errors)"));
pub(super) const ROLE: Label =
    ("role", LabelValues::Listed(|| [Role::Draft, Role::Target].map(Role::as_str).to_vec()));
pub(super) const SHADOW_DROPPED_REASON: Label =
    ("reason", LabelValues::Listed(|| ShadowEnd::ALL.map(ShadowEnd::as_str).to_vec()));
pub(super) const SLO_NAME: Label = ("slo", LabelValues::Listed(|| vec!["ttft", "tpot"]));
pub(super) const SOURCE: Label =
    ("source", LabelValues::Listed(|| LookupSource::ALL.map(LookupSource::as_str).to_vec()));
pub(super) const TEMPERATURE: Label = ("temperature", LabelValues::Listed(temperatures));

/// Whether a draft was requested or looked up for a round, or why not.
fn drafts() -> Vec<&'static str> {
    [HAD_DRAFT].into_iter().chain(DisabledReason::ALL.map(DisabledReason::as_str)).collect()
}

fn temperatures() -> Vec<&'static str> {
    use TemperatureBand as T;
    [T::Greedy, T::Low, T::Medium, T::High].map(TemperatureBand::as_str).to_vec()
}
