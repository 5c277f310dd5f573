//! A sequence's ids with a running hash, which router and worker compare to check that they mean the same
//! prefix.

use crate::TokenId;

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// Ids and, for every length, the FNV-1a 64 hash over the ids before it as little-endian u32 (contract part
/// A).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    ids: Vec<TokenId>,
    /// `hashes[n]` covers `ids[..n]`; one longer than `ids`.
    hashes: Vec<u64>,
}

impl Default for Prefix {
    fn default() -> Self {
        Self { ids: Vec::new(), hashes: vec![FNV_OFFSET] }
    }
}

impl Prefix {
    /// Creates a prefix of `ids`.
    pub fn new(ids: &[TokenId]) -> Self {
        let mut prefix = Self::default();
        prefix.extend(ids);
        prefix
    }

    /// All ids.
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Number of ids.
    pub fn len(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Whether there are no ids.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Hash over the first `len` ids; `None` past the end.
    pub fn hash_at(&self, len: u32) -> Option<u64> {
        self.hashes.get(len as usize).copied()
    }

    /// Appends ids.
    pub fn extend(&mut self, ids: &[TokenId]) {
        let mut hash = self.hashes[self.ids.len()];
        for &id in ids {
            for byte in id.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME);
            }
            self.ids.push(id);
            self.hashes.push(hash);
        }
    }

    /// Drops everything from `len` on.
    pub fn truncate(&mut self, len: u32) {
        self.ids.truncate(len as usize);
        self.hashes.truncate(len as usize + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_fnv_1a_vectors() {
        // "foobar" is not a multiple of four bytes: use the vector for "" and one computed byte by byte from
        // the published definition over "chongo w" (two little-endian words).
        assert_eq!(Prefix::default().hash_at(0), Some(0xcbf2_9ce4_8422_2325));
        let words = [u32::from_le_bytes(*b"chon"), u32::from_le_bytes(*b"go w")];
        let mut expected = FNV_OFFSET;
        for byte in b"chongo w" {
            expected = (expected ^ u64::from(*byte)).wrapping_mul(FNV_PRIME);
        }
        assert_eq!(Prefix::new(&words).hash_at(2), Some(expected));
    }

    #[test]
    fn truncate_and_extend_equal_building_anew() {
        let mut prefix = Prefix::new(&[1, 2, 3, 4, 5]);
        prefix.truncate(2);
        prefix.extend(&[9, 8]);
        assert_eq!(prefix, Prefix::new(&[1, 2, 9, 8]));
        assert_eq!(prefix.hash_at(5), None);
    }
}
