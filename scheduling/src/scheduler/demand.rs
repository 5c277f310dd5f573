//! Demand on the worker pools of each model, and how many workers it takes: [`crate::pool_size`] on measured
//! values. For metrics only; no decision here depends on it.

use std::collections::BTreeSet;

use serde::Serialize;
use speculation::Role;

use super::pairing;
use super::state::SchedulerState;
use super::workers::Worker;
use crate::cost::WorkerCost;
use crate::pool_size::{CurrentPools, Demand, DesiredWorkers, desired_workers};

/// Demand on the pools of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolDemand {
    /// The model.
    pub model: String,
    /// Active sequences, including waiting ones.
    pub sequences: u32,
    /// Targets that serve the model now.
    pub target_workers: u32,
    /// Number of target workers wanted, as a fraction.
    pub wanted_target_workers: f64,
    /// Number of draft workers wanted.
    pub wanted_draft_workers: f64,
}

impl SchedulerState {
    /// Demand of each model that has targets or ever had sequences.
    pub(super) fn demands(&self) -> Vec<PoolDemand> {
        let served = self.workers.values().filter(|worker| worker.info.role == Role::Target);
        let served = served.map(|worker| worker.info.model_id.as_str());
        let models: BTreeSet<&str> = served.chain(self.lanes.models()).collect();
        models.into_iter().map(|model| self.demand(model)).collect()
    }

    fn demand(&self, model: &str) -> PoolDemand {
        let targets: Vec<&Worker> = self.workers.targets_of(model).collect();
        let sequences = self.lanes.sequences_of(model);
        let desired = match targets.first() {
            Some(first) => self.desired_workers(model, (sequences, &targets), first),
            // Nothing is known about the speed without a target, so ask for one.
            None => DesiredWorkers { targets: f64::from(sequences.min(1)), drafts: 0.0 },
        };
        PoolDemand {
            model: model.to_owned(),
            sequences,
            target_workers: targets.len() as u32,
            wanted_target_workers: desired.targets,
            wanted_draft_workers: desired.drafts,
        }
    }

    fn desired_workers(
        &self,
        model: &str,
        (sequences, targets): (u32, &[&Worker]),
        first: &Worker,
    ) -> DesiredWorkers {
        let count = targets.len() as f64;
        let running: u32 = targets.iter().map(|target| target.load).sum();
        let reserved: u64 = targets.iter().map(|target| target.reserved).sum();
        // Assume that waiting sequences need as many blocks as running ones.
        let each = reserved as f64 / f64::from(running.max(1));
        let waiting = f64::from(sequences.saturating_sub(running));
        let demand = Demand { sequences: f64::from(sequences), kv_blocks: reserved as f64 + waiting * each };
        let supply = CurrentPools {
            targets: count,
            drafts: self.workers.serving_drafts().count() as f64,
            kv_blocks_each: targets.iter().map(|target| target.info.kv_blocks as f64).sum::<f64>() / count,
            tpot_us: self.config.tpot_objective.map(crate::cost::micros),
        };
        let Some(draft) = self.draft_cost(first) else {
            // The cost of a draft worker is unknown until one connects, so ask for one if it could be used.
            let alone = |sequences: f64, _: f64| {
                self.lanes.predict_throughput(model, (sequences, 0.0), (&first.cost, &first.cost))
            };
            let drafts = f64::from(u8::from(self.lanes.may_draft(model)));
            return DesiredWorkers { drafts, ..desired_workers(demand, supply, &alone) };
        };
        let speed = |sequences: f64, drafts: f64| {
            self.lanes.predict_throughput(model, (sequences, drafts), (&first.cost, draft))
        };
        desired_workers(demand, supply, &speed)
    }

    /// Cost of a draft worker that fits this target: a connected one, or else the last one that was
    /// connected.
    fn draft_cost(&self, target: &Worker) -> Option<&WorkerCost> {
        let mut drafts = self.workers.serving_drafts();
        let fits = |worker: &&Worker| pairing::check(&worker.info, &target.info).is_ok();
        let last = self.workers.last_draft.as_ref();
        let last = last.filter(|(info, _)| pairing::check(info, &target.info).is_ok());
        drafts.find(fits).map(|worker| &worker.cost).or(last.map(|(_, cost)| cost))
    }
}
