//! One worker: what a device thread does between two forwards, with a curve in place of a model.

use std::time::Duration;

use super::Sharing;
use crate::Role;
use crate::batch::{
    Group, GroupRules, Groups, LaneRows, Returns, Share, Waiting, by_lane, first_alone, form,
};
use crate::cost::{Forward, WorkerCost};
use crate::profile::{ForwardRows, Pool, StepCurve};

/// What a step asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Feed,
    Propose { k: u32 },
    Verify { k: u32 },
}

/// A step under way.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub(super) sequence: usize,
    pub(super) lane: u32,
    /// Context ids that were not run yet.
    pub(super) context: u32,
    /// KV tokens of the sequence.
    pub(super) holds: u32,
    pub(super) work: Work,
    pub(super) expected_tokens: f64,
}

/// What a forward was, as the frame of its replies tells.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    pub(super) rows: u32,
    /// Of these, prompts'.
    pub(super) prefill_rows: u32,
    pub(super) kv_tokens: u64,
    pub(super) sequences: u32,
    pub(super) took: Duration,
    /// Mean time that the answered steps waited to be admitted.
    pub(super) queue: Duration,
}

/// What a worker does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start {
    Nothing,
    /// It holds its forward back for so long at most.
    Waits(Duration),
    /// A forward of so many microseconds, without noise.
    Runs(f64),
}

#[derive(Debug)]
struct Running {
    task: Task,
    /// Guesses made.
    drafted: u32,
    passed_over: bool,
    came_at: Duration,
    started_at: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Worker {
    role: Role,
    curve: StepCurve,
    rows_max: u32,
    sharing: Sharing,
    tasks: Vec<Running>,
    /// In the forward that runs, and since when.
    shares: Vec<Share>,
    forward: ForwardRows,
    began_at: Option<Duration>,
    held_since: Option<Duration>,
    last_lane: u32,
    groups: Groups,
    cost: WorkerCost,
    returns: Returns<usize>,
}

impl Worker {
    pub(super) fn new(role: Role, pool: &Pool, (sharing, groups): (Sharing, GroupRules)) -> Self {
        Self {
            role,
            curve: pool.curve.clone(),
            rows_max: pool.max_batch_rows,
            sharing,
            tasks: Vec::new(),
            shares: Vec::new(),
            forward: ForwardRows::default(),
            began_at: None,
            held_since: None,
            last_lane: 0,
            groups: Groups::with_rules(groups),
            cost: WorkerCost::new(pool.curve.profiled_times()),
            returns: Returns::default(),
        }
    }

    pub(super) fn arrive(&mut self, now: Duration, task: Task) {
        let drafted = if let Work::Verify { k } = task.work { k } else { 0 };
        self.returns.arrived(task.sequence, now, task.context.min(2) + drafted);
        self.tasks.push(Running { task, drafted: 0, passed_over: false, came_at: now, started_at: None });
    }

    pub(super) fn forget(&mut self, sequence: usize) {
        self.returns.forget(&sequence);
    }

    /// Begins a forward, unless one runs, nothing waits, or waiting for more pays.
    pub(super) fn start(&mut self, now: Duration) -> Start {
        if self.began_at.is_some() || self.tasks.is_empty() {
            return Start::Nothing;
        }
        let waiting: Vec<Waiting> = self.tasks.iter().map(Running::waiting).collect();
        let held: u64 = self.tasks.iter().map(|running| u64::from(running.task.holds)).sum();
        let context = held as f64 / waiting.len() as f64;
        let group = self.group(&waiting, context);
        let ready = group.ready(&waiting);
        let cost = &self.cost;
        let rows_each = f64::from(ready.rows) / f64::from(ready.sequences);
        let step_us = |rows: u32| {
            let rows = f64::from(rows);
            cost.forward_micros(Forward { rows, sequences: rows / rows_each, context })
        };
        let waited = self.held_since.map_or(Duration::ZERO, |since| now - since);
        if let Some(wait) = self.returns.hold(now, (ready, waited), step_us) {
            self.held_since.get_or_insert(now);
            return Start::Waits(wait.max(Duration::from_micros(1)));
        }
        let alone = self.lane_alone(&waiting, step_us);
        let takes_part = |index: usize| {
            group.members[index] && alone.is_none_or(|lane| self.tasks[index].task.lane == lane)
        };
        self.shares = form(&waiting, self.rows_max, |index, _| takes_part(index));
        self.last_lane = alone.unwrap_or(self.last_lane);
        for running in &mut self.tasks {
            running.passed_over = alone.is_some_and(|lane| running.task.lane != lane);
        }
        self.forward = ForwardRows::default();
        for share in &self.shares {
            let running = &mut self.tasks[share.index];
            running.started_at.get_or_insert(now);
            let tail = share.rows(&waiting[share.index]) - share.context;
            self.forward.add((share.context, tail), running.task.holds + tail);
        }
        self.held_since = None;
        self.began_at = Some(now);
        Start::Runs(self.curve.micros(self.forward))
    }

