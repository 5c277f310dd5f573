//! Ranks the workers that may serve a sequence (`workers.rs` finds them) by preference. [`crate::placement`]
//! chooses within a rank.

use super::events::{WorkerInfo, WorkerKey};
use super::pairing;
use crate::placement::{PrefixMarks, RankedWorker, RecentPrefixes, choose};
use crate::rollout::Preference;

/// One worker, as needed for a placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) key: WorkerKey,
    pub(super) info: &'a WorkerInfo,
    /// Sequences assigned to it.
    pub(super) load: u32,
    /// Sequences of these in the lane.
    pub(super) lane_load: u32,
    /// Prefixes that it received, and those of the prompt; looked up when it is ranked.
    pub(super) prefixes: Option<(&'a RecentPrefixes, &'a PrefixMarks)>,
    /// Whether a draft worker does not answer and is not due to be asked again, or a target has no capacity.
    pub(super) is_unavailable: bool,
    /// Whether a target is silent or failing; it is chosen only if no other target serves, full ones
    /// included.
    pub(super) is_unhealthy: bool,
    /// Time of a one-row step there, microseconds.
    pub(super) step_us: f64,
    /// Preference of a draft worker for the sequence during a rollout; `None`: it may not serve it.
    pub(super) preference: Option<Preference>,
}

/// Step times within this factor of the fastest target's count as equal: they are measured on busy machines.
const EQUAL_SPEED_FACTOR: f64 = 1.5;

impl Candidate<'_> {
    fn ranked(&self, rank: u8) -> RankedWorker<WorkerKey> {
        let Self { key, load, lane_load, .. } = *self;
        let shared_prefix = self.prefixes.map_or(0, |(prefixes, marks)| prefixes.shared(marks));
        RankedWorker { key, rank, load, lane_load, shared_prefix }
    }
}

/// Chooses the target for a sequence. `numerics_id` is the numerics class of its earlier target, if it had
/// one; only a target of the same class continues with the same text. Unhealthy targets are chosen
/// only if there is no other target of the class, and `avoid` only if no other one has capacity. A target
/// without capacity is never chosen: the sequence waits, for targets of its class, and for a healthy one if
/// there is any. A slower target gets fewer sequences, in proportion.
pub(super) fn choose_target<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    numerics_id: Option<&str>,
    avoid: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let workers: Vec<_> = workers.collect();
    let fastest = workers.iter().map(|worker| worker.step_us).fold(f64::INFINITY, f64::min);
    let fit = preferred(&workers, numerics_id).filter(|worker| !worker.is_unavailable);
    let ranked = fit.map(|worker| RankedWorker {
        load: relative_load(worker, fastest),
        ..worker.ranked(u8::from(Some(worker.key) == avoid))
    });
    choose(&ranked.collect::<Vec<_>>())
}

/// Returns the targets for which a sequence waits if [`choose_target`] finds none with capacity.
pub(super) fn awaited_targets<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    numerics_id: Option<&str>,
) -> Vec<WorkerKey> {
    let workers: Vec<_> = workers.collect();
    preferred(&workers, numerics_id).map(|worker| worker.key).collect()
}

/// The targets of the sequence's numerics class, if there are any, and of these the healthy ones, if there
/// are any.
fn preferred<'c, 'a>(
    workers: &'c [Candidate<'a>],
    numerics_id: Option<&str>,
) -> impl Iterator<Item = &'c Candidate<'a>> {
    let class_and_health = move |worker: &Candidate<'_>| {
        let is_other_class = numerics_id.is_some_and(|numerics_id| worker.info.numerics_id != numerics_id);
        (is_other_class, worker.is_unhealthy)
    };
    let best = workers.iter().map(class_and_health).min();
    workers.iter().filter(move |worker| Some(class_and_health(worker)) == best)
}

/// Load of a worker in terms of the fastest target: the number of sequences there at which one more is as
/// slow as one more here.
fn relative_load(worker: &Candidate<'_>, fastest: f64) -> u32 {
    let slowness = worker.step_us / fastest;
    if slowness.is_finite() && slowness > EQUAL_SPEED_FACTOR {
        (f64::from(worker.load + 1) * slowness) as u32 - 1
    } else {
        worker.load
    }
}

