//! Negotiation of the worker protocol's version.

use std::ops::RangeInclusive;

/// Versions of the worker protocol that this build supports.
pub const PROTOCOL_VERSIONS: RangeInclusive<u32> = 1..=1;

/// Returns the newest version that both ends support; `None` if their ranges do not overlap: the older end
/// has to be upgraded.
pub fn common_version(local: &RangeInclusive<u32>, remote: &RangeInclusive<u32>) -> Option<u32> {
    let newest = *local.end().min(remote.end());
    (local.contains(&newest) && remote.contains(&newest)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_is_chosen() {
        for (local, remote, common) in [
            (1..=1, 1..=1, Some(1)),
            (1..=3, 2..=2, Some(2)),
            (2..=2, 1..=3, Some(2)),
            (2..=4, 3..=9, Some(4)),
            (3..=4, 1..=2, None),
            (1..=2, 3..=4, None),
            // An invalid range is empty.
            (1..=4, RangeInclusive::new(3, 2), None),
            (1..=1, 0..=0, None),
        ] {
            assert_eq!(common_version(&local, &remote), common, "{local:?} {remote:?}");
        }
    }
}
