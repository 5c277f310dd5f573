//! Handles the tasks of a failed forward. Shared by the executors that run a model.

use std::collections::VecDeque;

use engine::EngineError;
use speculation::{Refusal, ReplyBody};

use crate::executor::StepExecutor;
use crate::task::{Task, take_tasks};

/// Runs each task in `failed` in a separate forward, because it is not known which one caused the failure.
pub fn advance_one_by_one(
    executor: &mut impl StepExecutor,
    tasks: &mut VecDeque<Task>,
    failed: Vec<usize>,
) -> Vec<(Task, ReplyBody)> {
    let mut finished = Vec::new();
    for task in take_tasks(tasks, failed) {
        let mut alone = VecDeque::from([task]);
        // If KV blocks are missing, the task waits as before.
        finished.extend(executor.advance(&mut alone, u32::MAX).unwrap_or_default());
        tasks.extend(alone);
    }
    tasks.make_contiguous().sort_by_key(|task| task.started);
    finished
}

/// Refuses the task in `failed` after its forward failed alone, and drops what it held.
pub fn refuse(
    executor: &mut impl StepExecutor,
    tasks: &mut VecDeque<Task>,
    failed: Vec<usize>,
    error: &EngineError,
) -> Vec<(Task, ReplyBody)> {
    tracing::error!(%error, "the forward pass of one sequence failed: the step is refused");
    let reason = format!("the forward pass failed: {error}");
    take_tasks(tasks, failed)
        .into_iter()
        .map(|mut task| {
            task.cached.truncate(0);
            executor.truncate(task.slot, 0);
            (task, ReplyBody::Refused(Refusal::failure(&reason)))
        })
        .collect()
}
