//! How many KV blocks each router may reserve (docs/contract.md A): arithmetic only. `device` counts, asks and tells.

/// A change that is smaller than this part of the pool is not told.
const TOLD_PART: u64 = 64;

/// The worker's KV blocks, and how many routers share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// There are.
    pub total: u64,
    /// Those that no sequence holds, kept prefixes included.
    pub free: u64,
    /// At least one.
    pub routers: u64,
}

impl Pool {
    /// What a router can always cached_len: who holds more gives way first.
    pub fn share(self) -> u64 {
        self.total / self.routers
    }

    /// What a router may reserve whose sequences hold so many blocks, shared ones counted once for each sequence.
    pub fn grant(self, held: u64) -> u64 {
        self.share().max(held + self.free / self.routers)
    }

    /// Whether a grant differs enough from what was told last.
    pub fn is_worth_telling(self, told: Option<u64>, grant: u64) -> bool {
        told.is_none_or(|told| told.abs_diff(grant) >= (self.total / TOLD_PART).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_follow_the_pool() {
        let pool = |free, routers| Pool { total: 128, free, routers };
        // Alone: all of it, whatever is held, and more where blocks are shared.
        assert_eq!((pool(128, 1).grant(0), pool(28, 1).grant(100), pool(100, 1).grant(90)), (128, 128, 190));
        // One of two holds most: it is lent what the other does not use, and the other is never below its share.
        assert_eq!((pool(28, 2).grant(100), pool(28, 2).grant(0)), (114, 64));
        assert_eq!((pool(0, 2).grant(128), pool(0, 2).grant(0)), (128, 64));
        assert_eq!(pool(128, 3).grant(0), 42);
    }

    #[test]
    fn small_changes_are_not_told() {
        let pool = Pool { total: 6_400, free: 0, routers: 1 };
        assert!(pool.is_worth_telling(None, 0));
        assert!(!pool.is_worth_telling(Some(1_000), 1_099));
        assert!(pool.is_worth_telling(Some(1_000), 1_100) && pool.is_worth_telling(Some(1_000), 900));
        let small = Pool { total: 10, ..pool };
        assert!(small.is_worth_telling(Some(5), 6) && !small.is_worth_telling(Some(5), 5));
    }
}
