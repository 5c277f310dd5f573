//! The effect of quantization: the change of logits and the agreement of greedy tokens for either model, and
//! acceptance by task type with the draft, the target or both quantized. The reference is the same models in
//! bf16.

mod fidelity;

use std::collections::BTreeMap;

use serde::Serialize;
use speculation::{AcceptanceMode, TokenId};

use super::error::CheckPairError;
use super::eval::{EvalPrompts, left_out_text, load};
use super::local::LocalPair;
use super::measure::{
    AcceptanceCounts, Counts, EvalOptions, EvalPrompt, Setting, measure, sequence_spec, settings,
};
use super::report::ALL;
use super::texts::CheckpointText;
use super::{CheckPairArgs, WeightsArg, eval_prompts};
use crate::output::line;
use crate::progress::Progress;
use fidelity::{Fidelity, Text, compare};

/// The quantized formats that are measured.
const QUANTIZED: [WeightsArg; 2] = [WeightsArg::Int8, WeightsArg::Int4];

/// Columns of the table: neither, then draft, target and both in each format.
const COLUMNS: usize = 1 + 3 * QUANTIZED.len();

/// Which models are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantized {
    /// Neither: the reference.
    Neither,
    /// The draft alone.
    Draft,
    /// The target alone.
    Target,
    /// Both.
    Both,
}

/// The complete report.
#[derive(Debug, Clone, Serialize)]
pub struct QuantizationReport {
    /// By format and model.
    pub fidelity: Vec<Fidelity>,
    /// By quantized models and format.
    pub acceptance: Vec<AcceptanceColumn>,
    /// k in every round.
    pub num_draft_tokens: u32,
    /// Maximum number of prompts per task type.
    pub num_prompts: usize,
    /// Task types that were not measured because none of their prompts fits, with their number of prompts.
    pub left_out: BTreeMap<String, usize>,
}

/// Acceptance with certain models quantized.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceColumn {
    /// The quantized models.
    pub who: Quantized,
    /// Their format; bf16 if neither is quantized.
    pub weights: &'static str,
    /// By temperature and task type, the sum of all task types last.
    pub cells: Vec<AcceptanceCell>,
}

/// One acceptance rate.
#[derive(Debug, Clone, Serialize)]
pub struct AcceptanceCell {
    /// Sampling temperature.
    pub temperature: f32,
    /// Task type, or `all`.
    pub task: String,
    /// Accepted / drafted.
    pub acceptance_rate: Option<f64>,
}

/// The prompts and settings for each pair.
type Workload<'a> = (&'a [EvalPrompt], &'a [Setting], &'a EvalOptions);

/// Runs all measurements.
pub fn run(args: &CheckPairArgs) -> Result<QuantizationReport, CheckPairError> {
    let (target_text, draft_text) = (CheckpointText::read(&args.target)?, CheckpointText::read(&args.draft)?);
    if let Some(difference) = target_text.compare(&draft_text).first_difference {
        return Err(CheckPairError::TokenizersDiffer(difference));
    }
    let target_in =
        |weights: WeightsArg| load(&args.target, (weights.format(), target_text.num_ids()), args.threads);
    let draft_in =
        |weights: WeightsArg| load(&args.draft, (weights.format(), draft_text.num_ids()), args.threads);
    let (mut target, mut draft) = (target_in(WeightsArg::Bf16)?, draft_in(WeightsArg::Bf16)?);
    let mut pair = LocalPair { target: &mut target, draft: &mut draft };
    let EvalPrompts { prompts: eval_prompts, left_out } = eval_prompts(args, &target_text, pair.window())?;
    let settings = settings(&args.temperatures, &[AcceptanceMode::Coupled]);
    let eval_options = args.pair_options().eval_options(pair.target);
    let progress = Progress::new(eval_prompts.len() * (settings.len() * COLUMNS + 1), "sequences");
    let workload: Workload<'_> = (&eval_prompts, &settings, &eval_options);
    let texts = greedy_texts(&mut pair, (&eval_prompts, &eval_options), &progress)?;

    let mut fidelity = Vec::new();
    let pair = LocalPair { target: &mut target, draft: &mut draft };
    let mut acceptance = vec![column((Quantized::Neither, WeightsArg::Bf16), pair, workload, &progress)?];
    for weights in QUANTIZED {
        let (mut small_target, mut small_draft) = (target_in(weights)?, draft_in(weights)?);
        fidelity.push(compare(("target", weights), (&mut target, &mut small_target), &texts)?);
        fidelity.push(compare(("draft", weights), (&mut draft, &mut small_draft), &texts)?);
        let pair = LocalPair { target: &mut target, draft: &mut small_draft };
        acceptance.push(column((Quantized::Draft, weights), pair, workload, &progress)?);
        let pair = LocalPair { target: &mut small_target, draft: &mut draft };
        acceptance.push(column((Quantized::Target, weights), pair, workload, &progress)?);
        let pair = LocalPair { target: &mut small_target, draft: &mut small_draft };
        acceptance.push(column((Quantized::Both, weights), pair, workload, &progress)?);
    }
    progress.end();
    let (num_draft_tokens, num_prompts) = (args.draft_tokens, args.num_prompts);
    Ok(QuantizationReport { fidelity, acceptance, num_draft_tokens, num_prompts, left_out })
}

