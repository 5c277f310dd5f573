//! The workers as the owner sees them: what they said, who sits where, what they have room for, what waits to be written to them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proto::frame::split_router_frame;
use proto::v1;
use speculation::Role;
use speculation::cost::{StepTimePoint, StepTimes, WorkerCost};
use speculation::draft_health::DraftHealth;
use speculation::placement::{PrefixMarks, PrefixMemory};
use tokio::sync::mpsc::error::TrySendError;

use crate::lane::controllers::Workers;
use crate::lane::placement::{Candidate, choose_draft, choose_target};
use crate::metrics::{RouterMetrics, WorkerMetrics};
use crate::workers::{ConnectedWorker, WorkerKey};

/// Ids of prompts, and of sequences that are replayed, that one target is sent at a time; the rest wait for their turn. So a mass failover is a queue.
pub(super) const MAX_PREFILL_IDS: u32 = 16_384;

/// How long a worker that does not keep up is left alone before its outbox is tried again.
const FLUSH_AGAIN: Duration = Duration::from_millis(2);

/// One worker.
#[derive(Debug)]
pub(super) struct PooledWorker {
    pub(super) worker: ConnectedWorker,
    /// Sequences assigned to it, and by lane.
    pub(super) load: u32,
    lane_loads: BTreeMap<u32, u32>,
    /// The most blocks that this router may reserve there, and how many it has.
    credits: u64,
    reserved: u64,
    /// Ids of sequences whose first step there is under way.
    prefilling: u32,
    prefixes: PrefixMemory,
    /// What goes out with the next flush, behind what is stuck.
    pub(super) outgoing: v1::RouterFrame,
    stuck: VecDeque<v1::RouterFrame>,
    /// How long its proposals are waited for, if it is a draft worker.
    pub(super) health: DraftHealth,
    /// What its steps take.
    pub(super) cost: WorkerCost,
    /// Steps without a draft or a prompt that a target was sent and has not answered.
    pub(super) plain_in_flight: u32,
    metrics: WorkerMetrics,
}

/// A sequence that wants a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) model: &'a str,
    pub(super) task_type: &'a str,
    /// The lane's number.
    pub(super) lane: u32,
    /// The most ids that it is expected to have there.
    pub(super) ids: u32,
    /// Ids that it has now.
    pub(super) len: u32,
    pub(super) marks: &'a PrefixMarks,
    /// The worker that it just lost.
    pub(super) not: Option<WorkerKey>,
}

/// A place that a sequence has at a worker. Given back by [`Pool::release`], or lost with the worker.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) key: WorkerKey,
    lane: u32,
    blocks: u64,
    prefilling: u32,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Pool {
    metrics: RouterMetrics,
    workers: BTreeMap<WorkerKey, PooledWorker>,
    /// The targets of each model: asked for with every round.
    targets: BTreeMap<String, BTreeSet<WorkerKey>>,
}

impl Pool {
    pub(super) fn new(metrics: RouterMetrics) -> Self {
        Self { metrics, workers: BTreeMap::new(), targets: BTreeMap::new() }
    }

    pub(super) fn join(&mut self, worker: ConnectedWorker) {
        let pooled = PooledWorker {
            load: 0,
            lane_loads: BTreeMap::new(),
            credits: worker.credits.unwrap_or(worker.hello.kv_blocks),
            reserved: 0,
            prefilling: 0,
            prefixes: PrefixMemory::default(),
            outgoing: v1::RouterFrame::default(),
            stuck: VecDeque::new(),
            health: DraftHealth::default(),
            cost: WorkerCost::new(step_times(&worker)),
            plain_in_flight: 0,
            metrics: self.metrics.worker(worker.role, &worker.address),
            worker,
        };
        pooled.show_blocks();
        if pooled.worker.role == Role::Target {
            let model = pooled.worker.hello.model_id.clone();
            self.targets.entry(model).or_default().insert(pooled.worker.key);
        }
        self.workers.insert(pooled.worker.key, pooled);
    }

    pub(super) fn leave(&mut self, key: WorkerKey) -> Option<ConnectedWorker> {
        let worker = self.workers.remove(&key)?.worker;
        if let Some(targets) = self.targets.get_mut(&worker.hello.model_id) {
            targets.remove(&key);
            if targets.is_empty() {
                self.targets.remove(&worker.hello.model_id);
            }
        }
        Some(worker)
    }

