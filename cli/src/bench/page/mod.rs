//! The report as one self-contained HTML page: tables from a template, plots as inline SVG.

mod axis;
mod charts;
mod svg;

use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, context};
use serde_json::json;

use super::compare::Comparison;
use super::report::{ArmResult, Report};
use super::table::by_kind;
use crate::load::Figures;
use crate::load::statistics::Distribution;

const TEMPLATE: &str = include_str!("page.html.jinja");

/// Renders the page.
pub(super) fn page(report: &Report) -> String {
    let mut environment = Environment::new();
    // Names of models, arms and task types are untrusted input.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    let sections: Vec<Value> = (0..report.conditions.len()).map(|i| section(report, i)).collect();
    let break_even: Vec<Value> = report
        .break_even
        .iter()
        .map(|found| context! { temperature => found.temperature, text => found.result.explain() })
        .collect();
    let page = environment.render_str(
        TEMPLATE,
        context! {
            command => report.command.as_str(),
            date => report.date.as_str(),
            machine => Serde(&report.machine),
            arms => Serde(&report.arms),
            rules => Serde(&report.rules),
            break_even,
            overview => plots(charts::overview(report)),
            sections,
            generator => Serde(&report.generator),
            faults => report.faults.clone(),
        },
    );
    page.expect("the template is bundled, and a test renders it")
}

/// Template values of one condition.
fn section(report: &Report, i: usize) -> Value {
    let condition = &report.conditions[i];
    let rows: Vec<serde_json::Value> =
        report.rows(i).map(|(task, arm, figures)| row(task, arm, figures)).collect();
    let compared = report.comparisons.get(i).into_iter();
    let verdicts: Vec<serde_json::Value> = compared
        .flat_map(|compared| compared.by_name(&report.tasks))
        .map(|(task, found)| verdict(task, found))
        .collect();
    context! {
        name => format!("{}, temperature {}", condition.level.name(), condition.temperature),
        rows => Serde(rows),
        verdicts => Serde(verdicts),
        failures => failures(report, &report.results[i]),
        plots => plots(charts::condition(report, i)),
    }
}

/// The plots that have something to show.
fn plots(all: Vec<Option<String>>) -> Vec<Value> {
    all.into_iter().flatten().map(Value::from_safe_string).collect()
}

fn failures(report: &Report, results: &[ArmResult]) -> Vec<String> {
    let arms = report.arms.iter().zip(results).filter(|(_, result)| !result.overall.failures.is_empty());
    arms.map(|(arm, result)| format!("{}: {}", arm.name, by_kind(&result.overall.failures))).collect()
}

fn row(task: &str, arm: &str, figures: &Figures) -> serde_json::Value {
    let latency = |latency: &Option<Distribution>| {
        let cell = |estimate: crate::load::statistics::Estimate| {
            json!({
                "value": axis::label(estimate.value),
                "interval": format!("[{}, {}]", axis::label(estimate.low), axis::label(estimate.high)),
            })
        };
        latency.as_ref().map(|found| [found.mean, found.p50, found.p90, found.p99].map(cell))
    };
    let spread = figures.e2el.as_ref().map(|e2el| axis::label(e2el.p99.value / e2el.p50.value));
    let acceptance = figures.acceptance.as_ref();
    json!({
        "task": task,
        "arm": arm,
        "completed": figures.completed,
        "failed": figures.num_prompts - figures.completed,
        "latencies": [
            latency(&figures.ttft), latency(&figures.tpot), latency(&figures.itl), latency(&figures.e2el),
        ],
        "spread": spread,
        "output_throughput": axis::label(figures.output_throughput()),
        "goodput": figures.request_goodput.map(axis::label),
        "rate": acceptance.map(|found| axis::label(found.rate())),
        "length": acceptance.and_then(crate::load::figures::Acceptance::length).map(axis::label),
    })
}

fn verdict(task: &str, found: &Comparison) -> serde_json::Value {
    let reason = match &found.verdict {
        super::compare::ShipVerdict::Undecided(reason) => Some(reason.as_str()),
        _ => None,
    };
    json!({
        "task": task,
        "word": found.verdict.label(),
        "class": found.verdict.label().replace(' ', "-"),
        "reason": reason,
        "speedup": found.speedup.map(|speedup| format!(
            "{:.2} [{:.2}, {:.2}]", speedup.value, speedup.low, speedup.high
        )),
        "same_text": found.same_text,
        "pairs": found.pairs,
        "failed": found.failed,
    })
}
