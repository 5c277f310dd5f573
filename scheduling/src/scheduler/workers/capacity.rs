//! Targets with capacity for a sequence, and those for which sequences wait. `placement.rs` ranks them.

use super::super::events::WorkerKey;
use super::super::placement::{Candidate, awaited_targets, choose_target};
use super::{PlacementRequest, Reservation, Workers};

impl Workers {
    /// Reserves capacity at the best target that has enough.
    pub(in crate::scheduler) fn reserve_target(
        &mut self,
        request: &PlacementRequest<'_>,
    ) -> Option<Reservation> {
        let chosen = choose_target(self.candidates(request), request.numerics_id, request.avoid);
        self.reserve(chosen?, request)
    }

    /// The targets for which a sequence waits that [`Self::reserve_target`] gave none.
    pub(in crate::scheduler) fn awaited_targets(&self, request: &PlacementRequest<'_>) -> Vec<WorkerKey> {
        awaited_targets(self.candidates(request), request.numerics_id)
    }

    /// Whether a target of the model other than these has capacity for a short sequence.
    pub(in crate::scheduler) fn has_capacity_beside(&self, model: &str, awaited: &[WorkerKey]) -> bool {
        let mut others = self.targets_of(model).filter(|worker| !awaited.contains(&worker.key));
        others.any(|worker| {
            !worker.draining.is_active() && worker.has_blocks(worker.blocks_of(1)) && worker.may_prefill(1)
        })
    }

    /// Whether a suspect can get no target because each target of its numerics class, or each target if there
    /// is none of that class, runs another suspect.
    pub(in crate::scheduler) fn all_run_suspects(&self, request: &PlacementRequest<'_>) -> bool {
        let is_same = |candidate: &Candidate<'_>| {
            request.numerics_id.is_none_or(|numerics_id| candidate.info.numerics_id == numerics_id)
        };
        let any_same = self.candidates(request).any(|candidate| is_same(&candidate));
        let mut eligible = self.candidates(request).filter(|candidate| !any_same || is_same(candidate));
        request.is_suspect
            && eligible.all(|candidate| self.get(candidate.key).is_some_and(|worker| worker.suspects > 0))
    }
}
