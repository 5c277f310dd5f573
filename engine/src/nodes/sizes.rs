//! What nodes tell each other between loading weights and allocating KV.

use super::Nodes;
use crate::EngineError;

/// Sizes of one node's ranks; after [`Sizes::agree`] of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Number of KV blocks for which every device has memory.
    pub(crate) kv_blocks: u32,
    /// Bytes of weights that a forward with logits reads.
    pub(crate) weight_bytes: u64,
    /// Bytes of embedding tables beside the vocabulary projection.
    pub(crate) table_bytes: u64,
    /// Bytes of a KV block.
    pub(crate) block_bytes: u64,
}

impl Sizes {
    /// Every node gets the number of blocks that all have memory for, and the sums of the rest. Without other
    /// nodes these are the sizes of this process.
    pub(crate) fn agree(self, nodes: Option<&Nodes>) -> Result<Self, EngineError> {
        let Some(nodes) = nodes else { return Ok(self) };
        let joined = nodes.agree(&self.to_bytes(), |others| {
            let mut all = self;
            for other in others {
                let Self { kv_blocks, weight_bytes, table_bytes, block_bytes } = Self::of_bytes(other)?;
                all.kv_blocks = all.kv_blocks.min(kv_blocks);
                all.weight_bytes += weight_bytes;
                all.table_bytes += table_bytes;
                all.block_bytes += block_bytes;
            }
            Ok(all.to_bytes())
        })?;
        Self::of_bytes(&joined)
    }

    fn to_bytes(self) -> Vec<u8> {
        let Self { kv_blocks, weight_bytes, table_bytes, block_bytes } = self;
        let numbers = [kv_blocks.into(), weight_bytes, table_bytes, block_bytes];
        numbers.iter().flat_map(|number: &u64| number.to_le_bytes()).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Result<Self, EngineError> {
        let (numbers, rest) = bytes.as_chunks();
        let numbers: Vec<u64> = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let foreign = || {
            EngineError::BadNode("sizes of a node are malformed: are all nodes of one release?".to_owned())
        };
        let ([kv_blocks, weight_bytes, table_bytes, block_bytes], []) = (&numbers[..], rest) else {
            return Err(foreign());
        };
        let kv_blocks = u32::try_from(*kv_blocks).map_err(|_| foreign())?;
        Ok(Self {
            kv_blocks,
            weight_bytes: *weight_bytes,
            table_bytes: *table_bytes,
            block_bytes: *block_bytes,
        })
    }
}
