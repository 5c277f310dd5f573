//! [`Admission`]: limits on the sequences that run at once and on the requests that wait. A request is
//! admitted as a whole, in the order of `scheduling::fair_queue`: by priority with aging, fair between API
//! keys, then by arrival. Its [`Permit`] travels inside the response and is released when the response ends
//! or is dropped. If the queue is full, the request fails with [`RouterError::Overloaded`] before the first
//! byte.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use scheduling::fair_queue::{FairQueue, Ticket};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::RouterError;
use scheduling::wait_stats::{WaitReport, WaitStats};

/// Maximum time that a request waits for admission.
pub const ADMISSION_WAIT_MAX: Duration = Duration::from_secs(30);

/// Name of the queue in errors.
const QUEUE: &str = "the router's queue";

/// A request for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asking {
    /// Number of sequences (prompts times choices) to run.
    pub num_sequences: u32,
    /// Lower goes first.
    pub priority: u8,
    /// Key among which admission is fair.
    pub key: u64,
}

/// Admission limits of one router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Maximum number of running sequences (prompts times choices).
    pub max_sequences: u32,
    /// Maximum number of waiting requests.
    pub max_waiting_requests: usize,
}

impl Default for AdmissionLimits {
    fn default() -> Self {
        Self { max_sequences: 1_024, max_waiting_requests: 1_024 }
    }
}

/// Admission control before tokenization and scheduling. Clones share the state.
#[derive(Debug, Clone)]
pub struct Admission {
    limits: AdmissionLimits,
    wait_max: Duration,
    gate: Arc<Gate>,
}

#[derive(Debug)]
struct Gate {
    opened: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    available: u32,
    /// Number of waiting requests, without cancelled ones.
    num_waiting: usize,
    /// Waiting requests by key. All are in one lane, because the task type is not known yet. Cancelled
    /// requests are skipped.
    waiting: FairQueue<u64, (), Waiting>,
    /// Number of waiting requests by key.
    num_waiting_of: BTreeMap<u64, usize>,
    /// Number assigned to the next waiting request.
    next_number: u64,
    /// Requests that were evicted in favor of another key and have not been polled since.
    turned_away: BTreeSet<u64>,
    waits: WaitStats,
}

#[derive(Debug)]
struct Waiting {
    num_sequences: u32,
    priority: u8,
    since: Duration,
    number: u64,
    key: u64,
    turn: oneshot::Sender<Permit>,
}

/// The right to run a request's sequences; released on drop.
#[derive(Debug)]
pub struct Permit {
    num_sequences: u32,
    gate: Arc<Gate>,
}

impl Admission {
    /// Creates an admission control without any requests.
    pub fn new(limits: AdmissionLimits) -> Self {
        let state = State {
            available: limits.max_sequences,
            num_waiting: 0,
            waiting: FairQueue::default(),
            num_waiting_of: BTreeMap::new(),
            next_number: 0,
            turned_away: BTreeSet::new(),
            waits: WaitStats::default(),
        };
        let gate = Gate { opened: Instant::now(), state: Mutex::new(state) };
        Self { limits, wait_max: ADMISSION_WAIT_MAX, gate: Arc::new(gate) }
    }

