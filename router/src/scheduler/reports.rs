//! Turns the scheduler's reports into metrics and log lines.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use scheduling::scheduler::WorkerKey;
use scheduling::scheduler::events::{CommittedRound, Report, WorkerInfo};
use scheduling::scheduler::lanes::{LaneId, LaneKey};
use speculation::sequence::TargetFault;
use speculation::{Refusal, RefusalCause};

use crate::metrics::{KvPools, LaneMetrics, RouterMetrics, ShadowMetrics, WorkerMetrics};

/// An outage of a draft worker that ends sooner is logged at level debug only: on a busy machine they are
/// frequent, and rounds continue without a draft.
const LONG_OUTAGE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Reports {
    metrics: RouterMetrics,
    /// By lane id.
    lanes: Vec<(Arc<LaneKey>, LaneMetrics)>,
    workers: BTreeMap<WorkerKey, (String, WorkerMetrics)>,
    draft_outages: Vec<DraftOutage>,
    kv_pools: KvPools,
    shadows: ShadowMetrics,
}

/// A draft worker that does not answer now.
#[derive(Debug)]
struct DraftOutage {
    worker: WorkerKey,
    since: Duration,
    /// Whether it was logged as a warning.
    is_logged: bool,
}

impl Reports {
    pub(super) fn new(metrics: RouterMetrics) -> Self {
        let (kv_pools, shadows) = (metrics.kv_pools(), metrics.shadows());
        let (lanes, workers, draft_outages) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { metrics, lanes, workers, draft_outages, kv_pools, shadows }
    }

    pub(super) fn worker_joined(&mut self, key: WorkerKey, info: &WorkerInfo) {
        let metrics = self.metrics.worker(info.role, &info.address);
        self.workers.insert(key, (info.address.clone(), metrics));
        self.kv_pools.add_worker(key, info);
    }

    pub(super) fn worker_left(&mut self, key: WorkerKey) {
        self.workers.remove(&key);
        self.draft_outages.retain(|outage| outage.worker != key);
        self.kv_pools.remove_worker(key);
    }

    pub(super) fn on_commit(&mut self, round: &CommittedRound) {
        let commit = &round.commit;
        if let Some((_, metrics)) = self.lanes.get_mut(round.lane.0 as usize) {
            metrics.count_output_tokens(commit.token_ids.len());
            metrics.count_round(round.usage.disabled_reason);
            metrics.count_verified_draft(commit.num_draft_tokens, commit.num_accepted);
        }
        if let Some(source) = round.source {
            self.metrics.count_lookup_draft(source, commit.num_draft_tokens, commit.num_accepted);
        }
    }

    /// Adds the metrics of a lane, and removes those of the idle lane that it replaces.
    fn open_lane(&mut self, lane: LaneId, key: Arc<LaneKey>) {
        let metrics = self.metrics.lane(&key);
        match self.lanes.get_mut(lane.0 as usize) {
            None => self.lanes.push((key, metrics)),
            Some(idle) => {
                let (replaced, _) = std::mem::replace(idle, (key, metrics));
                self.metrics.remove_lane(&replaced);
                if self.lanes.iter().all(|(lane, _)| lane.task_type != replaced.task_type) {
                    self.shadows.remove_task_type(&replaced.task_type);
                }
            }
        }
    }

    /// Logs draft workers that have not answered for [`LONG_OUTAGE`], once per outage.
    pub(super) fn warn_of_long_outages(&mut self, now: Duration) {
        for outage in &mut self.draft_outages {
            let waited = now.saturating_sub(outage.since);
            if waited >= LONG_OUTAGE && !outage.is_logged {
                outage.is_logged = true;
                let address = self.workers.get(&outage.worker).map_or("", |(address, _)| address);
                let waited_ms = waited.as_millis() as u64;
                tracing::warn!(
                    address,
                    waited_ms,
                    "draft worker does not answer: rounds continue without it"
                );
            }
        }
    }

