//! Memory limits for what a router buffers: request bodies while they arrive, responses that are not
//! streamed, until they are complete, and log probabilities that a stream holds back or repeats. Many large
//! ones could exhaust memory: each has a limit, and all of a kind together have one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::RouterError;

/// Maximum size of one response, in bytes of JSON.
pub const RESPONSE_BYTES_MAX: usize = 32 << 20;

/// Maximum size of all buffered responses of this router together; also that of all request bodies that are
/// being read, which count separately.
pub const BUFFERED_BYTES_MAX: usize = 256 << 20;

/// Bytes used by all buffers of one kind. Clones share the counter.
#[derive(Debug, Clone)]
pub struct BufferMemory {
    used: Arc<AtomicUsize>,
    /// Its name in the error for a client that has to wait.
    name: &'static str,
}

/// Bytes reserved by one buffer; released on drop.
#[derive(Debug)]
pub struct MemoryReservation {
    memory: BufferMemory,
    num_bytes: usize,
}

impl BufferMemory {
    /// Memory for responses.
    pub fn of_responses() -> Self {
        Self { used: Arc::default(), name: "the memory for buffered responses" }
    }

    /// Memory for request bodies. Each has a smaller limit of its own, which its reader checks.
    pub fn of_request_bodies() -> Self {
        Self { used: Arc::default(), name: "the memory for request bodies" }
    }

    /// Starts an empty reservation.
    pub fn reserve(&self) -> MemoryReservation {
        MemoryReservation { memory: self.clone(), num_bytes: 0 }
    }
}

impl MemoryReservation {
    /// Reserves `num_bytes` more. Fails if the limit of one response or of all buffers of this kind would be
    /// exceeded.
    pub fn grow(&mut self, num_bytes: usize) -> Result<(), RouterError> {
        if self.num_bytes + num_bytes > RESPONSE_BYTES_MAX {
            let limit = RESPONSE_BYTES_MAX;
            return Err(RouterError::ResponseTooLarge { limit });
        }
        self.num_bytes += num_bytes;
        if self.memory.used.fetch_add(num_bytes, Ordering::AcqRel) + num_bytes > BUFFERED_BYTES_MAX {
            return Err(RouterError::Overloaded { what: self.memory.name });
        }
        Ok(())
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.num_bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_response_and_all_responses_are_limited() {
        let memory = BufferMemory::of_responses();
        let mut large = memory.reserve();
        large.grow(RESPONSE_BYTES_MAX).unwrap();
        assert!(matches!(large.grow(1), Err(RouterError::ResponseTooLarge { .. })));
        let others: Vec<MemoryReservation> = (1..BUFFERED_BYTES_MAX / RESPONSE_BYTES_MAX)
            .map(|_| {
                let mut other = memory.reserve();
                other.grow(RESPONSE_BYTES_MAX).unwrap();
                other
            })
            .collect();
        let mut another = memory.reserve();
        assert!(matches!(another.grow(1), Err(RouterError::Overloaded { .. })));
        drop((others, large, another));
        assert_eq!(memory.used.load(Ordering::Acquire), 0);
    }
}
