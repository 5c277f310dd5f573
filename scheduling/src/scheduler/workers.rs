//! The connected workers: what they said of themselves, which sequences are assigned to them, what capacity is reserved
//! there, and what their steps cost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use speculation::Role;

use super::MAX_REPORTED_STEP;
use super::events::{Report, WorkerInfo, WorkerKey};
use super::lanes::{LaneId, WorkersOfLane};
use super::placement::{Candidate, choose_draft, choose_target};
use crate::cost::{Forward, StepTimes, WorkerCost};
use crate::draft_health::DraftHealth;
use crate::placement::{PrefixMarks, PrefixMemory};
use crate::target_health::{ExpectedSteps, FAILURES_TO_OPEN, MIN_SILENCE, TargetHealth};

/// Ids of sequences whose first step is under way at one target; more wait. A mass failover becomes a queue.
pub(super) const MAX_PREFILL_IDS: u32 = 16_384;

/// A worker that says more is not believed.
const MAX_PROFILED_POINTS: usize = 1_024;
const MAX_KV_BLOCKS: u64 = 1 << 40;

/// Addresses whose crashes are remembered.
const MAX_CRASHES: usize = 1_024;

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) key: WorkerKey,
    pub(super) info: WorkerInfo,
    /// Sequences assigned to it.
    pub(super) load: u32,
    lane_loads: BTreeMap<LaneId, u32>,
    /// KV blocks that may be reserved there, and that are.
    credit: u64,
    reserved: u64,
    /// Ids of sequences whose first step there is under way.
    prefilling: u32,
    prefixes: PrefixMemory,
    /// How long its proposals are waited for (draft workers).
    pub(super) health: DraftHealth,
    /// Whether it is about to stop: it gets no new sequences.
    pub(super) is_draining: bool,
    /// Whether it is to be relied on (targets).
    pub(super) target_health: TargetHealth,
    /// When to look whether it has fallen silent; none while it owes nothing (targets).
    check_at: Option<Duration>,
    /// Suspects assigned to it (targets); see [`Wanted::is_suspect`].
    suspects: u32,
    /// What its steps take.
    pub(super) cost: WorkerCost,
    /// Decode steps without draft or prompt that the target has not answered.
    pub(super) decodes_in_flight: u32,
}

/// A sequence that wants a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) model: &'a str,
    pub(super) task_type: &'a str,
    pub(super) lane: LaneId,
    /// Ids that it is expected to have at most.
    pub(super) expected_len: u32,
    /// Ids that it has now.
    pub(super) len: u32,
    pub(super) marks: &'a PrefixMarks,
    /// Ids that it may have at most.
    pub(super) max_len: u32,
    /// The worker that it just lost.
    pub(super) avoid: Option<WorkerKey>,
    /// Targets that refused it.
    pub(super) refused_by: &'a [WorkerKey],
    /// Whether targets were lost while they ran it: it runs beside no other such sequence, so that the one that kills
    /// its targets is found.
    pub(super) is_suspect: bool,
    pub(super) now: Duration,
}

/// Capacity reserved for a sequence at a worker. Returned by [`Workers::release`], or lost with the worker.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) key: WorkerKey,
    lane: LaneId,
    blocks: u64,
    /// Ids of its first step, while that is under way.
    prefilling: u32,
    is_suspect: bool,
    /// Whether the target owes it an answer.
    is_owed: bool,
}

impl Reservation {
    /// Whether the target owes the sequence an answer.
    pub(super) fn is_owed(&self) -> bool {
        self.is_owed
    }
}

/// Rows that a sequence brings to a step at most, for what a target may have to run.
const MAX_ROWS_OF_A_SEQUENCE: f64 = 8.0;

/// All connected workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    workers: BTreeMap<WorkerKey, Worker>,
    /// The targets of each model; read in every round.
    targets: BTreeMap<String, BTreeSet<WorkerKey>>,
    /// Connections in a row, by a target's address, that ended while it owed answers.
    crashes: BTreeMap<String, u32>,
    /// When the first target is to be looked at; may be early.
    next_check: Option<Duration>,
    /// Workers whose block counts changed since they were last reported.
    changed: BTreeSet<WorkerKey>,
}

