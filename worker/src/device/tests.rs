//! The device thread without a model: a method that counts blocks and answers at once shows what is kept, evicted,
//! preempted, closed and to whom replies go.

use std::sync::Arc;
use std::time::Instant;

use service::metrics::Metrics;
use speculation::prefix::Prefix;
use speculation::{Role, SequenceSpec, TokenId, Work};

use super::*;
use crate::method::MethodStats;
use crate::task::Slot;

/// One block a token; a task needs its whole context at once.
struct Blocks {
    total: usize,
    used: HashMap<Slot, u32>,
    next: u64,
}

impl Method for Blocks {
    fn limits(&self) -> Limits {
        Limits { role: Role::Target, vocab_size: 1_000, max_model_len: 1_000 }
    }

    fn open(&mut self) -> Slot {
        self.next += 1;
        self.used.insert(Slot(self.next), 0);
        Slot(self.next)
    }

    fn close(&mut self, slot: Slot) {
        self.used.remove(&slot).expect("closed once");
    }

    fn truncate(&mut self, slot: Slot, len: u32) {
        let used = self.used.get_mut(&slot).expect("open");
        *used = len.min(*used);
    }

    fn advance(&mut self, tasks: &mut VecDeque<Task>) -> Result<Vec<(Task, ReplyBody)>, NeedRoom> {
        let free = self.total - self.used.values().sum::<u32>() as usize;
        let first = tasks.front().expect("called with tasks").step.context.len();
        if first > free {
            return Err(NeedRoom);
        }
        let task = tasks.pop_front().expect("there is one");
        *self.used.get_mut(&task.slot).expect("open") = task.step.start();
        let have = task.step.start();
        Ok(vec![(task, ReplyBody::Fed { have, prompt_logprobs: None })])
    }

    fn blocks_held(&self, slot: Slot) -> u64 {
        self.used.get(&slot).map_or(0, |used| u64::from(*used))
    }

    fn stats(&self) -> MethodStats {
        let kv_blocks_used = self.used.values().map(|used| u64::from(*used)).sum();
        MethodStats { kv_blocks_used, kv_blocks_total: self.total as u64, ..MethodStats::default() }
    }
}

struct Bench {
    device: Device<Blocks>,
    round: u64,
}

impl Bench {
    fn new(total: usize) -> Self {
        let method = Blocks { total, used: HashMap::new(), next: 0 };
        Self { device: Device::new(method, &[], WorkerMetrics::new(&Metrics::new())), round: 0 }
    }

    fn open(&mut self, router: u64, stream: u64) -> mpsc::Receiver<v1::WorkerFrame> {
        let (replies, received) = mpsc::channel(64);
        let (router, stream) = (RouterId(router), StreamId(stream));
        self.device.receive(Message::Opened { router, stream, replies });
        received
    }

    fn step(&mut self, sequence: u64, generation: u32, base: &[TokenId], context: &[TokenId]) -> Step {
        self.round += 1;
        Step {
            sequence_id: SequenceId(sequence),
            generation,
            round: self.round,
            spec: base.is_empty().then(|| Arc::new(SequenceSpec::default())),
            base_len: base.len() as u32,
            prefix_hash: Prefix::new(base).hash_at(base.len() as u32).unwrap(),
            context: context.to_vec(),
            work: Work::Feed,
            expected_tokens: 1.0,
        }
    }

    fn send(&mut self, router: u64, steps: Vec<Step>, closes: &[(u64, u32)]) {
        let closes = closes.iter().map(|(id, generation)| (SequenceId(*id), *generation)).collect();
        let steps = steps.into_iter().map(|step| SentStep { step, span_id: 0 }).collect();
        let frame = Message::Frame { router: RouterId(router), steps, closes, received: Instant::now() };
        self.device.receive(frame);
        while !self.device.waiting.is_empty() || !self.device.running.is_empty() {
            self.device.admit_waiting();
            let timing = self.device.forward();
            self.device.flush(&timing);
        }
    }

    fn blocks_used(&self) -> u64 {
        self.device.method.stats().kv_blocks_used
    }
}

/// What a router read: (sequence, words).
fn read(replies: &mut mpsc::Receiver<v1::WorkerFrame>) -> Vec<(u64, String)> {
    // Credits are read by `credits`.
    use v1::reply::Body;
    let mut read = Vec::new();
    while let Ok(frame) = replies.try_recv() {
        read.extend(frame.preempted.iter().map(|preempted| (preempted.sequence_id, "preempted".to_owned())));
        read.extend(frame.replies.into_iter().map(|reply| {
            let words = match reply.body.unwrap() {
                Body::Fed(fed) => format!("fed {}", fed.have),
                Body::NeedContext(need) => format!("need {} {}", need.have_len, need.have_spec),
                Body::Refused(refused) => refused.reason,
                Body::Proposal(_) | Body::Span(_) => unreachable!("the method only feeds"),
            };
            (reply.sequence_id, words)
        }));
    }
    read
}

