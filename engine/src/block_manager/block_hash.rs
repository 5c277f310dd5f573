//! What a published block is called (docs/contract.md A): a hash of everything before it and in it, and of the isolation key.
//! SHA-256, for a tenant who finds two texts of one hash would read another's KV.

use sha2::{Digest, Sha256};

use crate::TokenId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockHash([u8; 32]);

impl BlockHash {
    /// What the first block follows.
    pub(super) fn root(isolation_key: u64) -> Self {
        let hash =
            Sha256::new().chain_update("outrider kv block 1").chain_update(isolation_key.to_le_bytes());
        Self(hash.finalize().into())
    }

    /// The block of these ids behind this one.
    pub(super) fn next(&self, ids: &[TokenId]) -> Self {
        let mut hash = Sha256::new().chain_update(self.0);
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        Self(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_order_prefix_and_key_count() {
        let root = BlockHash::root(1);
        let hashes = [
            root,
            BlockHash::root(2),
            root.next(&[1, 2]),
            root.next(&[2, 1]),
            BlockHash::root(2).next(&[1, 2]),
            root.next(&[1]).next(&[2]),
        ];
        for (i, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..i].contains(hash));
        }
        assert_eq!(root.next(&[1, 2]), BlockHash::root(1).next(&[1, 2]));
    }
}
