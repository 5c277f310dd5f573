//! [`Admission`]: how many sequences this router runs at once, and how many requests may wait for their turn. A request is
//! admitted as a whole, in the order of `scheduling::fair_queue`: by priority, with aging, and in order of arrival; its [`Permit`] travels inside the
//! response and is given back when the response ends or is dropped. Full means [`RouterError::Overloaded`] before the first byte.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use scheduling::fair_queue::{FairQueue, Ticket};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::RouterError;
use scheduling::waits::{WaitReport, Waits};

/// How long a request may wait for its turn before it is turned away.
pub const ADMISSION_WAIT_MAX: Duration = Duration::from_secs(30);

/// The limits of one router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Sequences (prompts times choices) that run at once.
    pub max_sequences: u32,
    /// Requests that may wait for sequences to end.
    pub max_waiting_requests: usize,
}

impl Default for AdmissionLimits {
    fn default() -> Self {
        Self { max_sequences: 1_024, max_waiting_requests: 1_024 }
    }
}

/// The gate in front of tokenizer and lanes. Clones share it.
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
    /// Requests that have not given up.
    num_waiting: usize,
    /// All of one lane: what a request is, is not known yet. Who gave up is skipped.
    waiting: FairQueue<(), Waiting>,
    waits: Waits,
}

#[derive(Debug)]
struct Waiting {
    num_sequences: u32,
    priority: u8,
    since: Duration,
    turn: oneshot::Sender<Permit>,
}

/// The right to run a request's sequences; given back on drop.
#[derive(Debug)]
pub struct Permit {
    num_sequences: u32,
    gate: Arc<Gate>,
}

impl Admission {
    /// An open gate.
    pub fn new(limits: AdmissionLimits) -> Self {
        let state = State {
            available: limits.max_sequences,
            num_waiting: 0,
            waiting: FairQueue::default(),
            waits: Waits::default(),
        };
        let gate = Gate { opened: Instant::now(), state: Mutex::new(state) };
        Self { limits, wait_max: ADMISSION_WAIT_MAX, gate: Arc::new(gate) }
    }