impl Workers {
    pub(super) fn join(&mut self, now: Duration, key: WorkerKey, info: WorkerInfo) {
        let info = believable(info);
        let crashes = self.crashes.get(&info.address).copied().unwrap_or(0);
        if info.role == Role::Target {
            self.targets.entry(info.model_id.clone()).or_default().insert(key);
        }
        let worker = Worker {
            key,
            load: 0,
            lane_loads: BTreeMap::new(),
            credit: info.credit_blocks.unwrap_or(info.kv_blocks),
            reserved: 0,
            prefilling: 0,
            prefixes: PrefixMemory::default(),
            health: DraftHealth::default(),
            is_draining: false,
            target_health: TargetHealth::joined(
                now,
                crashes.min(FAILURES_TO_OPEN),
                !info.step_times.is_empty(),
            ),
            check_at: None,
            suspects: 0,
            cost: WorkerCost::new(step_times(&info)),
            decodes_in_flight: 0,
            info,
        };
        self.workers.insert(key, worker);
        self.changed.insert(key);
    }

    pub(super) fn leave(&mut self, key: WorkerKey) -> Option<WorkerInfo> {
        let Worker { info, target_health, .. } = self.workers.remove(&key)?;
        self.changed.remove(&key);
        if info.role == Role::Target && target_health.owes() {
            if self.crashes.len() >= MAX_CRASHES && !self.crashes.contains_key(&info.address) {
                self.crashes.pop_first();
            }
            *self.crashes.entry(info.address.clone()).or_default() += 1;
        }
        if let Some(targets) = self.targets.get_mut(&info.model_id) {
            targets.remove(&key);
            if targets.is_empty() {
                self.targets.remove(&info.model_id);
            }
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

    pub(super) fn role_of(&self, key: WorkerKey) -> Option<Role> {
        self.workers.get(&key).map(|worker| worker.info.role)
    }

    /// Whether a target serves a model.
    pub(super) fn is_served(&self, model: &str) -> bool {
        self.targets.contains_key(model)
    }

    pub(super) fn has(&self, role: Role) -> bool {
        self.workers.values().any(|worker| worker.info.role == role)
    }

    /// The workers of a sequence of `model`; `None` where it lacks one.
    pub(super) fn of_lane(
        &self,
        model: &str,
        target: Option<WorkerKey>,
        draft: Option<WorkerKey>,
    ) -> Option<WorkersOfLane<'_>> {
        let (target, draft) = (self.get(target?)?, self.get(draft?)?);
        Some(WorkersOfLane {
            target: &target.cost,
            draft: &draft.cost,
            num_targets: self.targets.get(model).map_or(0, BTreeSet::len) as u32,
            target_sequences: target.load,
            draft_sequences: draft.load,
        })
    }

    /// Reserves capacity at the best target that has it.
    pub(super) fn reserve_target(
        &mut self,
        wanted: &Wanted<'_>,
        numerics_id: Option<&str>,
    ) -> Option<Reservation> {
        let chosen = choose_target(self.candidates(wanted), wanted.model, numerics_id, wanted.avoid);
        self.reserve(chosen?, wanted)
    }

    /// Reserves capacity at the best draft worker for a sequence on `target`.
    pub(super) fn reserve_draft(&mut self, wanted: &Wanted<'_>, target: WorkerKey) -> Option<Reservation> {
        let chosen = self.best_draft(wanted, target);
        self.reserve(chosen?, wanted)
    }

    /// The draft worker that a sequence on `target` would be assigned.
    pub(super) fn best_draft(&self, wanted: &Wanted<'_>, target: WorkerKey) -> Option<WorkerKey> {
        let target = &self.get(target)?.info;
        let with_capacity = self.candidates(wanted).filter(|candidate| {
            let worker = self.get(candidate.key);
            worker.is_some_and(|worker| worker.has_blocks(worker.blocks_of(wanted.expected_len)))
        });
        choose_draft(with_capacity, target, wanted.task_type, wanted.avoid)
    }

    pub(super) fn release(&mut self, reservation: Reservation) {
        let Reservation { key, lane, blocks, prefilling, is_suspect, is_owed } = reservation;
        let Some(worker) = self.workers.get_mut(&key) else { return };
        if is_owed {
            worker.target_health.settled();
        }
        worker.suspects = worker.suspects.saturating_sub(u32::from(is_suspect));
        worker.load = worker.load.saturating_sub(1);
        worker.reserved = worker.reserved.saturating_sub(blocks);
        worker.prefilling = worker.prefilling.saturating_sub(prefilling);
        if let Some(load) = worker.lane_loads.get_mut(&lane) {
            *load -= 1;
            if *load == 0 {
                worker.lane_loads.remove(&lane);
            }
        }
        self.changed.insert(key);
    }

    /// The sequence has `len` ids now, and its first step is done. True where that frees capacity for others.
    pub(super) fn grow(&mut self, reservation: &mut Reservation, len: u32) -> bool {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return false };
        let blocks = worker.blocks_of(len);
        if blocks > reservation.blocks {
            worker.reserved += blocks - reservation.blocks;
            reservation.blocks = blocks;
            self.changed.insert(reservation.key);
        }
        worker.prefilling = worker.prefilling.saturating_sub(reservation.prefilling);
        std::mem::take(&mut reservation.prefilling) > 0
    }

