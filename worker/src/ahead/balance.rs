//! Decides whether drafting ahead pays off at this worker. Guesses made ahead save forward passes, but steps
//! that arrive during a forward pass of branches wait for its end. If the losses exceed the gains, drafting
//! ahead pauses.

use std::time::{Duration, Instant};

/// Number of proposals between comparisons of gain and loss.
const LOOK_EVERY: u32 = 64;

/// Number of proposals to skip after a comparison shows a loss.
const PAUSE: u32 = 512;

/// EWMA weight of one forward pass.
const GAIN: f64 = 1.0 / 8.0;

/// Running gain and loss of drafting ahead; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Mean time of a forward pass of steps, in seconds.
    forward: f64,
    gained: f64,
    lost: f64,
    looked: u32,
    pause: u32,
    /// Start and end of the last forward pass of branches.
    ran_ahead: Option<(Instant, Instant)>,
}

impl Balance {
    /// Called once per proposal; returns whether to draft ahead of its outcomes.
    pub(super) fn pays(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        self.looked += 1;
        if self.looked < LOOK_EVERY {
            return true;
        }
        let pays = self.gained >= self.lost;
        self.pause = if pays { 0 } else { PAUSE };
        (self.gained, self.lost, self.looked) = (0.0, 0.0, 0);
        pays
    }

    /// Records the duration of a forward pass of steps.
    pub(super) fn ran(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.forward += if self.forward > 0.0 { GAIN * (took - self.forward) } else { took };
    }

    /// Records that `guesses` guesses no longer need a forward pass.
    pub(super) fn saved(&mut self, guesses: usize) {
        self.gained += guesses as f64 * self.forward;
    }

    /// Records a completed forward pass of branches.
    pub(super) fn ran_ahead(&mut self, began: Instant, ended: Instant) {
        self.ran_ahead = Some((began, ended));
    }

    /// Records the admission of a step that arrived at `received`.
    pub(super) fn admitted(&mut self, received: Instant) {
        if let Some((began, ended)) = self.ran_ahead {
            self.lost += ended.saturating_duration_since(received.max(began)).as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates steps that each save `guesses` forward passes and arrive `wait` before a forward pass of
    /// branches ends. Returns how many of 1,000 proposals are drafted ahead of.
    fn drafted_ahead(guesses: usize, wait: Duration) -> usize {
        let mut balance = Balance::default();
        balance.ran(Duration::from_millis(10));
        let began = Instant::now();
        let ended = began + Duration::from_millis(20);
        let mut drafted = 0;
        for _ in 0..1_000 {
            if balance.pays() {
                drafted += 1;
                balance.ran_ahead(began, ended);
                balance.admitted(ended - wait);
                balance.saved(guesses);
            }
        }
        drafted
    }

    #[test]
    fn it_goes_on_while_it_gains_and_pauses_where_it_loses() {
        assert_eq!(drafted_ahead(2, Duration::from_millis(5)), 1_000);
        assert_eq!(drafted_ahead(0, Duration::ZERO), 1_000, "it costs nothing");
        let rare = drafted_ahead(0, Duration::from_millis(5));
        assert!((LOOK_EVERY as usize..=3 * LOOK_EVERY as usize).contains(&rare), "{rare}");
    }

    #[test]
    fn a_step_that_came_before_the_branches_ran_waited_for_them_alone() {
        let mut balance = Balance::default();
        let began = Instant::now();
        balance.ran_ahead(began, began + Duration::from_millis(20));
        balance.admitted(began.checked_sub(Duration::from_secs(5)).unwrap());
        assert_eq!(balance.lost, 0.02);
    }
}
