// Layout of paged KV: kv [blocks][layers][kv_heads][K | V of 16 keys] bf16; a slot is block * 16 + offset.
//   K: [key / 8 (2)][dim / 8][key % 8][dim % 8], V: [dim / 8][key / 8 (2)][dim % 8][key % 8]
// 128 neighbouring bytes are a matrix of 8 rows x 8 numbers that tensor cores read at once: from shared memory
// without bank conflicts, in the order of global memory. head_dim is a multiple of 8.
// Twin: parity/kv_layout.rs.

// Offset of a block of a layer and KV head. `layers` is 1 for blocks of one layer.
__device__ __forceinline__ u64 kv_block(u64 block, u32 layer, u32 layers, u32 kv_head, u32 kv_heads, u32 head_dim) {
  return ((block * layers + layer) * kv_heads + kv_head) * (u64)(32 * head_dim);
}

// Index of a number of a key in a block. Eight dimensions from a multiple of 8 on follow one another.
__device__ __forceinline__ u32 key_index(u32 key, u32 dim, u32 head_dim) {
  return (key / 8 * (head_dim / 8) + dim / 8) * 64 + key % 8 * 8 + dim % 8;
}

// The same of a value. Eight keys from a multiple of 8 on follow one another.
__device__ __forceinline__ u32 value_index(u32 key, u32 dim, u32 head_dim) {
  return 16 * head_dim + (dim / 8 * 2 + key / 8) * 64 + dim % 8 * 8 + key % 8;
}
