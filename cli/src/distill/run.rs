//! Runs `outrider distill` from its arguments to its report.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use distill::draft::DraftModel;
use distill::training::{EvalLoss, TrainingOptions, evaluate, train};
use distill::weights::check_out;
use distill::windows::{Window, cut};
use engine::{ParameterCount, TokenId, WeightFormat};
use serde::Serialize;

use super::args::DistillArgs;
use super::error::DistillCommandError;
use super::progress::Progress;
use super::rows::{HOLD_OUT_EVERY, Row, Rows};
use super::teacher::max_logit_difference;
use crate::check_pair;
use crate::check_pair::error::CheckPairError;
use crate::check_pair::eval::{Evaluation, PairOptions, fits, load, require_some};
use crate::check_pair::local::LocalModel;
use crate::check_pair::measure::EvalPrompt;
use crate::check_pair::report::Report;
use crate::check_pair::texts::CheckpointText;
use crate::output::note;

/// Maximum number of held-out windows for the evaluation of losses.
const EVAL_WINDOWS_MAX: usize = 64;

/// Allowed difference of a logit, from f32 sums in another order. A misread setting changes logits by whole
/// units.
const LOGIT_TOLERANCE: f32 = 0.05;

/// Results of a run.
#[derive(Debug, Serialize)]
struct DistillReport {
    /// Number of rows for training and of held-out rows.
    rows: [usize; 2],
    /// Number of unusable lines in the log.
    unusable_lines: usize,
    /// Losses of the old draft on held-out rows.
    before: EvalLoss,
    /// Losses of the new draft on held-out rows.
    after: EvalLoss,
    /// `outrider check-pair` on held-out prompts: for the old draft and the new one.
    reports: Vec<Report>,
}

/// Distils the draft and returns the report to print.
pub fn run(args: &DistillArgs) -> Result<String, DistillCommandError> {
    args.check()?;
    check_out(&args.out)?;
    let text = paired_text(args)?;
    let rows = Rows::read(&args.log, args.model.as_deref(), text.num_ids())?;
    if rows.faults.count > 0 {
        note(&rows.faults.to_string());
    }
    check_enough(args, &rows)?;
    let (before, after) = train_and_write(args, &rows, text.num_ids())?;
    let evaluation = Evaluation {
        target_dir: &args.target,
        target_text: &text,
        options: &pair_options(args),
        prompts: &|window| fitting_prompts(args, &rows.held_out, window),
    };
    let reports = evaluation.reports(&[&args.draft, &args.out])?;
    let report = DistillReport {
        rows: [rows.train.len(), rows.held_out.len()],
        unusable_lines: rows.faults.count,
        before,
        after,
        reports,
    };
    Ok(match args.json {
        true => format!("{}\n", serde_json::json!(report)),
        false => report.text(args, &check_pair::text(&report.reports)),
    })
}

/// Reads the target's text files; fails if the draft numbers its tokens differently.
fn paired_text(args: &DistillArgs) -> Result<CheckpointText, DistillCommandError> {
    let target = CheckpointText::read(&args.target)?;
    match target.compare(&CheckpointText::read(&args.draft)?).first_difference {
        None => Ok(target),
        Some(difference) => Err(DistillCommandError::TokenizersDiffer {
            draft: args.draft.clone(),
            target: args.target.clone(),
            difference,
        }),
    }
}

fn check_enough(args: &DistillArgs, rows: &Rows) -> Result<(), DistillCommandError> {
    let tokens = rows.train_tokens();
    if tokens < args.min_tokens || tokens == 0 {
        let (rows, min_tokens) = (rows.train.len(), args.min_tokens.max(1));
        return Err(DistillCommandError::TooFewTokens { tokens, rows, min_tokens });
    }
    match rows.held_out.is_empty() {
        true => Err(DistillCommandError::NoHeldOutRows(HOLD_OUT_EVERY)),
        false => Ok(()),
    }
}

/// Trains and writes the new draft; returns the losses on held-out rows before and after.
fn train_and_write(
    args: &DistillArgs,
    rows: &Rows,
    num_ids: u32,
) -> Result<(EvalLoss, EvalLoss), DistillCommandError> {
    let mut target = load(&args.target, (args.weights.format(), num_ids), all_cores())?;
    let mut draft = DraftModel::read(&args.draft, args.context)?;
    let context = args.context.min(draft.max_len()).min(target.info().max_model_len as usize);
    let windows = |rows: &[Row]| {
        let of = |row: &Row| cut(&row.prompt_ids, &row.completion_ids, context);
        rows.iter().flat_map(of).collect::<Vec<Window>>()
    };
    let (train_windows, eval_windows) =
        (windows(&rows.train), evenly_spaced(windows(&rows.held_out), EVAL_WINDOWS_MAX));
    let mut served = load(&args.draft, (WeightFormat::F32, num_ids), all_cores())?;
    check_same_logits(args, &draft, &mut served, longest(&eval_windows))?;
    // The comparison after the training must not be the first to find that no prompt fits.
    let window = target.info().max_model_len.min(served.info().max_model_len);
    fitting_prompts(args, &rows.held_out, window)?;
    drop(served);
    note(&format!(
        "training on {} rows with {} answer tokens, {} rows held out",
        rows.train.len(),
        rows.train_tokens(),
        rows.held_out.len()
    ));
    let before = evaluate(&draft, &mut target, &eval_windows)?;
    let plan = TrainingOptions {
        steps: args.steps,
        batch: args.batch,
        peak_rate: args.learning_rate,
        seed: args.seed,
        threads: all_cores(),
    };
    let mut progress = Progress::new(plan.steps);
    train(&mut draft, &mut target, &train_windows, (&plan, &mut |step| progress.step(step)))?;
    let after = evaluate(&draft, &mut target, &eval_windows)?;
    draft.weights.write(&args.out)?;
    Ok((before, after))
}

