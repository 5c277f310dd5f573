//! Tests of the device thread without a model: what is kept, evicted, preempted and closed, and which router
//! receives each reply.

use std::sync::Arc;
use std::time::{Duration, Instant};

use scheduling::cost::StepTimePoint;
use speculation::{SequenceSpec, TokenId};
use tokio::sync::oneshot::error::TryRecvError;

use super::bench::*;
use super::*;
use crate::model;

#[test]
fn steps_of_one_sequence_run_in_order_and_others_beside_them() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let steps =
        vec![bench.step(7, 1, &[], &[1, 2]), bench.step(7, 1, &[1, 2], &[3]), bench.step(8, 1, &[], &[4])];
    bench.send(1, steps, &[]);
    assert_eq!(read(&mut replies), [said(7, "fed 2"), said(8, "fed 1"), said(7, "fed 3")]);
}

#[test]
fn the_idle_sequence_used_longest_ago_makes_room_and_is_rebuilt() {
    let mut bench = Bench::new(10);
    let mut replies = bench.open(1, 1);
    for id in 1..=3 {
        let step = bench.step(id, 1, &[], &[1, 2, 3]);
        bench.send(1, vec![step], &[]);
    }
    let step = bench.step(4, 1, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[]);
    assert_eq!(bench.blocks_used(), 9, "one of the three made room");
    read(&mut replies);
    let (second, first) = (bench.step(2, 1, &[1, 2], &[9]), bench.step(1, 1, &[1, 2], &[9]));
    bench.send(1, vec![second], &[]);
    bench.send(1, vec![first], &[]);
    assert_eq!(read(&mut replies), [said(2, "fed 3"), said(1, "need 0 true")]);
}

/// A step that only cuts has no row for a forward. Counted as one that does not fit, it cost every idle
/// sequence its KV, and running ones were preempted.
#[test]
fn a_step_that_only_cuts_is_answered_and_costs_nobody_anything() {
    let mut bench = Bench::new(10);
    let mut one = bench.open(1, 1);
    let mut two = bench.open(2, 2);
    for router in [1, 2] {
        let step = bench.step(5, 1, &[], &[1, 2, 3]);
        bench.send(router, vec![step], &[]);
    }
    let (cut, empty) = (bench.step(5, 1, &[1, 2], &[]), bench.step(6, 1, &[], &[]));
    bench.send(2, vec![cut, empty], &[]);
    assert_eq!(read(&mut two), [said(5, "fed 3"), said(5, "fed 2"), said(6, "fed 0")]);
    assert_eq!(bench.blocks_used(), 3 + 2, "the other router's sequence and what is left of this one");
    let next = bench.step(5, 1, &[1, 2, 3], &[4]);
    bench.send(1, vec![next], &[]);
    assert_eq!(read(&mut one), [said(5, "fed 3"), said(5, "fed 4")], "its KV is still there");
}

/// Left behind, it could not be evicted: running sequences were preempted for it.
#[test]
fn a_higher_epoch_frees_the_kv_of_the_one_before_though_its_step_does_not_run() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    for (epoch, base, appended, answer) in [
        (2, &[][..], 1_000, "REFUSAL_CAUSE_UNSPECIFIED: id 1000 is outside the vocabulary of 1000"),
        (4, &[1, 2, 3], 4, "need 0 false"),
    ] {
        let first = bench.step(1, epoch - 1, &[], &[1, 2, 3]);
        bench.send(1, vec![first], &[]);
        assert_eq!((bench.blocks_used(), read(&mut replies)), (3, vec![said(1, "fed 3")]));
        let next = bench.step(1, epoch, base, &[appended]);
        bench.send(1, vec![next], &[]);
        assert_eq!((bench.blocks_used(), read(&mut replies)), (0, vec![said(1, answer)]));
    }
}

/// A router waits for this answer before it sends the context.
#[test]
fn an_answer_that_needs_no_forward_does_not_wait_for_one() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let (long, lost) = (bench.step(1, 1, &[], &[1; 50]), bench.step(2, 1, &[1, 2], &[3]));
    bench.receive((1, 1), vec![long, lost], &[]);
    assert!(bench.step_loop.admit_waiting().is_some(), "there is something to send");
    bench.step_loop.flush(&v1::StepTiming::default());
    assert_eq!(bench.step_loop.running.len(), 1, "the other step has not run");
    assert_eq!(read(&mut replies), [said(2, "need 0 false")]);
}