    /// A step is sent to the sequence's target.
    pub(super) fn asked(&mut self, reservation: &mut Reservation, now: Duration) {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return };
        if !std::mem::replace(&mut reservation.is_owed, true) {
            worker.target_health.asked(now);
        }
        if worker.check_at.is_none() {
            let check_at = now + MIN_SILENCE;
            worker.check_at = Some(check_at);
            self.next_check = Some(self.next_check.map_or(check_at, |next| next.min(check_at)));
        }
    }

    /// The sequence's target answered.
    pub(super) fn answered(&mut self, reservation: &mut Reservation) {
        if std::mem::take(&mut reservation.is_owed)
            && let Some(worker) = self.workers.get_mut(&reservation.key)
        {
            worker.target_health.settled();
        }
    }

    /// The sequence got tokens from its target.
    pub(super) fn succeeded(&mut self, reservation: &mut Reservation) {
        let Some(worker) = self.workers.get_mut(&reservation.key) else { return };
        worker.target_health.succeeded();
        if !self.crashes.is_empty() {
            self.crashes.remove(&worker.info.address);
        }
        worker.suspects -= u32::from(std::mem::take(&mut reservation.is_suspect));
    }

    /// When to call [`Self::fallen_silent`] at the latest.
    pub(super) fn next_check(&self) -> Option<Duration> {
        self.next_check
    }

    /// The targets that have fallen silent since the last call.
    pub(super) fn fallen_silent(&mut self, now: Duration) -> Vec<WorkerKey> {
        if self.next_check.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let mut silent = Vec::new();
        for worker in self.workers.values_mut() {
            if worker.check_at.is_none_or(|at| now < at) {
                continue;
            }
            let expected = worker.expected_steps();
            if worker.target_health.falls_silent(now, expected) {
                silent.push(worker.key);
            }
            worker.check_at = worker.target_health.silent_at(expected);
        }
        self.next_check = self.workers.values().filter_map(|worker| worker.check_at).min();
        silent
    }

    /// Whether a target that could serve the sequence exists, with capacity or not.
    pub(super) fn could_serve(&self, wanted: &Wanted<'_>) -> bool {
        self.candidates(wanted).any(|candidate| candidate.serves(wanted.model))
    }

    /// Whether a target that could serve the sequence, of the same numerics class as `from`, is to be relied on.
    pub(super) fn could_move(&self, wanted: &Wanted<'_>, from: WorkerKey) -> bool {
        let Some(from) = self.get(from) else { return false };
        self.candidates(wanted).any(|candidate| {
            candidate.key != from.key
                && candidate.serves(wanted.model)
                && candidate.info.numerics_id == from.info.numerics_id
                && !candidate.is_out
        })
    }

    /// The worker limits how many blocks may be reserved there.
    pub(super) fn set_credit(&mut self, key: WorkerKey, blocks: u64) {
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.credit = blocks.min(MAX_KV_BLOCKS);
            self.changed.insert(key);
        }
    }

    /// The block counts that changed since the last call.
    pub(super) fn take_changed_blocks(&mut self) -> impl Iterator<Item = Report> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.filter_map(|key| {
            let worker = self.workers.get(&key)?;
            Some(Report::Blocks { worker: key, credit: worker.credit, reserved: worker.reserved })
        })
    }

    fn reserve(&mut self, key: WorkerKey, wanted: &Wanted<'_>) -> Option<Reservation> {
        let worker = self.workers.get_mut(&key)?;
        let blocks = worker.blocks_of(wanted.expected_len);
        let reservation = Reservation {
            key,
            lane: wanted.lane,
            blocks,
            prefilling: wanted.len,
            is_suspect: wanted.is_suspect,
            is_owed: false,
        };
        worker.target_health.assigned(wanted.now);
        worker.suspects += u32::from(wanted.is_suspect);
        worker.load += 1;
        *worker.lane_loads.entry(wanted.lane).or_default() += 1;
        worker.reserved += blocks;
        worker.prefilling += wanted.len;
        worker.prefixes.remember(wanted.marks);
        self.changed.insert(key);
        Some(reservation)
    }

    fn candidates(&self, wanted: &Wanted<'_>) -> impl Iterator<Item = Candidate<'_>> {
        let Wanted { lane, expected_len, len, marks, is_suspect, now, .. } = *wanted;
        let may_serve = |worker: &&Worker| {
            let window = worker.info.max_model_len;
            let serves =
                (window == 0 || wanted.max_len <= window) && !wanted.refused_by.contains(&worker.key);
            !worker.is_draining && (worker.info.role == Role::Draft || serves)
        };
        self.workers.values().filter(may_serve).map(move |worker| Candidate {
            key: worker.key,
            info: &worker.info,
            load: worker.load,
            lane_load: worker.lane_loads.get(&lane).copied().unwrap_or(0),
            shared_prefix: worker.prefixes.shared(marks),
            is_unfit: match worker.info.role {
                Role::Target => {
                    !worker.has_blocks(worker.blocks_of(expected_len))
                        || !worker.may_prefill(len)
                        || (is_suspect && worker.suspects > 0)
                }
                Role::Draft => worker.health.is_out(),
            },
            is_out: worker.target_health.is_out(now),
            step_micros: worker.cost.step_micros(1.0, 0.0),
        })
    }
}

