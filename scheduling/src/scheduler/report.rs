//! Report of the scheduler's state and the reasons for it, for `/debug/lanes` and the simulator's outcome.

use std::collections::BTreeMap;

use serde::Serialize;
use speculation::Role;

use super::assign::WaitKind;
use super::demand::PoolDemand;
use super::lanes::LaneExplanation;
use super::shadows::ShadowsReport;
use super::state::SchedulerState;
use super::workers::Worker;
use crate::draft_health::DraftHealthReport;
use crate::fair_queue::FairQueue;
use crate::rollout::RolloutReport;
use crate::target_health::TargetHealthReport;
use crate::wait_stats::WaitReport;

/// Lanes, workers and queues.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SchedulerReport {
    /// Each lane with the reasons for its draft length.
    pub lanes: Vec<LaneExplanation>,
    /// The connected workers.
    pub workers: Vec<WorkerReport>,
    /// Demand on worker pools, by model.
    pub pools: Vec<PoolDemand>,
    /// Number of sequences that wait for a target with capacity.
    pub waiting_for_target: usize,
    /// Sequences of these that lost their target and are replayed.
    pub replays_waiting: usize,
    /// Addresses that an operator drains, including those without a connected worker.
    pub drained: Vec<String>,
    /// Waiting times for a target by priority, including those of sequences that lost theirs.
    pub target_waits: Vec<WaitReport>,
    /// Draft workers on trial, with their scores.
    pub shadows: ShadowsReport,
    /// The current rollout, if there is one.
    pub rollout: Option<RolloutReport>,
}

/// One worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerReport {
    /// Its role.
    pub role: Role,
    /// Its address.
    pub address: String,
    /// Model that it serves.
    pub model: String,
    /// Its numerics class: targets of one class compute results that are equal bit for bit.
    pub numerics_id: String,
    /// Task types that it is meant for; empty: all.
    pub task_types: Vec<String>,
    /// Sequences assigned to it.
    pub sequences: u32,
    /// Sequences of these that it only shadows (draft workers).
    pub shadowed: u32,
    /// Whether it is a shadow draft or the candidate of a rollout, and not a serving draft.
    pub is_on_trial: bool,
    /// Why it gets no new sequences, if it drains: `stopping`, `operator` or `unlisted`.
    pub draining: Option<&'static str>,
    /// KV blocks that may be reserved there.
    pub credit_blocks: u64,
    /// KV blocks reserved there.
    pub reserved_blocks: u64,
    /// Network time, microseconds.
    pub wire_us: f64,
    /// By position, share of its proposals whose token there was drafted ahead (draft workers).
    pub drafted_ahead: Option<Vec<f64>>,
    /// Responsiveness (draft workers).
    pub health: Option<DraftHealthReport>,
    /// Health of a target.
    pub target_health: Option<TargetHealthReport>,
}

impl SchedulerState {
    pub(super) fn report(&self) -> SchedulerReport {
        let mut waiting = BTreeMap::new();
        for (priority, (count, since)) in self.waiting.values().flat_map(FairQueue::waiting) {
            let (all, first) = waiting.entry(priority).or_insert((0, since));
            *all += count;
            *first = since.min(*first);
        }
        let replays = self.waiting.iter().filter(|(key, _)| key.kind != WaitKind::Ordinary);
        SchedulerReport {
            lanes: self.lanes.explain(),
            workers: self.workers.values().map(|worker| self.report_worker(worker)).collect(),
            pools: self.demands(),
            waiting_for_target: self.waiting.values().map(FairQueue::len).sum(),
            replays_waiting: replays.map(|(_, queue)| queue.len()).sum(),
            drained: self.workers.drained.iter().cloned().collect(),
            target_waits: self.target_waits.report(&waiting, self.now),
            shadows: self.report_shadows(),
            rollout: self.report_rollout(),
        }
    }

    fn report_worker(&self, worker: &Worker) -> WorkerReport {
        let is_draft = worker.info.role == Role::Draft;
        WorkerReport {
            role: worker.info.role,
            address: worker.info.address.clone(),
            model: worker.info.model_id.clone(),
            numerics_id: worker.info.numerics_id.clone(),
            task_types: worker.info.task_types.clone(),
            sequences: worker.load,
            shadowed: worker.shadows,
            is_on_trial: is_draft && self.workers.is_on_trial(worker),
            draining: worker.draining.reason(),
            credit_blocks: worker.credit,
            reserved_blocks: worker.reserved,
            wire_us: worker.cost.wire_us(),
            drafted_ahead: is_draft.then(|| worker.cost.drafted_ahead.shares().to_vec()),
            health: is_draft.then(|| worker.draft_health.report(self.now)),
            target_health: (!is_draft).then(|| worker.target_health.report()),
        }
    }
}
