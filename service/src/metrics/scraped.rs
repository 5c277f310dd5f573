//! Metrics that are read when a page is scraped: for values that change without an event in this process.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::Labels;

/// Reads a gauge; `None`: it has no value now, and the page has no series of it.
pub type ReadGauge = Box<dyn Fn() -> Option<i64> + Send + Sync>;

/// Gauges with a common name and different labels. Clones share them.
#[derive(Clone)]
pub(super) struct ScrapedGauges<L>(Arc<[(L, ReadGauge)]>);

impl<L: Labels> ScrapedGauges<L> {
    pub(super) fn new(series: Vec<(L, ReadGauge)>) -> Self {
        Self(series.into())
    }
}

impl<L: Labels> EncodeMetric for ScrapedGauges<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, read) in self.0.iter() {
            if let Some(value) = read() {
                encoder.encode_family(labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|(_, read)| read().is_none())
    }
}

/// A counter or gauge without labels.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScrapedValue {
    pub(super) kind: MetricType,
    /// Reads it; `None`: it has no value now, and the page does not have it.
    pub(super) read: fn() -> Option<f64>,
}

impl EncodeMetric for ScrapedValue {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        match ((self.read)(), self.kind) {
            (None, _) => Ok(()),
            (Some(value), MetricType::Counter) => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
            (Some(value), _) => encoder.encode_gauge(&value),
        }
    }

    fn metric_type(&self) -> MetricType {
        self.kind
    }

    fn is_empty(&self) -> bool {
        (self.read)().is_none()
    }
}

impl<L: Labels> fmt::Debug for ScrapedGauges<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(labels, _)| labels)).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::ReadGauge;
    use crate::metrics::{CounterName, EncodeLabelSet, Exposition, GaugeName, Metrics};

    const AGE: GaugeName = GaugeName::new("outrider_age_seconds", "Age, by file");

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct FileLabels {
        file: &'static str,
    }

    const BEATS: CounterName = CounterName::new("outrider_beats_total", "Beats");
    const ABSENT: GaugeName = GaugeName::new("outrider_absent", "Never known");

    #[test]
    fn a_value_without_labels_is_read_at_each_scrape_and_may_be_absent() {
        static BEATS_SO_FAR: AtomicI64 = AtomicI64::new(0);
        let metrics = Metrics::new();
        metrics.scraped_counter(&BEATS, || Some(BEATS_SO_FAR.fetch_add(1, Ordering::Relaxed) as f64 / 4.0));
        metrics.scraped_gauge(&ABSENT, || None);
        let read = |page: String| -> f64 {
            let header = "# HELP outrider_beats_total Beats.\n# TYPE outrider_beats_total counter\n";
            let value = page.strip_prefix(header).unwrap().strip_prefix("outrider_beats_total ");
            value.unwrap().trim().parse().unwrap()
        };
        let first = read(metrics.encode(Exposition::Prometheus));
        assert!(read(metrics.encode(Exposition::Prometheus)) > first);
    }

    #[test]
    fn a_gauge_is_read_at_each_scrape_and_may_have_no_value() {
        let (metrics, age) = (Metrics::new(), Arc::new(AtomicI64::new(-1)));
        let read = {
            let age = Arc::clone(&age);
            move || Some(age.load(Ordering::Relaxed)).filter(|age| *age >= 0)
        };
        let series: Vec<(_, ReadGauge)> =
            vec![(FileLabels { file: "a" }, Box::new(read)), (FileLabels { file: "b" }, Box::new(|| None))];
        metrics.scraped_gauges(&AGE, series);
        assert_eq!(metrics.encode(Exposition::Prometheus), "");
        for now in [3, 4] {
            age.store(now, Ordering::Relaxed);
            let expected = format!(
                "# HELP outrider_age_seconds Age, by file.\n# TYPE outrider_age_seconds gauge\n\
                 outrider_age_seconds{{file=\"a\"}} {now}\n"
            );
            assert_eq!(metrics.encode(Exposition::Prometheus), expected);
        }
        let labels = metrics.descriptions().remove(0).labels;
        assert_eq!(labels.into_iter().map(|label| label.name).collect::<Vec<_>>(), ["file"]);
    }
}
