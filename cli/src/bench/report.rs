//! The results of a run, collected once for table, JSON and page.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::args::BenchArgs;
use super::break_even::{BreakEven, break_even};
use super::compare::{Comparison, VerdictRules, compare};
use super::machine::Machine;
use super::plan::{Condition, LoadLevel};
use super::run::{Cell, Experiment, Observations};
use crate::load::cpu::GeneratorReport;
use crate::load::{FigureOptions, Figures, Sample};
use crate::shell;

/// Largest number of failures that are quoted.
const ERRORS_SHOWN: usize = 5;

/// The report.
pub(super) struct Report {
    pub(super) command: String,
    pub(super) date: String,
    pub(super) machine: Machine,
    pub(super) arms: Vec<ArmReport>,
    pub(super) tasks: Vec<String>,
    pub(super) conditions: Vec<Condition>,
    pub(super) rules: VerdictRules,
    /// Indexed by condition, then arm.
    pub(super) results: Vec<Vec<ArmResult>>,
    /// Indexed by condition; empty unless there are two arms.
    pub(super) comparisons: Vec<ConditionComparison>,
    /// One per temperature and kind of load.
    pub(super) break_even: Vec<BreakEvenReport>,
    pub(super) generator: GeneratorReport,
    /// Distinct error texts of failed requests.
    pub(super) faults: Vec<String>,
    max_tokens: usize,
    seed: u32,
}

/// Description of an arm.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ArmReport {
    pub(super) name: String,
    pub(super) url: String,
    pub(super) model: String,
    pub(super) served_by: String,
}

/// Results of one arm under one condition.
pub(super) struct ArmResult {
    pub(super) overall: Figures,
    /// In the order of the report's tasks.
    pub(super) by_task: Vec<Figures>,
    /// From the server's counters: share of drafts accepted at least as far as each position.
    pub(super) drafts_per_position: Option<Vec<f64>>,
    /// Mean acceptance length from the server's counters, without plain rounds.
    pub(super) draft_length: Option<f64>,
    /// Number of verified drafts from the server's counters.
    pub(super) num_drafts: Option<u64>,
    /// Milliseconds per token of each completed request, ascending.
    pub(super) ms_per_token: Vec<f64>,
}

/// Comparison of both arms under one condition.
pub(super) struct ConditionComparison {
    pub(super) overall: Comparison,
    /// In the order of the report's tasks.
    pub(super) by_task: Vec<Comparison>,
}

/// Break-even at one temperature.
#[derive(Debug, Clone, Serialize)]
pub(super) struct BreakEvenReport {
    pub(super) temperature: f64,
    #[serde(flatten)]
    pub(super) result: BreakEven,
}

impl Report {
    pub(super) fn new(args: &BenchArgs, experiment: &Experiment, observations: &Observations) -> Self {
        let mut tasks: Vec<String> = experiment.prompts.iter().map(|prompt| prompt.task.clone()).collect();
        tasks.sort();
        tasks.dedup();
        let rules = VerdictRules { threshold: args.threshold, confidence: args.confidence };
        let options = FigureOptions { slo: args.slo, seed: args.seed.into() };
        // An interrupted run did not reach all of them.
        let is_measured = |cells: &Vec<Cell>| cells.iter().any(|cell| !cell.samples.is_empty());
        let planned = experiment.plan.conditions.iter().zip(&observations.cells);
        let (conditions, cells): (Vec<Condition>, Vec<&Vec<Cell>>) = planned
            .filter(|(_, cells)| is_measured(cells))
            .map(|(condition, cells)| (*condition, cells))
            .unzip();
        let of_condition = |cells: &Vec<Cell>| -> Vec<ArmResult> {
            cells.iter().map(|cell| ArmResult::new(cell, &tasks, &options)).collect()
        };
        let results = cells.iter().copied().map(of_condition).collect();
        let comparisons: Vec<ConditionComparison> =
            cells.iter().filter_map(|cells| compare_cells(cells, &tasks, &rules)).collect();
        let arm = |arm: &super::arm::Arm| ArmReport {
            name: arm.spec.name.clone(),
            url: arm.endpoint.url().to_owned(),
            model: arm.endpoint.model().to_owned(),
            served_by: arm.endpoint.served_by().to_owned(),
        };
        Self {
            command: command_line(),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
            machine: Machine::here(),
            arms: experiment.arms.iter().map(arm).collect(),
            break_even: break_evens(&conditions, &comparisons),
            faults: faults(observations),
            generator: observations.generator.report(),
            tasks,
            conditions,
            rules,
            results,
            comparisons,
            max_tokens: args.max_tokens.get(),
            seed: args.seed,
        }
    }

