//! Runs `outrider distill` from its arguments to its report.

use std::num::NonZeroUsize;
use std::time::Duration;

use distill::draft::DraftModel;
use distill::training::{EvalLoss, TrainingOptions, evaluate, train};
use distill::weights::check_out;
use distill::windows::{Window, cut};
use engine::{ParameterCount, WeightFormat};
use serde::Serialize;

use super::args::DistillArgs;
use super::error::DistillCommandError;
use super::held_out::{fitting_prompts, left_out_notes};
use super::progress::Progress;
use super::rows::{HOLD_OUT_EVERY, Row, Rows};
use super::space::check_space;
use super::teacher::max_logit_difference;
use crate::check_pair;
use crate::check_pair::eval::{Evaluation, PairOptions, load};
use crate::check_pair::local::LocalModel;
use crate::check_pair::report::Report;
use crate::check_pair::texts::CheckpointText;
use crate::output::note;
use crate::shell;

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
    // The draft first: whether it can be trained and written is known before the target is loaded.
    let mut draft = DraftModel::read(&args.draft, args.context)?;
    check_space(&args.out, draft.weights.stored_bytes())?;
    let mut target = load(&args.target, (args.weights.format(), num_ids), all_cores())?;
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
    let prompts = fitting_prompts(args, &rows.held_out, window)?;
    left_out_notes(rows, &prompts.left_out).iter().for_each(|text| note(text));
    drop(served);
    note(&format!("measuring the present draft on {} windows of held-out rows", eval_windows.len()));
    let before = evaluate(&draft, &mut target, &eval_windows)?;
    note(&format!(
        "training on {} rows with {} answer tokens, {} rows held out",
        rows.train.len(),
        rows.train_tokens(),
        rows.held_out.len()
    ));
    let plan = TrainingOptions {
        steps: args.steps,
        batch: args.batch,
        peak_rate: args.learning_rate,
        seed: args.seed,
        threads: all_cores(),
    };
    let mut progress = Progress::new(plan.steps);
    train(&mut draft, &mut target, &train_windows, (&plan, &mut |step| progress.step(step)))?;
    // Before anything else may fail: the training may have taken hours.
    draft.weights.write(&args.out)?;
    note(&format!("the new draft is in {}; comparing it with the present one", args.out.display()));
    let after = evaluate(&draft, &mut target, &eval_windows)?;
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
        let out = args.out.display().to_string();
        let verdict = match self.after.kl < kl {
            true => "",
            false => "The new draft is not closer to the target on held-out rows: do not roll it out.\n",
        };
        format!(
            "{pair_report}\n\
             Held-out rows, nats per token: KL(target || draft) {kl:.3} -> {:.3}, cross entropy {cross_entropy:.3} -> {:.3}\n\
             {verdict}\
             The new draft is in {out}. Run it as a shadow of the serving draft first:\n\
             \x20 outrider-draft-worker --model {model} --shadow ..\n\
             then roll it out as described in docs/operating.md, \"Rolling out a draft\".\n",
            self.after.kl,
            self.after.cross_entropy,
            model = shell::quote(&out),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_are_compared_over_the_longest_window() {
        let windows = [2, 7, 3].map(|len| Window { ids: (0..len).collect(), first_label: 1 });
        assert_eq!(longest(&windows), &windows[1]);
    }
}
