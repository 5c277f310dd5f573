//! [`Admission`]: limits on the sequences that run at once and on the requests that wait. A request is
//! admitted as a whole, in the order of `scheduling::fair_queue`: by priority with aging, fair between API
//! keys, then by arrival. Its [`Permit`] travels inside the response and is released when the response ends
//! or is dropped. If the queue is full, the request fails with [`RouterError::Overloaded`] before the first
//! byte, and if it waits too long, with [`RouterError::WaitedTooLong`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use scheduling::fair_queue::{NumberedQueue, Ticket};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::RouterError;
use scheduling::wait_stats::{WaitReport, WaitStats};

/// Maximum time that a request waits for admission.
const ADMISSION_WAIT_MAX: Duration = Duration::from_secs(30);

/// Name of the queue in errors.
const QUEUE: &str = "the router's queue";

/// A request for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionRequest {
    /// Number of sequences (prompts times choices) to run.
    pub num_sequences: u32,
    /// Lower goes first.
    pub priority: u8,
    /// Key for fair queueing.
    pub fair_queue_key: u64,
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
    started_at: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    available: u32,
    /// Without lanes, because the task type is not known yet.
    waiting: NumberedQueue<WaitingRequest>,
    waits: WaitStats,
}

#[derive(Debug)]
struct WaitingRequest {
    num_sequences: u32,
    priority: u8,
    since: Duration,
    permit_tx: oneshot::Sender<Permit>,
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
            waiting: NumberedQueue::default(),
            waits: WaitStats::default(),
        };
        let gate = Gate { started_at: Instant::now(), state: Mutex::new(state) };
        Self { limits, wait_max: ADMISSION_WAIT_MAX, gate: Arc::new(gate) }
    }

    /// Waits until the request may run. Fails if too many requests wait already.
    ///
    /// Cancel safety: dropping the future gives up the place in the queue.
    pub async fn admit(&self, request: AdmissionRequest) -> Result<Permit, RouterError> {
        let AdmissionRequest { num_sequences, priority, fair_queue_key } = request;
        let max_sequences = self.limits.max_sequences;
        if num_sequences > max_sequences {
            let message = format!(
                "prompts times n make {num_sequences} sequences, but this router runs at most {max_sequences} at once"
            );
            return Err(RouterError::invalid("n", message));
        }
        let (permit_tx, permit_rx) = oneshot::channel();
        let (_slot, evicted) = {
            let mut state = self.gate.state();
            // Waiting requests go first.
            if state.waiting.is_empty() && num_sequences <= state.available {
                state.waits.observe(priority, Duration::ZERO);
                return Ok(self.gate.grant(&mut state, num_sequences));
            }
            let mut evicted = None;
            if state.waiting.len() >= self.limits.max_waiting_requests {
                let newest = state.waiting.evict_for(fair_queue_key);
                evicted = Some(newest.ok_or(RouterError::Overloaded { what: QUEUE })?);
            }
            let cost = f64::from(num_sequences);
            let since = self.gate.started_at.elapsed();
            let ticket = Ticket { priority, weight: 1.0, cost, arrived: since, since };
            let request = WaitingRequest { num_sequences, priority, since, permit_tx };
            let number = state.waiting.push(fair_queue_key, ticket, request);
            (QueueSlot { gate: &self.gate, number }, evicted)
        };
        // Outside the lock, as this wakes its waiting future.
        drop(evicted);
        // It may go before a larger one that waits for more capacity than is free.
        self.gate.admit_waiting();
        match tokio::time::timeout(self.wait_max, permit_rx).await {
            // The sender was dropped: the request was evicted in favor of another key.
            Ok(permit) => permit.map_err(|_| RouterError::Overloaded { what: QUEUE }),
            Err(_) => Err(RouterError::WaitedTooLong { what: "the router", waited: self.wait_max }),
        }
    }

    /// How long requests waited here, by priority.
    pub fn waits(&self) -> Vec<WaitReport> {
        let state = self.gate.state();
        state.waits.report(&state.waiting.waiting(), self.gate.started_at.elapsed())
    }

    /// Number of sequences that could be admitted now.
    pub fn available(&self) -> usize {
        self.gate.state().available as usize
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
    fn admit_waiting(self: &Arc<Self>) {
        while let Some((permit_tx, permit)) = self.next_admission() {
            // If the request was cancelled meanwhile, the permit is dropped, which frees capacity for the
            // next one.
            drop(permit_tx.send(permit));
        }
    }

    fn next_admission(self: &Arc<Self>) -> Option<(oneshot::Sender<Permit>, Permit)> {
        let mut state = self.state();
        let now = self.started_at.elapsed();
        let State { available, waiting, waits } = &mut *state;
        let (number, next) = waiting.peek(now)?;
        if next.num_sequences > *available {
            return None;
        }
        let WaitingRequest { num_sequences, priority, since, permit_tx } = waiting.serve(number)?;
        waits.observe(priority, now.saturating_sub(since));
        Some((permit_tx, self.grant(&mut state, num_sequences)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.state().available += self.num_sequences;
        self.gate.admit_waiting();
    }
}

/// A waiting request's slot in the queue; dropping it leaves the queue.
struct QueueSlot<'a> {
    gate: &'a Arc<Gate>,
    number: u64,
}

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        // Absent if it was admitted or evicted. Its lock must be released before the next line.
        drop(self.gate.state().waiting.remove(self.number));
        // A cancelled request that was too large for the free capacity no longer blocks the ones behind it.
        self.gate.admit_waiting();
    }
}

#[cfg(test)]
mod tests;
