//! The connected workers: what they reported about themselves, the sequences assigned to them, the capacity
//! reserved there, and the cost of their steps.

mod capacity;
mod changes;
mod draining;
mod headroom;
mod health;
mod trials;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use speculation::{Role, SequenceId};

use self::draining::Draining;
use super::events::{WorkerInfo, WorkerKey};
use super::lanes::{LaneId, LaneLoads, LaneWorkers};
use super::placement::{Candidate, choose_draft};
use crate::cost::{MAX_REPORTED, StepTimes, WorkerCost};
use crate::draft_health::{Access, DraftHealth};
use crate::headroom::MeanRound;
use crate::placement::{PrefixMarks, RecentPrefixes};
use crate::rollout::{Rollout, preference};
use crate::target_health::{FAILURES_TO_OPEN, TargetHealth};
use crate::tree_size::MAX_LEAVES;

/// Maximum ids of sequences whose first step is in flight at one target; further sequences wait. After a mass
/// failover they form a queue.
pub(super) const MAX_PREFILL_IDS: u32 = 16_384;

/// Maximum entries of tables filled from outside: points of a profile, addresses of crashes and of drained
/// workers, scores of drafts by task type.
pub(super) const MAX_ENTRIES: usize = 1_024;

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) key: WorkerKey,
    pub(super) info: WorkerInfo,
    /// Sequences assigned to it.
    pub(super) load: u32,
    pub(super) lane_loads: LaneLoads,
    /// KV blocks that this scheduler may reserve there, and those it has reserved.
    pub(super) credit: u64,
    pub(super) reserved: u64,
    /// Ids of sequences whose first step there is in flight.
    prefilling: u32,
    /// Number of these sequences that have a grammar, which the worker may have to compile first.
    compiling: u32,
    prefixes: RecentPrefixes,
    /// Responsiveness (draft workers).
    pub(super) draft_health: DraftHealth,
    /// Reasons for which it drains, if any.
    pub(super) draining: Draining,
    /// Health of a target.
    pub(super) target_health: TargetHealth,
    /// When to check whether it is silent; absent while no answer is outstanding (targets).
    check_at: Option<Duration>,
    /// Number of suspects assigned to it (targets); see [`PlacementRequest::is_suspect`].
    suspects: u32,
    /// Cost of its steps.
    pub(super) cost: WorkerCost,
    /// Mean round there when it last had sequences (targets).
    round: MeanRound,
    /// Decode steps without draft or prompt that are in flight at the target.
    pub(super) decodes_in_flight: u32,
    /// Sequences that it shadows (draft workers); included in its load.
    pub(super) shadows: u32,
}

/// A sequence that needs a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlacementRequest<'a> {
    pub(super) id: SequenceId,
    pub(super) model: &'a str,
    pub(super) task_type: &'a str,
    pub(super) lane: LaneId,
    /// Expected final length, in ids.
    pub(super) expected_len: u32,
    /// Present length, in ids.
    pub(super) len: u32,
    pub(super) marks: &'a PrefixMarks,
    /// Maximum length, in ids.
    pub(super) max_len: u32,
    /// Numerics class of its earlier target, if it had one.
    pub(super) numerics_id: Option<&'a str>,
    /// The worker that it just lost.
    pub(super) avoid: Option<WorkerKey>,
    /// Targets that refused it.
    pub(super) refused_by: &'a [WorkerKey],
    /// Targets for which sequences wait that go first; it gets none of these.
    pub(super) awaited: &'a [WorkerKey],
    /// Whether several targets were lost while they ran it. It does not share a target with another suspect,
    /// so that the sequence that causes the failures is identified.
    pub(super) is_suspect: bool,
    /// Whether its output must match a grammar.
    pub(super) has_grammar: bool,
    pub(super) now: Duration,
}

/// Capacity reserved for a sequence at a worker. Freed by [`Workers::release`], or lost with the worker.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) key: WorkerKey,
    lane: LaneId,
    blocks: u64,
    /// Length of the sequence in ids while its first step there is in flight.
    prefilling: u32,
    /// Whether it has a grammar and its first step there is in flight.
    is_compiling: bool,
    is_suspect: bool,
    /// Whether an answer of the target is outstanding.
    pub(super) awaits_reply: bool,
}

impl Reservation {
    /// Whether the sequence's first step there is not done.
    pub(super) fn is_prefilling(&self) -> bool {
        self.prefilling > 0
    }
}

