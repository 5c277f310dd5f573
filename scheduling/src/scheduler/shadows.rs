//! Shadow drafts. A share of sequences is also opened at a draft worker on trial. Its proposals are compared
//! with the tokens that targets commit, and are sent to no target. A sequence never waits for its shadow. A
//! shadow that is late, refuses, or is preempted is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use speculation::sequence::{Commit, SHADOW_TOKENS, Shadow, ShadowFault, ShadowScore};
use speculation::{Reply, Role, SequenceId};

use super::Scheduler;
use super::active::ActiveSequence;
use super::events::{Command, Report, ShadowScored, WorkerKey};
use super::state::SchedulerState;
use super::workers::{MAX_ENTRIES, Reservation};
use crate::draft_score::{DraftScore, Pair, PairSums, PairedReport, PairedScore, ServedDraft};
use crate::rollout::is_sampled;

/// A sequence's contribution to trials.
#[derive(Debug, Default)]
pub(super) struct Trial {
    session: Option<Box<ShadowSession>>,
    /// Whether its shadow was dropped; it gets no other one.
    is_over: bool,
    /// Positions of its serving draft that were judged, and how many were accepted.
    served: (u64, u64),
}

/// A sequence at one shadow draft worker.
#[derive(Debug)]
struct ShadowSession {
    shadow: Shadow,
    reservation: Reservation,
    draft: Arc<str>,
    /// The serving draft at the position of the shadow's latest proposal.
    serving: Option<ServedDraft>,
    sums: PairSums,
}

impl Trial {
    /// Records the verification of a serving draft.
    pub(super) fn served(&mut self, judged: u32, accepted: u32) {
        self.served.0 += u64::from(judged);
        self.served.1 += u64::from(accepted);
    }

    pub(super) fn reservation_mut(&mut self) -> Option<&mut Reservation> {
        self.session.as_mut().map(|session| &mut session.reservation)
    }

    /// The worker that shadows the sequence.
    pub(super) fn shadowed_at(&self) -> Option<WorkerKey> {
        self.session.as_ref().map(|session| session.reservation.key)
    }
}

/// All trials of a scheduler.
#[derive(Debug, Default)]
pub(super) struct Shadows {
    /// Whether a draft worker is on trial; read for every commit.
    has_trials: bool,
    /// By draft and task type.
    scores: BTreeMap<(Arc<str>, String), Score>,
    /// By draft, for sequences that ended.
    paired: BTreeMap<Arc<str>, PairedScore>,
    dropped: BTreeMap<&'static str, u64>,
    /// Whether there is new evidence for a rollout.
    has_new_evidence: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Score {
    shadow: DraftScore,
    serving: DraftScore,
}

impl Shadows {
    pub(super) fn paired(&self, draft: &str) -> PairedScore {
        self.paired.get(draft).copied().unwrap_or_default()
    }

    /// Returns whether there is new evidence since the last call.
    pub(super) fn take_new_evidence(&mut self) -> bool {
        std::mem::take(&mut self.has_new_evidence)
    }

    /// Discards all scores; another draft serves now, so earlier comparisons are void.
    pub(super) fn forget_scores(&mut self) {
        self.scores.clear();
        self.paired.clear();
    }

    fn score(&mut self, draft: &Arc<str>, task_type: &str) -> Option<&mut Score> {
        let key = (Arc::clone(draft), task_type.to_owned());
        let has_capacity = self.scores.len() < MAX_ENTRIES;
        match self.scores.entry(key) {
            std::collections::btree_map::Entry::Vacant(_) if !has_capacity => None,
            entry => Some(entry.or_default()),
        }
    }
}

/// Why a shadow was dropped before its sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowEnd {
    /// It did not answer in time.
    Late,
    /// Its worker refused it.
    Refused,
    /// Its worker broke the contract.
    BrokeContract,
    /// Its worker dropped it to free KV.
    Preempted,
    /// Its worker disconnected or drains.
    WorkerLeft,
    /// Its worker is no longer on trial.
    RolloutEnded,
}

impl ShadowEnd {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::Late,
        Self::Refused,
        Self::BrokeContract,
        Self::Preempted,
        Self::WorkerLeft,
        Self::RolloutEnded,
    ];

    /// Name used in metrics and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Refused => "refused",
            Self::BrokeContract => "broke_contract",
            Self::Preempted => "preempted",
            Self::WorkerLeft => "worker_left",
            Self::RolloutEnded => "rollout_ended",
        }
    }
}

impl From<ShadowFault> for ShadowEnd {
    fn from(fault: ShadowFault) -> Self {
        match fault {
            ShadowFault::Timeout => Self::Late,
            ShadowFault::Refused => Self::Refused,
            ShadowFault::ProtocolViolation => Self::BrokeContract,
        }
    }
}