    /// Who belongs to the next forward: at a target one group of those that draft.
    fn group(&mut self, waiting: &[Waiting], context: f64) -> Group {
        if self.role == Role::Draft {
            return Group::all(waiting);
        }
        let forward_us = |rows, sequences| self.cost.forward_micros(Forward { rows, sequences, context });
        Group::form(self.groups.size(self.returns.drafting(), forward_us), waiting)
    }

    /// The lane that has the next forward for itself.
    fn lane_alone(&self, waiting: &[Waiting], step_us: impl Fn(u32) -> f64) -> Option<u32> {
        if self.role == Role::Draft || waiting.iter().any(|waiting| waiting.is_prompt(self.rows_max)) {
            return None;
        }
        let lanes = by_lane(self.tasks.iter().zip(waiting).map(|(running, waiting)| LaneRows {
            lane: running.task.lane,
            rows: waiting.context + waiting.tail,
            expected_tokens: running.task.expected_tokens,
            passed_over: running.passed_over,
            is_plain: waiting.tail == 0,
        }));
        match self.sharing {
            Sharing::Shared => None,
            Sharing::ByCost => first_alone(&lanes, step_us),
            // In turns: another than the last one, where there is another.
            Sharing::Apart => lanes
                .iter()
                .map(|lane| lane.lane)
                .find(|lane| *lane != self.last_lane)
                .or(Some(self.last_lane)),
        }
    }

    /// The forward is done: what is complete leaves.
    pub(super) fn finish(&mut self, now: Duration) -> (Vec<Task>, Timing) {
        let took = now - self.began_at.take().expect("a forward that ends has begun");
        let shares = std::mem::take(&mut self.shares);
        let (mut done, mut queue) = (Vec::new(), Duration::ZERO);
        for share in &shares {
            let running = &mut self.tasks[share.index];
            running.task.context -= share.context;
            running.task.holds += share.context;
            if !share.ends_context {
                continue;
            }
            running.drafted += 1;
            let is_done = match running.task.work {
                Work::Feed | Work::Verify { .. } => true,
                Work::Propose { k } => running.drafted >= k,
            };
            if is_done {
                done.push(share.index);
            }
        }
        let rows = self.forward.rows + self.forward.prefill_rows;
        let sequences = shares.len() as u32;
        let context = self.forward.kv_tokens as f64 / f64::from(sequences.max(1));
        let forward = Forward { rows: f64::from(rows), sequences: f64::from(sequences), context };
        if self.forward.prefill_rows == 0 {
            self.cost.observe_forward(forward, took);
        }
        done.sort_unstable();
        let mut left = Vec::with_capacity(self.tasks.len());
        let mut finished = Vec::with_capacity(done.len());
        for (index, running) in self.tasks.drain(..).enumerate() {
            if done.binary_search(&index).is_err() {
                left.push(running);
                continue;
            }
            queue += running.started_at.unwrap_or(now) - running.came_at;
            finished.push(running.task);
        }
        self.tasks = left;
        for task in &finished {
            self.returns.answered(&task.sequence, now);
        }
        let queue = queue / finished.len().max(1) as u32;
        (
            finished,
            Timing {
                rows,
                prefill_rows: self.forward.prefill_rows,
                kv_tokens: self.forward.kv_tokens,
                sequences,
                took,
                queue,
            },
        )
    }
}

impl Running {
    fn waiting(&self) -> Waiting {
        let tail = match self.task.work {
            Work::Verify { k } => k,
            Work::Propose { .. } => u32::from(self.drafted > 0),
            Work::Feed => 0,
        };
        Waiting { context: self.task.context, tail }
    }
}