/// The batch former may wait for other steps before it starts a forward. A router would take this time for
/// network time.
#[test]
fn the_wait_of_an_admitted_step_for_its_forward_is_queue_time() {
    let mut bench = Bench::new(100);
    let _replies = bench.open(1, 1);
    let step = bench.step(1, 1, &[], &[1]);
    bench.receive((1, 1), vec![step], &[]);
    bench.step_loop.admit_waiting();
    let wait = Duration::from_secs(1);
    bench.age_running(wait);
    let Decision::Run(batch) = bench.step_loop.next_forward() else { panic!("nothing else is awaited") };
    let timing = bench.step_loop.forward(&batch);
    assert!(u128::from(timing.queue_us) >= wait.as_micros(), "{timing:?}");
}

/// The executor runs one task per forward, so the second one waits for the first one's forward.
#[test]
fn the_wait_of_a_step_that_gets_no_rows_is_queue_time() {
    let mut bench = Bench::new(100);
    let _replies = bench.open(1, 1);
    let steps = vec![bench.step(1, 1, &[], &[1]), bench.step(2, 1, &[], &[2])];
    bench.receive((1, 1), steps, &[]);
    bench.step_loop.admit_waiting();
    let wait = Duration::from_secs(1);
    let queue_us = [Duration::ZERO, wait].map(|wait| {
        bench.age_running(wait);
        let Decision::Run(batch) = bench.step_loop.next_forward() else { panic!("nothing else is awaited") };
        u128::from(bench.step_loop.forward(&batch).queue_us)
    });
    assert!(bench.step_loop.running.is_empty(), "each forward ran one of them");
    assert!(queue_us[1] >= wait.as_micros(), "{queue_us:?}");
}

/// Counted as prefill, ids from the prefix cache hid the rows of other steps in the same forward: 2 rows of a
/// round and 8 of a prompt were 10 prefill rows.
#[test]
fn ids_from_the_prefix_cache_are_no_prefill_rows() {
    let mut bench = Bench::of(model::tests::executor(1 << 20), &[]);
    let mut replies = bench.open(1, 1);
    let prompt: Vec<TokenId> = (100..156).collect();
    let first = bench.step(1, 1, &[], &prompt);
    bench.send(1, vec![first], &[]);
    let steps = vec![bench.step(1, 1, &prompt, &[9, 9]), bench.step(2, 1, &[], &prompt)];
    bench.receive((1, 1), steps, &[]);
    bench.step_loop.admit_waiting();
    let Decision::Run(batch) = bench.step_loop.next_forward() else { panic!("nothing else is awaited") };
    let timing = bench.step_loop.forward(&batch);
    // Three blocks of 16 ids are cached.
    assert_eq!((timing.rows, timing.prefill_rows), (10, 8), "{timing:?}");
    bench.step_loop.flush(&timing);
    assert_eq!(read(&mut replies), [said(1, "fed 56"), said(1, "fed 58"), said(2, "fed 56")]);
}

/// The queue of a sequence is bounded, and so is the queue of all of them.
#[test]
fn steps_that_newer_ones_displace_leave_nothing_behind() {
    let mut bench = Bench::new(100);
    let _replies = bench.open(1, 1);
    let steps = (0..10 * WAITING_STEPS).map(|_| bench.step(1, 1, &[], &[1])).collect();
    bench.receive((1, 1), steps, &[]);
    assert_eq!(bench.step_loop.waiting.len(), WAITING_STEPS);
}

#[test]
fn a_sequence_that_never_fits_is_refused_with_the_setting_to_raise() {
    let mut bench = Bench::new(2);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 1, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[]);
    let read = read(&mut replies);
    assert!(
        read[0].1.starts_with("REFUSAL_CAUSE_CAPACITY: ") && read[0].1.contains("--kv-memory"),
        "{read:?}"
    );
    assert_eq!(bench.blocks_used(), 0);
}

