//! The plots of the page: first over the measured loads, then per condition.

use super::axis::Scale;
use super::svg::{IntervalRow, Labels, Point, Series, intervals, lines};
use crate::bench::plan::Condition;
use crate::bench::report::{ArmResult, Report};
use crate::load::Figures;
use crate::load::statistics::{Distribution, percentile};

/// Points of the curve of a distribution.
const CURVE_POINTS: usize = 100;

/// Speedup, latencies and throughput over load, for each kind of load with more than one level.
pub(super) fn overview(report: &Report) -> Vec<Option<String>> {
    let curves = report.curves().into_iter().filter(|curve| curve.len() > 1);
    curves.flat_map(|curve| against_load(report, &curve)).collect()
}

/// A metric of a set of requests.
type Metric = fn(&Figures) -> Option<Point>;

fn against_load(report: &Report, conditions: &[usize]) -> Vec<Option<String>> {
    let Condition { level, temperature } = report.conditions[conditions[0]];
    let size = |i: usize| report.conditions[i].level.size();
    let metrics: [(&str, &str, Metric); 6] = [
        ("TTFT, median", "ms", |figures| figures.ttft.as_ref().map(median)),
        ("TPOT, median", "ms", |figures| figures.tpot.as_ref().map(median)),
        ("E2EL, P99", "ms", |figures| figures.e2el.as_ref().map(p99)),
        ("Output throughput", "tokens/s", |figures| Some(bare(figures.output_throughput()))),
        ("Goodput", "good requests/s", |figures| figures.request_goodput.map(bare)),
        ("Tail: P99 over P50 of E2EL", "ratio", |figures| {
            figures.e2el.as_ref().map(|e2el| bare(e2el.p99.value / e2el.p50.value))
        }),
    ];
    let mut plots = vec![speedups_against_load(report, conditions)];
    for (name, unit, metric) in metrics {
        let of_arm = |(a, arm): (usize, &crate::bench::report::ArmReport)| Series {
            name: arm.name.clone(),
            class: format!("s{a}"),
            points: conditions
                .iter()
                .filter_map(|&i| Some(Point { x: size(i), ..metric(&report.results[i][a].overall)? }))
                .collect(),
        };
        let series: Vec<Series> = report.arms.iter().enumerate().map(of_arm).collect();
        let title = format!("{name}, temperature {temperature}");
        plots.push(lines(
            &Labels { title: &title, x: level.axis(), y: unit },
            &series,
            Scale::Log,
            Scale::Linear,
        ));
    }
    plots
}

fn speedups_against_load(report: &Report, conditions: &[usize]) -> Option<String> {
    let Condition { level: load, temperature } = report.conditions[conditions[0]];
    let point = |i: &usize| {
        let speedup = report.comparisons.get(*i)?.overall.speedup?;
        let x = report.conditions[*i].level.size();
        Some(Point { x, y: speedup.value, interval: Some((speedup.low, speedup.high)) })
    };
    let points: Vec<Point> = conditions.iter().filter_map(point).collect();
    let level = |name: &str, class: &str, y: f64| Series {
        name: name.to_owned(),
        class: class.to_owned(),
        points: points.iter().map(|point| Point { y, interval: None, ..*point }).collect(),
    };
    let (even, threshold) =
        (level("even", "even", 1.0), level("threshold", "threshold", report.rules.threshold));
    let speedup = Series { name: "speedup".to_owned(), class: "s0".to_owned(), points };
    let title = format!("Speedup, all task types, temperature {temperature}");
    let labels = Labels { title: &title, x: load.axis(), y: "time per token, second arm over first" };
    lines(&labels, &[speedup, even, threshold], Scale::Log, Scale::Linear)
}

/// Speedup by task type, distribution of latencies, acceptance by task type and by position.
pub(super) fn condition(report: &Report, i: usize) -> Vec<Option<String>> {
    vec![
        speedups(report, i),
        spread(report, &report.results[i]),
        acceptance(report, &report.results[i]),
        positions(report, &report.results[i]),
    ]
}

fn speedups(report: &Report, i: usize) -> Option<String> {
    let compared = report.comparisons.get(i)?;
    let row = |(task, found): (&str, &crate::bench::compare::Comparison)| {
        let speedup = found.speedup?;
        Some(IntervalRow {
            name: task.to_owned(),
            class: found.verdict.label().replace(' ', "-"),
            low: speedup.low,
            value: speedup.value,
            high: speedup.high,
        })
    };
    let rows: Vec<IntervalRow> = compared.by_name(&report.tasks).filter_map(row).collect();
    let y = format!("{} over {}, with intervals", report.arms[0].name, report.arms[1].name);
    let labels = Labels { title: "Speedup by task type", x: "", y: &y };
    intervals(&labels, &rows, &[(1.0, "even"), (report.rules.threshold, "threshold")], Scale::Log)
}

fn spread(report: &Report, results: &[ArmResult]) -> Option<String> {
    let series = |(a, result): (usize, &ArmResult)| Series {
        name: report.arms[a].name.clone(),
        class: format!("s{a}"),
        points: (0..=CURVE_POINTS)
            .filter(|_| !result.ms_per_token.is_empty())
            .map(|i| {
                let share = 100.0 * i as f64 / CURVE_POINTS as f64;
                Point { x: percentile(&result.ms_per_token, share), y: share, interval: None }
            })
            .collect(),
    };
    let labels = Labels {
        title: "Time per token of a whole request",
        x: "ms a token",
        y: "percent of requests that take at most this long",
    };
    let series: Vec<Series> = results.iter().enumerate().map(series).collect();
    lines(&labels, &series, Scale::Log, Scale::Linear)
}

fn acceptance(report: &Report, results: &[ArmResult]) -> Option<String> {
    let mut rows = Vec::new();
    for (a, result) in results.iter().enumerate() {
        for (task, figures) in result.by_name(&report.tasks) {
            let Some(found) = &figures.acceptance else { continue };
            let [low, value, high] = found.rate_percentiles;
            rows.push(IntervalRow { name: task.to_owned(), class: format!("s{a}"), low, value, high });
        }
    }
    let labels = Labels { title: "Acceptance rate of a request", x: "", y: "P10, P50, P90 over requests" };
    intervals(&labels, &rows, &[], Scale::Linear)
}

fn positions(report: &Report, results: &[ArmResult]) -> Option<String> {
    let series = |(a, result): (usize, &ArmResult)| {
        let by_chunks = result.overall.acceptance.as_ref().and_then(|found| found.per_position.as_ref());
        let rates = result.drafts_per_position.as_ref().or(by_chunks)?;
        let point = |(i, rate): (usize, &f64)| Point { x: (i + 1) as f64, y: *rate, interval: None };
        Some(Series {
            name: report.arms[a].name.clone(),
            class: format!("s{a}"),
            points: rates.iter().enumerate().map(point).collect(),
        })
    };
    let labels = Labels {
        title: "Acceptance by position",
        x: "drafted position",
        y: "share of drafts accepted at least so far",
    };
    let series: Vec<Series> = results.iter().enumerate().filter_map(series).collect();
    lines(&labels, &series, Scale::Linear, Scale::Linear)
}

fn bare(y: f64) -> Point {
    Point { x: 0.0, y, interval: None }
}

fn median(latency: &Distribution) -> Point {
    Point { interval: Some((latency.p50.low, latency.p50.high)), ..bare(latency.p50.value) }
}

fn p99(latency: &Distribution) -> Point {
    Point { interval: Some((latency.p99.low, latency.p99.high)), ..bare(latency.p99.value) }
}
