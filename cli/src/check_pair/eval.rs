//! Evaluates drafts for one target on prompts and returns a report per draft. `outrider check-pair` and
//! `outrider distill` call it with their own prompts; it must not depend on the command line of either.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use engine::{Engine, LoadOptions, ParameterCount, WeightFormat};
use speculation::AcceptanceMode;

use super::cost;
use super::error::CheckPairError;
use super::local::{LocalModel, LocalPair};
use super::measure::{self, EvalOptions, EvalPrompt, Setting, settings};
use super::report::{MeasuredReport, Report, SizeCheck};
use super::texts::CheckpointText;
use crate::progress::Progress;

/// An upper limit: KV memory is allocated as sequences grow.
const KV_MEMORY_BYTES: u64 = 16 << 30;
/// All modes; the served mode comes first.
const MODES: [AcceptanceMode; 3] =
    [AcceptanceMode::Coupled, AcceptanceMode::Rejection, AcceptanceMode::Typical];

/// How a pair is run and measured.
#[derive(Debug, Clone)]
pub struct PairOptions {
    /// Weight format of the target.
    pub target_weights: WeightFormat,
    /// Weight format of the draft.
    pub draft_weights: WeightFormat,
    /// Compute threads.
    pub threads: NonZeroUsize,
    /// Ballast of the target.
    pub ballast: ParameterCount,
    /// Temperatures to measure at.
    pub temperatures: Vec<f32>,
    /// Tokens drafted per round.
    pub num_draft_tokens: u32,
    /// Maximum number of output tokens per sequence.
    pub max_tokens: u32,
    /// Round-trip time to a separate draft worker.
    pub wire: Duration,
}

impl PairOptions {
    /// Settings shared by all prompts.
    pub fn eval_options(&self, target: &LocalModel) -> EvalOptions {
        EvalOptions {
            num_draft_tokens: self.num_draft_tokens,
            max_tokens: self.max_tokens,
            stop_token_ids: target.info().eos_token_ids.clone(),
        }
    }
}

/// The prompts that a pair is evaluated on.
#[derive(Debug, Clone)]
pub struct EvalPrompts {
    /// The prompts, at least one.
    pub prompts: Vec<EvalPrompt>,
    /// Task types without one among them, with their number of prompts, of which none fits.
    pub left_out: BTreeMap<String, usize>,
}

impl EvalPrompts {
    /// Prompts that fit into a window of `window` tokens, out of `offered` by task type.
    ///
    /// # Errors
    /// None fits.
    pub fn new(
        prompts: Vec<EvalPrompt>,
        mut offered: BTreeMap<String, usize>,
        window: u32,
    ) -> Result<Self, CheckPairError> {
        if prompts.is_empty() {
            return Err(CheckPairError::NoPromptFits(window));
        }
        offered.retain(|task, _| prompts.iter().all(|prompt| prompt.task != *task));
        Ok(Self { prompts, left_out: offered })
    }
}

/// Names the task types that are left out, with their number of prompts; `None` if there are none.
pub fn left_out_text(left_out: &BTreeMap<String, usize>) -> Option<String> {
    let task = |(task, count): (&String, &usize)| {
        let prompts = if *count == 1 { "prompt" } else { "prompts" };
        format!("{task} ({count} {prompts})")
    };
    let tasks = left_out.iter().map(task).collect::<Vec<_>>().join(", ");
    (!tasks.is_empty())
        .then(|| format!("left out, because no prompt of theirs fits together with --max-tokens: {tasks}"))
}

/// Returns the prompts that fit into a window of this many tokens; see [`fits`].
pub type PromptSource<'a> = &'a dyn Fn(u32) -> Result<EvalPrompts, CheckPairError>;

/// A target and how drafts for it are evaluated.
pub struct Evaluation<'a> {
    /// The target's checkpoint.
    pub target_dir: &'a Path,
    /// Its text files.
    pub target_text: &'a CheckpointText,
    /// How pairs are run and measured.
    pub options: &'a PairOptions,
    /// The prompts.
    pub prompts: PromptSource<'a>,
}

