//! Memory limit for what a router buffers of responses: those that are not streamed, until they are complete,
//! and log probabilities that a stream holds back or repeats. Many large ones could exhaust memory: each has
//! a limit, and all together have one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::RouterError;

/// Maximum size of one response, in bytes of JSON.
pub const RESPONSE_BYTES_MAX: usize = 32 << 20;

/// Maximum size of all buffered responses of this router together; also that of all request bodies that are
/// being read, which count separately ([`body_memory`](super::body_memory)).
pub const BUFFERED_BYTES_MAX: usize = 256 << 20;

/// Bytes used by all buffers. Clones share the counter.
#[derive(Debug, Clone, Default)]
pub struct BufferMemory(Arc<AtomicUsize>);

/// Bytes reserved by one buffer; released on drop.
#[derive(Debug)]
pub struct MemoryReservation {
    memory: BufferMemory,
    num_bytes: usize,
}

impl BufferMemory {
    /// Starts an empty reservation.
    pub fn reserve(&self) -> MemoryReservation {
        MemoryReservation { memory: self.clone(), num_bytes: 0 }
    }
}

impl MemoryReservation {
    /// Reserves `num_bytes` more. Fails if the limit of one response or of all buffers would be exceeded.
    pub fn grow(&mut self, num_bytes: usize) -> Result<(), RouterError> {
        if self.num_bytes + num_bytes > RESPONSE_BYTES_MAX {
            let limit = RESPONSE_BYTES_MAX;
            return Err(RouterError::ResponseTooLarge { limit });
        }
        self.num_bytes += num_bytes;
        if self.memory.0.fetch_add(num_bytes, Ordering::AcqRel) + num_bytes > BUFFERED_BYTES_MAX {
            return Err(RouterError::Overloaded { what: "the memory for buffered responses" });
        }
        Ok(())
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.memory.0.fetch_sub(self.num_bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_response_and_all_responses_are_limited() {
        let memory = BufferMemory::default();
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
        assert_eq!(memory.0.load(Ordering::Acquire), 0);
    }
}
