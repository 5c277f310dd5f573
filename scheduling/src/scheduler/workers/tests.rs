//! Tests of workers: capacity, limits on reported numbers, crash loops and prefills.

use super::*;
use crate::cost::{BatchTimePoint, ForwardShape, StepTimePoint};
use crate::rollout::{RolloutRules, RolloutSettings};
use crate::scheduler::events::Report;

/// A target with 10 blocks of 16 ids.
fn target() -> WorkerInfo {
    WorkerInfo { kv_blocks: 10, kv_block_size: 16, vocab_size: 9, ..WorkerInfo::of(Role::Target, "m") }
}

fn with_target() -> Workers {
    let mut workers = Workers::default();
    workers.join(Duration::ZERO, WorkerKey(1), target());
    workers
}

fn placement_request(expected_len: u32, len: u32, marks: &PrefixMarks) -> PlacementRequest<'_> {
    PlacementRequest {
        id: SequenceId(1),
        model: "m",
        task_type: "",
        lane: LaneId(1),
        expected_len,
        len,
        marks,
        max_len: expected_len,
        numerics_id: None,
        avoid: None,
        refused_by: &[],
        awaited: &[],
        is_suspect: false,
        has_grammar: false,
        now: Duration::ZERO,
    }
}

#[test]
fn capacity_is_reserved_within_the_credit_and_returned() {
    let (mut workers, marks) = (with_target(), PrefixMarks::default());
    let reserve = |workers: &mut Workers, ids| workers.reserve_target(&placement_request(ids, 10, &marks));
    let reserved = |workers: &Workers| workers.get(WorkerKey(1)).unwrap().reserved;
    let first = reserve(&mut workers, 100).unwrap();
    assert!(reserve(&mut workers, 100).is_none(), "7 + 7 blocks of 10");
    let mut second = reserve(&mut workers, 48).unwrap();
    workers.set_credit(WorkerKey(1), 20);
    assert!(reserve(&mut workers, 160).is_some(), "3 + 7 + 10 blocks of 20");
    assert!(workers.grow_reservation(&mut second, 64), "the first step is done");
    assert!(!workers.grow_reservation(&mut second, 65), "prefill capacity is freed once");
    assert_eq!(reserved(&workers), 22, "a sequence that outgrows its reservation gets more");
    workers.release(second);
    workers.release(first);
    let report = Report::WorkerChanged { worker: WorkerKey(1), credit: 20, reserved: 10, is_usable: true };
    assert_eq!(workers.take_changed().collect::<Vec<_>>(), [report]);
    assert_eq!(workers.take_changed().count(), 0, "reported once");
    workers.set_credit(WorkerKey(1), 0);
    assert!(reserve(&mut workers, 1).is_none());
}

#[test]
fn absurd_numbers_of_a_worker_overflow_nothing() {
    let point = |rows, context, micros| StepTimePoint { rows, context, micros };
    let (mut workers, marks) = (Workers::default(), PrefixMarks::default());
    let step_times =
        vec![point(0, 0, 1), point(1, 0, 1), point(1, 1, u64::MAX), point(u32::MAX, u64::MAX, u64::MAX)];
    let batch = |sequences, rows, context, micros| BatchTimePoint { sequences, rows, context, micros };
    let batch_times = vec![
        batch(0, 1, 1, 1),
        batch(1, 0, 1, 1),
        batch(1, 1, u64::MAX, u64::MAX),
        batch(u32::MAX, u32::MAX, u64::MAX, u64::MAX),
    ];
    let (kv_blocks, credit_blocks) = (u64::MAX, Some(u64::MAX));
    let info = WorkerInfo { kv_blocks, credit_blocks, step_times, batch_times, ..target() };
    workers.join(Duration::ZERO, WorkerKey(1), info);
    workers.set_credit(WorkerKey(1), u64::MAX);
    for _ in 0..3 {
        assert!(workers.reserve_target(&placement_request(u32::MAX, MAX_PREFILL_IDS / 3, &marks)).is_some());
    }
    let expected = workers.get(WorkerKey(1)).unwrap().expected_steps();
    let mut health = TargetHealth::default();
    health.request_sent(Duration::ZERO);
    assert!(health.silent_at(expected).is_some(), "{expected:?}");
    let long = workers.get(WorkerKey(1)).unwrap().cost.step_us(512.0, f64::from(u32::MAX));
    assert!(Duration::from_secs_f64(long / 1e6) < Duration::MAX / 1_000);
}

