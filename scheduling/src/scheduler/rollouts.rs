//! Rollouts: orders of an operator, and decisions from evidence. Sequences change draft workers as they do
//! when one drains: the old worker is left at once, and the next round asks the new one. The text does not
//! change, because the target draws it.

use speculation::Role;
use speculation::sequence::Event as SequenceEvent;

use super::Scheduler;
use super::active::ActiveSequence;
use super::events::{Command, Report};
use super::shadows::ShadowEnd;
use super::state::SchedulerState;
use crate::rollout::{Preference, Rollout, RolloutOrder, RolloutReport, RolloutStage};

impl Scheduler {
    /// Executes an operator's order.
    pub(super) fn on_rollout_order(&mut self, order: RolloutOrder) {
        let rollout = self.state.workers.rollout_mut();
        match order {
            RolloutOrder::Begin(settings) => *rollout = Some(Rollout::new(settings)),
            RolloutOrder::Promote => {
                if let Some(rollout) =
                    rollout.as_mut().filter(|rollout| rollout.stage() != RolloutStage::Promoted)
                {
                    rollout.end(RolloutStage::Promoted);
                    return self.rollout_ended(RolloutStage::Promoted);
                }
            }
            RolloutOrder::End => *rollout = None,
        }
        self.state.shadows.forget_scores();
        self.move_to_preferred();
    }

    /// Ends the rollout if the evidence suffices.
    pub(super) fn evaluate_rollout(&mut self) {
        let SchedulerState { workers, shadows, .. } = &mut self.state;
        if !shadows.take_new_evidence() {
            return;
        }
        let Some(rollout) = workers.rollout().filter(|rollout| rollout.stage() == RolloutStage::Canary)
        else {
            return;
        };
        let (paired, slowdown) = (shadows.paired(rollout.draft()), workers.slowdown());
        let ended = workers.rollout_mut().as_mut().and_then(|rollout| rollout.evaluate(&paired, slowdown));
        if let Some(stage) = ended {
            self.rollout_ended(stage);
        }
    }

    /// Handles a new draft worker: it may be on trial, or run the promoted draft.
    pub(super) fn draft_worker_joined(&mut self) {
        if self.state.workers.rollout().is_some_and(|rollout| rollout.stage() == RolloutStage::Promoted) {
            self.move_to_preferred();
        } else {
            self.update_has_trials();
        }
    }

    fn rollout_ended(&mut self, stage: RolloutStage) {
        let moved = self.move_to_preferred();
        let Some(rollout) = self.state.workers.rollout() else { return };
        let draft = rollout.draft().to_owned();
        if stage == RolloutStage::Promoted {
            self.state.shadows.forget_scores();
        }
        self.state.commands.push(Command::Report(Report::RolloutEnded { draft, stage, moved }));
    }

    /// Removes sequences from draft workers that may no longer serve them or that only substitute for the
    /// promoted draft, and drops shadows at workers that are no longer on trial. Returns the number of
    /// sequences that moved.
    fn move_to_preferred(&mut self) -> usize {
        self.state.workers.draft_changes += 1;
        let is_promoted =
            self.state.workers.rollout().is_some_and(|rollout| rollout.stage() == RolloutStage::Promoted);
        let leaves = |active: &ActiveSequence| {
            let preference =
                active.worker(Role::Draft).map(|key| self.state.workers.preference_at(key, active.id));
            match preference {
                None | Some(Some(Preference::Primary)) => false,
                Some(Some(Preference::Fallback)) => is_promoted && self.state.has_preferred_draft(active),
                Some(None) => true,
            }
        };
        let leaving = self.select_sequences(leaves);
        for id in &leaving {
            self.drive(*id, SequenceEvent::Reassign(Role::Draft));
        }
        let on_trial: Vec<_> = self.state.workers.drafts_on_trial().map(|worker| worker.key).collect();
        self.drop_shadows(ShadowEnd::RolloutEnded, |key| !on_trial.contains(&key));
        leaving.len()
    }
}

impl SchedulerState {
    pub(super) fn report_rollout(&self) -> Option<RolloutReport> {
        let rollout = self.workers.rollout()?;
        let paired = self.shadows.paired(rollout.draft()).report();
        Some(rollout.report(paired, self.workers.slowdown()))
    }
}