/// Each prompt followed by the greedy output of the pair.
fn greedy_texts(
    pair: &mut LocalPair<'_>,
    (eval_prompts, eval_options): (&[EvalPrompt], &EvalOptions),
    progress: &Progress,
) -> Result<Vec<Text>, CheckPairError> {
    progress.begin_part("texts to compare logits on".to_owned());
    let greedy = Setting { temperature: 0.0, mode: AcceptanceMode::Coupled };
    let mut texts = Vec::new();
    for eval_prompt in eval_prompts {
        let prompt: &[TokenId] = &eval_prompt.prompt_ids;
        let decoded = pair.decode(
            sequence_spec(eval_prompt, &greedy, eval_options),
            prompt,
            eval_options.num_draft_tokens,
        )?;
        texts.push(Text { ids: [prompt, &decoded.token_ids].concat(), prompt_len: prompt.len() });
        progress.finish_unit();
    }
    Ok(texts)
}

fn column(
    (who, weights): (Quantized, WeightsArg),
    mut pair: LocalPair<'_>,
    (eval_prompts, settings, eval_options): Workload<'_>,
    progress: &Progress,
) -> Result<AcceptanceColumn, CheckPairError> {
    let weights = weights.as_str();
    let head = head(who, weights);
    let on_task = |setting: &Setting, task: &str| progress.begin_part(format!("{head}, {setting}, {task}"));
    let hooks = (on_task, || progress.finish_unit());
    let measured = measure(&mut pair, eval_prompts, (settings, eval_options), hooks)?;
    Ok(AcceptanceColumn { who, weights, cells: cells(&measured) })
}

fn cells(measured: &AcceptanceCounts) -> Vec<AcceptanceCell> {
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

/// The printed report.
pub(super) fn output(args: &CheckPairArgs, report: &QuantizationReport) -> String {
    if args.json {
        return format!("{}\n", serde_json::json!(report));
    }
    let mut text = fidelity::table(&report.fidelity);
    let heads: Vec<String> =
        report.acceptance.iter().map(|column| head(column.who, column.weights)).collect();
    line!(text, "\n| T | task type | {} |\n|---|---|{}", heads.join(" | "), "---|".repeat(heads.len()));
    let rows = report.acceptance.first().map_or(0, |column| column.cells.len());
    for row in 0..rows {
        let AcceptanceCell { temperature, task, .. } = &report.acceptance[0].cells[row];
        let rates = report.acceptance.iter().map(|column| column.cells[row].acceptance_rate);
        let rates: Vec<String> =
            rates.map(|rate| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}"))).collect();
        line!(text, "| {temperature} | {task} | {} |", rates.join(" | "));
    }
    if let Some(left_out) = left_out_text(&report.left_out) {
        line!(text, "\nTask types {left_out}");
    }
    text
}

/// Heading of a column.
fn head(who: Quantized, weights: &str) -> String {
    match who {
        Quantized::Neither => "bf16".to_owned(),
        Quantized::Draft => format!("draft {weights}"),
        Quantized::Target => format!("target {weights}"),
        Quantized::Both => format!("both {weights}"),
    }
}
