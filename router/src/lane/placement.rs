//! Who works for a sequence: pure choices over what is known of the workers.

use proto::v1::WorkerHello;
use speculation::Role;

use crate::workers::{WorkerKey, pairing};

/// One worker, as far as a choice needs it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its connection.
    pub key: WorkerKey,
    /// Its pool.
    pub role: Role,
    /// What it said of itself.
    pub hello: &'a WorkerHello,
    /// Sequences assigned to it.
    pub load: usize,
}

/// The target for a sequence of `model`: one whose bits equal those of `numerics_id` where there was a target before, so
/// that the text goes on as it would have; among these the least loaded. `not` is taken only if nothing else is there.
pub fn choose_target<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    model: &str,
    numerics_id: Option<&str>,
    not: Option<WorkerKey>,
) -> Option<WorkerKey> {
    workers
        .filter(|worker| worker.role == Role::Target && worker.hello.model_id == model)
        .min_by_key(|worker| {
            let other_bits = numerics_id.is_some_and(|numerics_id| worker.hello.numerics_id != numerics_id);
            (other_bits, Some(worker.key) == not, worker.load, worker.key)
        })
        .map(|worker| worker.key)
}

/// The draft worker for a sequence on `target`: one that may be paired with it and is meant for `task_type`, rather than
/// one that is meant for all; among these the least loaded.
pub fn choose_draft<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    target: &WorkerHello,
    task_type: &str,
    not: Option<WorkerKey>,
) -> Option<WorkerKey> {
    workers
        .filter(|worker| worker.role == Role::Draft && pairing::check(worker.hello, target).is_ok())
        .filter(|worker| {
            worker.hello.task_types.is_empty() || worker.hello.task_types.iter().any(|t| t == task_type)
        })
        .min_by_key(|worker| {
            (Some(worker.key) == not, worker.hello.task_types.is_empty(), worker.load, worker.key)
        })
        .map(|worker| worker.key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(role: Role, model: &str, numerics: &str, tasks: &[&str]) -> (Role, WorkerHello) {
        let hello = WorkerHello {
            model_id: model.to_owned(),
            numerics_id: numerics.to_owned(),
            task_types: tasks.iter().map(|task| (*task).to_owned()).collect(),
            ..WorkerHello::default()
        };
        (role, hello)
    }

    fn candidates<'a>(
        workers: &'a [(Role, WorkerHello)],
        loads: &'a [usize],
    ) -> impl Iterator<Item = Candidate<'a>> {
        workers.iter().zip(loads).enumerate().map(|(i, ((role, hello), load))| Candidate {
            key: WorkerKey(i as u64),
            role: *role,
            hello,
            load: *load,
        })
    }

    #[test]
    fn a_target_of_equal_bits_wins_then_another_than_before_then_the_less_loaded() {
        let t = |model, numerics| hello(Role::Target, model, numerics, &[]);
        let workers =
            [t("m", "a"), t("m", "b"), t("m", "a"), t("other", "a"), hello(Role::Draft, "m", "a", &[])];
        let loads = [5, 0, 9, 0, 0];
        let choose = |numerics, not: Option<u64>| {
            choose_target(candidates(&workers, &loads), "m", numerics, not.map(WorkerKey)).map(|key| key.0)
        };
        assert_eq!(choose(None, None), Some(1));
        assert_eq!(choose(Some("a"), None), Some(0));
        assert_eq!(choose(Some("a"), Some(0)), Some(2));
        assert_eq!(choose(Some("b"), Some(1)), Some(1), "equal bits before another worker");
        assert_eq!(choose_target(candidates(&workers, &loads), "none", None, None), None);
    }

    #[test]
    fn a_draft_meant_for_the_task_wins() {
        let d = |tasks: &[&str]| hello(Role::Draft, "d", "", tasks);
        let workers = [d(&[]), d(&["sql"]), d(&["code", "sql"]), d(&["chat"])];
        let target = WorkerHello::default();
        let choose =
            |task| choose_draft(candidates(&workers, &[0, 3, 2, 0]), &target, task, None).map(|key| key.0);
        assert_eq!(choose("sql"), Some(2));
        assert_eq!(choose("math"), Some(0));
    }
}
