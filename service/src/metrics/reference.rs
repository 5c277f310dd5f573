//! Documents all metrics of a process, from what it has registered.

use std::fmt::Write as _;

use super::{LabelDescription, LabelValues, MetricDescription, Metrics};

/// Metrics of one process in Markdown: a section with a table.
pub fn reference(heading: &str, metrics: &Metrics) -> String {
    let mut section = format!("## {heading}\n\n| name | type | labels | |\n|---|---|---|---|\n");
    for metric in metrics.descriptions() {
        section += &row(&metric);
    }
    section
}

fn row(metric: &MetricDescription) -> String {
    let labels: Vec<String> = metric.labels.iter().map(label).collect();
    let cells =
        [format!("`{}`", metric.name), metric.kind.to_owned(), labels.join(", "), metric.help.to_owned()];
    format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))
}

/// The label's name, and its values in parentheses.
fn label(label: &LabelDescription) -> String {
    let mut text = format!("`{}`", label.name);
    let values = label.values.map(|values| match values {
        LabelValues::Listed(list) => {
            list().into_iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ")
        }
        LabelValues::Described(described) => described.to_owned(),
    });
    if let Some(values) = values {
        write!(text, " ({values})").expect("writing into a string cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::reference;
    use crate::metrics::{CounterName, EncodeLabelSet, GaugeName, HistogramName, LabelValues, Metrics};

    const STEPS: CounterName = CounterName::new("steps_total", "Steps, by outcome").with_labels(&[
        ("outcome", LabelValues::Listed(|| vec!["run", "refused"])),
        ("worker", LabelValues::Described("its address")),
    ]);
    const QUEUE: GaugeName = GaugeName::new("queue_depth", "Waiting requests");
    const WAIT: HistogramName = HistogramName::new("wait_seconds", "Time that a|b waited", &[1.0])
        .with_labels(&[("outcome", LabelValues::Described("of its step"))]);

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct StepLabels {
        worker: String,
        outcome: &'static str,
        position: u32,
    }

    #[test]
    fn each_metric_is_a_row_with_its_labels_and_their_values() {
        let metrics = Metrics::new();
        drop(metrics.counter_family::<StepLabels>(&STEPS));
        drop(metrics.gauge(&QUEUE));
        // The type does not fix these labels.
        drop(metrics.histogram_family::<Vec<(&'static str, String)>>(&WAIT));
        let expected = "## worker

| name | type | labels | |
|---|---|---|---|
| `steps_total` | counter | `worker` (its address), `outcome` (`run`, `refused`), `position` | Steps, by outcome |
| `queue_depth` | gauge |  | Waiting requests |
| `wait_seconds` | histogram | `outcome` (of its step) | Time that a\\|b waited |
";
        assert_eq!(reference("worker", &metrics), expected);
    }
}
