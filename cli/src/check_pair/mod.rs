//! `outrider check-pair`: measures what a draft is worth to a target before the pair is served.
//!
//! First come checks that need no model (`texts`). Then the pair runs (`eval`) in this process (`local`, the
//! router's rules over two engines): acceptance (`measure`), step times (`cost`), the resulting advice
//! (`advice`), and the report (`report`, `table`). With `--quantization` it reports instead the effect of
//! quantizing either model (`quantization`). It must never judge drafts by separate rules: every draw,
//! verdict and choice of k comes from `speculation` and `scheduling`.

pub mod advice;
mod args;
pub mod cost;
pub mod error;
pub mod eval;
pub mod local;
pub mod measure;
pub mod quantization;
pub mod report;
mod table;
pub mod texts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use service::process::stdin_closed;
use tokio::sync::oneshot;

pub use args::{CheckPairArgs, WeightsArg};

use crate::load::Prompt;
use crate::output;
use error::CheckPairError;
use eval::{EvalPrompts, Evaluation, fits};
use measure::EvalPrompt;
use report::Report;
use texts::CheckpointText;

/// Runs the subcommand. Prints an error on one line; a pair that cannot be served is also a failure.
pub async fn main(args: CheckPairArgs) -> ExitCode {
    if !args.exit_on_stdin_close {
        return run_and_print(&args);
    }
    let (finished, checked) = oneshot::channel();
    // Nobody waits for this thread: if the parent ends first, it ends with this process.
    std::thread::spawn(move || finished.send(run_and_print(&args)).ok());
    tokio::select! {
        biased;
        // The parent has ended.
        () = stdin_closed() => {
            output::note("outrider: standard input has closed, so the check has stopped");
            ExitCode::FAILURE
        }
        // An error means that the check has panicked; its message is on standard error.
        code = checked => code.unwrap_or(ExitCode::FAILURE),
    }
}

fn run_and_print(args: &CheckPairArgs) -> ExitCode {
    let outcome = args.check().and_then(|()| match args.quantization {
        true => quantization::run(args).map(|report| (quantization::output(args, &report), true)),
        false => run(args).map(|reports| {
            let all_pair = reports.iter().all(|report| report.text.can_pair());
            let text = match args.json {
                true => format!("{}\n", serde_json::json!(reports)),
                false => text(&reports),
            };
            (text, all_pair)
        }),
    });
    match outcome {
        Ok((text, all_pair)) => {
            let printed = output::finish(&text);
            if all_pair { printed } else { ExitCode::FAILURE }
        }
        Err(error) => output::failed(&error, matches!(error, CheckPairError::Usage(_))),
    }
}

/// Checks the draft, and that of `--against`.
fn run(args: &CheckPairArgs) -> Result<Vec<Report>, CheckPairError> {
    let target_text = CheckpointText::read(&args.target)?;
    let drafts = [Some(&args.draft), args.against.as_ref()].into_iter().flatten();
    let drafts: Vec<&Path> = drafts.map(PathBuf::as_path).collect();
    let options = args.pair_options();
    let evaluation = Evaluation {
        target_dir: &args.target,
        target_text: &target_text,
        options: &options,
        prompts: &|window| eval_prompts(args, &target_text, window),
    };
    evaluation.reports(&drafts)
}

/// Tokenizes up to `num_prompts` prompts per task type, and skips those that do not fit into `window` tokens.
/// The n-th prompt of a task type has seed n, counted from 0.
fn eval_prompts(
    args: &CheckPairArgs,
    target_text: &CheckpointText,
    window: u32,
) -> Result<EvalPrompts, CheckPairError> {
    let prompts = match &args.prompts {
        Some(path) => Prompt::read(path)?,
        None => Prompt::built_in(),
    };
    let prompt_encoder = target_text.prompt_encoder()?;
    let (mut offered, mut taken) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
    let mut eval_prompts = Vec::new();
    for prompt in &prompts {
        *offered.entry(prompt.task.clone()).or_default() += 1;
        let count = taken.entry(prompt.task.clone()).or_default();
        if *count == args.num_prompts {
            continue;
        }
        let prompt_ids = prompt_encoder.encode(prompt)?;
        if prompt_ids.is_empty() || !fits(prompt_ids.len(), args.max_tokens, window) {
            continue;
        }
        eval_prompts.push(EvalPrompt { task: prompt.task.clone(), prompt_ids, seed: *count as u64 });
        *count += 1;
    }
    EvalPrompts::new(eval_prompts, offered, window)
}

/// The reports as Markdown.
pub fn text(reports: &[Report]) -> String {
    let mut text: String = reports.iter().map(table::text).collect::<Vec<_>>().join("\n");
    if let [one, other] = reports {
        text.push_str(&table::comparison(one, other));
    }
    text
}
