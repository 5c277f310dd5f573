//! Which version of the worker wire two ends speak.

use std::ops::RangeInclusive;

/// The versions of the worker wire that this build speaks.
pub const PROTOCOL_VERSIONS: RangeInclusive<u32> = 1..=1;

/// The newest version that both ends speak. `None` where their ranges do not meet: the older end has to be upgraded.
pub fn common_version(ours: &RangeInclusive<u32>, theirs: &RangeInclusive<u32>) -> Option<u32> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_both_is_spoken() {
        for (ours, theirs, common) in [
            (1..=1, 1..=1, Some(1)),
            (1..=3, 2..=2, Some(2)),
            (2..=2, 1..=3, Some(2)),
            (2..=4, 3..=9, Some(4)),
            (3..=4, 1..=2, None),
            (1..=2, 3..=4, None),
            // What an end says that makes no sense is no range.
            (1..=4, RangeInclusive::new(3, 2), None),
            (1..=1, 0..=0, None),
        ] {
            assert_eq!(common_version(&ours, &theirs), common, "{ours:?} {theirs:?}");
        }
    }
}
