//! The two text formats of a metrics page: OpenMetrics, which Prometheus requests, and the older Prometheus
//! text format, which everything else reads.
//!
//! They differ in the header lines of counters (OpenMetrics has `_total` only in samples), in the end marker,
//! and in exemplars, which only OpenMetrics has.

use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, header};
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

use super::Metrics;

/// Text format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// `application/openmetrics-text`.
    OpenMetrics,
    /// `text/plain; version=0.0.4`.
    Prometheus,
}

impl Metrics {
    /// Answers a scraper with the page, in the format that its headers request.
    pub fn respond(&self, headers: &HeaderMap) -> Response {
        let exposition = Exposition::from_accept_header(headers);
        ([(header::CONTENT_TYPE, exposition.content_type())], self.encode(exposition)).into_response()
    }
}

impl Exposition {
    /// Returns the format that the scraper requests: OpenMetrics if its `Accept` names it, else the older
    /// one.
    fn from_accept_header(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut types = accepted.flat_map(|value| value.split(','));
        let open_metrics =
            types.any(|accepted| accepted.trim_start().starts_with("application/openmetrics-text"));
        if open_metrics { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// The `Content-Type` of the page.
    fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    pub(super) fn encode(self, registry: &Registry) -> String {
        let mut page = String::new();
        match self {
            Self::OpenMetrics => text::encode(&mut page, registry),
            Self::Prometheus => text::encode_registry(&mut page, registry),
        }
        .expect("writing into a string cannot fail");
        match self {
            Self::OpenMetrics => page,
            Self::Prometheus => to_prometheus_text(&page),
        }
    }
}

/// Start of an exemplar, after a sample.
const EXEMPLAR: &str = " # {trace_id=";

/// Adds `_total` to counters' names in `# HELP` and `# TYPE` lines, as in their samples, and removes
/// exemplars.
fn to_prometheus_text(page: &str) -> String {
    let mut rewritten = String::with_capacity(page.len());
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let declares_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        // The help line is directly above the type line.
        let is_counters = declares_counter(line)
            || line.starts_with("# HELP ") && lines.peek().copied().is_some_and(declares_counter);
        match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
            [hash, keyword, name, rest] if is_counters => {
                rewritten.extend([hash, " ", keyword, " ", name, "_total ", rest]);
            }
            _ => rewritten.push_str(line.rfind(EXEMPLAR).map_or(line, |at| &line[..at])),
        }
        rewritten.push('\n');
    }
    rewritten
}

#[cfg(test)]
mod tests {
    use super::Exposition;
    use crate::metrics::{CounterName, Family, GaugeName, HistogramName, Metrics};

    const DRAFTS: CounterName =
        CounterName::new("vllm:spec_decode_num_drafts_total", "Drafts that were verified");
    const ACCEPTED: CounterName =
        CounterName::new("vllm:spec_decode_num_accepted_tokens_per_pos_total", "Accepted tokens by position");
    const QUEUE: GaugeName = GaugeName::new("outrider_queue_depth", "Requests that wait");
    const RATE: GaugeName = GaugeName::new("outrider_acceptance_rate", "Accepted of drafted");
    const TTFT: HistogramName =
        HistogramName::new("vllm:time_to_first_token_seconds", "Time to the first token", &[0.1, 1.0]);

    fn metrics() -> Metrics {
        let metrics = Metrics::new();
        metrics.counter(&DRAFTS).inc_by(3);
        let by_position: Family<Vec<(&'static str, String)>, _> = metrics.counter_family(&ACCEPTED);
        by_position.get_or_create(&vec![("position", "0".to_owned())]).inc();
        metrics.gauge(&QUEUE).set(2);
        let by_model: Family<Vec<(&'static str, String)>, _> = metrics.rate_gauge_family(&RATE);
        by_model.get_or_create(&vec![("model_name", "demo".to_owned())]).set(0.5);
        let by_task = metrics.histogram_family(&TTFT);
        by_task.get_or_create(&vec![("task_type", "co\"de".to_owned())]).observe(0.25);
        metrics
    }

    #[test]
    fn a_bucket_names_its_trace_where_the_form_has_a_place_for_it() {
        let metrics = Metrics::new();
        let by_task = metrics.traced_histogram_family::<Vec<(&'static str, String)>>(&TTFT);
        by_task.get_or_create(&Vec::new()).observe(0.05, &tracing::Span::none());
        by_task.get_or_create(&Vec::new()).observe_in(0.25, "4bf92f35");
        let named = "vllm:time_to_first_token_seconds_bucket{le=\"1.0\"} 2 # {trace_id=\"4bf92f35\"} 0.25\n";
        let page = metrics.encode(Exposition::OpenMetrics);
        assert!(page.contains(named) && page.matches("trace_id").count() == 1, "{page}");
        let page = metrics.encode(Exposition::Prometheus);
        assert!(page.contains("_bucket{le=\"1.0\"} 2\n") && !page.contains("trace_id"), "{page}");
    }

    #[test]
    fn prometheus_text_names_each_metric_as_its_table_does() {
        let expected = "\
# HELP vllm:spec_decode_num_drafts_total Drafts that were verified.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total 3
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens by position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 1
# HELP outrider_queue_depth Requests that wait.
# TYPE outrider_queue_depth gauge
outrider_queue_depth 2
# HELP outrider_acceptance_rate Accepted of drafted.
# TYPE outrider_acceptance_rate gauge
outrider_acceptance_rate{model_name=\"demo\"} 0.5
# HELP vllm:time_to_first_token_seconds Time to the first token.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_sum{task_type=\"co\\\"de\"} 0.25
vllm:time_to_first_token_seconds_count{task_type=\"co\\\"de\"} 1
vllm:time_to_first_token_seconds_bucket{le=\"0.1\",task_type=\"co\\\"de\"} 0
vllm:time_to_first_token_seconds_bucket{le=\"1.0\",task_type=\"co\\\"de\"} 1
vllm:time_to_first_token_seconds_bucket{le=\"+Inf\",task_type=\"co\\\"de\"} 1
";
        assert_eq!(metrics().encode(Exposition::Prometheus), expected);
    }

    #[test]
    fn open_metrics_leaves_total_to_the_samples_and_ends_in_eof() {
        let page = metrics().encode(Exposition::OpenMetrics);
        assert!(
            page.contains(
                "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total 3\n"
            )
        );
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn the_accept_header_chooses_the_form() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2";
        let rows = [
            (None, Exposition::Prometheus),
            (Some("*/*"), Exposition::Prometheus),
            (Some("text/plain"), Exposition::Prometheus),
            (Some(prometheus), Exposition::OpenMetrics),
            (Some("text/plain, application/openmetrics-text"), Exposition::OpenMetrics),
        ];
        for (accept, expected) in rows {
            let mut headers = http::HeaderMap::new();
            if let Some(accept) = accept {
                headers.insert(http::header::ACCEPT, accept.parse().unwrap());
            }
            assert_eq!(Exposition::from_accept_header(&headers), expected, "{accept:?}");
        }
    }

    #[test]
    #[should_panic(expected = "metric outrider_queue_depth is registered twice")]
    fn a_name_is_registered_once() {
        let metrics = metrics();
        metrics.gauge(&QUEUE);
    }
}
