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

/// Name of all task types together.
const ALL: &str = "all";
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

    /// The conditions of each curve over load.
    pub(super) fn curves(&self) -> Vec<Vec<usize>> {
        curves(&self.conditions)
    }

    /// The rows of a condition's table: task type, arm, figures.
    pub(super) fn rows(&self, condition: usize) -> impl Iterator<Item = (&str, &str, &Figures)> {
        let arms = move || self.arms.iter().map(|arm| arm.name.as_str()).zip(&self.results[condition]);
        let all = arms().map(|(arm, result)| (ALL, arm, &result.overall));
        all.chain(self.tasks.iter().enumerate().flat_map(move |(t, task)| {
            arms().map(move |(arm, result)| (task.as_str(), arm, &result.by_task[t]))
        }))
    }

    /// One object per arm, condition and task type, with vLLM's field names where it has one.
    pub(super) fn to_json(&self) -> Value {
        let mut results = Vec::new();
        for (condition, arms) in self.conditions.iter().zip(&self.results) {
            for (arm, result) in self.arms.iter().zip(arms) {
                for (task, figures) in result.by_name(&self.tasks) {
                    results.push(self.result_json(condition, (arm, task), result, figures));
                }
            }
        }
        let mut comparisons = Vec::new();
        for (condition, compared) in self.conditions.iter().zip(&self.comparisons) {
            for (task, comparison) in compared.by_name(&self.tasks) {
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
        if task == ALL
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

/// The value of all task types, under the name [`ALL`], then that of each.
fn by_name<'a, T>(
    overall: &'a T,
    by_task: &'a [T],
    tasks: &'a [String],
) -> impl Iterator<Item = (&'a str, &'a T)> {
    std::iter::once((ALL, overall)).chain(tasks.iter().map(String::as_str).zip(by_task))
}

impl ConditionComparison {
    /// By task type, [`ALL`] first.
    pub(super) fn by_name<'a>(
        &'a self,
        tasks: &'a [String],
    ) -> impl Iterator<Item = (&'a str, &'a Comparison)> {
        by_name(&self.overall, &self.by_task, tasks)
    }
}

impl ArmResult {
    /// By task type, [`ALL`] first.
    pub(super) fn by_name<'a>(&'a self, tasks: &'a [String]) -> impl Iterator<Item = (&'a str, &'a Figures)> {
        by_name(&self.overall, &self.by_task, tasks)
    }

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

/// Indices of the conditions of each curve over load: those with one temperature and one kind of load.
fn curves(conditions: &[Condition]) -> Vec<Vec<usize>> {
    let mut curves: Vec<Vec<usize>> = Vec::new();
    for (i, condition) in conditions.iter().enumerate() {
        match curves.iter_mut().find(|curve| conditions[curve[0]].is_on_curve_of(condition)) {
            Some(curve) => curve.push(i),
            None => curves.push(vec![i]),
        }
    }
    curves
}

fn break_evens(conditions: &[Condition], comparisons: &[ConditionComparison]) -> Vec<BreakEvenReport> {
    let of_curve = |curve: Vec<usize>| {
        let compared = curve.iter().filter_map(|&i| Some((conditions[i].level, comparisons.get(i)?)));
        let levels: Vec<(LoadLevel, &Comparison)> =
            compared.map(|(level, compared)| (level, &compared.overall)).collect();
        let temperature = conditions[curve[0]].temperature;
        break_even(&levels).map(|result| BreakEvenReport { temperature, result })
    };
    curves(conditions).into_iter().filter_map(of_curve).collect()
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