/// Chooses the draft worker for a sequence on `target`, among those that fit. Preferred in this order:
/// workers that answer, workers of the draft that a rollout prefers for the sequence, workers other than
/// the one that it left, workers with a window for all of the sequence, and workers meant for its task type
/// over those meant for all.
pub(super) fn choose_draft<'a>(
    workers: impl Iterator<Item = Candidate<'a>>,
    target: &WorkerInfo,
    task_type: &str,
    max_len: u32,
    avoid: Option<WorkerKey>,
) -> Option<WorkerKey> {
    let ranked_workers: Vec<_> = workers
        .filter(|worker| worker.info.accepts_task(task_type) && pairing::check(worker.info, target).is_ok())
        .filter_map(|worker| {
            let is_fallback = worker.preference? == Preference::Fallback;
            let is_general = worker.info.task_types.is_empty();
            let is_avoided = Some(worker.key) == avoid;
            let is_short = !worker.info.has_window(max_len);
            let faults = [worker.is_unavailable, is_fallback, is_avoided, is_short, is_general];
            Some(worker.ranked(faults.iter().fold(0, |rank, fault| 2 * rank + u8::from(*fault))))
        })
        .collect();
    choose(&ranked_workers)
}

#[cfg(test)]
mod tests {
    use speculation::Role;

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
            prefixes: None,
            is_unavailable: unfit.contains(&(i as u64)),
            is_unhealthy: false,
            step_us: 1_000.0,
            preference: Some(Preference::Primary),
        })
    }

    #[test]
    fn the_same_numerics_class_wins_then_another_target_than_before_then_the_least_loaded() {
        let workers = ["a", "b", "a"].map(|numerics| worker(Role::Target, "m", numerics, &[]));
        let loads = [5, 0, 9];
        let choose = |numerics, not: Option<u64>, unfit: &[u64]| {
            choose_target(candidates(&workers, &loads, unfit), numerics, not.map(WorkerKey)).map(|key| key.0)
        };
        assert_eq!(choose(None, None, &[]), Some(1));
        assert_eq!(choose(Some("a"), None, &[]), Some(0));
        assert_eq!(choose(Some("a"), Some(0), &[]), Some(2));
        assert_eq!(
            choose(Some("b"), Some(1), &[]),
            Some(1),
            "the numerics class comes before avoiding a worker"
        );
        assert_eq!(choose(Some("a"), None, &[0]), Some(2), "a target without capacity is not chosen");
        assert_eq!(choose(Some("a"), None, &[0, 2]), None, "the sequence waits for its numerics class");
    }

    #[test]
    fn an_unhealthy_target_comes_last_and_a_slow_one_gets_its_part() {
        let workers = [0, 1].map(|_| worker(Role::Target, "m", "a", &[]));
        let choose = |loads: [u32; 2], unhealthy: Option<u64>, step_us: [f64; 2]| {
            let candidates = candidates(&workers, &loads, &[]).map(|candidate| Candidate {
                is_unhealthy: unhealthy == Some(candidate.key.0),
                step_us: step_us[candidate.key.0 as usize],
                ..candidate
            });
            let candidates: Vec<_> = candidates.collect();
            choose_target(candidates.into_iter(), Some("a"), Some(WorkerKey(1))).map(|key| key.0)
        };
        assert_eq!(
            choose([9, 0], Some(0), [1.0, 1.0]),
            Some(1),
            "the target that was just left comes before an unhealthy one"
        );
        assert_eq!(choose([9, 9], None, [1.0, 1.0]), Some(0));
        let choose = |loads: [u32; 2]| {
            let candidates = candidates(&workers, &loads, &[]);
            let slow = |candidate: Candidate<'_>| candidate.key.0 == 1;
            let speeds: Vec<_> = candidates
                .map(|candidate| Candidate { step_us: if slow(candidate) { 10.0 } else { 1.0 }, ..candidate })
                .collect();
            choose_target(speeds.into_iter(), None, None).map(|key| key.0)
        };
        assert_eq!(choose([7, 0]), Some(0), "a target ten times as slow gets fewer sequences");
        assert_eq!(choose([12, 0]), Some(1));
    }

    #[test]
    fn a_draft_that_answers_wins_then_one_meant_for_the_task() {
        let d = |tasks: &[&str]| worker(Role::Draft, "d", "", tasks);
        let workers = [d(&[]), d(&["sql"]), d(&["code", "sql"]), d(&["chat"])];
        let target = worker(Role::Target, "m", "", &[]);
        let choose = |task, unfit: &[u64]| {
            choose_draft(candidates(&workers, &[0, 5, 2, 0], unfit), &target, task, 8, None).map(|key| key.0)
        };
        assert_eq!(choose("sql", &[]), Some(2));
        assert_eq!(choose("math", &[]), Some(0));
        assert_eq!(choose("sql", &[1, 2]), Some(0));
        assert_eq!(
            choose("math", &[0]),
            Some(0),
            "a silent draft worker is better than none: it may recover"
        );
    }
}