/// All connected workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    workers: BTreeMap<WorkerKey, Worker>,
    /// Targets of each model.
    targets: BTreeMap<String, BTreeSet<WorkerKey>>,
    drafts: BTreeSet<WorkerKey>,
    /// Number of times that draft workers joined, freed blocks, stopped draining, or were meant for other
    /// sequences: one of them may now take a sequence that found none.
    pub(super) draft_changes: u64,
    /// By address, consecutive connections to a target that ended while answers were outstanding.
    crashes: BTreeMap<String, u32>,
    /// Addresses that an operator drains.
    pub(super) drained: BTreeSet<String>,
    /// Workers that are no longer listed and whose connections must end.
    unlisted: BTreeSet<WorkerKey>,
    /// Latest time for the next call of [`Workers::newly_silent`]; may be early.
    pub(super) next_check: Option<Duration>,
    /// Workers whose block counts or usability may have changed since they were last reported.
    changed: BTreeSet<WorkerKey>,
    /// The draft worker that left last, kept for its cost when the pool is empty.
    pub(super) last_draft: Option<(WorkerInfo, WorkerCost)>,
    /// The current rollout.
    rollout: Option<Rollout>,
}

impl Workers {
    pub(super) fn join(&mut self, now: Duration, key: WorkerKey, info: WorkerInfo) {
        let info = clamp_reported(info);
        let crashes = self.crashes.get(&info.address).copied().unwrap_or(0);
        if info.role == Role::Target {
            self.targets.entry(info.model_id.clone()).or_default().insert(key);
            // Some may fit this target only.
            self.changed.extend(&self.drafts);
        } else {
            self.drafts.insert(key);
            self.draft_changes += 1;
        }
        let worker = Worker {
            key,
            load: 0,
            lane_loads: LaneLoads::new(),
            credit: info.credit_blocks.unwrap_or(info.kv_blocks),
            reserved: 0,
            prefilling: 0,
            compiling: 0,
            prefixes: RecentPrefixes::default(),
            draft_health: DraftHealth::default(),
            draining: Draining { by_operator: self.drained.contains(&info.address), ..Draining::default() },
            target_health: TargetHealth::new(now, crashes.min(FAILURES_TO_OPEN), !info.step_times.is_empty()),
            check_at: None,
            suspects: 0,
            cost: WorkerCost::new(step_times(&info)),
            round: MeanRound::default(),
            decodes_in_flight: 0,
            shadows: 0,
            info,
        };
        self.workers.insert(key, worker);
        self.changed.insert(key);
    }

    pub(super) fn leave(&mut self, key: WorkerKey) -> Option<WorkerInfo> {
        let Worker { info, target_health, cost, .. } = self.workers.remove(&key)?;
        if info.role == Role::Draft && !info.is_shadow {
            self.last_draft = Some((info.clone(), cost));
        }
        self.drafts.remove(&key);
        self.changed.remove(&key);
        self.unlisted.remove(&key);
        if info.role == Role::Target && target_health.has_outstanding() {
            if self.crashes.len() >= MAX_ENTRIES && !self.crashes.contains_key(&info.address) {
                self.crashes.pop_first();
            }
            *self.crashes.entry(info.address.clone()).or_default() += 1;
        }
        if let Some(targets) = self.targets.get_mut(&info.model_id) {
            targets.remove(&key);
            if targets.is_empty() {
                self.targets.remove(&info.model_id);
            }
            self.changed.extend(&self.drafts);
        }
        Some(info)
    }

    pub(super) fn get(&self, key: WorkerKey) -> Option<&Worker> {
        self.workers.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: WorkerKey) -> Option<&mut Worker> {
        self.workers.get_mut(&key)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// Whether any target serves a model.
    pub(super) fn is_served(&self, model: &str) -> bool {
        self.targets.contains_key(model)
    }

    /// The targets that serve a model.
    pub(super) fn targets_of(&self, model: &str) -> impl Iterator<Item = &Worker> {
        self.targets.get(model).into_iter().flatten().filter_map(|key| self.workers.get(key))
    }

    /// Whether every target that serves a model drains.
    pub(super) fn all_targets_drain(&self, model: &str) -> bool {
        self.is_served(model) && self.targets_of(model).all(|worker| worker.draining.is_active())
    }

    /// Returns the workers of a sequence; `None` if it lacks one.
    pub(super) fn lane_workers(
        &self,
        target: Option<WorkerKey>,
        draft: Option<WorkerKey>,
    ) -> Option<LaneWorkers<'_>> {
        let (target, draft) = (self.get(target?)?, self.get(draft?)?);
        Some(LaneWorkers {
            target: &target.cost,
            draft: &draft.cost,
            target_sequences: target.load,
            draft_sequences: draft.load,
            shares_cores: target.info.shares_cores_with(&draft.info),
            max_tree_tokens: target.info.max_tree_tokens,
        })
    }

