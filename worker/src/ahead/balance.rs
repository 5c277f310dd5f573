//! Whether drafting ahead pays at this worker: guesses made ahead save forward passes, and steps that come during a forward pass of
//! branches wait for its end. A worker that loses time by it stops for a while.

use std::time::{Duration, Instant};

/// Proposals after which gain and loss are compared.
const LOOK_EVERY: u32 = 64;

/// Proposals that are not drafted ahead of once it did not pay.
const PAUSE: u32 = 512;

/// Weight of a forward pass in the mean.
const GAIN: f64 = 1.0 / 8.0;

/// See the module's page.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// What forward passes of steps take on average, seconds.
    forward: f64,
    gained: f64,
    lost: f64,
    looked: u32,
    pause: u32,
    /// When the last forward pass of branches began and ended.
    ran_ahead: Option<(Instant, Instant)>,
}

impl Balance {
    /// Asked for each proposal: whether to draft ahead of what comes of it.
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

    /// A forward pass of steps took so long.
    pub(super) fn ran(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.forward += if self.forward > 0.0 { GAIN * (took - self.forward) } else { took };
    }

    /// So many guesses need no forward pass any more.
    pub(super) fn saved(&mut self, guesses: usize) {
        self.gained += guesses as f64 * self.forward;
    }

    /// A forward pass of branches is over.
    pub(super) fn ran_ahead(&mut self, began: Instant, ended: Instant) {
        self.ran_ahead = Some((began, ended));
    }

    /// A step that came at `received` is admitted.
    pub(super) fn admitted(&mut self, received: Instant) {
        if let Some((began, ended)) = self.ran_ahead {
            self.lost += ended.saturating_duration_since(received.max(began)).as_secs_f64();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that each save `guesses` forward passes and come so long before a forward pass of branches ends; how many of 1,000
    /// proposals are drafted ahead of.
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
