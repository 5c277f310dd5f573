//! Renders a report as Markdown, so that it can be kept with the model.

use super::advice::{Advice, Placement};
use super::eval::left_out_text;
use super::report::{ALL, AcceptanceLine, MeasuredReport, Report};
use super::texts::{TemplateCheck, TextCheck};
use crate::output::line;

/// Renders one report.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    line!(text, "# {} drafting for {}\n", report.draft, report.target);
    texts(&mut text, &report.text);
    if let Some(size) = &report.size {
        let (target, draft, ratio) = (size.target_parameters, size.draft_parameters, size.ratio);
        let verdict = match size.within_8_to_12 {
            true => "within the 1 : 8 to 1 : 12 that works best in published pairs",
            false if ratio < 8.0 => {
                "a large draft: published pairs work best at 1 : 8 to 1 : 12; see the cost ratio"
            }
            false => "a small draft: published pairs work best at 1 : 8 to 1 : 12; see the acceptance",
        };
        line!(text, "- size: {draft} to {target} parameters, 1 : {ratio:.1}; {verdict}");
    }
    if let Some(measured) = &report.measured {
        cost(&mut text, measured);
        if let Some(left_out) = left_out_text(&measured.left_out) {
            line!(text, "- task types {left_out}");
        }
        acceptance(&mut text, measured);
        modes(&mut text, measured);
        tasks(&mut text, measured);
    }
    text
}

/// Compares two drafts by task type.
pub(super) fn comparison(one: &Report, other: &Report) -> String {
    let mut text = String::new();
    line!(text, "\n# {} against {}\n", one.draft, other.draft);
    let (Some(ours), Some(theirs)) = (&one.measured, &other.measured) else {
        line!(text, "One of them cannot be paired: nothing to compare.");
        return text;
    };
    line!(
        text,
        "| task type | acceptance | against | difference | k, speedup apart, 1 sequence | against |\n|---|---|---|---|---|---|"
    );
    for task in &ours.tasks {
        let Some(other) = theirs.tasks.iter().find(|other| other.task == task.task) else { continue };
        let rates = (task.acceptance_rate.unwrap_or(0.0), other.acceptance_rate.unwrap_or(0.0));
        line!(
            text,
            "| {} | {:.3} | {:.3} | {:+.3} | {} | {} |",
            task.task,
            rates.0,
            rates.1,
            rates.1 - rates.0,
            best_k(&task.advice, Placement::Apart, 1),
            best_k(&other.advice, Placement::Apart, 1)
        );
    }
    text
}

fn texts(text: &mut String, check: &TextCheck) {
    match &check.first_difference {
        None => line!(text, "- tokenizer: every id means the same token ({})", check.target_fingerprint),
        Some(difference) => line!(
            text,
            "- tokenizer: DIFFERENT, nothing is measured: {difference}; a draft worker serves such a pair with --target-tokenizer, \
                 `outrider up` by itself\n  target {}\n  draft  {}",
            check.target_fingerprint,
            check.draft_fingerprint
        ),
    }
    match check.special_tokens.as_slice() {
        [] => line!(text, "- special tokens: the same"),
        differences => line!(text, "- special tokens: {}", differences.join("; ")),
    }
    let template = match check.chat_template {
        TemplateCheck::Equal => "the same",
        TemplateCheck::Differs => {
            "different: conversations are rendered with the target's template, which the draft may not have learned"
        }
        TemplateCheck::OnlyTarget => "only the target has one: the draft may not have learned conversations",
        TemplateCheck::OnlyDraft => "only the draft has one: conversations cannot be served",
    };
    line!(text, "- chat template: {template}");
}

fn cost(text: &mut String, measured: &MeasuredReport) {
    let shown =
        |ratio: Option<f64>| ratio.map_or_else(|| "not measured".to_owned(), |ratio| format!("{ratio:.3}"));
    let cost = &measured.cost;
    let (one, eight) = (shown(cost.ratio_at_1_row), shown(cost.ratio_at_8_rows));
    line!(
        text,
        "- cost of a draft step over a target step, measured here: {one} at 1 row, {eight} at 8 rows"
    );
}

fn acceptance(text: &mut String, measured: &MeasuredReport) {
    let k = measured.num_draft_tokens;
    line!(text, "\n## Acceptance, coupled, k = {k}\n");
    line!(
        text,
        "| T | task type | acceptance rate | tokens per round | by position, given all before accepted | drafted |\n|---|---|---|---|---|---|"
    );
    for found in measured.acceptance.iter().filter(|found| found.mode == "coupled") {
        let positions: Vec<String> =
            found.acceptance_by_position.iter().map(|rate| format!("{rate:.2}")).collect();
        line!(
            text,
            "| {} | {} | {} | {:.2} | {} | {} |",
            found.temperature,
            found.task,
            rate(found.acceptance_rate),
            found.acceptance_length,
            positions.join(" "),
            found.counts.draft_tokens
        );
    }
}

fn modes(text: &mut String, measured: &MeasuredReport) {
    let of = |mode: &str| -> Vec<&AcceptanceLine> {
        measured.acceptance.iter().filter(|found| found.mode == mode && found.temperature > 0.0).collect()
    };
    let (coupled, rejection, typical) = (of("coupled"), of("rejection"), of("typical"));
    if coupled.is_empty() || rejection.len() != coupled.len() || typical.len() != coupled.len() {
        return;
    }
    line!(text, "\n## The three acceptance modes\n");
    line!(text, "| T | task type | coupled | rejection | typical (lossy) |\n|---|---|---|---|---|");
    for ((coupled, rejection), typical) in coupled.iter().zip(&rejection).zip(&typical) {
        line!(
            text,
            "| {} | {} | {} | {} | {} |",
            coupled.temperature,
            coupled.task,
            rate(coupled.acceptance_rate),
            rate(rejection.acceptance_rate),
            rate(typical.acceptance_rate)
        );
    }
}

fn tasks(text: &mut String, measured: &MeasuredReport) {
    line!(text, "\n## The k that pays, and its speedup\n");
    line!(
        text,
        "| task type | acceptance rate | colocated, 1 sequence | 8 sequences | apart, 1 sequence | 8 sequences | |\n|---|---|---|---|---|---|---|"
    );
    for task in &measured.tasks {
        let at = |placement, load| best_k(&task.advice, placement, load);
        let flag = if task.switch_off && task.task != ALL { "switch off" } else { "" };
        line!(
            text,
            "| {} | {} | {} | {} | {} | {} | {flag} |",
            task.task,
            rate(task.acceptance_rate),
            at(Placement::Colocated, 1),
            at(Placement::Colocated, 8),
            at(Placement::Apart, 1),
            at(Placement::Apart, 8)
        );
    }
    let off = measured.to_switch_off();
    match off.is_empty() {
        true => line!(
            text,
            "\nDrafting pays at one placement and load at least for every task type in which tokens were drafted."
        ),
        false => line!(
            text,
            "\nNo k pays at any placement and load of the table; switch drafting off for these: {}.",
            off.join(", ")
        ),
    }
    line!(
        text,
        "Speedups are predicted from the step times and acceptance measured here, not timed end to end."
    );
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}"))
}

fn best_k(advice: &[Advice], placement: Placement, sequences: u32) -> String {
    match advice.iter().find(|advice| advice.placement == placement && advice.sequences == sequences) {
        None => "-".to_owned(),
        Some(Advice { k: 0, .. }) => "off".to_owned(),
        Some(advice) => format!("k = {}, {:.2}x", advice.k, advice.speedup),
    }
}