/// Report on draft workers on trial.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ShadowsReport {
    /// Share of sequences that are shadowed, capacity permitting.
    pub share: f64,
    /// Number of dropped shadows, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Scores by draft.
    pub drafts: Vec<ShadowReport>,
}

/// One shadow draft compared with the serving drafts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShadowReport {
    /// The shadow's model id.
    pub draft: String,
    /// Time of a one-row step at its fastest worker, microseconds; absent if none is connected.
    pub step_us: Option<f64>,
    /// Both drafts at the same positions, over sequences that ended.
    pub paired: PairedReport,
    /// By task type, including active sequences.
    pub task_types: Vec<TaskTypeReport>,
}

/// Scores for one task type.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TaskTypeReport {
    /// The task type.
    pub task_type: String,
    /// All compared proposals of the shadow.
    pub shadow: DraftScore,
    /// Mean accepted tokens per proposal.
    pub shadow_accepted: Option<f64>,
    /// Serving drafts at the same positions, cut to the same length.
    pub serving: DraftScore,
    /// Mean accepted tokens per proposal.
    pub serving_accepted: Option<f64>,
}

impl Scheduler {
    /// Handles the reply of a shadow draft.
    pub(super) fn shadow_replied(&mut self, key: WorkerKey, id: SequenceId, reply: Reply) {
        let Some(active) = self.sequences.get_mut(&id).filter(|at| at.trial.shadowed_at() == Some(key))
        else {
            return;
        };
        let Some(session) = &mut active.trial.session else { return };
        match session.shadow.on_reply(reply) {
            Ok(()) => self.state.advance_shadow(active),
            Err(fault) => self.state.drop_shadow(active, fault.into()),
        }
    }

    /// Handles a preemption by a shadow draft's worker.
    pub(super) fn shadow_preempted(&mut self, key: WorkerKey, id: SequenceId) {
        if let Some(active) = self.sequences.get_mut(&id).filter(|at| at.trial.shadowed_at() == Some(key)) {
            self.state.drop_shadow(active, ShadowEnd::Preempted);
        }
    }

    /// Drops the shadows at a worker that disconnected or drains.
    pub(super) fn drop_shadows_at(&mut self, key: WorkerKey) {
        self.drop_shadows(ShadowEnd::WorkerLeft, |at| at == key);
    }

    pub(super) fn drop_shadows(&mut self, reason: ShadowEnd, is_meant: impl Fn(WorkerKey) -> bool) {
        if self.state.shadows.has_trials {
            for active in self.sequences.values_mut() {
                if active.trial.shadowed_at().is_some_and(&is_meant) {
                    self.state.drop_shadow(active, reason);
                }
            }
        }
        self.update_has_trials();
    }

    /// Updates whether any draft worker is on trial.
    pub(super) fn update_has_trials(&mut self) {
        self.state.shadows.has_trials = self.state.workers.drafts_on_trial().next().is_some();
    }
}

impl SchedulerState {
    /// After a commit, compares the shadow's proposal and requests the next one.
    pub(super) fn follow_shadow(&mut self, active: &mut ActiveSequence, commit: &Commit) {
        if !self.shadows.has_trials {
            return;
        }
        match &mut active.trial.session {
            None if !active.sequence.is_done() => self.open_shadow(active),
            Some(session) if session.shadow.start() == Some(commit.start) => {
                let round = active.round;
                let has_serving_draft = round.num_requested > 0 && !round.is_late && round.source.is_none();
                session.serving = has_serving_draft.then_some(ServedDraft {
                    start: commit.start,
                    asked: round.num_requested,
                    judged: commit.draft_outcome.num_positions,
                    accepted: commit.draft_outcome.num_first,
                });
            }
            _ => {}
        }
        self.advance_shadow(active);
    }

    fn open_shadow(&mut self, active: &mut ActiveSequence) {
        let spec = active.sequence.spec();
        let is_meant = !active.trial.is_over
            && is_sampled(active.id, self.config.shadow_share, "shadow")
            && Shadow::can_score(spec)
            && !active.speculation.disables_drafting();
        let Some(target) = active.worker(Role::Target).filter(|_| is_meant) else { return };
        let serving = active.worker(Role::Draft);
        let request = self.placement_request(active, None);
        let Some(reservation) = self.workers.reserve_shadow(&request, target, serving) else { return };
        let Some(worker) = self.workers.get(reservation.key) else { return };
        let draft = worker.info.model_id.as_str().into();
        let (shadow, sums) = (Shadow::new(&active.sequence), PairSums::default());
        active.trial.session =
            Some(Box::new(ShadowSession { shadow, reservation, draft, serving: None, sums }));
    }

