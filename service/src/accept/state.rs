//! State of a connection's requests, used by the connection's task: whether any are in flight, and whose
//! responses are not read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Version;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::response::{ResponseBody, ResponseSlot};

/// The requests of one connection, shared by its task and the requests' tasks.
#[derive(Debug)]
pub(super) struct ConnectionState {
    /// Wakes the connection's task: another timeout applies, or a response is to be cut.
    pub(super) wake: Arc<Notify>,
    /// Bytes written to the peer.
    pub(super) written: Arc<AtomicU64>,
    is_http1: AtomicBool,
    requests: Mutex<Requests>,
}

#[derive(Debug)]
struct Requests {
    num_begun: u64,
    in_flight: HashMap<u64, Arc<ResponseSlot>>,
    /// Time since when no request is in flight.
    idle_since: Instant,
}

/// Snapshot of the requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    /// Whether there was ever a request.
    pub(super) any_begun: bool,
    /// Time since when no request is in flight; `None` while there is one.
    pub(super) idle_since: Option<Instant>,
}

impl ConnectionState {
    pub(super) fn new() -> Self {
        let requests = Requests { num_begun: 0, in_flight: HashMap::new(), idle_since: Instant::now() };
        Self {
            wake: Arc::default(),
            written: Arc::default(),
            is_http1: AtomicBool::new(false),
            requests: Mutex::new(requests),
        }
    }

    /// Registers a request whose head has arrived.
    pub(super) fn begin(self: &Arc<Self>, version: Version) -> (Arc<ResponseSlot>, ResponseBody) {
        self.is_http1.store(version < Version::HTTP_2, Ordering::Relaxed);
        let slot = Arc::new(ResponseSlot::new(Arc::clone(&self.wake)));
        let (id, was_idle) = {
            let mut requests = self.requests();
            requests.num_begun += 1;
            let (id, was_idle) = (requests.num_begun, requests.in_flight.is_empty());
            requests.in_flight.insert(id, Arc::clone(&slot));
            (id, was_idle)
        };
        if was_idle {
            self.wake.notify_one();
        }
        let in_flight = InFlight { id, connection: Arc::clone(self) };
        (Arc::clone(&slot), ResponseBody::begin(slot, in_flight))
    }

    pub(super) fn is_http1(&self) -> bool {
        self.is_http1.load(Ordering::Relaxed)
    }

    pub(super) fn traffic(&self) -> Traffic {
        let requests = self.requests();
        let idle_since = requests.in_flight.is_empty().then_some(requests.idle_since);
        Traffic { any_begun: requests.num_begun > 0, idle_since }
    }

    /// Drops the bodies that are to be cut, and those not read since `then`; returns whether there was one.
    pub(super) fn cut_unread(&self, then: Instant) -> bool {
        let slots: Vec<Arc<ResponseSlot>> = self.requests().in_flight.values().cloned().collect();
        let unread = slots.iter().filter(|slot| slot.is_cut() || slot.is_unread_since(then));
        unread.map(|slot| slot.release()).count() > 0
    }

    fn end(&self, id: u64) {
        let is_idle = {
            let mut requests = self.requests();
            requests.in_flight.remove(&id);
            requests.idle_since = Instant::now();
            requests.in_flight.is_empty()
        };
        if is_idle {
            self.wake.notify_one();
        }
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        // Nothing panics while the lock is held.
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks a request as in flight until dropped.
#[derive(Debug)]
pub(super) struct InFlight {
    id: u64,
    connection: Arc<ConnectionState>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.connection.end(self.id);
    }
}
