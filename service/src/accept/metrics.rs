//! Metrics of connections.

use prometheus_client::encoding::EncodeLabelSet;

use super::limits::LimitReached;
use super::monitor::CloseReason;
use crate::metrics::{
    Counter, CounterName, Family, Gauge, GaugeGuard, GaugeName, Label, LabelValues, Metrics,
};

const LISTENER: Label = ("listener", LabelValues::Listed(|| vec!["http", "grpc", "admin"]));
const OPEN: GaugeName =
    GaugeName::new("outrider_connections", "Open connections, by listener").with_labels(&[LISTENER]);
const CLOSED: CounterName = CounterName::new(
    "outrider_connections_closed_total",
    "Connections closed or refused, by listener and reason",
)
.with_labels(&[LISTENER, ("reason", LabelValues::Listed(reasons))]);

fn reasons() -> Vec<&'static str> {
    use CloseReason as C;
    let closed = [C::Finished, C::HeaderTimeout, C::IdleTimeout, C::WriteTimeout, C::Stopped];
    let refused = [LimitReached::Process, LimitReached::Peer].map(LimitReached::as_str);
    closed.map(CloseReason::as_str).into_iter().chain(refused).chain(["tls", "accept_error"]).collect()
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListenerLabels {
    listener: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    listener: &'static str,
    reason: &'static str,
}

/// Metrics of all listeners of a process.
#[derive(Clone, Debug)]
pub(super) struct ConnectionMetrics {
    open: Family<ListenerLabels, Gauge>,
    closed: Family<ReasonLabels, Counter>,
}

impl ConnectionMetrics {
    pub(super) fn register(metrics: &Metrics) -> Self {
        Self { open: metrics.gauge_family(&OPEN), closed: metrics.counter_family(&CLOSED) }
    }

    /// Counts a connection as open until the guard is dropped.
    pub(super) fn opened(&self, listener: &'static str) -> GaugeGuard {
        GaugeGuard::new(self.open.get_or_create(&ListenerLabels { listener }).clone())
    }

    pub(super) fn closed(&self, listener: &'static str, reason: &'static str) {
        self.closed.get_or_create(&ReasonLabels { listener, reason }).inc();
    }
}