impl Worker {
    /// KV blocks that this scheduler may reserve there, and those it has reserved.
    pub(super) fn blocks(&self) -> (u64, u64) {
        (self.credit, self.reserved)
    }

    /// KV blocks of a sequence of `len` ids.
    fn blocks_of(&self, len: u32) -> u64 {
        u64::from(len).div_ceil(u64::from(self.info.kv_block_size.max(1)))
    }

    /// Whether the credit covers `blocks` more (contract part A). One sequence always may run, and a worker without KV
    /// has nothing to count.
    fn has_blocks(&self, blocks: u64) -> bool {
        self.info.kv_blocks == 0 || self.load == 0 || self.reserved + blocks <= self.credit
    }

    /// What the target's steps take, for how long it may be silent.
    pub(super) fn expected_steps(&self) -> ExpectedSteps {
        let micros = |micros: f64| Duration::from_micros(micros as u64);
        let rows = f64::from(self.load) * MAX_ROWS_OF_A_SEQUENCE + f64::from(self.prefilling);
        let workload = Forward { rows, sequences: f64::from(self.load.max(1)), context: 0.0 };
        ExpectedSteps {
            one_row: micros(self.cost.step_micros(1.0, 0.0)),
            workload: micros(self.cost.forward_micros(workload)),
        }
    }

    fn may_prefill(&self, ids: u32) -> bool {
        self.prefilling == 0 || self.prefilling + ids <= MAX_PREFILL_IDS
    }
}

/// What a worker says of itself, with numbers that no arithmetic overflows on.
fn believable(info: WorkerInfo) -> WorkerInfo {
    let longest = MAX_REPORTED_STEP.as_micros() as u64;
    let mut step_times = info.step_times;
    step_times.truncate(MAX_PROFILED_POINTS);
    step_times.retain(|point| point.rows > 0);
    for point in &mut step_times {
        point.rows = point.rows.min(MAX_PREFILL_IDS);
        point.kv_tokens = point.kv_tokens.min(u64::from(u32::MAX));
        point.micros = point.micros.min(longest);
    }
    WorkerInfo {
        step_times,
        kv_blocks: info.kv_blocks.min(MAX_KV_BLOCKS),
        credit_blocks: info.credit_blocks.map(|blocks| blocks.min(MAX_KV_BLOCKS)),
        ..info
    }
}

