//! The workers as the owner sees them: what they said, how loaded they are, what waits to be written to them.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::frame::split_router_frame;
use proto::v1;
use speculation::Role;
use speculation::cost::{StepTimePoint, StepTimes, WorkerCost};
use tokio::sync::mpsc::error::TrySendError;

use crate::lane::controllers::Workers;
use crate::lane::placement::{Candidate, choose_draft, choose_target};
use crate::lane::policy::DraftTime;
use crate::workers::{ConnectedWorker, WorkerKey};

/// One worker.
#[derive(Debug)]
pub(super) struct PooledWorker {
    pub(super) worker: ConnectedWorker,
    /// Sequences assigned to it.
    pub(super) load: usize,
    /// What goes out with the next flush.
    pub(super) outgoing: v1::RouterFrame,
    /// How long its proposals take, if it is a draft worker.
    pub(super) draft_time: DraftTime,
    /// What its steps take.
    pub(super) cost: WorkerCost,
    /// Steps without a draft or a prompt that a target was sent and has not answered.
    pub(super) plain_in_flight: u32,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Pool {
    workers: BTreeMap<WorkerKey, PooledWorker>,
}

impl Pool {
    pub(super) fn join(&mut self, worker: ConnectedWorker) {
        let outgoing = v1::RouterFrame::default();
        let draft_time = DraftTime::default();
        let cost = WorkerCost::new(step_times(&worker));
        let pooled = PooledWorker { worker, load: 0, outgoing, draft_time, cost, plain_in_flight: 0 };
        self.workers.insert(pooled.worker.key, pooled);
    }

    pub(super) fn leave(&mut self, key: WorkerKey) -> Option<ConnectedWorker> {
        self.workers.remove(&key).map(|pooled| pooled.worker)
    }

    pub(super) fn get(&self, key: WorkerKey) -> Option<&PooledWorker> {
        self.workers.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: WorkerKey) -> Option<&mut PooledWorker> {
        self.workers.get_mut(&key)
    }

    pub(super) fn role_of(&self, key: WorkerKey) -> Option<Role> {
        self.workers.get(&key).map(|pooled| pooled.worker.role)
    }

    pub(super) fn hello_of(&self, key: WorkerKey) -> Option<&v1::WorkerHello> {
        self.workers.get(&key).map(|pooled| &pooled.worker.hello)
    }

    /// Ids of a model, while a target serves it.
    pub(super) fn vocab_size_of(&self, model: &str) -> Option<u32> {
        let mut targets = self.candidates().filter(|worker| worker.role == Role::Target);
        targets.find(|worker| worker.hello.model_id == model).map(|worker| worker.hello.vocab_size)
    }

    /// The workers of a sequence of `model`, as the choice of its k sees them; nothing where one is missing.
    pub(super) fn costs(
        &self,
        model: &str,
        target: Option<WorkerKey>,
        draft: Option<WorkerKey>,
    ) -> Option<Workers<'_>> {
        let (target, draft) = (self.get(target?)?, self.get(draft?)?);
        let serves = |worker: &Candidate<'_>| worker.role == Role::Target && worker.hello.model_id == model;
        Some(Workers {
            target: &target.cost,
            draft: &draft.cost,
            num_targets: self.candidates().filter(serves).count() as u32,
            draft_sequences: draft.load as u32,
        })
    }

    pub(super) fn has_target(&self) -> bool {
        self.candidates().any(|worker| worker.role == Role::Target)
    }

    /// Takes a place at the best target.
    pub(super) fn assign_target(
        &mut self,
        model: &str,
        numerics_id: Option<&str>,
        not: Option<WorkerKey>,
    ) -> Option<WorkerKey> {
        let chosen = choose_target(self.candidates(), model, numerics_id, not);
        self.take_place(chosen)
    }

    /// Takes a place at the best draft worker for a sequence on `target`.
    pub(super) fn assign_draft(
        &mut self,
        target: WorkerKey,
        task_type: &str,
        not: Option<WorkerKey>,
    ) -> Option<WorkerKey> {
        let hello = self.hello_of(target)?;
        let chosen = choose_draft(self.candidates(), hello, task_type, not);
        self.take_place(chosen)
    }

    /// Gives a place back.
    pub(super) fn release(&mut self, key: WorkerKey) {
        if let Some(pooled) = self.workers.get_mut(&key) {
            pooled.load -= 1;
        }
    }

    /// Writes what waits. `Some` names how long to wait before trying again where a worker does not keep up; what waits
    /// for it stays, one step a sequence at most.
    pub(super) fn flush(&mut self) -> Option<Duration> {
        const RETRY: Duration = Duration::from_millis(2);
        let mut again = None;
        for pooled in self.workers.values_mut() {
            if pooled.outgoing.steps.is_empty() && pooled.outgoing.closes.is_empty() {
                continue;
            }
            for frame in split_router_frame(std::mem::take(&mut pooled.outgoing)) {
                match pooled.worker.outbox.try_send(frame) {
                    Ok(()) => {}
                    Err(TrySendError::Full(frame)) => {
                        pooled.outgoing.steps.extend(frame.steps);
                        pooled.outgoing.closes.extend(frame.closes);
                        again = Some(RETRY);
                    }
                    // Its connection ends; that it is gone comes as an event.
                    Err(TrySendError::Closed(_)) => {}
                }
            }
        }
        again
    }

    fn take_place(&mut self, chosen: Option<WorkerKey>) -> Option<WorkerKey> {
        let pooled = self.workers.get_mut(&chosen?)?;
        pooled.load += 1;
        chosen
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.workers.values().map(|pooled| Candidate {
            key: pooled.worker.key,
            role: pooled.worker.role,
            hello: &pooled.worker.hello,
            load: pooled.load,
        })
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
