//! Pinned memory in two halves for copies to a device: the host fills one half while the device copies from
//! the other. Inputs of a pass and weights that are being read go through it, so the next piece is prepared
//! while the last one is copied. The host only waits if it is a whole half ahead.
//!
//! [`StagingHalves`] decides, without side effects: a half is entered again only after a wait for the last
//! copy out of it, so no bytes are overwritten before they are copied. `device.rs` executes the decisions.

use std::ops::Range;

/// Size of a half in bytes, and maximum size of one staged piece.
pub(crate) const HALF_BYTES: usize = 16 << 20;
/// Alignment of the places in bytes, enough for every type that is copied.
const ALIGN: usize = 256;

/// Where to put the next bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which half: 0 or 1.
    pub(crate) half: usize,
    /// Byte range in that half.
    pub(crate) range: Range<usize>,
    /// Whether this place is the first one after a change to this half. Then: record an event after the other
    /// half's last copy, wait for the event that was recorded when this half was left, and write.
    pub(crate) switches_half: bool,
}

/// Allocates places in the two halves.
#[derive(Debug)]
pub(crate) struct StagingHalves {
    size: usize,
    half: usize,
    used: usize,
}

impl StagingHalves {
    /// Two free halves of `size` bytes.
    pub(crate) fn new(size: usize) -> Self {
        Self { size, half: 0, used: 0 }
    }

    /// A place for `bytes`, which must not exceed the size of a half.
    pub(crate) fn take(&mut self, bytes: usize) -> Place {
        assert!(bytes <= self.size, "what is staged at a time fits into a half");
        let switches_half = self.used + bytes > self.size;
        if switches_half {
            (self.half, self.used) = (1 - self.half, 0);
        }
        let range = self.used..self.used + bytes;
        self.used = range.end.next_multiple_of(ALIGN);
        Place { half: self.half, range, switches_half }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A device that copies as late as possible: a copy is in progress until a wait for an event after it.
    #[derive(Default)]
    struct Late {
        under_way: Vec<(usize, Range<usize>)>,
        /// For each half: copies before the event that was recorded when the half was left.
        marked: [Vec<(usize, Range<usize>)>; 2],
    }

    impl Late {
        fn stage(&mut self, place: &Place) -> Result<(), TestCaseError> {
            if place.switches_half {
                self.marked[1 - place.half] = self.under_way.clone();
                let done = std::mem::take(&mut self.marked[place.half]);
                self.under_way.retain(|copy| !done.contains(copy));
            }
            for (half, range) in &self.under_way {
                let apart = range.end <= place.range.start || place.range.end <= range.start;
                prop_assert!(*half != place.half || apart, "{place:?} is written while {range:?} is read");
            }
            self.under_way.push((place.half, place.range.clone()));
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn nothing_is_written_that_is_still_read(lens in prop::collection::vec(1usize..5000, 1..200)) {
            let (mut halves, mut late) = (StagingHalves::new(5000), Late::default());
            let mut entered = 0;
            for &len in &lens {
                let place = halves.take(len);
                prop_assert_eq!(place.range.len(), len);
                prop_assert!(place.range.end <= 5000 && place.range.start % ALIGN == 0);
                entered += usize::from(place.switches_half);
                late.stage(&place)?;
            }
            // A half is filled before it is left, so there are no needless waits.
            prop_assert!(entered <= lens.iter().map(|len| len + ALIGN).sum::<usize>() * 2 / 5000);
        }
    }
}
