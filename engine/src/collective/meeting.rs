//! A barrier for ranks that detects a missing rank. A rank that is lost (it panicked, or did not arrive
//! within the watchdog timeout) stays lost, and every later wait fails with its number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cpu_kernels::Patience;

use crate::EngineError;

/// A barrier that can fail. Shared by all ranks and the thread that drives them.
#[derive(Debug)]
pub(crate) struct Meeting {
    watchdog: Duration,
    /// Number of completed barriers and other signs of progress.
    round: AtomicU64,
    /// How long a rank spins before it blocks: a peer with the same work is a few microseconds late.
    patience: Patience,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    here: Vec<bool>,
    lost: Option<(usize, String)>,
}

impl Meeting {
    pub(crate) fn new(ranks: usize, watchdog: Duration) -> Self {
        let state = Mutex::new(State { here: vec![false; ranks], lost: None });
        Self {
            watchdog,
            round: AtomicU64::new(0),
            patience: Patience::default(),
            state,
            changed: Condvar::new(),
        }
    }

    /// Maximum time that a rank may be missing.
    pub(crate) fn watchdog(&self) -> Duration {
        self.watchdog
    }

    /// Grows with every completed barrier, which shows that ranks make progress.
    pub(crate) fn round(&self) -> u64 {
        self.round.load(Ordering::Acquire)
    }

    /// Marks a rank as permanently lost. The first reason recorded is kept.
    pub(crate) fn lose(&self, rank: usize, reason: String) {
        self.lock().lost.get_or_insert((rank, reason));
        self.changed.notify_all();
    }

    /// Returns an error if a rank is lost.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        lost(&self.lock())
    }

    /// Records progress of ranks that synchronise elsewhere.
    pub(crate) fn go_on(&self) {
        self.round.fetch_add(1, Ordering::Release);
    }

    /// Waits until every rank has arrived.
    pub(crate) fn wait(&self, rank: usize) -> Result<(), EngineError> {
        let round = self.round();
        {
            let mut state = self.lock();
            lost(&state)?;
            state.here[rank] = true;
            if state.here.iter().all(|here| *here) {
                state.here.fill(false);
                self.round.fetch_add(1, Ordering::Release);
                self.changed.notify_all();
                return Ok(());
            }
        }
        if self.patience.look(|| self.round() != round) { Ok(()) } else { self.sleep(round) }
    }

    fn sleep(&self, round: u64) -> Result<(), EngineError> {
        let deadline = Instant::now() + self.watchdog;
        let mut state = self.lock();
        while self.round() == round {
            lost(&state)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = state.here.iter().position(|here| !here).unwrap_or(0);
                let reason = format!("it did not reach the barrier within {:?}", self.watchdog);
                state.lost = Some((missing, reason));
                self.changed.notify_all();
                continue;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lost(state: &State) -> Result<(), EngineError> {
    match &state.lost {
        None => Ok(()),
        Some((rank, reason)) => Err(EngineError::RankLost { rank: *rank, reason: reason.clone() }),
    }
}