fn said(sequence: u64, words: &str) -> (u64, String) {
    (sequence, words.to_owned())
}

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

#[test]
fn a_sequence_that_never_fits_is_refused_with_the_setting_to_raise() {
    let mut bench = Bench::new(2);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 1, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[]);
    let read = read(&mut replies);
    assert!(read[0].1.contains("--kv-memory"), "{read:?}");
    assert_eq!(bench.blocks_used(), 0);
}

#[test]
fn the_youngest_task_is_preempted_when_running_ones_fill_everything() {
    let mut bench = Bench::new(4);
    let mut replies = bench.open(1, 1);
    // Neither fits beside the other, and nothing idle is there to evict.
    let (first, second) = (bench.step(1, 1, &[], &[1; 5]), bench.step(2, 1, &[], &[1; 5]));
    bench.send(1, vec![first, second], &[]);
    let read = read(&mut replies);
    assert_eq!(read[0], said(2, "preempted"), "{read:?}");
    assert!(read[1].1.contains("alone needs more KV blocks"), "{read:?}");
}

#[test]
fn closing_frees_and_a_close_of_an_older_generation_does_not() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 2, &[], &[1, 2, 3]);
    bench.send(1, vec![step], &[(1, 1)]);
    assert_eq!(bench.blocks_used(), 3, "generation 1 is over, 2 goes on");
    bench.send(1, vec![], &[(1, 2)]);
    assert_eq!((bench.blocks_used(), bench.device.table.len()), (0, 0));
    let step = bench.step(5, 1, &[], &[1]);
    bench.send(1, vec![step], &[(5, 1)]);
    assert_eq!(
        (bench.blocks_used(), bench.device.table.len()),
        (0, 0),
        "closed in the frame that brought the step"
    );
    assert_eq!(read(&mut replies).len(), 1);
}

#[test]
fn routers_do_not_see_each_other_and_a_newer_stream_keeps_what_is_held() {
    let mut bench = Bench::new(100);
    let mut one = bench.open(1, 1);
    let mut two = bench.open(2, 2);
    let (a, b) = (bench.step(1, 1, &[], &[1, 2]), bench.step(1, 1, &[], &[3]));
    bench.send(1, vec![a], &[]);
    bench.send(2, vec![b], &[]);
    assert_eq!((read(&mut one), read(&mut two)), (vec![said(1, "fed 2")], vec![said(1, "fed 1")]));
    let mut again = bench.open(1, 3);
    bench.device.receive(Message::Expired { router: RouterId(1), stream: StreamId(1) });
    let step = bench.step(1, 1, &[1, 2], &[3]);
    bench.send(1, vec![step], &[]);
    assert_eq!(read(&mut again), [said(1, "fed 3")], "kept across streams");
    bench.device.receive(Message::Expired { router: RouterId(1), stream: StreamId(3) });
    assert_eq!(bench.blocks_used(), 1, "only the other router's sequence is left");
}

/// The credits that a router was told last, with all other frames read too.
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
    // 60 held, 40 free: the first is lent half of what is left, the second keeps its share.
    assert_eq!((credits(&mut one), credits(&mut two)), (Some(80), None));
    bench.send(1, vec![], &[(1, 1)]);
    bench.device.flush(&v1::StepTiming::default());
    assert_eq!((credits(&mut one), credits(&mut two)), (Some(50), None));
    bench.device.receive(Message::Expired { router: RouterId(2), stream: StreamId(2) });
    bench.device.flush(&v1::StepTiming::default());
    assert_eq!(credits(&mut one), Some(100));
}

#[test]
fn a_router_above_its_share_gives_way_first() {
    let mut bench = Bench::new(10);
    let mut one = bench.open(1, 1);
    let mut two = bench.open(2, 2);
    // The second router's sequence is idle for longer, but its router holds less than its half.
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
    assert_eq!(read(&mut replies), [], "its generation is over");
    let next = bench.step(1, 2, &[], &[1]);
    bench.send(1, vec![next], &[]);
    assert_eq!(read(&mut replies), [said(1, "fed 1")]);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_step_frees_its_blocks() {
    let mut bench = Bench::new(100);
    let mut replies = bench.open(1, 1);
    let step = bench.step(1, 1, &[], &[1, 2, 3]);
    let frame =
        |steps, closes| Message::Frame { router: RouterId(1), steps, closes, received: Instant::now() };
    bench.device.receive(frame(vec![SentStep { step, span_id: 0 }], vec![]));
    bench.device.admit_waiting();
    assert_eq!(bench.device.running.len(), 1);
    bench.device.receive(frame(vec![], vec![(SequenceId(1), 1)]));
    assert_eq!((bench.device.running.len(), bench.device.table.len()), (0, 0));
    assert_eq!((bench.blocks_used(), read(&mut replies)), (0, vec![]));
}