    /// Scores the shadow's pending proposal if possible, and sends its next step if one is due.
    fn advance_shadow(&mut self, active: &mut ActiveSequence) {
        let Some(session) = &mut active.trial.session else { return };
        if session.shadow.is_overdue(self.now) {
            return self.drop_shadow(active, ShadowEnd::Late);
        }
        if let Some(scored) = session.shadow.score(active.sequence.ids()) {
            let serving = session.serving.take();
            let pair = serving.and_then(|served| Pair::of(&scored, &served));
            pair.into_iter().for_each(|pair| session.sums.add(pair));
            let serving = pair.zip(serving).map(|(pair, served)| {
                let length = scored.asked.min(served.asked);
                (served.judged.min(length), pair.serving)
            });
            let draft = Arc::clone(&session.draft);
            self.on_scored(active, draft, (scored, serving));
        }
        let Some(session) = active.trial.session.as_mut().filter(|_| !active.sequence.is_done()) else {
            return;
        };
        if let Some(step) = session.shadow.next_step(self.now, &active.sequence) {
            self.commands.push(Command::Send(session.reservation.key, step));
        }
    }

    fn on_scored(
        &mut self,
        active: &ActiveSequence,
        draft: Arc<str>,
        (scored, serving): (ShadowScore, Option<(u32, u32)>),
    ) {
        let lane = Arc::clone(&active.lane.key);
        if let Some(score) = self.shadows.score(&draft, &lane.task_type) {
            score.shadow.observe(scored.judged, scored.accepted);
            serving.into_iter().for_each(|(judged, accepted)| score.serving.observe(judged, accepted));
        }
        let shadow = (scored.judged.min(SHADOW_TOKENS), scored.accepted);
        let report = ShadowScored { draft, lane, shadow, serving };
        self.commands.push(Command::Report(Report::ShadowScored(report)));
    }

    fn drop_shadow(&mut self, active: &mut ActiveSequence, reason: ShadowEnd) {
        active.trial.is_over = true;
        if let Some(draft) = self.close_shadow(active) {
            *self.shadows.dropped.entry(reason.as_str()).or_default() += 1;
            self.commands.push(Command::Report(Report::ShadowDropped { draft, reason }));
        }
    }

    /// Closes the sequence's shadow, if it has one, and keeps its scores.
    fn close_shadow(&mut self, active: &mut ActiveSequence) -> Option<Arc<str>> {
        let ShadowSession { shadow, reservation, draft, sums, .. } = *active.trial.session.take()?;
        let (name, assignment) = shadow.key();
        if self.workers.get(reservation.key).is_some() {
            self.commands.push(Command::Close(reservation.key, name, assignment));
        }
        self.workers.release_shadow(reservation);
        if sums.pairs > 0 {
            self.shadows.paired.entry(Arc::clone(&draft)).or_default().add(&sums);
            self.shadows.has_new_evidence = true;
        }
        Some(draft)
    }

    /// Ends the trial of a sequence that ended.
    pub(super) fn end_trial(&mut self, active: &mut ActiveSequence) {
        self.close_shadow(active);
        self.credit_serving_draft(active);
    }

    /// Credits the serving draft with its results for a sequence that leaves it.
    pub(super) fn credit_serving_draft(&mut self, active: &mut ActiveSequence) {
        let (judged, accepted) = std::mem::take(&mut active.trial.served);
        let draft = active.worker_in(&self.workers, Role::Draft);
        let Some(draft) = draft.map(|worker| worker.info.model_id.clone()) else { return };
        if let Some(rollout) = self.workers.rollout_mut() {
            rollout.on_served(&draft, judged, accepted);
            self.shadows.has_new_evidence = true;
        }
    }

    pub(super) fn report_shadows(&self) -> ShadowsReport {
        let mut drafts: BTreeMap<&str, Vec<TaskTypeReport>> = BTreeMap::new();
        for worker in self.workers.drafts_on_trial() {
            drafts.entry(&worker.info.model_id).or_default();
        }
        for ((draft, task_type), score) in &self.shadows.scores {
            drafts.entry(draft).or_default().push(TaskTypeReport {
                task_type: task_type.clone(),
                shadow: score.shadow,
                shadow_accepted: score.shadow.mean_accepted(),
                serving: score.serving,
                serving_accepted: score.serving.mean_accepted(),
            });
        }
        let report = |(draft, task_types): (&str, _)| ShadowReport {
            draft: draft.to_owned(),
            step_us: self.workers.fastest_step_us(|info| info.model_id == draft),
            paired: self.shadows.paired(draft).report(),
            task_types,
        };
        ShadowsReport {
            share: self.config.shadow_share,
            dropped: self.shadows.dropped.clone(),
            drafts: drafts.into_iter().map(report).collect(),
        }
    }
}
