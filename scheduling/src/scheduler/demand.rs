//! What the pools of each model are asked for, and how many workers that takes: [`crate::pool_size`] over what workers measured. For metrics;
//! nothing is decided by it here.

use std::collections::BTreeSet;

use serde::Serialize;
use speculation::Role;

use super::pairing;
use super::state::SchedulerState;
use super::workers::Worker;
use crate::cost::WorkerCost;
use crate::pool_size::{Demand, Supply, Wanted, wanted};

/// The pools of one model, as this scheduler needs them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolDemand {
    /// Which model.
    pub model: String,
    /// Sequences under way or waiting.
    pub sequences: u32,
    /// Targets that serve it now.
    pub target_workers: u32,
    /// Target workers that are wanted, with their fraction.
    pub wanted_target_workers: f64,
    /// Draft workers that are wanted.
    pub wanted_draft_workers: f64,
}

impl SchedulerState {
    /// The demand for every model that has targets or ever had sequences.
    pub(super) fn demands(&self) -> Vec<PoolDemand> {
        let served = self.workers.values().filter(|worker| worker.info.role == Role::Target);
        let served = served.map(|worker| worker.info.model_id.as_str());
        let models: BTreeSet<&str> = served.chain(self.lanes.models()).collect();
        models.into_iter().map(|model| self.demand(model)).collect()
    }

    fn demand(&self, model: &str) -> PoolDemand {
        let is_target = |worker: &&Worker| worker.info.role == Role::Target && worker.info.model_id == model;
        let targets: Vec<&Worker> = self.workers.values().filter(is_target).collect();
        let sequences = self.lanes.sequences_of(model);
        let wanted = match targets.first() {
            Some(first) => self.wanted(model, (sequences, &targets), first),
            // Nothing is known of targets that are not there; the first one will tell.
            None => Wanted { targets: f64::from(sequences.min(1)), drafts: 0.0 },
        };
        PoolDemand {
            model: model.to_owned(),
            sequences,
            target_workers: targets.len() as u32,
            wanted_target_workers: wanted.targets,
            wanted_draft_workers: wanted.drafts,
        }
    }

    fn wanted(&self, model: &str, (sequences, targets): (u32, &[&Worker]), first: &Worker) -> Wanted {
        let count = targets.len() as f64;
        let running: u32 = targets.iter().map(|target| target.load).sum();
        let reserved: u64 = targets.iter().map(|target| target.blocks().1).sum();
        // Those that wait will need what those that run need.
        let each = reserved as f64 / f64::from(running.max(1));
        let waiting = f64::from(sequences.saturating_sub(running));
        let demand = Demand { sequences: f64::from(sequences), kv_blocks: reserved as f64 + waiting * each };
        let supply = Supply {
            targets: count,
            drafts: self.workers.serving_drafts().count() as f64,
            kv_blocks_each: targets.iter().map(|target| target.info.kv_blocks as f64).sum::<f64>() / count,
            tpot_us: self.config.tpot_objective.map(crate::cost::micros),
        };
        let Some(draft) = self.draft_cost(first) else {
            // A draft worker that nobody has seen is worth a try, and tells its cost.
            let may_draft = self.lanes.policy().max_draft_tokens > 0;
            let alone = |sequences: f64, _: f64| {
                self.lanes.promise(model, (sequences, 0.0), (&first.cost, &first.cost))
            };
            let drafts = if may_draft { f64::from(sequences.min(1)) } else { 0.0 };
            return Wanted { drafts, ..wanted(demand, supply, &alone) };
        };
        let speed = |sequences: f64, drafts: f64| {
            self.lanes.promise(model, (sequences, drafts), (&first.cost, draft))
        };
        wanted(demand, supply, &speed)
    }

    /// What a draft worker for this target costs: one that is connected, or the last one that was.
    fn draft_cost(&self, target: &Worker) -> Option<&WorkerCost> {
        let mut drafts = self.workers.serving_drafts();
        let fits = |worker: &&Worker| pairing::check(&worker.info, &target.info).is_ok();
        let last = self.workers.last_draft().filter(|(info, _)| pairing::check(info, &target.info).is_ok());
        drafts.find(fits).map(|worker| &worker.cost).or(last.map(|(_, cost)| cost))
    }
}