    /// The sequences at the target that has most of a lane's. Lanes part the targets between them
    /// ([`crate::placement`]), so a lane shares its target with few others.
    pub(super) fn target_loads(&self, model: &str, lane: LaneId) -> Option<&LaneLoads> {
        let loads = self.targets_of(model).map(|target| &target.lane_loads);
        loads.max_by_key(|loads| loads.get(&lane))
    }

    /// Reserves capacity at the best draft worker for a sequence on `target`.
    pub(super) fn reserve_draft(
        &mut self,
        request: &PlacementRequest<'_>,
        target: WorkerKey,
    ) -> Option<Reservation> {
        let chosen = self.best_draft(request, target);
        self.reserve(chosen?, request)
    }

    /// The draft worker that a sequence on `target` would be assigned.
    pub(super) fn best_draft(&self, request: &PlacementRequest<'_>, target: WorkerKey) -> Option<WorkerKey> {
        self.best_draft_of(request, target, |_| true)
    }

    /// The same among the workers that answer.
    pub(super) fn best_responsive_draft(
        &self,
        request: &PlacementRequest<'_>,
        target: WorkerKey,
    ) -> Option<WorkerKey> {
        self.best_draft_of(request, target, |worker| !worker.draft_health.is_silent())
    }

    fn best_draft_of(
        &self,
        request: &PlacementRequest<'_>,
        target: WorkerKey,
        is_eligible: impl Fn(&Worker) -> bool,
    ) -> Option<WorkerKey> {
        let target = &self.get(target)?.info;
        let fits = |worker: &&Worker| {
            // It drafts until its window is full.
            worker.info.has_window(request.len.saturating_add(1))
                && !worker.draining.is_active()
                && is_eligible(worker)
                && worker.has_blocks(worker.blocks_of(request.expected_len))
        };
        let drafts = self.drafts.iter().filter_map(|key| self.workers.get(key)).filter(fits);
        let candidates = drafts.map(|worker| Candidate {
            is_unavailable: worker.draft_health.access(request.now) == Access::Skip,
            ..self.candidate(worker, request)
        });
        choose_draft(candidates, target, request.task_type, request.max_len, request.avoid)
    }

    pub(super) fn release(&mut self, reservation: Reservation) {
        let Reservation { key, lane, blocks, prefilling, is_compiling, is_suspect, awaits_reply } =
            reservation;
        let Some(worker) = self.workers.get_mut(&key) else { return };
        if awaits_reply {
            worker.target_health.request_done();
        }
        worker.suspects = worker.suspects.saturating_sub(u32::from(is_suspect));
        worker.load = worker.load.saturating_sub(1);
        worker.reserved = worker.reserved.saturating_sub(blocks);
        worker.prefilling = worker.prefilling.saturating_sub(prefilling);
        worker.compiling = worker.compiling.saturating_sub(u32::from(is_compiling));
        if let Some(load) = worker.lane_loads.get_mut(&lane) {
            *load -= 1;
            if *load == 0 {
                worker.lane_loads.remove(&lane);
            }
        }
        self.changed.insert(key);
        self.draft_changes += u64::from(self.drafts.contains(&key));
    }

