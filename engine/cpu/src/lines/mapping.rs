//! Memory from the system in large pages, where it has them. Matrices are cut one after the other from regions that they
//! share: alone, one smaller than a large page would lie in small pages, and so would the end of every other
//! (docs/adr/0076-matrices-share-large-pages.md).

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{Advice, MmapMut, MmapRaw};

/// A large page of x86-64, and of most others.
const LARGE_PAGE: usize = 2 << 20;

/// A page that the system takes and advises, at most: shares of a region begin at one, so that no two meet in one.
const PAGE: usize = 64 << 10;

/// Bytes of a region. What nobody writes takes no memory.
const REGION: usize = 128 << 20;

static REGIONS: Mutex<Regions> = Mutex::new(Regions::new());

/// Cuts regions into shares.
struct Regions {
    /// What the next share is cut from. Its shares keep it: it goes with the last of them.
    region: Weak<MmapRaw>,
    /// What is left of it, in bytes from its first.
    left: Range<usize>,
}

impl Regions {
    const fn new() -> Self {
        Self { region: Weak::new(), left: 0..0 }
    }

    fn cut(&mut self, len: usize) -> io::Result<Memory> {
        let region = self.region.upgrade().filter(|_| len <= self.left.len());
        let map = match region {
            Some(map) => map,
            None => {
                let bytes = len.max(REGION).next_multiple_of(LARGE_PAGE);
                let (map, start) = map(bytes, bytes)?;
                (self.region, self.left) = (Arc::downgrade(&map), start..start + bytes);
                map
            }
        };
        let (start, end) = (self.left.start, self.left.start + len);
        // By the address: the mapping itself may begin anywhere.
        self.left.start = end + map.as_ptr().wrapping_add(end).align_offset(PAGE);
        Ok(Memory { map, start, len })
    }
}

/// Bytes of a mapping that one owner has to itself, zeroed.
pub(super) struct Memory {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Memory {
    /// A whole mapping, which goes with its owner; it begins at a large page, and its end may be in small ones.
    pub(super) fn alone(len: usize) -> io::Result<Self> {
        let (map, start) = map(len, len / LARGE_PAGE * LARGE_PAGE)?;
        Ok(Self { map, start, len })
    }

    /// A share of a region.
    pub(super) fn of_region(len: usize) -> io::Result<Self> {
        REGIONS.lock().unwrap_or_else(PoisonError::into_inner).cut(len)
    }

    /// Takes the memory now, not page by page as it is first written.
    pub(super) fn populate(&self) -> io::Result<()> {
        self.map.advise_range(Advice::PopulateWrite, self.start, self.len)
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.as_mut_ptr()
    }

    /// Valid for all of the share's bytes, which are nobody else's.
    #[inline(always)]
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.start)
    }
}

/// Zeroed bytes, and where among them the first large page begins; large pages are asked for from there on for so many.
fn map(len: usize, in_large_pages: usize) -> io::Result<(Arc<MmapRaw>, usize)> {
    // More than is asked for, so that a large page begins inside.
    let map = MmapRaw::from(MmapMut::map_anon(len + LARGE_PAGE)?);
    let start = map.as_ptr().align_offset(LARGE_PAGE);
    if in_large_pages > 0
        && let Err(error) = map.advise_range(Advice::HugePage, start, in_large_pages)
    {
        tracing::debug!(%error, "no large pages for what kernels stream, reading will be slower");
    }
    Ok((Arc::new(map), start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_lie_side_by_side_each_at_a_page_of_its_own_and_zeroed() {
        let mut regions = Regions::new();
        let shares = [1, 70_000, 64, 3 << 20].map(|len| regions.cut(len).unwrap());
        for pair in shares.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let gap = b.as_ptr() as usize - (a.as_ptr() as usize + a.len);
            assert!(gap < PAGE, "{gap} bytes between neighbours");
            assert_eq!(b.as_ptr() as usize % PAGE, 0);
        }
        for share in &shares {
            // SAFETY: the bytes are the share's own.
            let bytes = unsafe { std::slice::from_raw_parts_mut(share.as_mut_ptr(), share.len) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(1);
        }
    }

    #[test]
    fn what_a_region_has_no_room_for_gets_one_that_has() {
        let mut regions = Regions::new();
        let (small, large) = (regions.cut(1).unwrap(), regions.cut(REGION).unwrap());
        assert!(!Arc::ptr_eq(&small.map, &large.map));
        assert!(regions.cut(REGION + 1).unwrap().map.len() > REGION + LARGE_PAGE);
        assert_eq!(large.as_ptr() as usize % LARGE_PAGE, 0);
    }

    #[test]
    fn a_region_goes_with_its_last_share() {
        let mut regions = Regions::new();
        let (first, second) = (regions.cut(1).unwrap(), regions.cut(1).unwrap());
        drop(first);
        assert!(regions.region.upgrade().is_some());
        drop(second);
        assert!(regions.region.upgrade().is_none());
    }
}
