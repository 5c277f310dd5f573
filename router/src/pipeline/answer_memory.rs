//! Memory limits for responses that are not streamed. Such a response is buffered until it is complete, so
//! many long ones could exhaust memory: each response has a limit, and all of them together have one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::RouterError;

/// Maximum size of one response, in bytes of JSON.
pub const WHOLE_ANSWER_BYTES_MAX: usize = 32 << 20;

/// Maximum size of all buffered responses of this router together.
pub const WHOLE_ANSWERS_BYTES_MAX: usize = 256 << 20;

/// Bytes used by all buffered responses. Clones share the counter.
#[derive(Debug, Clone, Default)]
pub struct AnswerMemory(Arc<AtomicUsize>);

/// Bytes reserved by one response; released on drop.
#[derive(Debug)]
pub struct AnswerHold {
    of: AnswerMemory,
    num_bytes: usize,
}

impl AnswerMemory {
    /// Starts an empty reservation.
    pub fn begin(&self) -> AnswerHold {
        AnswerHold { of: self.clone(), num_bytes: 0 }
    }
}

impl AnswerHold {
    /// Reserves `num_bytes` more. Fails if the limit of this response or of all responses would be exceeded.
    pub fn grow(&mut self, num_bytes: usize) -> Result<(), RouterError> {
        if self.num_bytes + num_bytes > WHOLE_ANSWER_BYTES_MAX {
            let limit = WHOLE_ANSWER_BYTES_MAX;
            return Err(RouterError::AnswerTooLarge { limit });
        }
        self.num_bytes += num_bytes;
        if self.of.0.fetch_add(num_bytes, Ordering::AcqRel) + num_bytes > WHOLE_ANSWERS_BYTES_MAX {
            return Err(RouterError::Overloaded { what: "the memory for responses that are not streamed" });
        }
        Ok(())
    }
}

impl Drop for AnswerHold {
    fn drop(&mut self) {
        self.of.0.fetch_sub(self.num_bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_answer_and_all_answers_have_a_limit() {
        let memory = AnswerMemory::default();
        let mut large = memory.begin();
        large.grow(WHOLE_ANSWER_BYTES_MAX).unwrap();
        assert!(matches!(large.grow(1), Err(RouterError::AnswerTooLarge { .. })));
        let others: Vec<AnswerHold> = (1..WHOLE_ANSWERS_BYTES_MAX / WHOLE_ANSWER_BYTES_MAX)
            .map(|_| {
                let mut other = memory.begin();
                other.grow(WHOLE_ANSWER_BYTES_MAX).unwrap();
                other
            })
            .collect();
        let mut late = memory.begin();
        assert!(matches!(late.grow(1), Err(RouterError::Overloaded { .. })));
        drop((others, large, late));
        assert_eq!(memory.0.load(Ordering::Acquire), 0);
    }
}
