//! Constants for tables of metric names, checked at compile time.

use super::Buckets;
use super::description::{Label, Registered};

/// Kind of a metric.
pub trait MetricKind: Copy {
    /// Name in the reference of metrics.
    const NAME: &'static str;
}

/// Name of a metric, with what the reference of metrics needs.
#[derive(Clone, Copy, Debug)]
pub struct MetricName<K> {
    pub(super) name: &'static str,
    help: &'static str,
    labels: &'static [Label],
    pub(super) kind: K,
}

/// Kind of counters.
#[derive(Clone, Copy, Debug)]
pub struct CounterKind;

/// Kind of gauges.
#[derive(Clone, Copy, Debug)]
pub struct GaugeKind;

/// Name of a counter, which ends in `_total`.
pub type CounterName = MetricName<CounterKind>;

/// Name of a gauge.
pub type GaugeName = MetricName<GaugeKind>;

/// Name of a histogram, with the upper bounds of its buckets. `/metrics` adds `_bucket`, `_sum` and `_count`.
pub type HistogramName = MetricName<Buckets>;

const TOTAL: &str = "_total";

impl MetricKind for CounterKind {
    const NAME: &'static str = "counter";
}

impl MetricKind for GaugeKind {
    const NAME: &'static str = "gauge";
}

impl MetricKind for Buckets {
    const NAME: &'static str = "histogram";
}

impl<K: MetricKind> MetricName<K> {
    const fn checked(name: &'static str, help: &'static str, kind: K) -> Self {
        assert!(is_name(name), "a metric name holds only ASCII letters, digits after the first, `_` and `:`");
        Self { name, help, labels: &[], kind }
    }

    /// Notes the values of labels, for the reference of metrics.
    pub const fn with_labels(self, labels: &'static [Label]) -> Self {
        Self { labels, ..self }
    }

    pub(super) fn registered(&self, label_names: fn() -> Vec<String>) -> Registered {
        let Self { name, help, labels, .. } = *self;
        Registered { name, kind: K::NAME, help, labels, label_names }
    }
}

impl CounterName {
    /// Defines a counter named as on `/metrics`; `help` is one sentence without a full stop.
    pub const fn new(name: &'static str, help: &'static str) -> Self {
        assert!(is_total(name), "a counter's name ends in _total");
        Self::checked(name, help, CounterKind)
    }

    /// Name of the family, to which OpenMetrics adds `_total`.
    pub(super) fn family(&self) -> &'static str {
        self.name.strip_suffix(TOTAL).expect("checked by the constructor")
    }
}

impl GaugeName {
    /// Defines a gauge named as on `/metrics`; `help` is one sentence without a full stop.
    pub const fn new(name: &'static str, help: &'static str) -> Self {
        assert!(!is_total(name), "a name that ends in _total is a counter's");
        Self::checked(name, help, GaugeKind)
    }
}

impl HistogramName {
    /// Defines a histogram named as on `/metrics`, with the increasing upper bounds of its buckets; the last
    /// one, infinity, is added.
    pub const fn new(name: &'static str, help: &'static str, buckets: &'static [f64]) -> Self {
        let mut bucket = 1;
        while bucket < buckets.len() {
            assert!(buckets[bucket - 1] < buckets[bucket], "a histogram's buckets rise");
            bucket += 1;
        }
        Self::checked(name, help, Buckets(buckets))
    }
}

const fn is_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    let mut idx = 0;
    while idx < bytes.len() {
        let byte = bytes[idx];
        if !(byte.is_ascii_alphabetic() || byte == b'_' || byte == b':' || idx > 0 && byte.is_ascii_digit()) {
            return false;
        }
        idx += 1;
    }
    !bytes.is_empty()
}

const fn is_total(name: &str) -> bool {
    let (name, total) = (name.as_bytes(), TOTAL.as_bytes());
    if name.len() <= total.len() {
        return false;
    }
    let (_, end) = name.split_at(name.len() - total.len());
    let mut idx = 0;
    while idx < total.len() {
        if end[idx] != total[idx] {
            return false;
        }
        idx += 1;
    }
    true
}
