//! Memory mappings in huge pages, if the system has them. Matrices are allocated consecutively from shared
//! regions. With separate mappings, a matrix smaller than a huge page would get small pages, and so would the
//! end of every larger one (docs/adr/0076-matrices-share-large-pages.md).

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{Advice, MmapMut, MmapRaw};

/// Size of a huge page on x86-64, and on most other machines.
const HUGE_PAGE: usize = 2 << 20;

/// Upper limit of the system's page size. Shares of a region begin at a multiple of it, so that no page
/// belongs to two.
const PAGE: usize = 64 << 10;

/// Bytes per region. Pages that are never written take no memory.
const REGION: usize = 128 << 20;

static REGIONS: Mutex<RegionAllocator> = Mutex::new(RegionAllocator::new());

/// Allocates shares from regions.
struct RegionAllocator {
    /// The region of the next share. Shares own it; it is freed with the last of them.
    region: Weak<MmapRaw>,
    /// Free bytes of the region, as a range of offsets.
    free: Range<usize>,
}

impl RegionAllocator {
    const fn new() -> Self {
        Self { region: Weak::new(), free: 0..0 }
    }

    fn allocate(&mut self, len: usize) -> io::Result<Memory> {
        let region = self.region.upgrade().filter(|_| len <= self.free.len());
        let map = match region {
            Some(map) => map,
            None => {
                let bytes = len.max(REGION).next_multiple_of(HUGE_PAGE);
                let (map, start) = map(bytes, bytes)?;
                (self.region, self.free) = (Arc::downgrade(&map), start..start + bytes);
                map
            }
        };
        let (start, end) = (self.free.start, self.free.start + len);
        // By address, since the mapping itself may begin anywhere.
        self.free.start = end + map.as_ptr().wrapping_add(end).align_offset(PAGE);
        Ok(Memory { map, start, len })
    }
}

/// Zeroed bytes of a mapping, exclusive to one owner.
pub(super) struct Memory {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Memory {
    /// A separate mapping, freed with its owner. It begins at a huge page; its end may be in small pages.
    pub(super) fn dedicated(len: usize) -> io::Result<Self> {
        let (map, start) = map(len, len / HUGE_PAGE * HUGE_PAGE)?;
        Ok(Self { map, start, len })
    }

    /// A share of a region.
    pub(super) fn in_region(len: usize) -> io::Result<Self> {
        REGIONS.lock().unwrap_or_else(PoisonError::into_inner).allocate(len)
    }

    /// Commits the memory now, instead of page by page at the first write.
    pub(super) fn populate(&self) -> io::Result<()> {
        self.map.advise_range(Advice::PopulateWrite, self.start, self.len)
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.as_mut_ptr()
    }

    /// Valid for all bytes of the share, which no other share has.
    #[inline(always)]
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.start)
    }
}

/// Maps zeroed bytes. Returns the offset of the first huge page; huge pages are requested for
/// `huge_len` bytes from there on.
fn map(len: usize, huge_len: usize) -> io::Result<(Arc<MmapRaw>, usize)> {
    // Larger than requested, so that a huge page begins inside.
    let map = MmapRaw::from(MmapMut::map_anon(len + HUGE_PAGE)?);
    let start = map.as_ptr().align_offset(HUGE_PAGE);
    if huge_len > 0
        && let Err(error) = map.advise_range(Advice::HugePage, start, huge_len)
    {
        tracing::debug!(%error, "huge pages are not available, kernels will read weights and KV more slowly");
    }
    Ok((Arc::new(map), start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_adjacent_page_aligned_and_zeroed() {
        let mut regions = RegionAllocator::new();
        let shares = [1, 70_000, 64, 3 << 20].map(|len| regions.allocate(len).unwrap());
        for pair in shares.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let gap = b.as_ptr() as usize - (a.as_ptr() as usize + a.len);
            assert!(gap < PAGE, "{gap} bytes between neighbours");
            assert_eq!(b.as_ptr() as usize % PAGE, 0);
        }
        for share in &shares {
            // SAFETY: the bytes belong to this share only.
            let bytes = unsafe { std::slice::from_raw_parts_mut(share.as_mut_ptr(), share.len) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(1);
        }
    }

    #[test]
    fn a_share_that_does_not_fit_gets_a_new_region() {
        let mut regions = RegionAllocator::new();
        let (small, large) = (regions.allocate(1).unwrap(), regions.allocate(REGION).unwrap());
        assert!(!Arc::ptr_eq(&small.map, &large.map));
        assert!(regions.allocate(REGION + 1).unwrap().map.len() > REGION + HUGE_PAGE);
        assert_eq!(large.as_ptr() as usize % HUGE_PAGE, 0);
    }

    #[test]
    fn a_region_is_freed_with_its_last_share() {
        let mut regions = RegionAllocator::new();
        let (first, second) = (regions.allocate(1).unwrap(), regions.allocate(1).unwrap());
        drop(first);
        assert!(regions.region.upgrade().is_some());
        drop(second);
        assert!(regions.region.upgrade().is_none());
    }
}