/// Three failures in a row open a target's circuit breaker: three long requests, or three with a grammar.
#[test]
fn a_step_beyond_the_workers_limits_is_refused_with_its_cause() {
    let mut bench = Bench::new(2_000);
    let mut replies = bench.open(1, 1);
    let long = bench.step(1, 1, &[], &[1; 1_001]);
    let spec = SequenceSpec { grammar: Some("{}".to_owned()), ..SequenceSpec::default() };
    let masked = Step { spec: Some(Arc::new(spec)), ..bench.step(2, 1, &[], &[1]) };
    let malformed = bench.step(3, 1, &[], &[1_000]);
    bench.send(1, vec![long, masked, malformed], &[]);
    let causes = ["REFUSAL_CAUSE_CAPACITY", "REFUSAL_CAUSE_GRAMMAR", "REFUSAL_CAUSE_UNSPECIFIED"];
    let read = read(&mut replies);
    assert_eq!(read.len(), causes.len(), "{read:?}");
    for ((_, words), cause) in read.iter().zip(causes) {
        assert!(words.starts_with(&format!("{cause}: ")), "{words} lacks {cause}");
    }
}

#[test]
fn the_youngest_task_is_preempted_when_running_ones_fill_everything() {
    let mut bench = Bench::new(4);
    let mut replies = bench.open(1, 1);
    // Neither fits beside the other, and no idle sequence can be evicted.
    let (first, second) = (bench.step(1, 1, &[], &[1; 5]), bench.step(2, 1, &[], &[1; 5]));
    bench.send(1, vec![first, second], &[]);
    let read = read(&mut replies);
    assert_eq!(read[0], said(2, "preempted"), "{read:?}");
    assert!(read[1].1.contains("alone needs more KV blocks"), "{read:?}");
}

/// A router that does not read loses replies, for which it asks again; it would never ask for a preemption.
#[test]
fn a_full_queue_keeps_a_preemption_until_the_router_reads() {
    let mut bench = Bench::new(4);
    let mut replies = bench.open(1, 1);
    for epoch in 1..100 {
        let step = bench.step(9, epoch, &[], &[1]);
        bench.send(1, vec![step], &[]);
    }
    assert_eq!(replies.len(), replies.max_capacity(), "the queue is full");
    let (first, second) = (bench.step(1, 1, &[], &[1; 5]), bench.step(2, 1, &[], &[1; 5]));
    bench.send(1, vec![first, second], &[]);
    read(&mut replies);
    let step = bench.step(9, 100, &[], &[1]);
    bench.send(1, vec![step], &[]);
    assert_eq!(read(&mut replies), [said(2, "preempted"), said(9, "fed 1")]);
}

#[test]
fn closing_frees_and_a_close_of_an_older_generation_does_not() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 2, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[(1, 1)]);
    assert_eq!(bench.blocks_used(), 3, "epoch 1 is over, 2 goes on");
    bench.send(1, vec![], &[(1, 2)]);
    assert_eq!((bench.blocks_used(), bench.step_loop.table.len()), (0, 0));
    let step = bench.step(5, 1, &[], &[1]);
    bench.send(1, vec![step], &[(5, 1)]);
    assert_eq!(
        (bench.blocks_used(), bench.step_loop.table.len()),
        (0, 0),
        "closed in the frame that brought the step"
    );
    assert_eq!(read(&mut replies).len(), 1);
}

#[test]
fn routers_do_not_see_each_other_and_a_newer_stream_begins_with_nothing() {
    let mut bench = Bench::new(100);
    let mut one = bench.open(1, 1);
    let mut two = bench.open(2, 2);
    let (a, b) = (bench.step(1, 1, &[], &[1, 2]), bench.step(1, 1, &[], &[3]));
    bench.send(1, vec![a], &[]);
    bench.send(2, vec![b], &[]);
    assert_eq!((read(&mut one), read(&mut two)), (vec![said(1, "fed 2")], vec![said(1, "fed 1")]));
    let mut again = bench.open(1, 3);
    assert_eq!(bench.blocks_used(), 1, "the router runs nothing by its older stream any more");
    bench.step_loop.receive(Message::Closed { router: RouterId(1), stream: StreamId(1) });
    let step = bench.step(1, 2, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[]);
    assert_eq!(
        read(&mut again),
        [said(1, "fed 3")],
        "the end of the older stream says nothing of the newer one"
    );
    bench.step_loop.receive(Message::Closed { router: RouterId(1), stream: StreamId(3) });
    assert_eq!(bench.blocks_used(), 1, "only the other router's sequence is left");
}

