//! Answers tasks that could not be computed: their forward failed, or the draw from its rows. Shared by the
//! executors that run a model.

use std::collections::VecDeque;

use engine::EngineError;
use speculation::{Refusal, RefusalCause, ReplyBody};

use crate::executor::StepExecutor;
use crate::task::{Task, take_tasks};

/// Handles the error of a forward of the tasks at the indices `failed`. Several tasks run one by one, to find
/// the cause; a task that failed alone is refused. Returns the finished tasks and their replies.
///
/// # Panics
///
/// If the device is unusable: the panic ends the device thread, and with it the process.
pub fn on_failed_forward(
    executor: &mut impl StepExecutor,
    tasks: &mut VecDeque<Task>,
    failed: Vec<usize>,
    error: &EngineError,
) -> Vec<(Task, ReplyBody)> {
    if error.is_fatal() {
        panic!("{error}");
    }
    if failed.len() > 1 {
        tracing::warn!(%error, "a forward pass failed: running its sequences one by one to find the cause");
        return advance_one_by_one(executor, tasks, failed);
    }
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

/// Refuses a step whose draw failed; its context stays cached.
pub fn refuse_draw(executor: &mut impl StepExecutor, task: &mut Task, refusal: Refusal) -> ReplyBody {
    let (cause, reason) = (refusal.cause, &*refusal.reason);
    match cause {
        RefusalCause::Failure => tracing::error!(reason, "no token can be drawn: the step is refused"),
        // Its reason may quote the output, which logs must not contain.
        RefusalCause::Grammar => tracing::warn!(?cause, "no token can be drawn: the step is refused"),
        RefusalCause::Capacity | RefusalCause::Unsupported => {
            tracing::warn!(?cause, reason, "no token can be drawn: the step is refused");
        }
    }
    task.cached.truncate(task.step.start());
    executor.truncate(task.slot, task.step.start());
    ReplyBody::Refused(refusal)
}

/// Runs each task in `failed` in a separate forward.
fn advance_one_by_one(
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
