//! What becomes of the tasks of a forward that failed. Methods that run a model share it.

use std::collections::VecDeque;

use engine::EngineError;
use speculation::ReplyBody;

use crate::method::Method;
use crate::task::{Task, take_tasks};

/// Which of the tasks in `failed` is to blame is not known: each gets a forward of its own.
pub fn advance_one_by_one(
    method: &mut impl Method,
    tasks: &mut VecDeque<Task>,
    failed: Vec<usize>,
) -> Vec<(Task, ReplyBody)> {
    let mut finished = Vec::new();
    for task in take_tasks(tasks, failed) {
        let mut alone = VecDeque::from([task]);
        // Without room it waits, as it would have done.
        finished.extend(method.advance(&mut alone, u32::MAX).unwrap_or_default());
        tasks.extend(alone);
    }
    tasks.make_contiguous().sort_by_key(|task| task.started);
    finished
}

/// A forward of the task in `failed` alone failed for a reason of its own: the task is refused and what it held is forgotten.
pub fn refuse(
    method: &mut impl Method,
    tasks: &mut VecDeque<Task>,
    failed: Vec<usize>,
    error: &EngineError,
) -> Vec<(Task, ReplyBody)> {
    tracing::error!(%error, "a forward failed");
    let reason = format!("the forward failed: {error}");
    take_tasks(tasks, failed)
        .into_iter()
        .map(|mut task| {
            task.cached.cut(0);
            method.truncate(task.slot, 0);
            (task, ReplyBody::Refused { reason: reason.clone() })
        })
        .collect()
}