#[test]
fn batches_that_a_target_measured_are_part_of_its_cost() {
    let step_times = [(1, 16), (64, 16), (1, 2_048), (64, 2_048)]
        .map(|(rows, context)| StepTimePoint { rows, context, micros: 10_000 })
        .to_vec();
    let batch_times = vec![BatchTimePoint { sequences: 8, rows: 40, context: 8_192, micros: 30_000 }];
    let cost_us = |batch_times| {
        let mut workers = Workers::default();
        let info = WorkerInfo { step_times: step_times.clone(), batch_times, ..target() };
        workers.join(Duration::ZERO, WorkerKey(1), info);
        let forward = ForwardShape { rows: 40.0, sequences: 8.0, context: 8_192.0 };
        workers.get(WorkerKey(1)).unwrap().cost.forward_us(forward)
    };
    assert_eq!(cost_us(Vec::new()), 10_000.0);
    let with = cost_us(batch_times);
    assert!((with - 30_000.0).abs() < 1_000.0, "{with}");
}

#[test]
fn a_target_in_a_crash_loop_joins_with_an_open_breaker_until_a_sequence_succeeds() {
    let (mut workers, marks) = (Workers::default(), PrefixMarks::default());
    let is_avoided =
        |workers: &Workers, key| workers.get(key).unwrap().target_health.is_unhealthy(Duration::ZERO);
    for crash in 1..=4 {
        let key = WorkerKey(crash);
        workers.join(Duration::ZERO, key, target());
        assert_eq!(is_avoided(&workers, key), crash == 4, "{crash}");
        let mut reservation = workers.reserve_target(&placement_request(10, 10, &marks)).unwrap();
        workers.request_sent(&mut reservation, Duration::ZERO);
        if crash == 4 {
            workers.succeeded(&mut reservation);
        }
        workers.leave(key);
    }
    workers.join(Duration::ZERO, WorkerKey(9), target());
    assert!(!is_avoided(&workers, WorkerKey(9)), "a success ends the crash loop");
}

/// Whether each worker is usable, of those that changed since the last call.
fn usable(workers: &mut Workers) -> Vec<(u64, bool)> {
    let changed = workers.take_changed().map(|report| match report {
        Report::WorkerChanged { worker, is_usable, .. } => (worker.0, is_usable),
        other => panic!("{other:?}"),
    });
    changed.collect()
}

#[test]
fn a_target_is_unusable_from_its_failures_to_its_next_success() {
    let (mut workers, marks) = (with_target(), PrefixMarks::default());
    assert_eq!(usable(&mut workers), [(1, true)]);
    let second = Duration::from_secs(1);
    for failure in 1..=FAILURES_TO_OPEN {
        assert_eq!(workers.failed(WorkerKey(1), second), failure == FAILURES_TO_OPEN);
    }
    assert_eq!(usable(&mut workers), [(1, false)]);
    let mut probe = workers.reserve_target(&placement_request(10, 10, &marks)).unwrap();
    assert_eq!(usable(&mut workers), [(1, false)], "a probe alone proves nothing");
    workers.succeeded(&mut probe);
    assert_eq!(usable(&mut workers), [(1, true)]);
    workers.succeeded(&mut probe);
    assert!(usable(&mut workers).is_empty(), "nothing changed");
    // The same for one that does not answer.
    workers.request_sent(&mut probe, second);
    let worker = workers.get(WorkerKey(1)).unwrap();
    let silent_at = worker.target_health.silent_at(worker.expected_steps()).unwrap();
    assert_eq!(workers.newly_silent(silent_at), [WorkerKey(1)]);
    assert_eq!(usable(&mut workers), [(1, false)]);
    workers.frame_received(WorkerKey(1), silent_at);
    assert_eq!(usable(&mut workers), [(1, true)]);
}

#[test]
fn a_draft_worker_is_usable_if_it_answers_and_fits_a_connected_target() {
    let mut workers = Workers::default();
    let info = |role, tokenizer: &str| WorkerInfo {
        tokenizer_fingerprint: tokenizer.to_owned(),
        ..WorkerInfo::of(role, "m")
    };
    workers.join(Duration::ZERO, WorkerKey(1), info(Role::Draft, "a"));
    assert_eq!(usable(&mut workers), [(1, true)], "there is no target that it does not fit");
    workers.join(Duration::ZERO, WorkerKey(2), info(Role::Target, "b"));
    assert_eq!(usable(&mut workers), [(1, false), (2, true)]);
    workers.join(Duration::ZERO, WorkerKey(3), info(Role::Target, "a"));
    assert_eq!(usable(&mut workers), [(1, true), (3, true)]);
    workers.leave(WorkerKey(3));
    assert_eq!(usable(&mut workers), [(1, false)]);
    workers.leave(WorkerKey(2));
    assert_eq!(usable(&mut workers), [(1, true)]);
    let second = Duration::from_secs(1);
    assert!(workers.get_mut(WorkerKey(1)).unwrap().draft_health.deadline_missed(Duration::ZERO, second));
    workers.health_changed(WorkerKey(1));
    assert_eq!(usable(&mut workers), [(1, false)]);
}