    pub(super) fn report(&mut self, now: Duration, report: Report) {
        match report {
            Report::LaneOpened(lane, key) => self.open_lane(lane, key),
            Report::DraftLength(lane, k) => {
                if let Some((_, metrics)) = self.lanes.get(lane.0 as usize) {
                    metrics.set_k(k);
                }
            }
            Report::Anomaly(anomaly) => self.metrics.count_anomaly(anomaly),
            Report::UsedProposalAhead => self.metrics.count_proposal_ahead(),
            Report::DraftWorkerSilent { worker, waited } => self.draft_silent(now, worker, waited),
            Report::DraftWorkerRecovered(worker) => self.draft_recovered(worker),
            Report::TargetSilent { worker, waited, moved } => self.target_silent(worker, waited, moved),
            Report::TargetRecovered(worker) => {
                tracing::info!(address = self.address_of(worker), "target worker answers again");
            }
            Report::WorkerDraining { worker, sequences } => {
                let address = self.address_of(worker);
                tracing::info!(address, sequences, "worker is draining: no new sequences");
            }
            Report::WorkerUndrained(worker) => {
                tracing::info!(address = self.address_of(worker), "worker is no longer draining");
            }
            Report::SequencesMoved { from, sequences } => {
                let address = self.address_of(from);
                tracing::info!(address, sequences, "moving sequences to other target workers");
            }
            Report::RolloutEnded { draft, stage, moved } => {
                let stage = tracing::field::debug(stage);
                tracing::info!(draft, stage, moved, "the rollout of a draft ended");
            }
            Report::ShadowScored(scored) => self.shadows.count_scored(&scored),
            Report::ShadowDropped { draft, reason } => self.shadows.count_dropped(&draft, reason),
            Report::TargetFailed { worker, fault, is_opened } => {
                self.target_failed(worker, &fault, is_opened)
            }
            Report::SequencesReplayed { role, address, sequences } => {
                let role = role.as_str();
                tracing::warn!(role, address, sequences, "worker lost: replaying its sequences");
            }
            Report::NumericsChanged { id, earlier, worker, numerics_id } => tracing::warn!(
                sequence = id.0,
                address = self.address_of(worker),
                earlier,
                numerics_id,
                "the sequence continues at a target of another numerics class: its text may differ from here on"
            ),
            Report::TargetAssigned { priority, waited } => self.metrics.observe_target_wait(priority, waited),
            Report::WaitingForTarget(count) => self.metrics.set_waiting_for_target(count),
            Report::WorkerChanged { worker, credit, reserved, is_usable } => {
                if let Some((_, metrics)) = self.workers.get(&worker) {
                    metrics.set_blocks(credit, reserved);
                    metrics.set_usable(is_usable);
                    self.kv_pools.set_blocks(worker, credit, reserved);
                }
            }
            Report::Headroom { worker, tokens_per_second } => {
                self.kv_pools.set_headroom(worker, tokens_per_second);
            }
        }
    }

    fn draft_silent(&mut self, now: Duration, worker: WorkerKey, waited: Duration) {
        self.metrics.count_draft_outage();
        let (address, waited_ms) = (self.address_of(worker), waited.as_millis() as u64);
        tracing::debug!(address, waited_ms, "draft worker is late: rounds continue without it");
        let since = now.saturating_sub(waited);
        self.draft_outages.push(DraftOutage { worker, since, is_logged: false });
    }

    fn target_silent(&self, worker: WorkerKey, waited: Duration, moved: usize) {
        self.metrics.count_target_outage();
        let (address, waited_ms) = (self.address_of(worker), waited.as_millis() as u64);
        tracing::warn!(address, waited_ms, moved, "target worker does not answer: moving its sequences");
    }

