//! One scrape of a process's `/metrics`.

use std::time::Duration;

use anyhow::{Context as _, ensure};

/// The samples of one scrape.
#[derive(Debug, Clone)]
pub struct Page {
    text: String,
}

/// One sample of a scrape, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample<'a> {
    /// Name of the metric, with the suffix of a histogram.
    pub name: &'a str,
    /// Names and values of the labels.
    pub labels: Vec<(&'a str, &'a str)>,
}

impl<'a> Sample<'a> {
    fn new(line: &'a str) -> Self {
        let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once("=\""));
        Self { name, labels: labels.map(|(name, value)| (name, value.trim_end_matches('"'))).collect() }
    }
}

impl Page {
    /// Scrapes `base`, as `http://HOST:PORT`.
    pub async fn scrape(base: &str) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).no_proxy().build()?;
        let response = client.get(format!("{base}/metrics")).send().await.context("cannot scrape")?;
        Ok(Self { text: response.error_for_status()?.text().await? })
    }

    /// The sum of all samples of a metric; 0 if there are none yet.
    pub fn sum(&self, name: &str) -> u64 {
        self.sum_where(name, "")
    }

    /// The sum of a metric's samples whose labels contain `label`, such as `reason="late_draft"`.
    pub fn sum_where(&self, name: &str, label: &str) -> u64 {
        self.total_where(name, label) as u64
    }

    /// Number of steps that a worker ran.
    pub fn steps_run(&self) -> u64 {
        self.sum_where("outrider_worker_steps_total", "outcome=\"run\"")
    }

    /// Like [`Self::sum`], without rounding, for instance for seconds.
    pub fn total(&self, name: &str) -> f64 {
        self.total_where(name, "")
    }

    /// The increase of a metric's total since an earlier scrape. Fails if there is none: nothing was measured
    /// then, and a quotient by it would not be a number.
    pub fn increase(&self, earlier: &Self, name: &str) -> anyhow::Result<f64> {
        let (before, after) = (earlier.total(name), self.total(name));
        ensure!(after > before, "nothing was measured: {name} was {before} before and {after} after");
        Ok(after - before)
    }

    /// All samples.
    pub fn samples(&self) -> impl Iterator<Item = Sample<'_>> {
        self.text.lines().filter(|line| !line.starts_with('#')).map(Sample::new)
    }

    fn total_where(&self, name: &str, label: &str) -> f64 {
        let samples = self.text.lines().filter_map(|line| line.split_once(' '));
        let matching = samples.filter(|(series, _)| {
            let (metric, labels) = series.split_once('{').unwrap_or((series, ""));
            metric == name && labels.contains(label)
        });
        matching.filter_map(|(_, value)| value.parse::<f64>().ok()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_by_name_and_label() {
        let text =
            "# TYPE a_total counter\na_total{why=\"x\",n=\"1\"} 2\na_total{why=\"y\"} 3\nab_total 7\nab 1\n";
        let page = Page { text: text.to_owned() };
        assert_eq!(page.sum("a_total"), 5);
        assert_eq!(page.sum_where("a_total", "why=\"x\""), 2);
        assert_eq!((page.sum("ab_total"), page.sum("ab"), page.sum("none")), (7, 1, 0));
    }

    #[test]
    fn a_counter_that_did_not_increase_measured_nothing() {
        let page = |text: &str| Page { text: text.to_owned() };
        let (before, after) = (page("a 2\nb 3\nc 3\n"), page("a 2.5\nb 3\nc 1\n"));
        assert_eq!(after.increase(&before, "a").unwrap(), 0.5);
        for name in ["b", "c", "unknown"] {
            let error = after.increase(&before, name).unwrap_err().to_string();
            assert!(error.contains(&format!("nothing was measured: {name}")), "{error}");
        }
    }

    #[test]
    fn samples_have_a_name_and_labels() {
        let text = "# TYPE a gauge\na{why=\"x y\",n=\"\"} 2\na{n=\"\"} 3\nb 1.5\n";
        let page = Page { text: text.to_owned() };
        let samples: Vec<Sample<'_>> = page.samples().collect();
        let expected = [
            Sample { name: "a", labels: vec![("why", "x y"), ("n", "")] },
            Sample { name: "a", labels: vec![("n", "")] },
            Sample { name: "b", labels: Vec::new() },
        ];
        assert_eq!(samples, expected);
    }
}
