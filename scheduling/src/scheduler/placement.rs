//! Which workers may serve a sequence, and in which order of preference. [`crate::placement`] chooses among equals.

use speculation::Role;

use super::events::{WorkerInfo, WorkerKey};
use super::pairing;
use crate::placement::{Place, choose};

/// One worker, as far as a choice needs it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) key: WorkerKey,
    pub(super) info: &'a WorkerInfo,
    /// Sequences assigned to it.
    pub(super) load: u32,
    /// Of these, the lane's own.
    pub(super) lane_load: u32,
    /// How many ids of the prompt it was sent before.
    pub(super) shared_prefix: u32,
    /// A draft worker that does not answer, or a target without capacity.
    pub(super) is_unfit: bool,
}

impl Candidate<'_> {
    fn place(&self, rank: u8) -> Place<WorkerKey> {
        let Self { key, load, lane_load, shared_prefix, .. } = *self;
        Place { key, rank, load, lane_load, shared_prefix }
    }
}

/// The target for a sequence of `model`. Where it had a target before, `numerics_id` names that one's numerics class:
/// a target of the same class continues the same text. `avoid` is chosen only if no other target is there, a target
/// without capacity never.
pub(super) fn choose_target<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    model: &str,
    numerics_id: Option<&str>,
    avoid: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let serving = workers.filter(|worker| worker.info.role == Role::Target && worker.info.model_id == model);
    let places: Vec<_> = serving
        .map(|worker| {
            let other_class = numerics_id.is_some_and(|numerics_id| worker.info.numerics_id != numerics_id);
            let rank = 2 * u8::from(other_class) + u8::from(Some(worker.key) == avoid);
            (worker.is_unfit, worker.place(rank))
        })
        .collect();
    // The same class is worth waiting for: another one is chosen only if no target of the class serves the model.
    let best_class = places.iter().map(|(_, place)| place.rank / 2).min()?;
    let fit = places.into_iter().filter(|(is_unfit, place)| !is_unfit && place.rank / 2 == best_class);
    choose(&fit.map(|(_, place)| place).collect::<Vec<_>>())
}

/// The draft worker for a sequence on `target`: one that fits it, rather one that answers, then rather another than
/// `avoid`, then rather one meant for `task_type` than one meant for all.
pub(super) fn choose_draft<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    target: &WorkerInfo,
    task_type: &str,
    avoid: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let places: Vec<_> = workers
        .filter(|worker| worker.info.role == Role::Draft && pairing::check(worker.info, target).is_ok())
        .filter(|worker| {
            worker.info.task_types.is_empty() || worker.info.task_types.iter().any(|t| t == task_type)
        })
        .map(|worker| {
            let is_general = worker.info.task_types.is_empty();
            let is_avoided = Some(worker.key) == avoid;
            worker.place(4 * u8::from(worker.is_unfit) + 2 * u8::from(is_avoided) + u8::from(is_general))
        })
        .collect();
    choose(&places)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(role: Role, model: &str, numerics: &str, tasks: &[&str]) -> WorkerInfo {
        WorkerInfo {
            numerics_id: numerics.to_owned(),
            task_types: tasks.iter().map(|task| (*task).to_owned()).collect(),
            ..WorkerInfo::of(role, model)
        }
    }

    fn candidates<'a>(
        workers: &'a [WorkerInfo],
        loads: &'a [u32],
        unfit: &'a [u64],
    ) -> impl Iterator<Item = Candidate<'a>> {
        workers.iter().zip(loads).enumerate().map(|(i, (info, load))| Candidate {
            key: WorkerKey(i as u64),
            info,
            load: *load,
            lane_load: 0,
            shared_prefix: 0,
            is_unfit: unfit.contains(&(i as u64)),
        })
    }

    #[test]
    fn the_same_numerics_class_wins_then_another_target_than_before_then_the_least_loaded() {
        let t = |model, numerics| worker(Role::Target, model, numerics, &[]);
        let workers =
            [t("m", "a"), t("m", "b"), t("m", "a"), t("other", "a"), worker(Role::Draft, "m", "a", &[])];
        let loads = [5, 0, 9, 0, 0];
        let choose = |numerics, not: Option<u64>, unfit: &[u64]| {
            choose_target(candidates(&workers, &loads, unfit), "m", numerics, not.map(WorkerKey))
                .map(|key| key.0)
        };
        assert_eq!(choose(None, None, &[]), Some(1));
        assert_eq!(choose(Some("a"), None, &[]), Some(0));
        assert_eq!(choose(Some("a"), Some(0), &[]), Some(2));
        assert_eq!(choose(Some("b"), Some(1), &[]), Some(1), "the class before another worker");
        assert_eq!(choose(Some("a"), None, &[0]), Some(2), "one without capacity is not chosen");
        assert_eq!(choose(Some("a"), None, &[0, 2]), None, "the class is waited for");
        assert_eq!(choose_target(candidates(&workers, &loads, &[]), "none", None, None), None);
    }

    #[test]
    fn a_draft_that_answers_wins_then_one_meant_for_the_task() {
        let d = |tasks: &[&str]| worker(Role::Draft, "d", "", tasks);
        let workers = [d(&[]), d(&["sql"]), d(&["code", "sql"]), d(&["chat"])];
        let target = worker(Role::Target, "m", "", &[]);
        let choose = |task, unfit: &[u64]| {
            choose_draft(candidates(&workers, &[0, 5, 2, 0], unfit), &target, task, None).map(|key| key.0)
        };
        assert_eq!(choose("sql", &[]), Some(2));
        assert_eq!(choose("math", &[]), Some(0));
        assert_eq!(choose("sql", &[1, 2]), Some(0));
        assert_eq!(choose("math", &[0]), Some(0), "one that is out may come back: better than none");
    }
}