    pub(super) fn get(&self, key: WorkerKey) -> Option<&PooledWorker> {
        self.workers.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: WorkerKey) -> Option<&mut PooledWorker> {
        self.workers.get_mut(&key)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &PooledWorker> {
        self.workers.values()
    }

    pub(super) fn role_of(&self, key: WorkerKey) -> Option<Role> {
        self.workers.get(&key).map(|pooled| pooled.worker.role)
    }

    pub(super) fn hello_of(&self, key: WorkerKey) -> Option<&v1::WorkerHello> {
        self.workers.get(&key).map(|pooled| &pooled.worker.hello)
    }

    /// Ids of a model, while a target serves it.
    pub(super) fn vocab_size_of(&self, model: &str) -> Option<u32> {
        let first = *self.targets.get(model)?.first()?;
        self.hello_of(first).map(|hello| hello.vocab_size)
    }

    /// The workers of a sequence of `model`, as the choice of its k sees them; nothing where one is missing.
    pub(super) fn costs(
        &self,
        model: &str,
        target: Option<WorkerKey>,
        draft: Option<WorkerKey>,
    ) -> Option<Workers<'_>> {
        let (target, draft) = (self.get(target?)?, self.get(draft?)?);
        Some(Workers {
            target: &target.cost,
            draft: &draft.cost,
            num_targets: self.targets.get(model).map_or(0, BTreeSet::len) as u32,
            target_sequences: target.load,
            draft_sequences: draft.load,
        })
    }

    pub(super) fn has(&self, role: Role) -> bool {
        self.workers.values().any(|pooled| pooled.worker.role == role)
    }

    /// Takes a place at the best target that has room.
    pub(super) fn seat_at_target(&mut self, wanted: &Wanted<'_>, numerics_id: Option<&str>) -> Option<Seat> {
        let chosen = choose_target(self.candidates(wanted), wanted.model, numerics_id, wanted.not);
        self.take_seat(chosen?, wanted)
    }

    /// Takes a place at the best draft worker for a sequence on `target`.
    pub(super) fn seat_at_draft(&mut self, wanted: &Wanted<'_>, target: WorkerKey) -> Option<Seat> {
        let chosen = self.best_draft(wanted, target);
        self.take_seat(chosen?, wanted)
    }

    /// The draft worker that a sequence on `target` would be given.
    pub(super) fn best_draft(&self, wanted: &Wanted<'_>, target: WorkerKey) -> Option<WorkerKey> {
        let hello = self.hello_of(target)?;
        let roomy = self.candidates(wanted).filter(|worker| {
            self.get(worker.key).is_some_and(|pooled| pooled.has_blocks(pooled.blocks_of(wanted.ids)))
        });
        choose_draft(roomy, hello, wanted.task_type, wanted.not)
    }

    /// Gives a place back.
    pub(super) fn release(&mut self, seat: Seat) {
        let Seat { key, lane, blocks, prefilling } = seat;
        let Some(pooled) = self.workers.get_mut(&key) else { return };
        pooled.load = pooled.load.saturating_sub(1);
        pooled.reserved = pooled.reserved.saturating_sub(blocks);
        pooled.show_blocks();
        pooled.prefilling = pooled.prefilling.saturating_sub(prefilling);
        if let Some(load) = pooled.lane_loads.get_mut(&lane) {
            *load -= 1;
            if *load == 0 {
                pooled.lane_loads.remove(&lane);
            }
        }
    }

    /// A sequence has now `len` ids at its seat, whose first step is done. True where that makes room for others.
    pub(super) fn settle(&mut self, seat: &mut Seat, len: u32) -> bool {
        let Some(pooled) = self.workers.get_mut(&seat.key) else { return false };
        let blocks = pooled.blocks_of(len);
        if blocks > seat.blocks {
            pooled.reserved += blocks - seat.blocks;
            seat.blocks = blocks;
            pooled.show_blocks();
        }
        pooled.prefilling = pooled.prefilling.saturating_sub(seat.prefilling);
        std::mem::take(&mut seat.prefilling) > 0
    }

    /// The worker says how much this router may reserve there.
    pub(super) fn credit(&mut self, key: WorkerKey, blocks: u64) {
        if let Some(pooled) = self.workers.get_mut(&key) {
            pooled.credits = blocks;
            pooled.show_blocks();
        }
    }

    /// Writes what waits. `Some` names how long to wait before trying again where a worker does not keep up; what waits
    /// for it stays, in order.
    pub(super) fn flush(&mut self) -> Option<Duration> {
        let mut is_stuck = false;
        for pooled in self.workers.values_mut() {
            is_stuck |= pooled.flush();
        }
        is_stuck.then_some(FLUSH_AGAIN)
    }

