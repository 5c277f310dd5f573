//! An outage of a listener: a time in which it cannot accept connections. Logged at its beginning and at its
//! end, because a line for every attempt would fill the log with the same error.

use std::mem;

/// State of a listener's outage, if there is one.
#[derive(Debug, Default)]
pub(super) struct AcceptOutage {
    num_failed: u64,
    /// Whether a connection was accepted since the last failure.
    has_accepted: bool,
}

impl AcceptOutage {
    /// Records a failed accept. Returns whether an outage begins.
    pub(super) fn failed(&mut self) -> bool {
        self.has_accepted = false;
        self.num_failed += 1;
        self.num_failed == 1
    }

    /// Records an accepted connection. If an outage ends, returns the number of accepts that failed in it.
    ///
    /// It ends with the second connection in a row: one alone may have had the reserve descriptor, or that of
    /// a connection that just ended.
    pub(super) fn accepted(&mut self) -> Option<u64> {
        if self.num_failed == 0 || !mem::replace(&mut self.has_accepted, true) {
            return None;
        }
        Some(mem::take(self).num_failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_has_one_beginning_and_one_end() {
        let mut outage = AcceptOutage::default();
        assert_eq!(outage.accepted(), None);
        assert!(outage.failed());
        for _ in 0..2 {
            assert!(!outage.failed(), "it has begun already");
            assert_eq!(outage.accepted(), None, "a single one, on the reserve descriptor");
        }
        assert_eq!(outage.accepted(), Some(3));
        assert_eq!((outage.accepted(), outage.failed()), (None, true));
    }
}