/// What a worker profiled. A draft worker that profiled nothing drafts without a model, which costs next to nothing; a
/// target cannot be free.
fn step_times(info: &WorkerInfo) -> StepTimes {
    if info.step_times.is_empty() && info.role == Role::Target {
        return StepTimes::assumed();
    }
    StepTimes::new(&info.step_times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepTimePoint;

    /// A target of 10 blocks of 16 ids.
    fn target() -> WorkerInfo {
        WorkerInfo { kv_blocks: 10, kv_block_size: 16, vocab_size: 9, ..WorkerInfo::of(Role::Target, "m") }
    }

    fn with_target() -> Workers {
        let mut workers = Workers::default();
        workers.join(Duration::ZERO, WorkerKey(1), target());
        workers
    }

    fn wanted(expected_len: u32, len: u32, marks: &PrefixMarks) -> Wanted<'_> {
        Wanted {
            model: "m",
            task_type: "",
            lane: LaneId(1),
            expected_len,
            len,
            marks,
            max_len: expected_len,
            avoid: None,
            refused_by: &[],
            is_suspect: false,
            now: Duration::ZERO,
        }
    }

    #[test]
    fn capacity_is_reserved_within_the_credit_and_returned() {
        let (mut workers, marks) = (with_target(), PrefixMarks::default());
        let reserve = |workers: &mut Workers, ids| workers.reserve_target(&wanted(ids, 10, &marks), None);
        let reserved = |workers: &Workers| workers.get(WorkerKey(1)).unwrap().reserved;
        let first = reserve(&mut workers, 100).unwrap();
        assert!(reserve(&mut workers, 100).is_none(), "7 + 7 blocks of 10");
        let mut second = reserve(&mut workers, 48).unwrap();
        workers.set_credit(WorkerKey(1), 20);
        assert!(reserve(&mut workers, 160).is_some(), "3 + 7 + 10 blocks of 20");
        assert!(workers.grow(&mut second, 64), "the first step is done");
        assert!(!workers.grow(&mut second, 65), "and done once");
        assert_eq!(reserved(&workers), 22, "a sequence that outgrows its reservation gets more");
        workers.release(second);
        workers.release(first);
        let report = Report::Blocks { worker: WorkerKey(1), credit: 20, reserved: 10 };
        assert_eq!(workers.take_changed_blocks().collect::<Vec<_>>(), [report]);
        assert_eq!(workers.take_changed_blocks().count(), 0, "reported once");
        workers.set_credit(WorkerKey(1), 0);
        assert!(reserve(&mut workers, 1).is_none());
    }

    #[test]
    fn absurd_numbers_of_a_worker_overflow_nothing() {
        let point = |rows, kv_tokens, micros| StepTimePoint { rows, kv_tokens, micros };
        let (mut workers, marks) = (Workers::default(), PrefixMarks::default());
        let step_times =
            vec![point(0, 0, 1), point(1, 0, 1), point(1, 1, u64::MAX), point(u32::MAX, u64::MAX, u64::MAX)];
        let info = WorkerInfo { kv_blocks: u64::MAX, credit_blocks: Some(u64::MAX), step_times, ..target() };
        workers.join(Duration::ZERO, WorkerKey(1), info);
        workers.set_credit(WorkerKey(1), u64::MAX);
        for _ in 0..3 {
            assert!(workers.reserve_target(&wanted(u32::MAX, MAX_PREFILL_IDS / 3, &marks), None).is_some());
        }
        let expected = workers.get(WorkerKey(1)).unwrap().expected_steps();
        let mut health = TargetHealth::default();
        health.asked(Duration::ZERO);
        assert!(health.silent_at(expected).is_some(), "{expected:?}");
        let long = workers.get(WorkerKey(1)).unwrap().cost.step_micros(512.0, f64::from(u32::MAX));
        assert!(Duration::from_secs_f64(long / 1e6) < Duration::MAX / 1_000);
    }

    #[test]
    fn a_target_in_a_crash_loop_is_out_when_it_joins_until_a_sequence_succeeds() {
        let (mut workers, marks) = (Workers::default(), PrefixMarks::default());
        let is_out = |workers: &Workers, key| workers.get(key).unwrap().target_health.is_out(Duration::ZERO);
        for crash in 1..=4 {
            let key = WorkerKey(crash);
            workers.join(Duration::ZERO, key, target());
            assert_eq!(is_out(&workers, key), crash == 4, "{crash}");
            let mut reservation = workers.reserve_target(&wanted(10, 10, &marks), None).unwrap();
            workers.asked(&mut reservation, Duration::ZERO);
            if crash == 4 {
                workers.succeeded(&mut reservation);
            }
            workers.leave(key);
        }
        workers.join(Duration::ZERO, WorkerKey(9), target());
        assert!(!is_out(&workers, WorkerKey(9)), "what succeeded is no loop");
    }

    #[test]
    fn one_sequence_may_always_run_however_long() {
        let (mut workers, marks) = (with_target(), PrefixMarks::default());
        assert!(workers.reserve_target(&wanted(10_000, MAX_PREFILL_IDS + 1, &marks), None).is_some());
        assert!(workers.reserve_target(&wanted(1, 1, &marks), None).is_none());
    }

    #[test]
    fn prefills_under_way_at_a_target_are_bounded() {
        let (mut workers, marks) = (with_target(), PrefixMarks::default());
        workers.set_credit(WorkerKey(1), 1 << 40);
        let want = wanted(1, MAX_PREFILL_IDS / 2, &marks);
        let mut under_way: Vec<Reservation> =
            std::iter::from_fn(|| workers.reserve_target(&want, None)).collect();
        assert_eq!(under_way.len(), 2);
        assert!(workers.grow(&mut under_way[0], 1));
        assert!(workers.reserve_target(&want, None).is_some());
    }
}
