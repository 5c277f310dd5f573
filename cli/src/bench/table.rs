//! The report as text for a terminal.

use std::collections::BTreeMap;

use super::plan::Condition;
use super::report::{ArmResult, ConditionComparison, Report};
use crate::load::Figures;
use crate::load::statistics::{Distribution, Estimate};
use crate::output::line;

/// Renders the report.
pub(super) fn table(report: &Report) -> String {
    let mut text = head(report);
    for i in 0..report.conditions.len() {
        text.push_str(&condition_table(report, i));
        if let Some(compared) = report.comparisons.get(i) {
            text.push_str(&verdicts(report, compared));
        }
    }
    text.push_str(&foot(report));
    text
}

fn head(report: &Report) -> String {
    let mut text = String::new();
    line!(text, "{}", report.command);
    line!(
        text,
        "{}, {} with {} cores, load average {}",
        report.date,
        report.machine.processor,
        report.machine.cores,
        report.machine.load_average.map_or("unknown".to_owned(), |load| format!("{load:.1}"))
    );
    for arm in &report.arms {
        line!(text, "arm {}: {} at {}, served by {}", arm.name, arm.model, arm.url, arm.served_by);
    }
    line!(
        text,
        "latencies (TTFT, TPOT, E2EL) in milliseconds; tok/s of all requests; length in tokens per round"
    );
    text
}

/// Widths of the columns with names, of which some are given by the user.
#[derive(Clone, Copy)]
struct NameWidths {
    task: usize,
    arm: usize,
}

impl NameWidths {
    fn of(report: &Report) -> Self {
        let tasks = report.tasks.iter().map(|task| task.chars().count());
        let arms = report.arms.iter().map(|arm| arm.name.chars().count());
        Self { task: tasks.fold(14, usize::max), arm: arms.fold(8, usize::max) }
    }
}

fn condition_table(report: &Report, i: usize) -> String {
    let Condition { level, temperature } = report.conditions[i];
    let mut text = String::new();
    let widths = NameWidths::of(report);
    let NameWidths { task: task_width, arm: arm_width } = widths;
    line!(text, "\n== {}, temperature {temperature} ==", level.name());
    line!(
        text,
        "{:<task_width$} {:<arm_width$} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>7} {:>6}",
        "task",
        "arm",
        "answers",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "E2EL p50",
        "E2EL p99",
        "p99/p50",
        "tok/s",
        "accept",
        "length"
    );
    for (task, arm, figures) in report.rows(i) {
        line!(text, "{}", row((task, arm), figures, widths));
    }
    for (arm, result) in report.arms.iter().zip(&report.results[i]) {
        let overall = &result.overall;
        let mean = |latency: &Option<Distribution>| match latency {
            Some(Distribution { mean: Estimate { value, low, high }, .. }) => {
                format!("{value:.2} [{low:.2}, {high:.2}]")
            }
            None => "-".to_owned(),
        };
        line!(
            text,
            "{}: mean ms with 95% intervals: TTFT {}, TPOT {}, ITL {}, E2EL {}",
            arm.name,
            mean(&overall.ttft),
            mean(&overall.tpot),
            mean(&overall.itl),
            mean(&overall.e2el)
        );
        let goodput =
            overall.request_goodput.map_or(String::new(), |good| format!(", {good:.2} good requests/s"));
        line!(text, "{}: {:.2} requests/s{goodput}", arm.name, overall.request_throughput());
        if let Some(acceptance) = &overall.acceptance {
            let [p10, p50, p90] = acceptance.rate_percentiles;
            line!(
                text,
                "{}: acceptance of a request P10 {p10:.2}, P50 {p50:.2}, P90 {p90:.2}; by position {}",
                arm.name,
                positions(result)
            );
        }
        if !overall.failures.is_empty() {
            line!(text, "{}: failed: {}", arm.name, by_kind(&overall.failures));
        }
    }
    text
}

