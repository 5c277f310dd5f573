//! Memory limit for request bodies while they arrive. The limit is a dynamic threshold, as in switches with
//! shared packet memory: a client may hold at most as much as stays free. Alone it gets half; n clients that
//! take turns get 1/(n+1) each, and as much stays free for the next one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer_memory::BUFFERED_BYTES_MAX;
use crate::error::RouterError;

/// Bytes used by all bodies that are being read. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct BodyMemory(Arc<Mutex<Used>>);

#[derive(Debug, Default)]
struct Used {
    total: usize,
    /// Of the clients that hold any.
    by_client: HashMap<u64, usize>,
}

/// Bytes reserved for one body; released on drop.
#[derive(Debug)]
pub struct BodyReservation {
    memory: BodyMemory,
    client: u64,
    num_bytes: usize,
}

impl BodyMemory {
    /// Starts an empty reservation of the client with this key for fair queueing.
    pub fn reserve(&self, client: u64) -> BodyReservation {
        BodyReservation { memory: self.clone(), client, num_bytes: 0 }
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // Nothing under the lock panics between two related changes.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyReservation {
    /// Reserves `num_bytes` more. Fails, and reserves nothing, if the client would hold more than is free.
    /// The size of one body has a limit of its own, which its reader checks.
    pub fn grow(&mut self, num_bytes: usize) -> Result<(), RouterError> {
        let mut used = self.memory.used();
        let of_client = used.by_client.get(&self.client).copied().unwrap_or_default() + num_bytes;
        let total = used.total + num_bytes;
        if total + of_client > BUFFERED_BYTES_MAX {
            let what = "this client's share of the memory for request bodies";
            return Err(RouterError::Overloaded { what });
        }
        used.total = total;
        used.by_client.insert(self.client, of_client);
        drop(used);
        self.num_bytes += num_bytes;
        Ok(())
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        let mut used = self.memory.used();
        used.total -= self.num_bytes;
        if let Some(of_client) = used.by_client.get_mut(&self.client) {
            *of_client -= self.num_bytes;
            if *of_client == 0 {
                used.by_client.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reserves all that the client gets; returns it with its size.
    fn all_for(memory: &BodyMemory, client: u64) -> (BodyReservation, usize) {
        let mut reservation = memory.reserve(client);
        let mut step = BUFFERED_BYTES_MAX;
        while step > 0 {
            if reservation.grow(step).is_err() {
                step /= 2;
            }
        }
        let num_bytes = reservation.num_bytes;
        (reservation, num_bytes)
    }

    #[test]
    fn a_client_gets_at_most_what_stays_free() {
        let memory = BodyMemory::default();
        let mut free = BUFFERED_BYTES_MAX;
        let mut held = Vec::new();
        for client in 0..20 {
            let (reservation, num_bytes) = all_for(&memory, client);
            assert_eq!(num_bytes, free / 2, "client {client}");
            free -= num_bytes;
            held.push(reservation);
            let what = "this client's share of the memory for request bodies";
            let refused = memory.reserve(client).grow(1);
            assert_eq!(refused, Err(RouterError::Overloaded { what }), "its bodies count together");
        }
        drop(held.remove(0));
        free += BUFFERED_BYTES_MAX / 2;
        let (_more, num_bytes) = all_for(&memory, 1);
        assert_eq!(num_bytes, (free - BUFFERED_BYTES_MAX / 4) / 2, "with what it holds, all that stays free");
    }

    #[test]
    fn clients_that_take_turns_get_equal_shares_and_leave_one() {
        let piece = 16 << 10;
        for num_clients in [1, 2, 3, 7, 63] {
            let memory = BodyMemory::default();
            let mut bodies: Vec<_> = (0..num_clients).map(|client| memory.reserve(client)).collect();
            while bodies.iter_mut().filter_map(|body| body.grow(piece).ok()).count() > 0 {}
            let share = BUFFERED_BYTES_MAX / (num_clients as usize + 1);
            let free = BUFFERED_BYTES_MAX - memory.used().total;
            for num_bytes in bodies.iter().map(|body| body.num_bytes).chain([free]) {
                assert!(num_bytes.abs_diff(share) <= piece, "{num_bytes} bytes of {num_clients} clients");
            }
        }
    }

    #[test]
    fn nothing_is_kept_of_bodies_that_were_read_or_refused() {
        let memory = BodyMemory::default();
        let (mut first, mut second) = (memory.reserve(1), memory.reserve(1));
        first.grow(BUFFERED_BYTES_MAX / 2).unwrap();
        assert!(first.grow(1).is_err() && second.grow(1).is_err());
        drop((first, second));
        let used = memory.used();
        assert_eq!((used.total, used.by_client.len()), (0, 0));
    }
}