#[test]
fn one_sequence_may_always_run_however_long() {
    let (mut workers, marks) = (with_target(), PrefixMarks::default());
    assert!(workers.reserve_target(&placement_request(10_000, MAX_PREFILL_IDS + 1, &marks)).is_some());
    assert!(workers.reserve_target(&placement_request(1, 1, &marks)).is_none());
}

#[test]
fn prefills_under_way_at_a_target_are_bounded() {
    let (mut workers, marks) = (with_target(), PrefixMarks::default());
    workers.set_credit(WorkerKey(1), 1 << 40);
    let request = placement_request(1, MAX_PREFILL_IDS / 2, &marks);
    let mut under_way: Vec<Reservation> = std::iter::from_fn(|| workers.reserve_target(&request)).collect();
    assert_eq!(under_way.len(), 2);
    assert!(workers.grow_reservation(&mut under_way[0], 1));
    assert!(workers.reserve_target(&request).is_some());
}

#[test]
fn a_target_without_sequences_that_gets_none_shares_no_load() {
    let (mut workers, marks) = (Workers::default(), PrefixMarks::default());
    (1..=3).for_each(|key| workers.join(Duration::ZERO, WorkerKey(key), target()));
    assert_eq!((workers.num_targets("m"), workers.num_targets("other")), (3, 0));
    let request = placement_request(10, 10, &marks);
    let mut reservation = workers.reserve_target(&request).unwrap();
    let key = reservation.key;
    workers.set_listed(key, false);
    assert_eq!(workers.num_targets("m"), 3, "its sequence is still there");
    workers.request_sent(&mut reservation, Duration::ZERO);
    let worker = workers.get(key).unwrap();
    let silent_at = worker.target_health.silent_at(worker.expected_steps()).unwrap();
    workers.release(reservation);
    assert_eq!(workers.num_targets("m"), 2);
    workers.set_listed(key, true);
    assert_eq!(workers.num_targets("m"), 3);
    // The same for one that does not answer.
    let mut reservation = workers.reserve_target(&request).unwrap();
    assert_eq!(reservation.key, key);
    workers.request_sent(&mut reservation, Duration::ZERO);
    assert_eq!(workers.newly_silent(silent_at), [key]);
    assert_eq!(workers.num_targets("m"), 3);
    workers.release(reservation);
    assert_eq!(workers.num_targets("m"), 2);
    workers.frame_received(key, silent_at);
    assert_eq!(workers.num_targets("m"), 3);
}

#[test]
fn a_candidate_is_compared_with_the_fastest_draft_that_serves() {
    let mut workers = Workers::default();
    let draft = |model: &str, micros: Option<u64>, is_shadow| {
        let step_times = micros.map(|micros| StepTimePoint { rows: 1, context: 0, micros });
        let step_times = step_times.into_iter().collect();
        WorkerInfo { step_times, is_shadow, ..WorkerInfo::of(Role::Draft, model) }
    };
    *workers.rollout_mut() = Some(Rollout::new(RolloutSettings {
        draft: "new".to_owned(),
        share: 0.1,
        decides: true,
        rules: RolloutRules::default(),
    }));
    let mut join = |key, info| {
        workers.join(Duration::ZERO, WorkerKey(key), info);
        (workers.fastest_step_us(|info| info.model_id == "new"), workers.slowdown())
    };
    assert_eq!(join(1, draft("new", Some(900), true)), (Some(900.0), None));
    assert_eq!(join(2, draft("new", Some(600), true)), (Some(600.0), None));
    assert_eq!(join(3, draft("trial", Some(100), true)), (Some(600.0), None), "another shadow serves nobody");
    assert_eq!(join(4, draft("old", Some(400), false)), (Some(600.0), Some(1.5)));
    assert_eq!(join(5, draft("ngram", None, false)), (Some(600.0), Some(600.0)), "no model takes no time");
}