    fn target_failed(&mut self, worker: WorkerKey, fault: &TargetFault, is_opened: bool) {
        let address = self.address_of(worker);
        match fault {
            // Its reason may quote the output, which logs must not contain.
            TargetFault::Refused(Refusal { cause: cause @ RefusalCause::Grammar, .. }) => {
                tracing::warn!(address, ?cause, "a sequence failed at its target worker");
            }
            fault => tracing::warn!(address, %fault, "a sequence failed at its target worker"),
        }
        if is_opened {
            self.metrics.count_target_outage();
            tracing::warn!(
                address,
                "target worker fails repeatedly: circuit breaker open until a probe succeeds"
            );
        }
    }

    fn draft_recovered(&mut self, worker: WorkerKey) {
        let was_logged = self.draft_outages.iter().any(|outage| outage.worker == worker && outage.is_logged);
        self.draft_outages.retain(|outage| outage.worker != worker);
        let address = self.address_of(worker);
        if was_logged {
            tracing::info!(address, "draft worker answers again");
        } else {
            tracing::debug!(address, "draft worker answers again");
        }
    }

    fn address_of(&self, worker: WorkerKey) -> &str {
        self.workers.get(&worker).map_or("", |(address, _)| address)
    }
}

#[cfg(test)]
mod tests {
    use scheduling::scheduler::events::ShadowScored;
    use scheduling::scheduler::lanes::TemperatureBand;
    use service::metrics::{Exposition, Metrics};
    use speculation::Role;

    use super::*;

    #[test]
    fn a_worker_that_is_avoided_has_a_gauge_of_0_until_it_leaves() {
        let page = Metrics::new();
        let mut reports = Reports::new(RouterMetrics::register(&page));
        let worker = WorkerKey(1);
        let info = WorkerInfo { address: "http://t:1".to_owned(), ..WorkerInfo::of(Role::Target, "demo") };
        let usable = |value: &str| {
            let line = format!("outrider_worker_usable{{role=\"target\",address=\"http://t:1\"}} {value}\n");
            page.encode(Exposition::Prometheus).contains(&line)
        };
        reports.worker_joined(worker, &info);
        for is_usable in [true, false] {
            let changed = Report::WorkerChanged { worker, credit: 1, reserved: 0, is_usable };
            reports.report(Duration::ZERO, changed);
            assert_eq!((usable("1"), usable("0")), (is_usable, !is_usable));
        }
        reports.worker_left(worker);
        assert!(!usable("0"), "its series is gone");
    }

    #[test]
    fn a_replaced_lane_leaves_no_series_of_shadow_drafts() {
        let page = Metrics::new();
        let mut reports = Reports::new(RouterMetrics::register(&page));
        let lane = |task_type: &str, temperature| {
            let (model, task_type) = ("demo".to_owned(), task_type.to_owned());
            Arc::new(LaneKey { model, task_type, temperature })
        };
        let mut open = |id, lane: &Arc<LaneKey>| {
            reports.report(Duration::ZERO, Report::LaneOpened(LaneId(id), Arc::clone(lane)));
            let (shadow, serving) = ((2, 1), Some((2, 1)));
            let scored = ShadowScored { draft: "next".into(), lane: Arc::clone(lane), shadow, serving };
            reports.report(Duration::ZERO, Report::ShadowScored(scored));
            let text = page.encode(Exposition::Prometheus);
            ["old", "new"].map(|task_type| {
                let label = format!(r#"draft="next",task_type="{task_type}""#);
                text.lines().filter(|line| line.contains(&label)).count()
            })
        };
        let old = lane("old", TemperatureBand::Greedy);
        let [num_series, _] = open(0, &old);
        assert!(num_series > 0);
        open(1, &lane("old", TemperatureBand::Low));
        assert_eq!(open(0, &lane("new", TemperatureBand::Greedy)), [num_series; 2], "a lane still has it");
        assert_eq!(open(1, &lane("new", TemperatureBand::Low)), [0, num_series]);
    }
}
