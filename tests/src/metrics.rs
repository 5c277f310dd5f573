//! One scrape of a process's `/metrics`.

use std::time::Duration;

use anyhow::Context as _;

/// The samples of one scrape.
#[derive(Debug, Clone)]
pub struct Page {
    text: String,
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

    /// Like [`Self::sum`], without rounding, for instance for seconds.
    pub fn total(&self, name: &str) -> f64 {
        self.total_where(name, "")
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
}