    /// The distinct temperatures, in the order of the conditions.
    pub(super) fn temperatures(&self) -> Vec<f64> {
        temperatures(&self.conditions)
    }

    /// One object per arm, condition and task type, with vLLM's field names where it has one.
    pub(super) fn to_json(&self) -> Value {
        let mut results = Vec::new();
        for (condition, arms) in self.conditions.iter().zip(&self.results) {
            for (arm, result) in self.arms.iter().zip(arms) {
                results.push(self.result_json(condition, (arm, "all"), result, &result.overall));
                for (task, figures) in self.tasks.iter().zip(&result.by_task) {
                    results.push(self.result_json(condition, (arm, task), result, figures));
                }
            }
        }
        let mut comparisons = Vec::new();
        for (condition, compared) in self.conditions.iter().zip(&self.comparisons) {
            let tasks = self.tasks.iter().map(String::as_str).zip(&compared.by_task);
            for (task, comparison) in std::iter::once(("all", &compared.overall)).chain(tasks) {
                let mut fields = head(condition, task);
                fields.insert("comparison".to_owned(), json!(comparison));
                comparisons.push(Value::Object(fields));
            }
        }
        json!({
            "command": self.command,
            "date": self.date,
            "version": service::release::version(),
            "machine": self.machine,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "arms": self.arms,
            "rules": self.rules,
            "results": results,
            "comparisons": comparisons,
            "stops_paying": self.break_even,
            "generator": self.generator,
            "faults": self.faults,
        })
    }

    fn result_json(
        &self,
        condition: &Condition,
        (arm, task): (&ArmReport, &str),
        result: &ArmResult,
        figures: &Figures,
    ) -> Value {
        let mut fields = head(condition, task);
        fields.insert("arm".to_owned(), arm.name.as_str().into());
        fields.insert("endpoint_type".to_owned(), "openai".into());
        fields.insert("model_id".to_owned(), arm.model.as_str().into());
        fields.extend(figures.to_json());
        if task == "all"
            && let Some(rates) = &result.drafts_per_position
        {
            // Per draft, as vLLM counts; the figures from chunks include plain rounds.
            fields.insert("spec_decode_per_position_acceptance_rates".to_owned(), json!(rates));
            fields.insert("spec_decode_acceptance_length".to_owned(), json!(result.draft_length));
            fields.insert("spec_decode_num_drafts".to_owned(), json!(result.num_drafts));
        }
        Value::Object(fields)
    }
}

