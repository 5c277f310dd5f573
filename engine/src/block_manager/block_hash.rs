//! Hash of a published block (docs/contract.md A): over the isolation key and all ids up to the block's end.
//! SHA-256, because a tenant who finds two texts with equal hashes would read another tenant's KV.

use sha2::{Digest, Sha256};

use crate::TokenId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockHash([u8; 32]);

impl BlockHash {
    /// The parent of a sequence's first block.
    pub(super) fn root(isolation_key: u64) -> Self {
        let hash =
            Sha256::new().chain_update("outrider kv block 1").chain_update(isolation_key.to_le_bytes());
        Self(hash.finalize().into())
    }

    /// The hash of a block of `ids` after this one.
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
    fn the_hash_depends_on_ids_order_prefix_and_key() {
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
