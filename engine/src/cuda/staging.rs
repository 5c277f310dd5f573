//! Memory that a device copies from while the host goes on: two halves, of which one is filled while what lies in the other is
//! on its way. A pass's inputs, and weights as they are read, go through it; so the next are prepared while the last are under
//! way, and the host waits only where it is a whole half ahead.
//!
//! [`Halves`] decides, pure: a half is entered anew only after a wait for the last copy out of it, so that nothing is
//! overwritten that is still to be read. `device.rs` does what it says.

use std::ops::Range;

/// Bytes of a half. The most that can be staged at a time.
pub(crate) const HALF_BYTES: usize = 16 << 20;
/// Places begin at multiples of this: whatever is copied is aligned.
const ALIGN: usize = 256;

/// Where the next bytes are put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// 0 or 1.
    pub(crate) half: usize,
    /// Inside that half.
    pub(crate) range: Range<usize>,
    /// Whether the other half was just left, and this one entered: mark the other's last copy, then wait for the mark that this
    /// one was left with, then write.
    pub(crate) is_entered: bool,
}

/// Which places are taken.
#[derive(Debug)]
pub(crate) struct Halves {
    size: usize,
    half: usize,
    used: usize,
}

impl Halves {
    /// Two free halves of `size` bytes.
    pub(crate) fn new(size: usize) -> Self {
        Self { size, half: 0, used: 0 }
    }

    /// A place for `bytes`, at most the size of a half.
    pub(crate) fn take(&mut self, bytes: usize) -> Place {
        assert!(bytes <= self.size, "what is staged at a time fits into a half");
        let is_entered = self.used + bytes > self.size;
        if is_entered {
            (self.half, self.used) = (1 - self.half, 0);
        }
        let range = self.used..self.used + bytes;
        self.used = range.end.next_multiple_of(ALIGN);
        Place { half: self.half, range, is_entered }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A device that copies as late as it may: a copy counts as under way until a wait for a mark behind it.
    #[derive(Default)]
    struct Late {
        under_way: Vec<(usize, Range<usize>)>,
        /// Of each half: copies before the mark that it was left with.
        marked: [Vec<(usize, Range<usize>)>; 2],
    }

    impl Late {
        fn stage(&mut self, place: &Place) -> Result<(), TestCaseError> {
            if place.is_entered {
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
            let (mut halves, mut late) = (Halves::new(5000), Late::default());
            let mut entered = 0;
            for &len in &lens {
                let place = halves.take(len);
                prop_assert_eq!(place.range.len(), len);
                prop_assert!(place.range.end <= 5000 && place.range.start % ALIGN == 0);
                entered += usize::from(place.is_entered);
                late.stage(&place)?;
            }
            // A half is used up before it is left: no wait without need.
            prop_assert!(entered <= lens.iter().map(|len| len + ALIGN).sum::<usize>() * 2 / 5000);
        }
    }
}