fn head(condition: &Condition, task: &str) -> Map<String, Value> {
    let (concurrency, rate) = match condition.level {
        LoadLevel::Concurrency(count) => (Some(count), None),
        LoadLevel::Rate(rate) => (None, Some(rate)),
    };
    let fields = [
        ("task", json!(task)),
        ("max_concurrency", json!(concurrency)),
        // vLLM's value for a closed loop.
        ("request_rate", rate.map_or_else(|| json!("inf"), |rate| json!(rate))),
        ("temperature", json!(condition.temperature)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

impl ArmResult {
    fn new(cell: &Cell, tasks: &[String], options: &FigureOptions) -> Self {
        let of = |task: &String| {
            let samples = cell.samples.iter().filter(|sample| sample.task == *task);
            Figures::of(samples, cell.duration, options)
        };
        let drafted = cell.counters.as_ref().filter(|counters| counters.drafts > 0.0);
        let completed = cell.samples.iter().filter(|sample| sample.is_completed());
        let per_token = completed.filter_map(Sample::seconds_per_token);
        let mut ms_per_token: Vec<f64> = per_token.map(|seconds| seconds * 1e3).collect();
        ms_per_token.sort_by(f64::total_cmp);
        Self {
            overall: Figures::of(&cell.samples, cell.duration, options),
            by_task: tasks.iter().map(of).collect(),
            drafts_per_position: drafted.map(|counters| {
                counters.accepted_per_position.iter().map(|accepted| accepted / counters.drafts).collect()
            }),
            draft_length: drafted.map(|counters| 1.0 + counters.accepted_tokens / counters.drafts),
            num_drafts: drafted.map(|counters| counters.drafts as u64),
            ms_per_token,
        }
    }
}

fn compare_cells(cells: &[Cell], tasks: &[String], rules: &VerdictRules) -> Option<ConditionComparison> {
    let [first, second] = cells else { return None };
    let of = |cell: &Cell, task: Option<&String>| -> Vec<Sample> {
        let wanted = |sample: &&Sample| task.is_none_or(|task| sample.task == *task);
        cell.samples.iter().filter(wanted).cloned().collect()
    };
    let compare_task = |task: Option<&String>| {
        let (first, second) = (of(first, task), of(second, task));
        compare(&first.iter().collect::<Vec<_>>(), &second.iter().collect::<Vec<_>>(), rules)
    };
    Some(ConditionComparison {
        overall: compare_task(None),
        by_task: tasks.iter().map(|task| compare_task(Some(task))).collect(),
    })
}

fn temperatures(conditions: &[Condition]) -> Vec<f64> {
    let mut found: Vec<f64> = Vec::new();
    for condition in conditions {
        if !found.contains(&condition.temperature) {
            found.push(condition.temperature);
        }
    }
    found
}

fn break_evens(conditions: &[Condition], comparisons: &[ConditionComparison]) -> Vec<BreakEvenReport> {
    let mut found = Vec::new();
    for temperature in temperatures(conditions) {
        for kind in [LoadLevel::Concurrency(0), LoadLevel::Rate(0.0)] {
            let of_kind = conditions.iter().zip(comparisons).filter(|(condition, _)| {
                condition.temperature == temperature && condition.level.is_same_kind(&kind)
            });
            let levels: Vec<(LoadLevel, &Comparison)> =
                of_kind.map(|(condition, compared)| (condition.level, &compared.overall)).collect();
            found.extend(break_even(&levels).map(|found| BreakEvenReport { temperature, result: found }));
        }
    }
    found
}

fn faults(observations: &Observations) -> Vec<String> {
    let all = observations.cells.iter().flatten().flat_map(|cell| &cell.samples);
    let mut faults: Vec<String> =
        all.filter(|sample| !sample.is_completed()).map(|sample| sample.outcome.explain()).collect();
    faults.sort();
    faults.dedup();
    faults.truncate(ERRORS_SHOWN);
    faults
}

/// The command line, quoted for a shell, without the API key.
fn command_line() -> String {
    // A path need not be valid Unicode.
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let mut words: Vec<String> = words.collect();
    if let Some(program) = words.first_mut() {
        *program = "outrider".to_owned();
    }
    if let Some(i) = words.iter().position(|word| word == "--api-key")
        && let Some(key) = words.get_mut(i + 1)
    {
        *key = "...".to_owned();
    }
    for word in words.iter_mut().filter(|word| word.starts_with("--api-key=")) {
        *word = "--api-key=...".to_owned();
    }
    words.iter().map(|word| shell::quote(word)).collect::<Vec<_>>().join(" ")
}