    fn take_seat(&mut self, key: WorkerKey, wanted: &Wanted<'_>) -> Option<Seat> {
        let pooled = self.workers.get_mut(&key)?;
        let seat =
            Seat { key, lane: wanted.lane, blocks: pooled.blocks_of(wanted.ids), prefilling: wanted.len };
        pooled.load += 1;
        *pooled.lane_loads.entry(seat.lane).or_default() += 1;
        pooled.reserved += seat.blocks;
        pooled.show_blocks();
        pooled.prefilling += seat.prefilling;
        pooled.prefixes.remember(wanted.marks);
        Some(seat)
    }

    fn candidates(&self, wanted: &Wanted<'_>) -> impl Iterator<Item = Candidate<'_>> {
        let Wanted { lane, ids, len, marks, .. } = *wanted;
        self.workers.values().map(move |pooled| Candidate {
            key: pooled.worker.key,
            role: pooled.worker.role,
            hello: &pooled.worker.hello,
            load: pooled.load,
            lane_load: pooled.lane_loads.get(&lane).copied().unwrap_or(0),
            shared_prefix: pooled.prefixes.shared(marks),
            is_unfit: match pooled.worker.role {
                Role::Target => !pooled.has_blocks(pooled.blocks_of(ids)) || !pooled.may_prefill(len),
                Role::Draft => pooled.health.is_out(),
            },
        })
    }
}

impl PooledWorker {
    /// Blocks that so many ids take.
    fn blocks_of(&self, ids: u32) -> u64 {
        u64::from(ids).div_ceil(u64::from(self.worker.hello.kv_block_size.max(1)))
    }

    /// Whether credits allow so many blocks more (contract part A). A worker without KV has none to count.
    fn has_blocks(&self, blocks: u64) -> bool {
        self.worker.hello.kv_blocks == 0 || self.load == 0 || self.reserved + blocks <= self.credits
    }

    /// Blocks that this router may reserve, and those that it has reserved.
    pub(super) fn blocks(&self) -> (u64, u64) {
        (self.credits, self.reserved)
    }

    fn show_blocks(&self) {
        self.metrics.blocks(self.credits, self.reserved);
    }

    fn may_prefill(&self, ids: u32) -> bool {
        self.prefilling == 0 || self.prefilling + ids <= MAX_PREFILL_IDS
    }

