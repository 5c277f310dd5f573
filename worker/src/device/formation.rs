//! When the next forward leaves: [`speculation::batch::late`] decides, this file gives it the clock and the steps' times as they are here.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proto::v1;
use speculation::batch::{Group, Groups, LaneRows, Returns, Waiting, by_lane, first_alone};
use speculation::cost::{Forward, StepTimePoint, StepTimes, WorkerCost};
use speculation::{Step, Work};

use crate::Task;
use crate::table::SequenceKey;

/// A wait that is shorter costs more than it brings: a thread is not woken sooner.
const WAIT_MIN: Duration = Duration::from_micros(50);

/// A longer context is a prompt's, and says nothing of the next round.
const ROUND_CONTEXT: usize = speculation::batch::ROUND_CONTEXT as usize;

/// See the module's page.
#[derive(Debug)]
pub(super) struct Formation {
    began: Instant,
    cost: WorkerCost,
    returns: Returns<SequenceKey>,
    groups: Groups,
    /// Since when the next forward is held back.
    held_since: Option<Instant>,
}

impl Formation {
    /// Without profiled step times nothing is ever held back.
    pub(super) fn new(step_times: &[v1::StepTimePoint]) -> Self {
        let point = |point: &v1::StepTimePoint| StepTimePoint {
            rows: point.rows,
            kv_tokens: point.kv_tokens,
            micros: point.micros,
        };
        Self {
            began: Instant::now(),
            cost: WorkerCost::new(StepTimes::new(&step_times.iter().map(point).collect::<Vec<_>>())),
            returns: Returns::default(),
            groups: Groups::default(),
            held_since: None,
        }
    }

    pub(super) fn arrived(&mut self, key: SequenceKey, step: &Step) {
        let drafted = match &step.work {
            Work::Verify { draft } => draft.token_ids.len(),
            Work::Feed | Work::Propose { .. } => 0,
        };
        let rows = step.context.len().min(ROUND_CONTEXT) + drafted;
        self.returns.arrived(key, self.began.elapsed(), rows as u32);
    }

    pub(super) fn answered(&mut self, key: &SequenceKey) {
        self.returns.answered(key, self.began.elapsed());
    }

    pub(super) fn forget(&mut self, key: &SequenceKey) {
        self.returns.forget(key);
    }

    /// A forward of so many sequences took this long.
    pub(super) fn ran(&mut self, timing: &v1::StepTiming, sequences: usize, took: Duration) {
        let context = timing.kv_tokens as f64 / sequences.max(1) as f64;
        let forward = Forward { rows: f64::from(timing.rows), sequences: sequences as f64, context };
        if timing.prefill_rows == 0 {
            self.cost.observe_forward(forward, took);
        }
        self.held_since = None;
    }

    /// How long the forward of `running` waits for others; `None`: it leaves now.
    pub(super) fn hold(&mut self, running: &VecDeque<Task>) -> Option<Duration> {
        let waiting: Vec<Waiting> = running.iter().map(Task::waiting).collect();
        let context = mean_context(running);
        let ready = self.group(running, &waiting, context).ready(&waiting);
        let waited = self.held_since.map_or(Duration::ZERO, |since| since.elapsed());
        let rows_each = f64::from(ready.rows) / f64::from(ready.sequences.max(1));
        let step_us = |rows: u32| {
            let rows = f64::from(rows);
            self.cost.forward_micros(Forward { rows, sequences: rows / rows_each.max(1.0), context })
        };
        let wait = self.returns.hold(self.began.elapsed(), (ready, waited), step_us)?;
        self.held_since.get_or_insert_with(Instant::now);
        Some(wait.max(WAIT_MIN))
    }

    /// Who belongs to the next forward: at a target one group of those that draft.
    fn group(&mut self, running: &VecDeque<Task>, waiting: &[Waiting], context: f64) -> Group {
        if !running.iter().any(|task| matches!(task.step.work, Work::Verify { .. })) {
            return Group::all(waiting);
        }
        let forward_us = |rows, sequences| self.cost.forward_micros(Forward { rows, sequences, context });
        Group::form(self.groups.size(self.returns.drafting(), forward_us), waiting)
    }

    /// Takes out those that the next forward goes without: at a target, where guesses are not cheap, the ones of another group
    /// (`speculation::batch::groups`), and of the others those of other lanes than one that goes first (`speculation::batch::separate`).
    pub(super) fn set_aside(&mut self, running: &mut VecDeque<Task>) -> VecDeque<Task> {
        let waiting: Vec<Waiting> = running.iter().map(Task::waiting).collect();
        let group = self.group(running, &waiting, mean_context(running));
        let (go, others): (Vec<_>, Vec<_>) =
            running.drain(..).zip(group.members).partition(|(_, is_member)| *is_member);
        let tasks = |part: Vec<(Task, bool)>| part.into_iter().map(|(task, _)| task).collect();
        *running = tasks(go);
        let mut aside = self.other_lanes(running);
        aside.append(&mut tasks(others));
        aside
    }

    /// Takes out those of other lanes than the one whose rows go first and alone, if one does.
    fn other_lanes(&self, running: &mut VecDeque<Task>) -> VecDeque<Task> {
        let is_round = |task: &Task| {
            matches!(task.step.work, Work::Verify { .. }) && task.context_left().len() <= ROUND_CONTEXT
        };
        if !running.iter().all(is_round) {
            return VecDeque::new();
        }
        let lanes = by_lane(running.iter().map(|task| {
            let waiting = task.waiting();
            LaneRows {
                lane: task.spec().lane,
                rows: waiting.context + waiting.tail,
                expected_tokens: task.step.expected_tokens.into(),
                passed_over: task.passed_over,
                is_plain: waiting.tail == 0,
            }
        }));
        let rows: u32 = lanes.iter().map(|lane| lane.rows).sum();
        let (sequences, context) = (running.len() as f64, mean_context(running));
        let step_us = |part: u32| {
            let share = f64::from(part) / f64::from(rows.max(1));
            self.cost.forward_micros(Forward { rows: f64::from(part), sequences: sequences * share, context })
        };
        let Some(first) = first_alone(&lanes, step_us) else { return VecDeque::new() };
        let (go, mut stay): (VecDeque<Task>, VecDeque<Task>) =
            running.drain(..).partition(|task| task.spec().lane == first);
        *running = go;
        stay.iter_mut().for_each(|task| task.passed_over = true);
        stay
    }
}

/// KV tokens that a sequence of `running` holds, on average.
fn mean_context(running: &VecDeque<Task>) -> f64 {
    let held: u32 = running.iter().map(|task| task.holding.len()).sum();
    f64::from(held) / running.len().max(1) as f64
}
