//! Draft workers on trial: selection of shadows, and the current rollout.

use speculation::{Role, SequenceId};

use super::{PlacementRequest, Reservation, Worker, Workers};
use crate::rollout::{Preference, Rollout, is_scored, preference};
use crate::scheduler::events::{WorkerInfo, WorkerKey};
use crate::scheduler::pairing;

/// Maximum sequences that one worker shadows for this router. Bounds the rows of its forward passes that
/// produce no output.
const MAX_SHADOWS: u32 = 8;

impl Workers {
    /// The current rollout.
    pub(in crate::scheduler) fn rollout(&self) -> Option<&Rollout> {
        self.rollout.as_ref()
    }

    pub(in crate::scheduler) fn rollout_mut(&mut self) -> &mut Option<Rollout> {
        &mut self.rollout
    }

    /// Whether the worker is a shadow draft, or a candidate that was not promoted.
    pub(in crate::scheduler) fn is_on_trial(&self, worker: &Worker) -> bool {
        is_scored(self.rollout(), &worker.info.model_id, worker.info.is_shadow)
    }

    /// Preference of this draft worker for a sequence.
    pub(in crate::scheduler) fn preference_at(&self, key: WorkerKey, id: SequenceId) -> Option<Preference> {
        let info = &self.get(key)?.info;
        preference(self.rollout(), (&info.model_id, info.is_shadow), id)
    }

    /// Draft workers that were not started as shadow drafts, or were promoted.
    pub(in crate::scheduler) fn serving_drafts(&self) -> impl Iterator<Item = &Worker> {
        self.values().filter(|worker| {
            worker.info.role == Role::Draft && !(worker.info.is_shadow && self.is_on_trial(worker))
        })
    }

    /// Draft workers on trial.
    pub(in crate::scheduler) fn drafts_on_trial(&self) -> impl Iterator<Item = &Worker> {
        self.values().filter(|worker| worker.info.role == Role::Draft && self.is_on_trial(worker))
    }

    /// Reserves capacity to shadow a sequence that runs on `target` and has the serving draft worker
    /// `serving`.
    pub(in crate::scheduler) fn reserve_shadow(
        &mut self,
        request: &PlacementRequest<'_>,
        target: WorkerKey,
        serving: Option<WorkerKey>,
    ) -> Option<Reservation> {
        let target = &self.get(target)?.info;
        let serving = serving.and_then(|key| self.get(key)).map(|worker| worker.info.model_id.as_str());
        let fits = |worker: &&Worker| {
            let info = &worker.info;
            serving != Some(info.model_id.as_str())
                && worker.shadows < MAX_SHADOWS
                && !worker.draining.is_active()
                && !worker.draft_health.is_silent()
                && info.has_window(request.max_len)
                && info.accepts_task(request.task_type)
                && worker.has_blocks(worker.blocks_of(request.expected_len))
                && pairing::check(info, target).is_ok()
        };
        let key = self.drafts_on_trial().filter(fits).min_by_key(|worker| (worker.shadows, worker.key))?.key;
        let reservation = self.reserve(key, request)?;
        if let Some(worker) = self.get_mut(key) {
            worker.shadows += 1;
        }
        Some(reservation)
    }

    /// Releases a reservation of [`Workers::reserve_shadow`].
    pub(in crate::scheduler) fn release_shadow(&mut self, reservation: Reservation) {
        if let Some(worker) = self.get_mut(reservation.key) {
            worker.shadows = worker.shadows.saturating_sub(1);
        }
        self.release(reservation);
    }

    /// Step time of the candidate divided by that of the fastest other draft, if both are connected.
    pub(in crate::scheduler) fn slowdown(&self) -> Option<f64> {
        let candidate = self.rollout()?.draft();
        let of_candidate = self.fastest_step_us(|draft| draft.model_id == candidate)?;
        let of_other = self.fastest_step_us(|draft| !draft.is_shadow && draft.model_id != candidate)?;
        // A draft without a model takes no time.
        Some(of_candidate.max(1.0) / of_other.max(1.0))
    }

    /// Time of a one-row step at the fastest of these draft workers, microseconds; `None` if there is none.
    pub(in crate::scheduler) fn fastest_step_us(
        &self,
        is_meant: impl Fn(&WorkerInfo) -> bool,
    ) -> Option<f64> {
        let drafts = self.values().filter(|worker| worker.info.role == Role::Draft && is_meant(&worker.info));
        drafts.map(|worker| worker.cost.step_us(1.0, 0.0)).reduce(f64::min)
    }
}
