//! Who may work for a sequence, and how much that is wished for; which of those it is, `speculation::placement` says. Pure.

use proto::v1::WorkerHello;
use speculation::Role;
use speculation::placement::{Place, choose};

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
    pub load: u32,
    /// Of these, the lane's own.
    pub lane_load: u32,
    /// How many ids of the prompt it was sent before.
    pub shared_prefix: u32,
    /// A draft worker that does not answer; a target that has no room.
    pub is_unfit: bool,
}

impl Candidate<'_> {
    fn place(&self, rank: u8) -> Place<WorkerKey> {
        let Self { key, load, lane_load, shared_prefix, .. } = *self;
        Place { key, rank, load, lane_load, shared_prefix }
    }
}

/// The target for a sequence of `model`: one whose bits equal those of `numerics_id` where there was a target before, so
/// that the text goes on as it would have. `not` is taken only if nothing else is there, one without room not at all.
pub fn choose_target<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    model: &str,
    numerics_id: Option<&str>,
    not: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let serving = workers.filter(|worker| worker.role == Role::Target && worker.hello.model_id == model);
    let places: Vec<_> = serving
        .map(|worker| {
            let other_bits = numerics_id.is_some_and(|numerics_id| worker.hello.numerics_id != numerics_id);
            let rank = 2 * u8::from(other_bits) + u8::from(Some(worker.key) == not);
            (worker.is_unfit, worker.place(rank))
        })
        .collect();
    // Equal bits are worth waiting for: one of other bits is taken only where none of equal bits serves the model.
    let best_bits = places.iter().map(|(_, place)| place.rank / 2).min()?;
    let fit = places.into_iter().filter(|(is_unfit, place)| !is_unfit && place.rank / 2 == best_bits);
    choose(&fit.map(|(_, place)| place).collect::<Vec<_>>())
}

/// The draft worker for a sequence on `target`: one that may be paired with it, that answers, and that is meant for `task_type`, rather than
/// one that is meant for all.
pub fn choose_draft<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    target: &WorkerHello,
    task_type: &str,
    not: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let places: Vec<_> = workers
        .filter(|worker| worker.role == Role::Draft && pairing::check(worker.hello, target).is_ok())
        .filter(|worker| {
            worker.hello.task_types.is_empty() || worker.hello.task_types.iter().any(|t| t == task_type)
        })
        .map(|worker| {
            let is_general = worker.hello.task_types.is_empty();
            let is_other = Some(worker.key) == not;
            worker.place(4 * u8::from(worker.is_unfit) + 2 * u8::from(is_other) + u8::from(is_general))
        })
        .collect();
    choose(&places)
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
        loads: &'a [u32],
        unfit: &'a [u64],
    ) -> impl Iterator<Item = Candidate<'a>> {
        workers.iter().zip(loads).enumerate().map(|(i, ((role, hello), load))| Candidate {
            key: WorkerKey(i as u64),
            role: *role,
            hello,
            load: *load,
            lane_load: 0,
            shared_prefix: 0,
            is_unfit: unfit.contains(&(i as u64)),
        })
    }

    #[test]
    fn a_target_of_equal_bits_wins_then_another_than_before_then_the_less_loaded() {
        let t = |model, numerics| hello(Role::Target, model, numerics, &[]);
        let workers =
            [t("m", "a"), t("m", "b"), t("m", "a"), t("other", "a"), hello(Role::Draft, "m", "a", &[])];
        let loads = [5, 0, 9, 0, 0];
        let choose = |numerics, not: Option<u64>, unfit: &[u64]| {
            choose_target(candidates(&workers, &loads, unfit), "m", numerics, not.map(WorkerKey))
                .map(|key| key.0)
        };
        assert_eq!(choose(None, None, &[]), Some(1));
        assert_eq!(choose(Some("a"), None, &[]), Some(0));
        assert_eq!(choose(Some("a"), Some(0), &[]), Some(2));
        assert_eq!(choose(Some("b"), Some(1), &[]), Some(1), "equal bits before another worker");
        assert_eq!(choose(Some("a"), None, &[0]), Some(2), "one without room is left alone");
        assert_eq!(choose(Some("a"), None, &[0, 2]), None, "equal bits are waited for");
        assert_eq!(choose_target(candidates(&workers, &loads, &[]), "none", None, None), None);
    }

    #[test]
    fn a_draft_that_answers_wins_then_one_meant_for_the_task() {
        let d = |tasks: &[&str]| hello(Role::Draft, "d", "", tasks);
        let workers = [d(&[]), d(&["sql"]), d(&["code", "sql"]), d(&["chat"])];
        let target = WorkerHello::default();
        let choose = |task, unfit: &[u64]| {
            choose_draft(candidates(&workers, &[0, 5, 2, 0], unfit), &target, task, None).map(|key| key.0)
        };
        assert_eq!(choose("sql", &[]), Some(2));
        assert_eq!(choose("math", &[]), Some(0));
        assert_eq!(choose("sql", &[1, 2]), Some(0));
        assert_eq!(choose("math", &[0]), Some(0), "one that is out may come back: better than none");
    }
}
