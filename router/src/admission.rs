//! [`Admission`]: how many sequences this router runs at once, and how many may wait for their turn. A request is
//! admitted as a whole, first come, first served; its [`Permit`] travels inside the response and is given back when the
//! response ends or is dropped. Full means [`RouterError::Overloaded`] before the first byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RouterError;

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
    sequences: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
}

/// The right to run a request's sequences; given back on drop.
#[derive(Debug)]
pub struct Permit {
    _sequences: OwnedSemaphorePermit,
}

impl Admission {
    /// An open gate.
    pub fn new(limits: AdmissionLimits) -> Self {
        let sequences = Arc::new(Semaphore::new(limits.max_sequences as usize));
        Self { limits, wait_max: ADMISSION_WAIT_MAX, sequences, waiting: Arc::default() }
    }

    /// Waits for the turn of a request of `num_sequences` sequences, unless too many wait already.
    ///
    /// Cancel safety: dropping the future gives the place in the queue back.
    pub async fn admit(&self, num_sequences: u32) -> Result<Permit, RouterError> {
        let max_sequences = self.limits.max_sequences;
        if num_sequences > max_sequences {
            let message = format!(
                "prompts times n make {num_sequences} sequences, but this router runs at most {max_sequences} at once"
            );
            return Err(RouterError::invalid("n", message));
        }
        let turn = Arc::clone(&self.sequences).acquire_many_owned(num_sequences);
        let mut turn = std::pin::pin!(turn);
        // The first poll takes free permits, or queues: fair to whoever waits already.
        if let std::task::Poll::Ready(permit) = futures::poll!(turn.as_mut()) {
            return granted(permit);
        }
        let _place = self.enter_queue()?;
        match tokio::time::timeout(self.wait_max, turn).await {
            Ok(permit) => granted(permit),
            Err(_) => Err(RouterError::Overloaded { what: "the router (the wait for a turn timed out)" }),
        }
    }

    /// Sequences that could be admitted now.
    pub fn available(&self) -> usize {
        self.sequences.available_permits()
    }

    fn enter_queue(&self) -> Result<Place, RouterError> {
        let place = Place(Arc::clone(&self.waiting));
        if self.waiting.fetch_add(1, Ordering::AcqRel) >= self.limits.max_waiting_requests {
            return Err(RouterError::Overloaded { what: "the router's queue" });
        }
        Ok(place)
    }
}

fn granted(permit: Result<OwnedSemaphorePermit, tokio::sync::AcquireError>) -> Result<Permit, RouterError> {
    permit.map(|sequences| Permit { _sequences: sequences }).map_err(|_| RouterError::Draining)
}

/// A place in the queue.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
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
        let permit = admission.admit(2).await.unwrap();
        assert_eq!(admission.available(), 1);
        assert!(matches!(admission.admit(2).await, Err(RouterError::Overloaded { .. })));
        drop(permit);
        assert!(admission.admit(3).await.is_ok());
    }

    #[tokio::test]
    async fn the_queue_has_a_limit_and_forgets_who_gave_up() {
        let admission = admission(1, 1);
        let permit = admission.admit(1).await.unwrap();
        let mut waiting = Box::pin(admission.admit(1));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(matches!(admission.admit(1).await, Err(RouterError::Overloaded { .. })));
        drop(waiting);
        let mut waiting = Box::pin(admission.admit(1));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(permit);
        assert!(waiting.await.is_ok());
    }

    #[tokio::test]
    async fn a_large_request_is_not_overtaken_for_ever() {
        let admission = admission(4, 8);
        let permit = admission.admit(2).await.unwrap();
        let mut large = Box::pin(admission.admit(4));
        assert!(large.as_mut().now_or_never().is_none());
        let mut small = Box::pin(admission.admit(1));
        assert!(small.as_mut().now_or_never().is_none(), "it must wait behind the large one");
        drop(permit);
        drop(large.await.unwrap());
        assert!(small.await.is_ok());
    }

    #[tokio::test]
    async fn whoever_waits_too_long_is_turned_away() {
        let admission = Admission { wait_max: Duration::from_millis(1), ..admission(1, 1) };
        let _permit = admission.admit(1).await.unwrap();
        assert!(matches!(admission.admit(1).await, Err(RouterError::Overloaded { .. })));
    }

    #[tokio::test]
    async fn what_can_never_run_is_refused_by_number() {
        let error = admission(2, 1).admit(3).await.unwrap_err();
        assert!(
            error.to_string().contains("3 sequences") && error.to_string().contains("at most 2"),
            "{error}"
        );
    }
}
