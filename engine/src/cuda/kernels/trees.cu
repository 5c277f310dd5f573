// Keys and values of token trees. Rows of a tree are stored in the order in which they arrive. At each
// position from the tree's start on, a row attends to its own ancestor, wherever that is stored. These
// kernels copy the ancestors into place; copies are exact, and attention needs no mask, no list of keys and
// no branch that depends on a tree.
//   kv: kv.cuh
// Twins, equal bits: those of `parity/trees.rs`.

#define EMPTY_SLOT 0xffffffffu

// Assembles blocks: position i of block b is a copy of slot sources[16 b + i], or zeros if that is EMPTY_SLOT.
//   sources [blocks][16] -> own [blocks][kv_heads][K | V of 16 keys]
// Grid (blocks, kv_heads), 128 threads; head_dim a multiple of 8, at most 128.
extern "C" __global__ void __launch_bounds__(128)
    gather_blocks(const bf16* kv, const u32* sources, bf16* own, u32 head_dim, u32 layer, u32 layers) {
  __shared__ u32 slots[16];
  if (threadIdx.x < 16) slots[threadIdx.x] = sources[blockIdx.x * 16 + threadIdx.x];
  __syncthreads();
  const u32 kv_head = blockIdx.y, kv_heads = gridDim.y;
  bf16* to = own + kv_block(blockIdx.x, 0, 1, kv_head, kv_heads, head_dim);
  // Eight dimensions of a key follow one another: copied in chunks of 16 bytes.
  for (u32 i = threadIdx.x; i < 2 * head_dim; i += 128) {
    const u32 key = i % 16, dim = i / 16 * 8, slot = slots[key];
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (slot != EMPTY_SLOT) {
      const u64 from = kv_block(slot / 16, layer, layers, kv_head, kv_heads, head_dim);
      chunk = load_16(kv + from + key_index(slot % 16, dim, head_dim));
    }
    *(uint4*)(to + key_index(key, dim, head_dim)) = chunk;
  }
  // Eight keys of a value do: each thread handles one dimension and collects 16 numbers.
  if (threadIdx.x >= head_dim) return;
  u32 pairs[8];
#pragma unroll
  for (u32 i = 0; i < 16; ++i) {
    const u32 slot = slots[i];
    u32 bits = 0;
    if (slot != EMPTY_SLOT) {
      const u64 from = kv_block(slot / 16, layer, layers, kv_head, kv_heads, head_dim);
      bits = kv[from + value_index(slot % 16, threadIdx.x, head_dim)].bits;
    }
    pairs[i / 2] = i % 2 == 0 ? bits : pairs[i / 2] | bits << 16;
  }
  *(uint4*)(to + value_index(0, threadIdx.x, head_dim)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  *(uint4*)(to + value_index(8, threadIdx.x, head_dim)) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// Copies the keys and values of tokens between slots, in order: copies [num_copies][from slot, to slot]. A
// thread handles the same dimensions in all copies, so that no barrier is needed between them. Grid (layers,
// kv_heads), 128 threads.
extern "C" __global__ void __launch_bounds__(128) copy_tokens(bf16* kv, const u32* copies, u32 num_copies, u32 head_dim) {
  const u32 layers = gridDim.x, kv_heads = gridDim.y;
  for (u32 i = 0; i < num_copies; ++i) {
    const u32 from = copies[2 * i], to = copies[2 * i + 1];
    const bf16* from_block = kv + kv_block(from / 16, blockIdx.x, layers, blockIdx.y, kv_heads, head_dim);
    bf16* to_block = kv + kv_block(to / 16, blockIdx.x, layers, blockIdx.y, kv_heads, head_dim);
    for (u32 d = threadIdx.x; d < head_dim; d += 128) {
      to_block[key_index(to % 16, d, head_dim)] = from_block[key_index(from % 16, d, head_dim)];
      to_block[value_index(to % 16, d, head_dim)] = from_block[value_index(from % 16, d, head_dim)];
    }
  }
}