    /// True where the worker does not take everything now.
    fn flush(&mut self) -> bool {
        if !self.outgoing.steps.is_empty() || !self.outgoing.closes.is_empty() {
            // The next frame is about as long: it does not have to grow step by step.
            let steps = Vec::with_capacity(self.outgoing.steps.len());
            let frame = std::mem::replace(
                &mut self.outgoing,
                v1::RouterFrame { steps, ..v1::RouterFrame::default() },
            );
            self.stuck.extend(split_router_frame(frame));
        }
        while let Some(frame) = self.stuck.pop_front() {
            match self.worker.outbox.try_send(frame) {
                Ok(()) => {}
                Err(TrySendError::Full(frame)) => {
                    self.stuck.push_front(frame);
                    return true;
                }
                // Its connection ends; that it is gone comes as an event.
                Err(TrySendError::Closed(_)) => self.stuck.clear(),
            }
        }
        false
    }
}

/// What a worker profiled. A draft worker that profiled nothing guesses without a model, which is nearly free; a target
/// cannot be.
fn step_times(worker: &ConnectedWorker) -> StepTimes {
    let profiled = &worker.hello.step_times;
    if profiled.is_empty() && worker.role == Role::Target {
        return StepTimes::assumed();
    }
    let point = |point: &v1::StepTimePoint| StepTimePoint {
        rows: point.rows,
        kv_tokens: point.kv_tokens,
        micros: point.micros,
    };
    StepTimes::new(&profiled.iter().map(point).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use service::metrics::{Exposition, Metrics};
    use tokio::sync::mpsc;

    use super::*;

    fn pool() -> Pool {
        Pool::new(RouterMetrics::register(&Metrics::new()))
    }

    /// A target of 10 blocks of 16 ids, and what it is sent.
    fn target(key: u64, outbox: usize) -> (ConnectedWorker, mpsc::Receiver<v1::RouterFrame>) {
        let (outbox, sent) = mpsc::channel(outbox);
        let hello = v1::WorkerHello {
            model_id: "m".to_owned(),
            kv_blocks: 10,
            kv_block_size: 16,
            vocab_size: 9,
            ..v1::WorkerHello::default()
        };
        let address = String::new();
        let key = WorkerKey(key);
        (ConnectedWorker { key, role: Role::Target, address, hello, credits: None, outbox }, sent)
    }

    fn wanted(ids: u32, len: u32, marks: &PrefixMarks) -> Wanted<'_> {
        Wanted { model: "m", task_type: "", lane: 1, ids, len, marks, not: None }
    }

    #[test]
    fn seats_are_taken_within_the_credits_and_given_back() {
        let page = Metrics::new();
        let (mut pool, marks) = (Pool::new(RouterMetrics::register(&page)), PrefixMarks::default());
        let (worker, _sent) = target(1, 4);
        pool.join(worker);
        let seat = |pool: &mut Pool, ids| pool.seat_at_target(&wanted(ids, 10, &marks), None);
        let first = seat(&mut pool, 100).unwrap();
        assert!(seat(&mut pool, 100).is_none(), "7 + 7 blocks of 10");
        let mut second = seat(&mut pool, 48).unwrap();
        pool.credit(WorkerKey(1), 20);
        assert!(seat(&mut pool, 160).is_some(), "3 + 7 + 10 blocks of 20");
        assert!(pool.settle(&mut second, 64), "the first step is done");
        assert!(!pool.settle(&mut second, 65), "and done once");
        assert_eq!(pool.get(WorkerKey(1)).unwrap().reserved, 22, "who outgrows its seat has more");
        pool.release(second);
        pool.release(first);
        assert_eq!(pool.get(WorkerKey(1)).unwrap().reserved, 10);
        pool.credit(WorkerKey(1), 0);
        assert!(seat(&mut pool, 1).is_none());
        let shown = || -> Vec<String> {
            let text = page.encode(Exposition::Prometheus);
            text.lines().filter(|line| line.starts_with("outrider_pool_")).map(str::to_owned).collect()
        };
        let of_target = r#"_blocks{role="target",address=""}"#;
        assert_eq!(
            shown(),
            [("credit", 0), ("reserved", 10)].map(|(of, n)| format!("outrider_pool_{of}{of_target} {n}"))
        );
        pool.leave(WorkerKey(1));
        assert!(shown().is_empty(), "a worker that left is not shown");
    }

    #[test]
    fn one_sequence_may_always_run_however_long() {
        let (mut pool, marks) = (pool(), PrefixMarks::default());
        let (worker, _sent) = target(1, 4);
        pool.join(worker);
        let alone = pool.seat_at_target(&wanted(10_000, MAX_PREFILL_IDS + 1, &marks), None);
        assert!(alone.is_some());
        assert!(pool.seat_at_target(&wanted(1, 1, &marks), None).is_none());
    }

    #[test]
    fn prompts_under_way_at_a_target_are_bounded() {
        let (mut pool, marks) = (pool(), PrefixMarks::default());
        let (worker, _sent) = target(1, 4);
        pool.join(worker);
        pool.credit(WorkerKey(1), 1 << 40);
        let want = wanted(1, MAX_PREFILL_IDS / 2, &marks);
        let mut seats: Vec<Seat> = std::iter::from_fn(|| pool.seat_at_target(&want, None)).collect();
        assert_eq!(seats.len(), 2);
        assert!(pool.settle(&mut seats[0], 1));
        assert!(pool.seat_at_target(&want, None).is_some());
    }

    #[test]
    fn frames_leave_in_order_whatever_is_full() {
        let mut pool = pool();
        let (worker, mut sent) = target(1, 1);
        pool.join(worker);
        let mut received = Vec::new();
        for id in 0..9_u64 {
            // Large enough that each step is a frame of its own.
            let steps = [2 * id, 2 * id + 1].map(|sequence_id| v1::Step {
                sequence_id,
                context: vec![u32::MAX; 110_000],
                ..v1::Step::default()
            });
            pool.get_mut(WorkerKey(1)).unwrap().outgoing.steps.extend(steps);
            assert!(pool.flush().is_some());
            if id % 3 == 0 {
                received.push(sent.try_recv().unwrap());
            }
        }
        while pool.flush().is_some() || !sent.is_empty() {
            received.push(sent.try_recv().unwrap());
        }
        let ids: Vec<u64> = received.iter().flat_map(|f| &f.steps).map(|step| step.sequence_id).collect();
        assert_eq!(ids, (0..18).collect::<Vec<_>>());
    }
}