    /// Updates a reservation: the sequence has `len` ids, and its first step is done. Returns whether this
    /// freed prefill capacity.
    pub(super) fn grow_reservation(&mut self, reservation: &mut Reservation, len: u32) -> bool {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return false };
        let blocks = worker.blocks_of(len);
        if blocks > reservation.blocks {
            worker.reserved += blocks - reservation.blocks;
            reservation.blocks = blocks;
            self.changed.insert(reservation.key);
        }
        worker.prefilling = worker.prefilling.saturating_sub(reservation.prefilling);
        let was_compiling = std::mem::take(&mut reservation.is_compiling);
        worker.compiling = worker.compiling.saturating_sub(u32::from(was_compiling));
        std::mem::take(&mut reservation.prefilling) > 0
    }

    /// Sets how many blocks may be reserved at a worker.
    pub(super) fn set_credit(&mut self, key: WorkerKey, blocks: u64) {
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.credit = blocks.min(MAX_REPORTED);
            self.changed.insert(key);
            self.draft_changes += u64::from(self.drafts.contains(&key));
        }
    }

    fn reserve(&mut self, key: WorkerKey, request: &PlacementRequest<'_>) -> Option<Reservation> {
        let worker = self.workers.get_mut(&key)?;
        let blocks = worker.blocks_of(request.expected_len);
        let reservation = Reservation {
            key,
            lane: request.lane,
            blocks,
            prefilling: request.len,
            is_compiling: request.has_grammar,
            is_suspect: request.is_suspect,
            awaits_reply: false,
        };
        worker.target_health.assigned(request.now);
        worker.suspects += u32::from(request.is_suspect);
        worker.load += 1;
        *worker.lane_loads.entry(request.lane).or_default() += 1;
        worker.reserved += blocks;
        worker.prefilling += request.len;
        worker.compiling += u32::from(request.has_grammar);
        worker.prefixes.remember(request.marks);
        self.changed.insert(key);
        Some(reservation)
    }

    /// The targets of the sequence's model that may serve it.
    fn candidates<'a>(&'a self, request: &'a PlacementRequest<'_>) -> impl Iterator<Item = Candidate<'a>> {
        let may_serve = |worker: &&Worker| {
            worker.info.has_window(request.max_len)
                && !request.refused_by.contains(&worker.key)
                && !worker.draining.is_active()
        };
        self.targets_of(request.model).filter(may_serve).map(move |worker| {
            let is_full = !worker.has_blocks(worker.blocks_of(request.expected_len))
                || !worker.may_prefill(request.len)
                || (request.is_suspect && worker.suspects > 0)
                || request.awaited.contains(&worker.key);
            Candidate { is_unavailable: is_full, ..self.candidate(worker, request) }
        })
    }

    fn candidate<'a>(&self, worker: &'a Worker, request: &PlacementRequest<'a>) -> Candidate<'a> {
        Candidate {
            key: worker.key,
            info: &worker.info,
            load: worker.load,
            lane_load: worker.lane_loads.get(&request.lane).copied().unwrap_or(0),
            prefixes: Some((&worker.prefixes, request.marks)),
            is_unavailable: false,
            is_unhealthy: worker.target_health.is_unhealthy(request.now),
            step_us: worker.cost.step_us(1.0, 0.0),
            preference: preference(
                self.rollout.as_ref(),
                (&worker.info.model_id, worker.info.is_shadow),
                request.id,
            ),
        }
    }
}

impl Worker {
    /// KV blocks of a sequence of `len` ids, including space for the leaves of a tree, which occupy KV until
    /// they are judged.
    fn blocks_of(&self, len: u32) -> u64 {
        let len = len.saturating_add(self.info.max_tree_tokens.min(MAX_LEAVES));
        u64::from(len).div_ceil(u64::from(self.info.kv_block_size.max(1)))
    }

    /// Whether the credit covers `blocks` more (contract part A). One sequence may always run, and a worker
    /// without KV has no limit.
    fn has_blocks(&self, blocks: u64) -> bool {
        self.info.kv_blocks == 0 || self.load == 0 || self.reserved + blocks <= self.credit
    }

    fn may_prefill(&self, ids: u32) -> bool {
        self.prefilling == 0 || self.prefilling.saturating_add(ids) <= MAX_PREFILL_IDS
    }
}

/// Clamps what a worker reported about itself.
fn clamp_reported(info: WorkerInfo) -> WorkerInfo {
    let mut step_times = info.step_times;
    step_times.truncate(MAX_ENTRIES);
    step_times.retain(|point| point.rows > 0);
    for point in &mut step_times {
        point.rows = point.rows.min(MAX_PREFILL_IDS);
        point.context = point.context.min(MAX_REPORTED);
        point.micros = point.micros.min(MAX_REPORTED);
    }
    let mut batch_times = info.batch_times;
    batch_times.truncate(MAX_ENTRIES);
    batch_times.retain(|batch| batch.is_possible());
    for batch in &mut batch_times {
        batch.rows = batch.rows.min(MAX_PREFILL_IDS);
        batch.sequences = batch.sequences.min(batch.rows);
        batch.context = batch.context.min(MAX_REPORTED);
        batch.micros = batch.micros.min(MAX_REPORTED);
    }
    WorkerInfo {
        step_times,
        batch_times,
        kv_blocks: info.kv_blocks.min(MAX_REPORTED),
        credit_blocks: info.credit_blocks.map(|blocks| blocks.min(MAX_REPORTED)),
        ..info
    }
}

/// Step times that a worker profiled. A draft worker without a profile drafts without a model, at almost no
/// cost; for a target without a profile, times are assumed.
fn step_times(info: &WorkerInfo) -> StepTimes {
    if info.step_times.is_empty() && info.role == Role::Target {
        return StepTimes::assumed();
    }
    StepTimes::with_batches(&info.step_times, &info.batch_times)
}

#[cfg(test)]
mod tests;
