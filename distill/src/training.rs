//! The training loop, and evaluation of a draft on held-out windows.

use std::num::NonZeroUsize;

use ndarray::Array2;
use rayon::ThreadPool;
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use serde::Serialize;

use crate::adamw::{AdamW, Gradients, clip};
use crate::draft::DraftModel;
use crate::error::DistillError;
use crate::loss::Loss;
use crate::schedule::share;
use crate::windows::{Window, WindowOrder};

/// Windows per thread whose gradients are held at once: threads that get short windows take more of them.
const WINDOWS_PER_THREAD: usize = 4;

/// Source of the target's logits.
pub trait Teacher {
    /// The error of a failed run.
    type Error: From<DistillError>;

    /// Logits at the learnt positions of a window, `[num_labels, vocab_size]`: the target's predictions after
    /// the ids before each of them.
    ///
    /// # Errors
    /// The target cannot run over the window.
    fn logits(&mut self, window: &Window) -> Result<Array2<f32>, Self::Error>;
}

/// Settings of a training run.
#[derive(Debug, Clone, Copy)]
pub struct TrainingOptions {
    /// Number of weight updates.
    pub steps: usize,
    /// Windows per update.
    pub batch: usize,
    /// Peak learning rate.
    pub peak_rate: f64,
    /// Seed of the order of windows.
    pub seed: u64,
    /// Number of windows processed in parallel.
    pub threads: NonZeroUsize,
}

/// A completed step.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// Number of completed steps.
    pub steps: usize,
    /// Loss of its windows before the update, in nats per learnt token.
    pub loss: f64,
    /// Number of tokens learnt in this step.
    pub tokens: usize,
}

/// Means per answer token, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EvalLoss {
    /// KL(target || draft).
    pub kl: f64,
    /// Cross entropy of the target's output.
    pub cross_entropy: f64,
}

/// Measures the distance of the draft from the target on these windows.
pub fn evaluate<T: Teacher>(
    draft: &DraftModel,
    target: &mut T,
    windows: &[Window],
) -> Result<EvalLoss, T::Error> {
    let (mut sum, mut tokens) = (Loss::default(), 0);
    for window in windows {
        let target_logits = target.logits(window)?;
        let pass = draft.forward(window.inputs(), (window.num_labels(), target_logits.ncols()));
        sum += Loss::new(target_logits, pass.logits, window.labels()).0;
        tokens += window.num_labels();
    }
    Ok(EvalLoss { kl: sum.kl / tokens as f64, cross_entropy: sum.cross_entropy / tokens as f64 })
}

/// Trains the draft in place and calls `done` after each step.
///
/// # Errors
/// The target cannot run, no thread can be started, or the loss is not finite.
pub fn train<T: Teacher>(
    draft: &mut DraftModel,
    target: &mut T,
    windows: &[Window],
    (options, done): (&TrainingOptions, &mut dyn FnMut(StepReport)),
) -> Result<(), T::Error> {
    let threads = thread_pool(options.threads)?;
    let mut optimizer = AdamW::default();
    let mut order = WindowOrder::new(options.seed, windows.len());
    for step in 0..options.steps {
        let batch: Vec<&Window> = order.by_ref().take(options.batch).map(|idx| &windows[idx]).collect();
        let mut target_logits = Vec::with_capacity(batch.len());
        for window in batch {
            target_logits.push((window, target.logits(window)?));
        }
        let tokens = target_logits.iter().map(|(window, _)| window.num_labels()).sum();
        let (mut gradients, loss) = gradients(draft, target_logits, &threads);
        let loss = loss.weighted() / tokens as f64;
        if !loss.is_finite() {
            return Err(DistillError::Diverged { step: step + 1 }.into());
        }
        gradients.values_mut().for_each(|gradient| *gradient /= tokens as f32);
        clip(&mut gradients);
        let rate = options.peak_rate * share(step, options.steps);
        optimizer.step(&mut draft.weights, &gradients, rate as f32);
        done(StepReport { steps: step + 1, loss, tokens });
    }
    Ok(())
}

fn thread_pool(num_threads: NonZeroUsize) -> Result<ThreadPool, DistillError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads.get()).build();
    pool.map_err(|error| DistillError::Threads(error.to_string()))
}

/// Sums over windows, each with the target's logits: the gradient of the weighted loss, and the loss. They are
/// added in the order of the windows, regardless of which thread computes them and when.
fn gradients(
    draft: &DraftModel,
    target_logits: Vec<(&Window, Array2<f32>)>,
    threads: &ThreadPool,
) -> (Gradients, Loss) {
    let mut sum: Option<(Gradients, Loss)> = None;
    let mut target_logits = target_logits.into_iter();
    loop {
        let chunk: Vec<_> =
            target_logits.by_ref().take(WINDOWS_PER_THREAD * threads.current_num_threads()).collect();
        if chunk.is_empty() {
            return sum.expect("a batch has at least one window");
        }
        let found: Vec<_> = threads.install(|| {
            let each = chunk.into_par_iter();
            each.map(|(window, target_logits)| gradient(draft, window, target_logits)).collect()
        });
        for (gradients, loss) in found {
            match &mut sum {
                None => sum = Some((gradients, loss)),
                Some((all, total)) => {
                    *total += loss;
                    all.iter_mut().for_each(|(name, sum)| *sum += &gradients[name]);
                }
            }
        }
    }
}

/// Gradient and loss of one window.
fn gradient(draft: &DraftModel, window: &Window, target_logits: Array2<f32>) -> (Gradients, Loss) {
    let mut pass = draft.forward(window.inputs(), (window.num_labels(), target_logits.ncols()));
    let logits = std::mem::take(&mut pass.logits);
    let (loss, d_logits) = Loss::new(target_logits, logits, window.labels());
    (draft.backward(&pass, &d_logits), loss)
}

#[cfg(test)]
mod tests;