#[test]
fn a_replaced_stream_ends_and_neither_its_steps_nor_its_end_touch_the_newer_one() {
    let mut bench = Bench::new(100);
    let (mut old, mut old_replaced) = bench.open_stream(1, 1);
    assert!(matches!(old_replaced.try_recv(), Err(TryRecvError::Empty)), "alone it is the newest");
    let (mut new, mut new_replaced) = bench.open_stream(1, 2);
    assert!(matches!(old_replaced.try_recv(), Err(TryRecvError::Closed)), "the older stream ends");
    let (late, step) = (bench.step(7, 1, &[], &[1, 2]), bench.step(8, 1, &[], &[3]));
    bench.send_by((1, 1), vec![late], &[]);
    bench.send_by((1, 2), vec![step], &[]);
    assert_eq!((read(&mut old), read(&mut new)), (vec![], vec![said(8, "fed 1")]));
    // Streams may open in a different order from the one in which the device thread receives the messages.
    let (_, mut overtaken) = bench.open_stream(1, 1);
    assert!(matches!(overtaken.try_recv(), Err(TryRecvError::Closed)));
    bench.step_loop.receive(Message::Closed { router: RouterId(1), stream: StreamId(1) });
    assert!(matches!(new_replaced.try_recv(), Err(TryRecvError::Empty)));
    let step = bench.step(8, 1, &[3], &[4]);
    bench.send_by((1, 2), vec![step], &[]);
    assert_eq!(read(&mut new), [said(8, "fed 2")], "the router is still known");
}

/// The last credits that a router received; all other frames are drained too.
fn credits(replies: &mut mpsc::Receiver<v1::WorkerFrame>) -> Option<u64> {
    std::iter::from_fn(|| replies.try_recv().ok()).filter_map(|frame| frame.credits).map(|c| c.blocks).last()
}

#[test]
fn credits_follow_the_pool_and_are_shared_among_routers() {
    let mut bench = Bench::new(100);
    let mut one = bench.open(1, 1);
    assert_eq!(credits(&mut one), Some(100), "alone it has everything");
    let mut two = bench.open(2, 2);
    assert_eq!((credits(&mut one), credits(&mut two)), (Some(50), Some(50)));
    let step = bench.step(1, 1, &[], &[1; 60]);
    bench.send(1, vec![step], &[]);
    // 60 held, 40 free: the first router may borrow half of the rest, the second keeps its share.
    assert_eq!((credits(&mut one), credits(&mut two)), (Some(80), None));
    bench.send(1, vec![], &[(1, 1)]);
    bench.step_loop.flush(&v1::StepTiming::default());
    assert_eq!((credits(&mut one), credits(&mut two)), (Some(50), None));
    bench.step_loop.receive(Message::Closed { router: RouterId(2), stream: StreamId(2) });
    bench.step_loop.flush(&v1::StepTiming::default());
    assert_eq!(credits(&mut one), Some(100));
}

#[test]
fn a_router_above_its_share_gives_way_first() {
    let mut bench = Bench::new(10);
    let mut one = bench.open(1, 1);
    let mut two = bench.open(2, 2);
    // The second router's sequence has been idle longer, but its router holds less than its half.
    let (small, large) = (bench.step(1, 1, &[], &[1; 2]), bench.step(1, 1, &[], &[2; 7]));
    bench.send(2, vec![small], &[]);
    bench.send(1, vec![large], &[]);
    let more = bench.step(2, 1, &[], &[3; 3]);
    bench.send(2, vec![more], &[]);
    let (again, lost) = (bench.step(1, 1, &[1; 2], &[9]), bench.step(1, 1, &[2; 7], &[9]));
    bench.send(2, vec![again], &[]);
    bench.send(1, vec![lost], &[]);
    assert_eq!(read(&mut two), [said(1, "fed 2"), said(2, "fed 3"), said(1, "fed 3")]);
    assert_eq!(read(&mut one), [said(1, "fed 7"), said(1, "need 0 true")]);
}

#[test]
fn the_least_urgent_task_is_preempted_and_its_generation_is_over() {
    let mut bench = Bench::new(4);
    let mut replies = bench.open(1, 1);
    let (mut urgent, mut other) = (bench.step(1, 1, &[], &[1; 5]), bench.step(2, 1, &[], &[1; 5]));
    let spec = |priority| Some(Arc::new(SequenceSpec { priority, ..SequenceSpec::default() }));
    (urgent.spec, other.spec) = (spec(1), spec(0));
    bench.send(1, vec![urgent, other], &[]);
    assert_eq!(read(&mut replies)[0], said(1, "preempted"), "though it came first");
    let late = bench.step(1, 1, &[], &[1]);
    bench.send(1, vec![late], &[]);
    assert_eq!(read(&mut replies), [], "its epoch is over");
    let next = bench.step(1, 2, &[], &[1]);
    bench.send(1, vec![next], &[]);
    assert_eq!(read(&mut replies), [said(1, "fed 1")]);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_step_frees_its_blocks() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 1, &[], &[1, 2, 3]);
    let (router, stream) = (RouterId(1), StreamId(1));
    let frame = |steps, closes| Message::Frame { router, stream, steps, closes, received: Instant::now() };
    bench.step_loop.receive(frame(vec![SentStep { step, span_id: 0 }], vec![]));
    bench.step_loop.admit_waiting();
    assert_eq!(bench.step_loop.running.len(), 1);
    bench.step_loop.receive(frame(vec![], vec![(SequenceId(1), 1)]));
    assert_eq!((bench.step_loop.running.len(), bench.step_loop.table.len()), (0, 0));
    assert_eq!((bench.blocks_used(), read(&mut replies)), (0, vec![]));
}

