//! `outrider check-pair`: measures what a draft is worth to a target before the pair is served.
//!
//! First come checks that need no model (`texts`). Then the pair runs in this process (`local`, the router's
//! rules over two engines): acceptance (`measure`), step times (`cost`), the resulting advice (`advice`), and
//! the report (`report`, `table`). With `--quantization` it reports instead the effect of quantizing either
//! model (`quantization`). It must never judge drafts by separate rules: every draw, verdict and choice of k
//! comes from `speculation` and `scheduling`.

pub mod advice;
mod args;
pub mod cost;
pub mod error;
pub mod local;
pub mod measure;
pub mod quantization;
pub mod report;
mod table;
pub mod texts;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use engine::{Engine, LoadOptions};
use speculation::{AcceptanceMode, TokenId};

pub use args::{CheckPairArgs, WeightsArg};

use crate::load::Prompt;
use crate::progress::Progress;
use crate::{EXIT_USAGE, output};
use error::CheckPairError;
use local::{LocalModel, LocalPair};
use measure::{EvalOptions, EvalPrompt, Setting, settings};
use report::{MeasuredReport, Report, SizeCheck};
use texts::CheckpointText;

/// An upper limit: KV memory is allocated as sequences grow.
const KV_MEMORY_BYTES: u64 = 16 << 30;
/// All modes; the served mode comes first.
const MODES: [AcceptanceMode; 3] =
    [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];