    /// Waits until a request of `num_sequences` sequences may run. Fails if too many requests wait already.
    /// Lower priorities go first.
    ///
    /// Cancel safety: dropping the future gives up the place in the queue.
    pub async fn admit(&self, asking: Asking) -> Result<Permit, RouterError> {
        let Asking { num_sequences, priority, key } = asking;
        let max_sequences = self.limits.max_sequences;
        if num_sequences > max_sequences {
            let message = format!(
                "prompts times n make {num_sequences} sequences, but this router runs at most {max_sequences} at once"
            );
            return Err(RouterError::invalid("n", message));
        }
        let (turn, granted) = oneshot::channel();
        let _place = {
            let mut state = self.gate.state();
            // Waiting requests go first.
            if state.num_waiting == 0 && num_sequences <= state.available {
                state.waits.observe(priority, Duration::ZERO);
                return Ok(self.gate.grant(&mut state, num_sequences));
            }
            if state.num_waiting >= self.limits.max_waiting_requests && !state.make_room(key) {
                return Err(RouterError::Overloaded { what: QUEUE });
            }
            state.num_waiting += 1;
            *state.num_waiting_of.entry(key).or_default() += 1;
            let number = state.next_number;
            state.next_number += 1;
            let cost = f64::from(num_sequences);
            let since = self.gate.opened.elapsed();
            let ticket = Ticket { priority, weight: 1.0, cost, since };
            let waiting = Waiting { num_sequences, priority, since, number, key, turn };
            state.waiting.push(key, (), ticket, waiting);
            Place { gate: &self.gate, number, key }
        };
        match tokio::time::timeout(self.wait_max, granted).await {
            // The sender was dropped: the request was evicted in favor of another key.
            Ok(permit) => permit.map_err(|_| RouterError::Overloaded { what: QUEUE }),
            Err(_) => Err(RouterError::Overloaded { what: "the router (timed out waiting for admission)" }),
        }
    }

    /// How long requests waited here, by priority.
    pub fn waits(&self) -> Vec<WaitReport> {
        let state = self.gate.state();
        state.waits.report(&state.waiting.waiting(), self.gate.opened.elapsed())
    }

    /// Number of sequences that could be admitted now.
    pub fn available(&self) -> usize {
        self.gate.state().available as usize
    }
}

impl State {
    /// Evicts the newest request of the key with the most waiting requests, if `key` would still have fewer.
    /// So no key can keep others out of the queue.
    fn make_room(&mut self, key: u64) -> bool {
        let own = self.num_waiting_of.get(&key).copied().unwrap_or(0);
        let most = self.num_waiting_of.iter().max_by_key(|(_, count)| **count);
        let Some((&most, _)) = most.filter(|(_, count)| **count > own + 1) else { return false };
        // Skip cancelled requests.
        while let Some(waiting) = self.waiting.pop_newest(&most) {
            if !waiting.turn.is_closed() {
                self.leave(waiting.key);
                self.turned_away.insert(waiting.number);
                return true;
            }
        }
        false
    }

    /// Removes a waiting request of `key` from the counts.
    fn leave(&mut self, key: u64) {
        self.num_waiting -= 1;
        if let Some(count) = self.num_waiting_of.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.num_waiting_of.remove(&key);
            }
        }
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under the lock can leave only counts half updated.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grant(self: &Arc<Self>, state: &mut State, num_sequences: u32) -> Permit {
        state.available -= num_sequences;
        Permit { num_sequences, gate: Arc::clone(self) }
    }

    /// Admits requests in turn while there is capacity.
    fn let_in(self: &Arc<Self>) {
        while let Some((turn, permit)) = self.next_turn() {
            // If the request was cancelled meanwhile, the permit is dropped, which frees capacity for the
            // next one.
            drop(turn.send(permit));
        }
    }

    fn next_turn(self: &Arc<Self>) -> Option<(oneshot::Sender<Permit>, Permit)> {
        let mut state = self.state();
        let now = self.opened.elapsed();
        loop {
            let next = state.waiting.peek(now)?;
            if next.turn.is_closed() {
                state.waiting.pop(now, false);
                continue;
            }
            if next.num_sequences > state.available {
                return None;
            }
            let Waiting { num_sequences, priority, since, turn, .. } = state.waiting.pop(now, true)?;
            state.waits.observe(priority, now.saturating_sub(since));
            return Some((turn, self.grant(&mut state, num_sequences)));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.state().available += self.num_sequences;
        self.gate.let_in();
    }
}

/// A waiting request's slot in the queue; dropping it leaves the queue.
struct Place<'a> {
    gate: &'a Arc<Gate>,
    number: u64,
    key: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.gate.state();
            if !state.turned_away.remove(&self.number) {
                state.leave(self.key);
            }
        }
        // A cancelled request that was too large for the free capacity no longer blocks the ones behind it.
        self.gate.let_in();
    }
}

#[cfg(test)]
mod tests;
