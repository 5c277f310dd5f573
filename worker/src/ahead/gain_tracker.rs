//! Decides whether drafting ahead pays off at this worker. Guesses made ahead save forward passes, but steps
//! that arrive during a forward pass of branches wait for its end. If the losses exceed the gains, drafting
//! ahead pauses.

use std::time::{Duration, Instant};

/// Number of proposals between comparisons of gain and loss.
const COMPARE_EVERY: u32 = 64;

/// Number of proposals to skip after a comparison shows a loss.
const PAUSE_PROPOSALS: u32 = 512;

/// EWMA weight of one forward pass.
const EWMA_WEIGHT: f64 = 1.0 / 8.0;

/// Running gain and loss of drafting ahead; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct GainTracker {
    /// Mean time of a forward pass of steps, in seconds.
    forward_secs: f64,
    saved_secs: f64,
    lost_secs: f64,
    num_proposals: u32,
    pause: u32,
    /// Start and end of the last forward pass of branches.
    last_branch_forward: Option<(Instant, Instant)>,
}

impl GainTracker {
    /// Called once per proposal; returns whether to draft ahead of its outcomes.
    pub(super) fn should_draft_ahead(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        self.num_proposals += 1;
        if self.num_proposals < COMPARE_EVERY {
            return true;
        }
        let is_gain = self.saved_secs >= self.lost_secs;
        self.pause = if is_gain { 0 } else { PAUSE_PROPOSALS };
        (self.saved_secs, self.lost_secs, self.num_proposals) = (0.0, 0.0, 0);
        is_gain
    }

    /// Records the duration of a forward pass of steps.
    pub(super) fn record_forward(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.forward_secs +=
            if self.forward_secs > 0.0 { EWMA_WEIGHT * (took - self.forward_secs) } else { took };
    }

    /// Records that `guesses` guesses no longer need a forward pass.
    pub(super) fn record_saved(&mut self, guesses: usize) {
        self.saved_secs += guesses as f64 * self.forward_secs;
    }

    /// Records a completed forward pass of branches.
    pub(super) fn record_branch_forward(&mut self, began: Instant, ended: Instant) {
        self.last_branch_forward = Some((began, ended));
    }

    /// Records the admission of a step that arrived at `received`, if its router waits for the answer.
    pub(super) fn record_admission(&mut self, received: Instant) {
        if let Some((began, ended)) = self.last_branch_forward {
            self.lost_secs += ended.saturating_duration_since(received.max(began)).as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates steps that each save `guesses` forward passes and arrive `wait` before a forward pass of
    /// branches ends. Returns how many of 1,000 proposals are drafted ahead of.
    fn drafted_ahead(guesses: usize, wait: Duration) -> usize {
        let mut tracker = GainTracker::default();
        tracker.record_forward(Duration::from_millis(10));
        let began = Instant::now();
        let ended = began + Duration::from_millis(20);
        let mut drafted = 0;
        for _ in 0..1_000 {
            if tracker.should_draft_ahead() {
                drafted += 1;
                tracker.record_branch_forward(began, ended);
                tracker.record_admission(ended - wait);
                tracker.record_saved(guesses);
            }
        }
        drafted
    }

    #[test]
    fn it_goes_on_while_it_gains_and_pauses_where_it_loses() {
        assert_eq!(drafted_ahead(2, Duration::from_millis(5)), 1_000);
        assert_eq!(drafted_ahead(0, Duration::ZERO), 1_000, "it costs nothing");
        let rare = drafted_ahead(0, Duration::from_millis(5));
        assert!((COMPARE_EVERY as usize..=3 * COMPARE_EVERY as usize).contains(&rare), "{rare}");
    }

    #[test]
    fn a_step_that_came_before_the_branches_ran_waited_for_them_alone() {
        let mut tracker = GainTracker::default();
        let began = Instant::now();
        tracker.record_branch_forward(began, began + Duration::from_millis(20));
        tracker.record_admission(began.checked_sub(Duration::from_secs(5)).unwrap());
        assert_eq!(tracker.lost_secs, 0.02);
    }
}
