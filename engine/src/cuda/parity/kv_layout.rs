//! The layout of paged KV: twin of `kernels/kv.cuh`.

use cpu_kernels::BLOCK_SIZE;

/// Numbers of a core matrix: 8 rows of 8.
const MATRIX: usize = 8 * 8;

/// Index of a number of a key in a block of a KV head: `[key / 8][dim / 8][key % 8][dim % 8]`.
pub(super) fn key_index(key: usize, dim: usize, head_dim: usize) -> usize {
    (key / 8 * (head_dim / 8) + dim / 8) * MATRIX + key % 8 * 8 + dim % 8
}

/// The same of a value, behind all keys: `[dim / 8][key / 8][dim % 8][key % 8]`.
pub(super) fn value_index(key: usize, dim: usize, head_dim: usize) -> usize {
    BLOCK_SIZE * head_dim + (dim / 8 * (BLOCK_SIZE / 8) + key / 8) * MATRIX + dim % 8 * 8 + key % 8
}
