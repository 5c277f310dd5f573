//! Prometheus metrics of one process.
//!
//! Each crate has a table of constants ([`CounterName`], [`GaugeName`], [`HistogramName`]) in one file, so
//! that names are not strings scattered through the code; registering a name returns the metric's handle.
//! Names are written as on `/metrics`, including `_total`.
//!
//! A metric must never decide anything: the process does not read them. docs/metrics.md is generated from
//! what is registered ([`reference()`]).

mod description;
mod exposition;
mod gauge_guard;
mod name;
mod process;
mod reference;
mod scraped;
mod traced;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::MetricConstructor;
use prometheus_client::registry::{Metric, Registry};

use description::{Registered, label_names};
use scraped::{ScrapedGauges, ScrapedValue};

pub use description::{Label, LabelDescription, LabelValues, MetricDescription};
pub use exposition::Exposition;
pub use gauge_guard::GaugeGuard;
pub use name::{CounterKind, CounterName, GaugeKind, GaugeName, HistogramName, MetricKind, MetricName};
pub use prometheus_client::encoding::EncodeLabelSet;
pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::family::Family;
pub use prometheus_client::metrics::histogram::Histogram;
pub use reference::reference;
pub use scraped::ReadGauge;
pub use traced::{TracedHistogram, TracedHistogramFamily};

/// A gauge with integer values.
pub type Gauge = prometheus_client::metrics::gauge::Gauge;

/// A gauge with fractional values, such as a rate.
pub type RateGauge = prometheus_client::metrics::gauge::Gauge<f64, std::sync::atomic::AtomicU64>;

/// Histograms with a common name and different labels.
pub type HistogramFamily<L> = Family<L, Histogram, Buckets>;

/// Labels of a family's members: `Vec<(&'static str, String)>`, or a struct that derives
/// `prometheus_client::encoding::EncodeLabelSet`. Label values must come from small closed sets, never from
/// clients. The reference of metrics reads the labels' names from the default value.
pub trait Labels: EncodeLabelSet + Clone + Debug + Default + Eq + Hash + Send + Sync + 'static {}

impl<L: EncodeLabelSet + Clone + Debug + Default + Eq + Hash + Send + Sync + 'static> Labels for L {}

/// Upper bounds of histograms' buckets.
#[derive(Clone, Copy, Debug)]
pub struct Buckets(&'static [f64]);

/// All metrics of a process, or of one role if several share a process. Clones share them.
///
/// Metrics are registered at startup. Registering a name twice panics: it is a bug, and scrapers refuse such
/// a page.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    registry: Registry,
    names: BTreeSet<&'static str>,
    /// In the order of registration.
    registered: Vec<Registered>,
}

impl Metrics {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the set of a process, with what every process reports: what was built, and what the process
    /// uses of its machine.
    pub fn of_process() -> Self {
        let metrics = Self::new();
        process::register(&metrics);
        metrics
    }

    /// Registers a counter.
    pub fn counter(&self, name: &CounterName) -> Counter {
        self.register(name.family(), name.registered(Vec::new), Counter::default())
    }

    /// Registers counters with a common name and different labels.
    pub fn counter_family<L: Labels>(&self, name: &CounterName) -> Family<L, Counter> {
        self.register(name.family(), name.registered(label_names::<L>), Family::default())
    }

    /// Registers a gauge with integer values.
    pub fn gauge(&self, name: &GaugeName) -> Gauge {
        self.register(name.name, name.registered(Vec::new), Gauge::default())
    }

    /// Registers gauges with integer values, a common name and different labels.
    pub fn gauge_family<L: Labels>(&self, name: &GaugeName) -> Family<L, Gauge> {
        self.register(name.name, name.registered(label_names::<L>), Family::default())
    }

    /// Registers gauges as [`Self::gauge_family`] does, which are read at each scrape.
    pub fn scraped_gauges<L: Labels>(&self, name: &GaugeName, series: Vec<(L, ReadGauge)>) {
        drop(self.register(name.name, name.registered(label_names::<L>), ScrapedGauges::new(series)));
    }

    /// Registers a counter that is read at each scrape; `None`: it has no value now.
    pub fn scraped_counter(&self, name: &CounterName, read: fn() -> Option<f64>) {
        let counter = ScrapedValue { kind: MetricType::Counter, read };
        self.register(name.family(), name.registered(Vec::new), counter);
    }

    /// Registers a gauge as [`Self::scraped_counter`] does.
    pub fn scraped_gauge(&self, name: &GaugeName, read: fn() -> Option<f64>) {
        let gauge = ScrapedValue { kind: MetricType::Gauge, read };
        self.register(name.name, name.registered(Vec::new), gauge);
    }

    /// Registers gauges with fractional values, a common name and different labels.
    pub fn rate_gauge_family<L: Labels>(&self, name: &GaugeName) -> Family<L, RateGauge> {
        self.register(name.name, name.registered(label_names::<L>), Family::default())
    }

    /// Registers a histogram.
    pub fn histogram(&self, name: &HistogramName) -> Histogram {
        self.register(name.name, name.registered(Vec::new), name.kind.new_metric())
    }

    /// Registers histograms with a common name and different labels.
    pub fn histogram_family<L: Labels>(&self, name: &HistogramName) -> HistogramFamily<L> {
        self.register(name.name, name.registered(label_names::<L>), Family::new_with_constructor(name.kind))
    }

    /// Registers histograms with a trace per bucket as exemplar.
    pub fn traced_histogram_family<L: Labels>(&self, name: &HistogramName) -> TracedHistogramFamily<L> {
        self.register(name.name, name.registered(label_names::<L>), Family::new_with_constructor(name.kind))
    }

    /// Returns the page for a scraper.
    pub fn encode(&self, exposition: Exposition) -> String {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        exposition.encode(&inner.registry)
    }

    /// Describes all registered metrics, in the order of registration.
    pub fn descriptions(&self) -> Vec<MetricDescription> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.registered.iter().map(Registered::describe).collect()
    }

    fn register<M: Metric + Clone>(&self, family: &'static str, registered: Registered, metric: M) -> M {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(inner.names.insert(family), "metric {family} is registered twice");
        inner.registry.register(family, registered.help, metric.clone());
        inner.registered.push(registered);
        metric
    }
}

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}
