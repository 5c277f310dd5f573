//! A barrier for ranks that detects a missing rank. A rank that is lost (it panicked, or did not arrive
//! within the watchdog timeout) stays lost, and every later wait fails with its number.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cpu_kernels::SpinPolicy;

use crate::EngineError;

/// A barrier that can fail. Shared by all ranks and the thread that drives them.
#[derive(Debug)]
pub(crate) struct RankBarrier {
    /// Number of the first rank; ranks of other nodes do not come to this barrier.
    first: usize,
    watchdog: Duration,
    /// Number of completed barriers.
    generation: AtomicU64,
    /// Number of other signs of progress.
    other_progress: AtomicU64,
    /// How long a rank spins before it blocks: a peer with the same work is a few microseconds late.
    spin_policy: SpinPolicy,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    arrived: Vec<bool>,
    lost: Option<(usize, String)>,
}

impl RankBarrier {
    pub(crate) fn new(ranks: usize, watchdog: Duration) -> Self {
        Self::of_node(0..ranks, watchdog)
    }

    /// The barrier of the ranks of one node.
    pub(crate) fn of_node(ranks: Range<usize>, watchdog: Duration) -> Self {
        let state = Mutex::new(State { arrived: vec![false; ranks.len()], lost: None });
        Self {
            first: ranks.start,
            watchdog,
            generation: AtomicU64::new(0),
            other_progress: AtomicU64::new(0),
            spin_policy: SpinPolicy::default(),
            state,
            changed: Condvar::new(),
        }
    }

    /// Number of the first rank of this node.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Maximum time that a rank may be missing.
    pub(crate) fn watchdog(&self) -> Duration {
        self.watchdog
    }

    /// Grows with every completed barrier, and with [`RankBarrier::record_progress`].
    pub(crate) fn progress(&self) -> u64 {
        self.generation() + self.other_progress.load(Ordering::Acquire)
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Marks a rank, of any node, as permanently lost. The first reason recorded is kept.
    pub(crate) fn mark_lost(&self, rank: usize, reason: String) {
        self.lock().lost.get_or_insert((rank, reason));
        self.changed.notify_all();
    }

    /// Returns an error if a rank is lost.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        lost(&self.lock())
    }

    /// Records progress of ranks that synchronise elsewhere.
    pub(crate) fn record_progress(&self) {
        self.other_progress.fetch_add(1, Ordering::Release);
    }

    /// Waits until every rank has arrived.
    pub(crate) fn wait(&self, rank: usize) -> Result<(), EngineError> {
        let generation = self.generation();
        {
            let mut state = self.lock();
            lost(&state)?;
            state.arrived[rank - self.first] = true;
            if state.arrived.iter().all(|arrived| *arrived) {
                state.arrived.fill(false);
                self.generation.fetch_add(1, Ordering::Release);
                self.changed.notify_all();
                return Ok(());
            }
        }
        if self.spin_policy.spin_until(|| self.generation() != generation) {
            Ok(())
        } else {
            self.wait_blocking(generation)
        }
    }

    fn wait_blocking(&self, generation: u64) -> Result<(), EngineError> {
        let deadline = Instant::now() + self.watchdog;
        let mut state = self.lock();
        while self.generation() == generation {
            lost(&state)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = state.arrived.iter().position(|arrived| !arrived).unwrap_or(0) + self.first;
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