/// Checks that the draft in training computes the same logits as the engine.
fn check_same_logits(
    args: &DistillArgs,
    draft: &DraftModel,
    served: &mut LocalModel,
    window: &Window,
) -> Result<(), DistillCommandError> {
    let difference = max_logit_difference(draft, served, window)?;
    match difference <= LOGIT_TOLERANCE {
        true => Ok(()),
        false => Err(DistillCommandError::LogitsDiffer { draft: args.draft.clone(), difference }),
    }
}

/// At most `max_windows` windows, evenly spaced.
fn evenly_spaced(all: Vec<Window>, max_windows: usize) -> Vec<Window> {
    let every = all.len().div_ceil(max_windows).max(1);
    all.into_iter().step_by(every).collect()
}

/// The window with the most tokens: some settings change logits only at later positions.
fn longest(windows: &[Window]) -> &Window {
    windows.iter().max_by_key(|window| window.ids.len()).expect("each of the held-out rows has a window")
}

/// The held-out prompts that are compared, for models with a window of `window` tokens.
fn fitting_prompts(
    args: &DistillArgs,
    held_out: &[Row],
    window: u32,
) -> Result<Vec<EvalPrompt>, CheckPairError> {
    let is_fitting = |prompt_ids: &[TokenId]| fits(prompt_ids.len(), args.max_tokens, window);
    require_some(eval_prompts(held_out, args.num_prompts, is_fitting), window)
}

/// Distinct held-out prompts for which `is_fitting` holds, up to `num_prompts` per task type.
fn eval_prompts(
    held_out: &[Row],
    num_prompts: usize,
    is_fitting: impl Fn(&[TokenId]) -> bool,
) -> Vec<EvalPrompt> {
    let mut asked: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in held_out.iter().filter(|row| is_fitting(&row.prompt_ids)) {
        let of_task = asked.entry(&row.task).or_default();
        let is_known = of_task.iter().any(|known| known.prompt_ids == row.prompt_ids);
        if of_task.len() < num_prompts && !is_known {
            of_task.push(row);
        }
    }
    let eval_prompt = |(seed, row): (u64, &&Row)| EvalPrompt {
        task: row.task.clone(),
        prompt_ids: row.prompt_ids.clone(),
        seed,
    };
    asked.values().flat_map(|rows| (0..).zip(rows).map(eval_prompt)).collect()
}

fn all_cores() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// How both drafts are compared.
fn pair_options(args: &DistillArgs) -> PairOptions {
    PairOptions {
        target_weights: args.weights.format(),
        draft_weights: WeightFormat::AsStored,
        threads: all_cores(),
        ballast: ParameterCount(0),
        temperatures: vec![0.0, 1.0],
        num_draft_tokens: 4,
        max_tokens: args.max_tokens,
        wire: Duration::from_micros(300),
    }
}

impl DistillReport {
    fn text(&self, args: &DistillArgs, pair_report: &str) -> String {
        let EvalLoss { kl, cross_entropy } = self.before;
        let verdict = match self.after.kl < kl {
            true => "",
            false => "The new draft is not closer to the target on held-out rows: do not roll it out.\n",
        };
        format!(
            "{pair_report}\n\
             Held-out rows, nats per token: KL(target || draft) {kl:.3} -> {:.3}, cross entropy {cross_entropy:.3} -> {:.3}\n\
             {verdict}\
             The new draft is in {out}. Run it as a shadow of the serving draft first:\n\
             \x20 outrider-draft-worker --model {out} --shadow ..\n\
             then roll it out as described in docs/operating.md, \"Rolling out a draft\".\n",
            self.after.kl,
            self.after.cross_entropy,
            out = args.out.display(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(task: &str, prompt: u32) -> Row {
        Row {
            task: task.to_owned(),
            model: "m".to_owned(),
            prompt_ids: vec![prompt],
            completion_ids: vec![1],
        }
    }

    #[test]
    fn different_prompts_of_each_task_type_are_asked() {
        let rows = [row("b", 1), row("a", 2), row("b", 1), row("b", 3), row("b", 4)];
        let asked: Vec<_> = eval_prompts(&rows, 2, |_| true)
            .into_iter()
            .map(|eval_prompt| (eval_prompt.task, eval_prompt.prompt_ids[0], eval_prompt.seed))
            .collect();
        let expected = [("a", 2, 0), ("b", 1, 0), ("b", 3, 1)];
        assert_eq!(asked, expected.map(|(task, id, seed)| (task.to_owned(), id, seed)));
    }

    #[test]
    fn prompts_that_do_not_fit_take_no_places() {
        let long = Row { prompt_ids: vec![9; 5], ..row("a", 9) };
        let rows = [long.clone(), long, row("b", 1), row("a", 2), row("a", 3)];
        let asked: Vec<_> = eval_prompts(&rows, 1, |prompt_ids| fits(prompt_ids.len(), 4, 8))
            .into_iter()
            .map(|eval_prompt| (eval_prompt.task, eval_prompt.prompt_ids))
            .collect();
        assert_eq!(asked, [("a".to_owned(), vec![2]), ("b".to_owned(), vec![1])]);
    }

    #[test]
    fn logits_are_compared_over_the_longest_window() {
        let windows = [2, 7, 3].map(|len| Window { ids: (0..len).collect(), first_label: 1 });
        assert_eq!(longest(&windows), &windows[1]);
    }
}