impl Evaluation<'_> {
    /// Evaluates these drafts, one after the other. The target is loaded for the first draft that can be
    /// paired.
    pub fn reports(&self, drafts: &[&Path]) -> Result<Vec<Report>, CheckPairError> {
        let mut target = None;
        drafts.iter().map(|draft| self.report(draft, &mut target)).collect()
    }

    fn report(&self, draft_dir: &Path, target: &mut Option<LocalModel>) -> Result<Report, CheckPairError> {
        let draft_text = CheckpointText::read(draft_dir)?;
        let text = self.target_text.compare(&draft_text);
        let names = [self.target_dir, draft_dir].map(|path| path.display().to_string());
        let [target_name, draft_name] = names;
        let mut report = Report { target: target_name, draft: draft_name, size: None, measured: None, text };
        if !report.text.can_pair() {
            return Ok(report);
        }
        let target = match target {
            Some(target) => target,
            None => target.insert(self.load_target()?),
        };
        let PairOptions { draft_weights, threads, .. } = *self.options;
        let mut draft = load(draft_dir, (draft_weights, draft_text.num_ids()), threads)?;
        report.size = Some(SizeCheck::new(target.info().num_parameters, draft.info().num_parameters));
        report.measured = Some(self.measure(LocalPair { target, draft: &mut draft })?);
        Ok(report)
    }

    fn measure(&self, mut pair: LocalPair<'_>) -> Result<MeasuredReport, CheckPairError> {
        let options = self.options;
        let EvalPrompts { prompts: eval_prompts, left_out } = (self.prompts)(pair.window())?;
        let settings = settings(&options.temperatures, &MODES);
        let eval_options = options.eval_options(pair.target);
        let progress = Progress::new(eval_prompts.len() * settings.len(), "sequences");
        let on_task = |setting: &Setting, task: &str| progress.begin_part(format!("{setting}, {task}"));
        let hooks = (on_task, || progress.finish_unit());
        let measured = measure::measure(&mut pair, &eval_prompts, (&settings, &eval_options), hooks)?;
        progress.end();
        let costs = cost::measure(pair.target, pair.draft)?;
        let tokens: usize = eval_prompts.iter().map(|eval_prompt| eval_prompt.prompt_ids.len()).sum();
        let context = tokens as f64 / eval_prompts.len() as f64 + f64::from(options.max_tokens) / 2.0;
        let report = MeasuredReport::new(&measured, costs, options.num_draft_tokens, (options.wire, context));
        Ok(MeasuredReport { left_out, ..report })
    }

    /// Loads the target with ballast.
    fn load_target(&self) -> Result<LocalModel, CheckPairError> {
        let PairOptions { target_weights, threads, ballast, .. } = *self.options;
        let load_options =
            LoadOptions { ballast: ballast.0, ..load_options(self.target_dir, target_weights, threads) };
        Ok(LocalModel::new(Engine::load(&load_options)?, self.target_text.num_ids()))
    }
}

/// Loads one model; `num_ids` is the number of ids of its tokenizer.
pub fn load(
    directory: &Path,
    (weights, num_ids): (WeightFormat, u32),
    threads: NonZeroUsize,
) -> Result<LocalModel, CheckPairError> {
    Ok(LocalModel::new(Engine::load(&load_options(directory, weights, threads))?, num_ids))
}

fn load_options(directory: &Path, weights: WeightFormat, threads: NonZeroUsize) -> LoadOptions {
    LoadOptions { threads: threads.get(), ..LoadOptions::new(directory, weights, KV_MEMORY_BYTES) }
}

/// Whether a prompt and its output fit into a window of `window` tokens.
pub fn fits(prompt_len: usize, max_tokens: u32, window: u32) -> bool {
    prompt_len as u64 + u64::from(max_tokens) <= u64::from(window)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_types_without_a_fitting_prompt_are_named_with_their_counts() {
        let prompt = |task: &str| EvalPrompt { task: task.to_owned(), prompt_ids: vec![1], seed: 0 };
        let found = |prompts| {
            let offered = [("chat", 4), ("code", 1), ("sql", 2)];
            let offered = offered.into_iter().map(|(task, count)| (task.to_owned(), count)).collect();
            EvalPrompts::new(prompts, offered, 64)
        };
        let some = found(vec![prompt("sql"), prompt("sql")]).unwrap();
        let text = left_out_text(&some.left_out).unwrap();
        assert!(text.ends_with(": chat (4 prompts), code (1 prompt)"), "{text}");
        let all = found(vec![prompt("sql"), prompt("chat"), prompt("code")]).unwrap();
        assert_eq!(left_out_text(&all.left_out), None);
        assert!(matches!(found(Vec::new()), Err(CheckPairError::NoPromptFits(64))));
    }
}
