//! Computes how many KV blocks each router may reserve (docs/contract.md A). Pure arithmetic;
//! `step_loop/kv_blocks.rs` counts blocks and sends the credits.

/// A grant is sent only if it changed by at least 1/64 of the pool.
const MIN_CHANGE_DIVISOR: u64 = 64;

/// The worker's KV blocks and the number of routers that share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPool {
    /// Total KV blocks.
    pub total: u64,
    /// Blocks held by no sequence, cached prefixes included.
    pub free: u64,
    /// Number of connected routers, at least 1.
    pub routers: u64,
}

impl KvPool {
    /// Blocks that every router is guaranteed. A router that holds more is evicted or preempted first.
    pub fn share(self) -> u64 {
        self.total / self.routers
    }

    /// Blocks that a router may reserve if its sequences hold `held` blocks; a shared block counts once per
    /// sequence.
    pub fn grant(self, held: u64) -> u64 {
        self.share().max(held + self.free / self.routers)
    }

    /// Whether `grant` differs enough from the last value sent.
    pub fn should_send(self, last_credits: Option<u64>, grant: u64) -> bool {
        last_credits.is_none_or(|last_credits| {
            last_credits.abs_diff(grant) >= (self.total / MIN_CHANGE_DIVISOR).max(1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_follow_the_pool() {
        let pool = |free, routers| KvPool { total: 128, free, routers };
        // One router: all blocks, whatever is held, and more than all if blocks are shared.
        assert_eq!((pool(128, 1).grant(0), pool(28, 1).grant(100), pool(100, 1).grant(90)), (128, 128, 190));
        // Two routers, one holding most: it may borrow what the other does not use, and the other never gets
        // less than its share.
        assert_eq!((pool(28, 2).grant(100), pool(28, 2).grant(0)), (114, 64));
        assert_eq!((pool(0, 2).grant(128), pool(0, 2).grant(0)), (128, 64));
        assert_eq!(pool(128, 3).grant(0), 42);
    }

    #[test]
    fn small_changes_are_not_told() {
        let pool = KvPool { total: 6_400, free: 0, routers: 1 };
        assert!(pool.should_send(None, 0));
        assert!(!pool.should_send(Some(1_000), 1_099));
        assert!(pool.should_send(Some(1_000), 1_100) && pool.should_send(Some(1_000), 900));
        let small = KvPool { total: 10, ..pool };
        assert!(small.should_send(Some(5), 6) && !small.should_send(Some(5), 5));
    }
}