/// Numbers of failures by kind, as in `3 timed out, 1 cut`.
pub(super) fn by_kind(failures: &BTreeMap<&'static str, usize>) -> String {
    failures.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

fn row((task, arm): (&str, &str), figures: &Figures, widths: NameWidths) -> String {
    let NameWidths { task: task_width, arm: arm_width } = widths;
    let ms = |latency: &Option<Distribution>, of: fn(&Distribution) -> f64| {
        latency.as_ref().map_or("-".to_owned(), |latency| format!("{:.1}", of(latency)))
    };
    let spread = figures.e2el.as_ref().map(|e2el| e2el.p99.value / e2el.p50.value);
    let acceptance = figures.acceptance.as_ref();
    let or_dash = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let p50 = |latency: &Distribution| latency.p50.value;
    let p99 = |latency: &Distribution| latency.p99.value;
    format!(
        "{task:<task_width$} {arm:<arm_width$} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7.1} {:>7} {:>6}",
        figures.completed,
        ms(&figures.ttft, p50),
        ms(&figures.ttft, p99),
        ms(&figures.tpot, p50),
        ms(&figures.tpot, p99),
        ms(&figures.e2el, p50),
        ms(&figures.e2el, p99),
        or_dash(spread),
        figures.output_throughput(),
        or_dash(acceptance.map(crate::load::figures::Acceptance::rate)),
        or_dash(acceptance.and_then(crate::load::figures::Acceptance::length)),
    )
}

fn positions(result: &ArmResult) -> String {
    let from_chunks = result.overall.acceptance.as_ref().and_then(|found| found.per_position.as_ref());
    let rates = result.drafts_per_position.as_ref().or(from_chunks);
    rates.map_or("unknown".to_owned(), |rates| {
        rates.iter().map(|rate| format!("{rate:.2}")).collect::<Vec<_>>().join(" ")
    })
}

fn verdicts(report: &Report, compared: &ConditionComparison) -> String {
    let mut text = String::new();
    let task_width = NameWidths::of(report).task;
    line!(
        text,
        "{} over {}: speedup with its {:.0}% interval, threshold {}",
        report.arms[0].name,
        report.arms[1].name,
        report.rules.confidence * 100.0,
        report.rules.threshold
    );
    for (task, comparison) in compared.by_name(&report.tasks) {
        let speedup = comparison.speedup.map_or("-".to_owned(), |speedup| {
            format!("{:.2} [{:.2}, {:.2}]", speedup.value, speedup.low, speedup.high)
        });
        let reason = match &comparison.verdict {
            super::compare::ShipVerdict::Undecided(reason) => format!(" ({reason})"),
            _ => String::new(),
        };
        line!(
            text,
            "  {task:<task_width$} {speedup:<22} {}{reason}; same text in {} of {}",
            comparison.verdict.label(),
            comparison.same_text,
            comparison.pairs
        );
    }
    text
}

fn foot(report: &Report) -> String {
    let mut text = "\n".to_owned();
    for found in &report.break_even {
        line!(
            text,
            "temperature {}: {} is {}",
            found.temperature,
            report.arms[0].name,
            found.result.explain()
        );
    }
    let generator = &report.generator;
    line!(
        text,
        "generator: {:.1} us of CPU per event, {:.1}% of this machine's {} cores; read delay {:.2} ms at P50, {:.2} at P99; send delay {:.2} ms at P50, {:.2} at P99",
        generator.cpu_us_per_event,
        generator.share_of_machine * 100.0,
        generator.cores,
        generator.read_late_ms_p50,
        generator.read_late_ms_p99,
        generator.sent_late_ms_p50,
        generator.sent_late_ms_p99
    );
    for fault in &report.faults {
        line!(text, "fault: {fault}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::load::FigureOptions;

    #[test]
    fn failures_are_listed_by_kind() {
        assert_eq!(by_kind(&BTreeMap::from([("timed out", 3), ("cut", 1)])), "1 cut, 3 timed out");
    }

    #[test]
    fn long_names_widen_their_columns() {
        let widths = NameWidths { task: 20, arm: 12 };
        let figures = Figures::of([], Duration::from_secs(1), &FigureOptions::default());
        let short = row(("sql", "on"), &figures, widths);
        let long = row(("a_task_of_20_letters", "twelve_chars"), &figures, widths);
        assert_eq!(short.chars().count(), long.chars().count());
    }
}