    /// Waits for the turn of a request of `num_sequences` sequences, unless too many wait already. Lower priorities go first.
    ///
    /// Cancel safety: dropping the future gives the place in the queue back.
    pub async fn admit(&self, num_sequences: u32, priority: u8) -> Result<Permit, RouterError> {
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
            // Whoever waits already goes first.
            if state.num_waiting == 0 && num_sequences <= state.available {
                state.waits.observe(priority, Duration::ZERO);
                return Ok(self.gate.grant(&mut state, num_sequences));
            }
            if state.num_waiting >= self.limits.max_waiting_requests {
                return Err(RouterError::Overloaded { what: "the router's queue" });
            }
            state.num_waiting += 1;
            let cost = f64::from(num_sequences);
            let since = self.gate.opened.elapsed();
            let ticket = Ticket { priority, weight: 1.0, cost, since };
            state.waiting.push((), ticket, Waiting { num_sequences, priority, since, turn });
            Place(&self.gate)
        };
        match tokio::time::timeout(self.wait_max, granted).await {
            Ok(permit) => permit.map_err(|_| RouterError::Draining),
            Err(_) => Err(RouterError::Overloaded { what: "the router (the wait for a turn timed out)" }),
        }
    }

    /// How long requests waited here, by priority.
    pub fn waits(&self) -> Vec<WaitReport> {
        let state = self.gate.state();
        state.waits.report(&state.waiting.waiting(), self.gate.opened.elapsed())
    }

    /// Sequences that could be admitted now.
    pub fn available(&self) -> usize {
        self.gate.state().available as usize
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked while it held the lock had changed whole numbers only.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grant(self: &Arc<Self>, state: &mut State, num_sequences: u32) -> Permit {
        state.available -= num_sequences;
        Permit { num_sequences, gate: Arc::clone(self) }
    }

    /// Lets in whose turn it is, as long as there is room.
    fn let_in(self: &Arc<Self>) {
        while let Some((turn, permit)) = self.next_turn() {
            // Who gave up meanwhile drops the permit, which makes room for the next one.
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
            let Waiting { num_sequences, priority, since, turn } = state.waiting.pop(now, true)?;
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

/// A place in the queue.
struct Place<'a>(&'a Arc<Gate>);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.state().num_waiting -= 1;
        // Whoever was too large for the room there was no longer holds up those behind it.
        self.0.let_in();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn admission(max_sequences: u32, max_waiting_requests: usize) -> Admission {
        Admission::new(AdmissionLimits { max_sequences, max_waiting_requests })
    }

    #[tokio::test]
    async fn a_permit_is_given_back_when_dropped() {
        let admission = admission(3, 0);
        let permit = admission.admit(2, 0).await.unwrap();
        assert_eq!(admission.available(), 1);
        assert!(matches!(admission.admit(2, 0).await, Err(RouterError::Overloaded { .. })));
        drop(permit);
        assert!(admission.admit(3, 0).await.is_ok());
    }

    #[tokio::test]
    async fn the_queue_has_a_limit_and_forgets_who_gave_up() {
        let admission = admission(1, 1);
        let permit = admission.admit(1, 0).await.unwrap();
        let mut waiting = Box::pin(admission.admit(1, 0));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(matches!(admission.admit(1, 0).await, Err(RouterError::Overloaded { .. })));
        drop(waiting);
        let mut waiting = Box::pin(admission.admit(1, 0));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(permit);
        assert!(waiting.await.is_ok());
    }

    #[tokio::test]
    async fn a_large_request_is_not_overtaken_for_ever() {
        let admission = admission(4, 8);
        let permit = admission.admit(2, 0).await.unwrap();
        let mut large = Box::pin(admission.admit(4, 0));
        assert!(large.as_mut().now_or_never().is_none());
        let mut small = Box::pin(admission.admit(1, 0));
        assert!(small.as_mut().now_or_never().is_none(), "it must wait behind the large one");
        drop(permit);
        drop(large.await.unwrap());
        assert!(small.await.is_ok());
    }

    #[tokio::test]
    async fn lower_priorities_go_first() {
        let admission = admission(1, 8);
        let permit = admission.admit(1, 0).await.unwrap();
        let mut patient = Box::pin(admission.admit(1, 9));
        assert!(patient.as_mut().now_or_never().is_none());
        let mut urgent = Box::pin(admission.admit(1, 0));
        assert!(urgent.as_mut().now_or_never().is_none());
        drop(permit);
        assert!(patient.as_mut().now_or_never().is_none());
        drop(urgent.await.unwrap());
        assert!(patient.await.is_ok());
    }

    #[tokio::test]
    async fn who_gives_up_lets_those_behind_it_in() {
        let admission = admission(4, 8);
        let _permit = admission.admit(2, 0).await.unwrap();
        let mut large = Box::pin(admission.admit(4, 0));
        assert!(large.as_mut().now_or_never().is_none());
        let mut small = Box::pin(admission.admit(1, 0));
        assert!(small.as_mut().now_or_never().is_none());
        drop(large);
        assert!(small.await.is_ok());
    }

    #[tokio::test]
    async fn whoever_waits_too_long_is_turned_away() {
        let admission = Admission { wait_max: Duration::from_millis(1), ..admission(1, 1) };
        let _permit = admission.admit(1, 0).await.unwrap();
        assert!(matches!(admission.admit(1, 0).await, Err(RouterError::Overloaded { .. })));
    }

    #[tokio::test]
    async fn what_can_never_run_is_refused_by_number() {
        let error = admission(2, 1).admit(3, 0).await.unwrap_err();
        assert!(
            error.to_string().contains("3 sequences") && error.to_string().contains("at most 2"),
            "{error}"
        );
    }
}
