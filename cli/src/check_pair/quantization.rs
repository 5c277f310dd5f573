//! What quantizing does: how far logits move and how often the greedy token stays, for either model; and what it does to acceptance
//! by task type where the draft, the target, or both are quantized. Everything against the same models in bf16.

mod fidelity;

use std::fmt::Write as _;

use serde::Serialize;
use speculation::{AcceptanceMode, TokenId};

use super::error::CheckPairError;
use super::local::{LocalModel, LocalPair};
use super::measure::{Counts, Measured, Question, Setting, Settings, measure, settings, spec};
use super::report::ALL;
use super::texts::CheckpointText;
use super::{CheckPairArgs, Weights, how, load, progress, questions};
use fidelity::{Fidelity, Text, compare};

/// The formats that are judged.
const QUANTIZED: [Weights; 2] = [Weights::Int8, Weights::Int4];

/// Columns of the table: nobody, then the draft, the target and both in each format.
const COLUMNS: usize = 1 + 3 * QUANTIZED.len();

/// Who is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// What all else is compared with.
    Neither,
    /// The draft alone.
    Draft,
    /// The target alone.
    Target,
    /// Both.
    Both,
}

/// The whole table.
#[derive(Debug, Clone, Serialize)]
pub struct QuantizationReport {
    /// By model and format.
    pub fidelity: Vec<Fidelity>,
    /// By who is quantized and to what.
    pub acceptance: Vec<AcceptanceColumn>,
    /// k of every round.
    pub num_draft_tokens: u32,
    /// Prompts of each task type.
    pub num_prompts: usize,
}

/// Acceptance with some of the models quantized.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceColumn {
    /// Who.
    pub who: Who,
    /// To what; bf16 where nobody is.
    pub weights: &'static str,
    /// By temperature and task type, the sum last.
    pub cells: Vec<AcceptanceCell>,
}

/// One number of it.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceCell {
    /// Of the draw.
    pub temperature: f32,
    /// Task type, or `all`.
    pub task: String,
    /// Accepted of drafted.
    pub acceptance_rate: Option<f64>,
}

/// What is asked of each pair.
type Asked<'a> = (&'a [Question], &'a [Setting], &'a Settings);

/// Measures it all.
pub fn run(args: &CheckPairArgs) -> Result<QuantizationReport, CheckPairError> {
    let (target_text, draft_text) = (CheckpointText::read(&args.target)?, CheckpointText::read(&args.draft)?);
    if let Some(difference) = target_text.compare(&draft_text).first_difference {
        return Err(CheckPairError::Unpaired(difference));
    }
    let target_in = |weights| load(args, &args.target, (weights, target_text.num_ids()));
    let draft_in = |weights| load(args, &args.draft, (weights, draft_text.num_ids()));
    let (mut target, mut draft) = (target_in(Weights::Bf16)?, draft_in(Weights::Bf16)?);
    let mut pair = LocalPair { target: &mut target, draft: &mut draft };
    let questions = questions(args, &target_text, pair.window())?;
    let settings = settings(&args.temperatures, &[AcceptanceMode::Coupled]);
    let how = how(args, pair.target);
    let bar = progress(questions.len() * (settings.len() * COLUMNS + 1), "sequences");
    let step = || bar.inc(1);
    let asked: Asked<'_> = (&questions, &settings, &how);
    let texts = greedy_texts(&mut pair, (&questions, &how), step)?;

    let mut fidelity = Vec::new();
    let mut acceptance = vec![column((Who::Neither, Weights::Bf16), (&mut target, &mut draft), asked, step)?];
    for weights in QUANTIZED {
        let (mut small_target, mut small_draft) = (target_in(weights)?, draft_in(weights)?);
        fidelity.push(compare(("target", weights), (&mut target, &mut small_target), &texts)?);
        fidelity.push(compare(("draft", weights), (&mut draft, &mut small_draft), &texts)?);
        acceptance.push(column((Who::Draft, weights), (&mut target, &mut small_draft), asked, step)?);
        acceptance.push(column((Who::Target, weights), (&mut small_target, &mut draft), asked, step)?);
        acceptance.push(column((Who::Both, weights), (&mut small_target, &mut small_draft), asked, step)?);
    }
    bar.finish_and_clear();
    let (num_draft_tokens, num_prompts) = (args.draft_tokens, args.num_prompts);
    Ok(QuantizationReport { fidelity, acceptance, num_draft_tokens, num_prompts })
}

/// Each prompt with the text that the pair writes to it greedily.
fn greedy_texts(
    pair: &mut LocalPair<'_>,
    (questions, how): (&[Question], &Settings),
    on_sequence: impl Fn(),
) -> Result<Vec<Text>, CheckPairError> {
    let greedy = Setting { temperature: 0.0, mode: AcceptanceMode::Coupled };
    let mut texts = Vec::new();
    for question in questions {
        let prompt: &[TokenId] = &question.prompt_ids;
        let decoded = pair.decode(spec(question, &greedy, how), prompt, how.num_draft_tokens)?;
        texts.push(Text { ids: [prompt, &decoded.token_ids].concat(), prompt_len: prompt.len() });
        on_sequence();
    }
    Ok(texts)
}

fn column(
    (who, weights): (Who, Weights),
    (target, draft): (&mut LocalModel, &mut LocalModel),
    (questions, settings, how): Asked<'_>,
    on_sequence: impl Fn(),
) -> Result<AcceptanceColumn, CheckPairError> {
    let measured = measure(&mut LocalPair { target, draft }, questions, (settings, how), on_sequence)?;
    Ok(AcceptanceColumn { who, weights: weights.as_str(), cells: cells(&measured) })
}

fn cells(measured: &Measured) -> Vec<AcceptanceCell> {
    let mut cells = Vec::new();
    for (setting, by_task) in &measured.by_setting {
        let sum = Counts::sum(by_task.values());
        for (task, counts) in
            by_task.iter().map(|(task, counts)| (task.as_str(), counts)).chain([(ALL, &sum)])
        {
            let acceptance_rate = counts.acceptance_rate();
            cells.push(AcceptanceCell {
                temperature: setting.temperature,
                task: task.to_owned(),
                acceptance_rate,
            });
        }
    }
    cells
}

/// The report as it is printed.
pub(super) fn output(args: &CheckPairArgs, report: &QuantizationReport) -> String {
    if args.json {
        return format!("{}\n", serde_json::json!(report));
    }
    let mut text = fidelity::table(&report.fidelity);
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        writeln!(text, "{arguments}").expect("a String can always be written to");
    };
    let heads: Vec<String> = report.acceptance.iter().map(head).collect();
    line(format_args!(
        "\n| T | task type | {} |\n|---|---|{}",
        heads.join(" | "),
        "---|".repeat(heads.len())
    ));
    let rows = report.acceptance.first().map_or(0, |column| column.cells.len());
    for row in 0..rows {
        let AcceptanceCell { temperature, task, .. } = &report.acceptance[0].cells[row];
        let rates = report.acceptance.iter().map(|column| column.cells[row].acceptance_rate);
        let rates: Vec<String> =
            rates.map(|rate| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}"))).collect();
        line(format_args!("| {temperature} | {task} | {} |", rates.join(" | ")));
    }
    text
}

fn head(column: &AcceptanceColumn) -> String {
    match column.who {
        Who::Neither => "bf16".to_owned(),
        Who::Draft => format!("draft {}", column.weights),
        Who::Target => format!("target {}", column.weights),
        Who::Both => format!("both {}", column.weights),
    }
}
