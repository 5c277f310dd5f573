//! Histograms with exemplars: each bucket names the trace of the last sampled request in it, so that a
//! dashboard can link a slow bucket to a trace. Only OpenMetrics has exemplars; Prometheus stores them with
//! `--enable-feature=exemplar-storage`.

use std::time::SystemTime;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use tracing::Span;

use super::Buckets;
use crate::telemetry;

/// Label of an exemplar, with the name that Grafana expects.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct TraceLabel {
    trace_id: String,
}

/// A histogram with a trace per bucket. Clones share it.
#[derive(Clone, Debug)]
pub struct TracedHistogram(HistogramWithExemplars<TraceLabel>);

/// [`TracedHistogram`]s with a common name and different labels.
pub type TracedHistogramFamily<L> = Family<L, TracedHistogram, Buckets>;

impl TracedHistogram {
    /// Observes a value measured within `span`.
    pub fn observe(&self, value: f64, span: &Span) {
        let trace = telemetry::trace_id_of(span).map(|trace_id| TraceLabel { trace_id });
        let at = trace.is_some().then(SystemTime::now);
        self.0.observe(value, trace, at);
    }

    #[cfg(test)]
    pub(super) fn observe_in(&self, value: f64, trace_id: &str) {
        self.0.observe(value, Some(TraceLabel { trace_id: trace_id.to_owned() }), None);
    }
}

impl MetricConstructor<TracedHistogram> for Buckets {
    fn new_metric(&self) -> TracedHistogram {
        TracedHistogram(HistogramWithExemplars::new(self.0.iter().copied()))
    }
}

impl prometheus_client::encoding::EncodeMetric for TracedHistogram {
    fn encode(&self, encoder: prometheus_client::encoding::MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> prometheus_client::metrics::MetricType {
        self.0.metric_type()
    }
}

impl prometheus_client::metrics::TypedMetric for TracedHistogram {
    const TYPE: prometheus_client::metrics::MetricType = prometheus_client::metrics::MetricType::Histogram;
}