#[test]
fn a_step_counts_as_back_when_it_came_and_not_when_it_is_read() {
    // A forward takes 20 s for any number of rows.
    let times = [1, 64].map(|rows| StepTimePoint { rows, context: 0, micros: 20_000_000 });
    let mut bench = Bench::with_step_times(100, &times);
    let _replies = bench.open(1, 1);
    let away = Duration::from_secs(4);
    let first = bench.step(1, 1, &[], &[5]);
    bench.send(1, vec![first], &[]);
    let second = SentStep { step: bench.step(1, 1, &[5], &[6]), span_id: 0 };
    let frame = |steps, received| Message::Frame {
        router: RouterId(1),
        stream: StreamId(1),
        steps,
        closes: Vec::new(),
        received,
    };
    bench.step_loop.receive(frame(vec![second], Instant::now() + away));
    bench.step_loop.admit_waiting();
    let Decision::Run(batch) = bench.step_loop.next_forward() else { panic!("nobody else is away") };
    bench.step_loop.forward(&batch);
    let other = SentStep { step: bench.step(2, 1, &[], &[7]), span_id: 0 };
    bench.step_loop.receive(frame(vec![other], Instant::now()));
    bench.step_loop.admit_waiting();
    let Decision::Wait(delay) = bench.step_loop.next_forward() else { panic!("the first sequence is away") };
    // If the step counted as returning at once, it would be overdue, and the delay would be a quarter of the
    // forward's 20 s.
    let about = away - Duration::from_secs(1)..away + Duration::from_millis(500);
    assert!(about.contains(&delay), "{delay:?}");
}

#[test]
fn a_proposal_is_cut_where_the_workers_window_ends() {
    // Held ids, k, and the k that remains in a window of 10: the last guess needs no row. A chain may be asked for
    // as a tree of k tokens.
    for (start, k, cut) in [(4, 4, 4), (7, 4, 4), (8, 4, 3), (9, 4, 2), (10, 4, 1), (11, 4, 1), (4, 0, 0)] {
        for (tree, tree_cut) in [(0, 0), (k, cut), (9, 9)] {
            let mut step = Bench::new(1).step(1, 1, &[], &vec![5; start]);
            step.work = Work::Propose { num_draft_tokens: k, num_tree_tokens: tree };
            limit_to_window(&mut step, 10);
            let expected = Work::Propose { num_draft_tokens: cut, num_tree_tokens: tree_cut };
            assert_eq!(step.work, expected, "{start} ids, k = {k}, a tree of {tree}");
        }
    }
    let mut step = Bench::new(1).step(1, 1, &[], &[5; 20]);
    limit_to_window(&mut step, 10);
    assert_eq!(step.work, Work::Feed);
}

#[test]
fn a_draining_worker_tells_each_router_once_and_serves_on() {
    let mut bench = Bench::new(100);
    let mut one = bench.open(1, 1);
    let drained = |replies: &mut mpsc::Receiver<v1::WorkerFrame>| {
        std::iter::from_fn(|| replies.try_recv().ok()).filter(|frame| frame.draining).count()
    };
    assert_eq!(drained(&mut one), 0);
    bench.step_loop.receive(Message::Drain);
    let mut two = bench.open(2, 2);
    let step = bench.step(1, 1, &[], &[1, 2]);
    bench.send(1, vec![step], &[]);
    assert_eq!((drained(&mut one), drained(&mut two)), (1, 1));
    let step = bench.step(1, 1, &[1, 2], &[3]);
    bench.send(1, vec![step], &[]);
    assert_eq!(read(&mut one), [said(1, "fed 3")]);
}
