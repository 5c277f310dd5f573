//! The content of a checkpoint as one hash, for `numerics_id`: every byte of every file, so that two
//! checkpoints that differ anywhere differ here. Chunks are hashed in parallel and their hashes hashed;
//! SHA-256 reads about 1.5 GB/s a core.

use cpu_kernels::Threads;
use sha2::{Digest, Sha256};

use super::Checkpoint;
use crate::EngineError;

/// What is hashed by itself.
const CHUNK_BYTES: u64 = 4 << 20;
/// What is read at a time: little enough to be hashed out of a cache.
const READ_BYTES: usize = 1 << 16;

impl Checkpoint {
    /// SHA-256 over files (their lengths and chunk hashes), in the order of their names.
    pub(crate) fn digest(&self, threads: &Threads) -> Result<[u8; 32], EngineError> {
        let mut whole = Sha256::new();
        for shard in self.shards() {
            whole.update(shard.len().to_le_bytes());
            let chunks: Vec<u64> = (0..shard.len().div_ceil(CHUNK_BYTES)).collect();
            let hashes = threads.map(&chunks, |chunk| {
                let start = chunk * CHUNK_BYTES;
                let end = shard.len().min(start + CHUNK_BYTES);
                let (mut hash, mut bytes) = (Sha256::new(), vec![0; READ_BYTES]);
                for at in (start..end).step_by(READ_BYTES) {
                    let bytes = &mut bytes[..READ_BYTES.min((end - at) as usize)];
                    shard.read(at, bytes)?;
                    hash.update(bytes);
                }
                Ok::<[u8; 32], EngineError>(hash.finalize().into())
            });
            for hash in hashes {
                whole.update(hash?);
            }
        }
        Ok(whole.finalize().into())
    }
}