/// Runs the subcommand. Prints an error on one line; a pair that cannot be served is also a failure.
#[expect(clippy::print_stderr, reason = "errors are printed for the user")]
pub fn main(args: &CheckPairArgs) -> ExitCode {
    let outcome = args.check().and_then(|()| match args.quantization {
        true => quantization::run(args).map(|report| (quantization::output(args, &report), true)),
        false => run_on(args, None).map(|reports| {
            let all_pair = reports.iter().all(|report| report.text.can_pair());
            (text(args, &reports), all_pair)
        }),
    });
    match outcome {
        Ok((text, all_pair)) => {
            let printed = output::finish(&text);
            if all_pair { printed } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("outrider: {error}");
            match error {
                CheckPairError::Usage { .. } => ExitCode::from(EXIT_USAGE),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Runs the check and returns one report, and a second for `--against`. Uses the prompts in `given_prompts`
/// if given, else the prompts that the arguments name.
pub fn run_on(
    args: &CheckPairArgs,
    given_prompts: Option<&[EvalPrompt]>,
) -> Result<Vec<Report>, CheckPairError> {
    let target_text = CheckpointText::read(&args.target)?;
    let mut target = None;
    let drafts = [Some(&args.draft), args.against.as_ref()].into_iter().flatten();
    drafts.map(|draft| check_draft(args, (&target_text, given_prompts), draft, &mut target)).collect()
}

/// Checks one draft. The target is loaded for the first draft that can be paired.
fn check_draft(
    args: &CheckPairArgs,
    (target_text, given_prompts): (&CheckpointText, Option<&[EvalPrompt]>),
    draft: &Path,
    target: &mut Option<LocalModel>,
) -> Result<Report, CheckPairError> {
    let draft_text = CheckpointText::read(draft)?;
    let text = target_text.compare(&draft_text);
    let names = [&args.target, draft].map(|path: &Path| path.display().to_string());
    let [target_name, draft_name] = names;
    let mut report = Report { target: target_name, draft: draft_name, size: None, measured: None, text };
    if !report.text.can_pair() {
        return Ok(report);
    }
    let target = match target {
        Some(target) => target,
        None => target.insert(load_target(args, target_text.num_ids())?),
    };
    let mut draft = load(args, draft, (args.draft_weights, draft_text.num_ids()))?;
    report.size = Some(SizeCheck::new(target.info().num_parameters, draft.info().num_parameters));
    report.measured =
        Some(measure_pair(args, (target_text, given_prompts), LocalPair { target, draft: &mut draft })?);
    Ok(report)
}

fn measure_pair(
    args: &CheckPairArgs,
    (target_text, given_prompts): (&CheckpointText, Option<&[EvalPrompt]>),
    mut pair: LocalPair<'_>,
) -> Result<MeasuredReport, CheckPairError> {
    let eval_prompts = match given_prompts {
        Some(given_prompts) => keep_fitting(args, given_prompts, pair.window())?,
        None => eval_prompts(args, target_text, pair.window())?,
    };
    let settings = settings(&args.temperatures, &MODES);
    let eval_options = eval_options(args, pair.target);
    let progress = Progress::new(eval_prompts.len() * settings.len(), "sequences");
    let on_task = |setting: &Setting, task: &str| progress.begin_part(format!("{setting}, {task}"));
    let hooks = (on_task, || progress.finish_unit());
    let measured = measure::measure(&mut pair, &eval_prompts, (&settings, &eval_options), hooks)?;
    progress.end();
    let costs = cost::measure(pair.target, pair.draft)?;
    let tokens: usize = eval_prompts.iter().map(|eval_prompt| eval_prompt.prompt_ids.len()).sum();
    let context = tokens as f64 / eval_prompts.len() as f64 + f64::from(args.max_tokens) / 2.0;
    let wire = Duration::from_micros(args.wire_us);
    Ok(MeasuredReport::new(&measured, costs, args.draft_tokens, (wire, context)))
}

/// Loads one model; `num_ids` is the number of ids of its tokenizer.
pub fn load(
    args: &CheckPairArgs,
    directory: &Path,
    (weights, num_ids): (WeightsArg, u32),
) -> Result<LocalModel, CheckPairError> {
    Ok(LocalModel::new(Engine::load(&options(args, directory, weights))?, num_ids))
}

fn options(args: &CheckPairArgs, directory: &Path, weights: WeightsArg) -> LoadOptions {
    LoadOptions {
        model_dir: directory.to_owned(),
        weights: weights.format(),
        threads: args.threads.get(),
        tensor_parallel: 1,
        kv_memory_bytes: KV_MEMORY_BYTES,
        max_model_len: None,
    }
}

/// Loads the target with ballast.
fn load_target(args: &CheckPairArgs, num_ids: u32) -> Result<LocalModel, CheckPairError> {
    let engine = Engine::load_with_ballast(&options(args, &args.target, args.weights), args.ballast.0, None)?;
    Ok(LocalModel::new(engine, num_ids))
}

/// Settings shared by all prompts.
pub fn eval_options(args: &CheckPairArgs, target: &LocalModel) -> EvalOptions {
    EvalOptions {
        num_draft_tokens: args.draft_tokens,
        max_tokens: args.max_tokens,
        stop_token_ids: target.info().eos_token_ids.clone(),
    }
}

/// Tokenizes up to `num_prompts` prompts per task type, and skips those that do not fit into `window` tokens.
/// The n-th prompt of a task type has seed n, counted from 0.
pub fn eval_prompts(
    args: &CheckPairArgs,
    target_text: &CheckpointText,
    window: u32,
) -> Result<Vec<EvalPrompt>, CheckPairError> {
    let prompts = match &args.prompts {
        Some(path) => Prompt::read(path)?,
        None => Prompt::built_in(),
    };
    let prompt_encoder = target_text.prompt_encoder()?;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut eval_prompts = Vec::new();
    for prompt in &prompts {
        let count = seen.entry(prompt.task.clone()).or_default();
        if *count == args.num_prompts {
            continue;
        }
        let prompt_ids = prompt_encoder.encode(prompt)?;
        if prompt_ids.is_empty() || !fits(&prompt_ids, args, window) {
            continue;
        }
        eval_prompts.push(EvalPrompt { task: prompt.task.clone(), prompt_ids, seed: *count as u64 });
        *count += 1;
    }
    require_some(eval_prompts, window)
}

/// Keeps the prompts that fit into a window of `window` tokens.
pub(crate) fn keep_fitting(
    args: &CheckPairArgs,
    given_prompts: &[EvalPrompt],
    window: u32,
) -> Result<Vec<EvalPrompt>, CheckPairError> {
    let eval_prompts = given_prompts.iter().filter(|eval_prompt| fits(&eval_prompt.prompt_ids, args, window));
    require_some(eval_prompts.cloned().collect(), window)
}

/// Whether a prompt and its output fit into a window of `window` tokens.
fn fits(prompt_ids: &[TokenId], args: &CheckPairArgs, window: u32) -> bool {
    prompt_ids.len() as u64 + u64::from(args.max_tokens) <= u64::from(window)
}

fn require_some(eval_prompts: Vec<EvalPrompt>, window: u32) -> Result<Vec<EvalPrompt>, CheckPairError> {
    match eval_prompts.is_empty() {
        true => Err(CheckPairError::NoPromptFits(window)),
        false => Ok(eval_prompts),
    }
}

/// The printed text of these reports.
pub fn text(args: &CheckPairArgs, reports: &[Report]) -> String {
    if args.json {
        return format!("{}\n", serde_json::json!(reports));
    }
    let mut text: String = reports.iter().map(table::text).collect::<Vec<_>>().join("\n");
    if let [one, other] = reports {
        text.push_str(&table::comparison(one, other));
    }
    text
}
