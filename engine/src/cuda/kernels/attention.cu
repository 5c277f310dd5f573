// Attention over paged KV on tensor cores. Decode, verify and prefill rows run the same code, so that a row's
// bits do not depend on its kind (design I4).
//   qkv [rows, row_width] f32: a row begins with its query heads, after rotary embedding; positions [rows]
//   kv: kv.cuh
//   tables: all block tables, concatenated
//   tiles [num_tiles]: up to 16 queries of one sequence that share a KV head; query q of a KV head is
//   (row q / group, head kv_head * group + q % group)
//
// What it computes: attention.cuh. A warp has 16 queries. The warps of a block share the keys and values in
// shared memory: a tile of 64 queries loads them once. A block processes a run of splits, so that it loads its
// queries once and copies the next step meanwhile.

// A block of keys and values in shared memory, in the layout of global memory (kv.cuh).
template <int HEAD_DIM>
struct Stage {
  // Chunks of 16 bytes: of keys, then of as many values.
  static constexpr u32 KEY_CHUNKS = 2 * HEAD_DIM;
  static constexpr u32 CHUNKS = 2 * KEY_CHUNKS;
  uint4 chunks[CHUNKS];

  // Starts the copy of a block; the threads of the CUDA block share the work.
  template <u32 THREADS>
  __device__ __forceinline__ void copy(const bf16* block) {
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i += THREADS) {
      if (CHUNKS % THREADS != 0 && i + threadIdx.x >= CHUNKS) break;
      cp_async_16(chunks + threadIdx.x + i, (const uint4*)block + threadIdx.x + i, true);
    }
  }

  // Zeroes the values from the `left`-th key on. Nothing else may access the stage meanwhile.
  template <u32 THREADS>
  __device__ __forceinline__ void clear_values(u32 left) {
    u32* const pairs = (u32*)(chunks + KEY_CHUNKS);
    for (u32 i = threadIdx.x; i < 8 * HEAD_DIM; i += THREADS) {
      const u32 first = i / 32 % 2 * 8 + i % 4 * 2;
      pairs[i] &= first + 1 < left ? 0xffffffffu : first < left ? 0xffffu : 0u;
    }
  }

  // Operands of products over 16 dimensions from 16 * step on: of keys 0 .. 7 (two registers) and 8 .. 15.
  __device__ __forceinline__ void keys(u32 (&to)[4], u32 step) const {
    const u32 lane = threadIdx.x % WARP;
    load_matrices(to, chunks + lane / 16 * HEAD_DIM + lane % 16 + 16 * step);
  }
  // Operands of products over the 16 keys: of values of dimensions 16 * step .. + 7 (two registers) and the
  // next eight.
  __device__ __forceinline__ void values(u32 (&to)[4], u32 step) const {
    load_matrices(to, chunks + KEY_CHUNKS + threadIdx.x % WARP + 32 * step);
  }
};

// Steps in shared memory: the one in use and the next one. A block of one warp has only the one in use, so that
// more blocks fit: they hide each other's copies.
template <u32 WARPS>
constexpr u32 STAGES = WARPS == 1 ? 1 : 2;

// A warp's 16 queries as tensor-core fragments, and the key ranges of this lane's two queries, rows g and g +
// 8.
template <int HEAD_DIM>
struct Queries {
  static constexpr int STEPS = HEAD_DIM / 16;
  u32 high[STEPS][4], low[STEPS][4];
  KeyRange sees[2];

  // `first` is the index of the warp's first query in the tile.
  __device__ __forceinline__ Queries(const float* qkv, const u32* positions, const AttentionTile& tile, u32 first, u32 row_width,
                                     u32 group, u32 kv_head, u32 window) {
    const u32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 q = first + g + 8 * r;
      const bool exists = q < tile.num_queries;
      const u32 query = tile.first_query + (exists ? q : 0), row = query / group;
      const float* from = qkv + (u64)row * row_width + (kv_head * group + query % group) * HEAD_DIM + 2 * t;
      sees[r].set(exists, exists ? positions[row] : 0, window);
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const u64 bits = exists ? load_8((const u64*)(from + 8 * i)) : 0;
        const int at = r + 2 * (i % 2);
        split_bf16(__uint_as_float((u32)bits), __uint_as_float((u32)(bits >> 32)), high[i / 2][at], low[i / 2][at]);
      }
    }
  }
};

// Running result of a warp's 16 queries in a split.
template <int HEAD_DIM>
struct SplitOfWarp {
  float values[HEAD_DIM / 8][4];
  Softmax softmax;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
    }
    softmax.begin();
  }

  // Computes the scores of a block of 16 keys.
  static __device__ __forceinline__ void multiply(const Queries<HEAD_DIM>& queries, const Stage<HEAD_DIM>& stage,
                                                  float (&first)[4], float (&second)[4]) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      u32 keys[4];
      stage.keys(keys, step);
      const u32 b0[2] = {keys[0], keys[1]}, b1[2] = {keys[2], keys[3]};
      mma_bf16(first, queries.low[step], b0);
      mma_bf16(second, queries.low[step], b1);
      mma_bf16(first, queries.high[step], b0);
      mma_bf16(second, queries.high[step], b1);
    }
  }

  // Adds a step of 64 keys, of which blocks `from .. to` are in shared memory; no query sees the others.
  __device__ __forceinline__ void add(const Queries<HEAD_DIM>& queries, const Stage<HEAD_DIM>* step, u32 from, u32 to,
                                      u32 first_key, float scale) {
    float scores[2 * STEP_BLOCKS][4] = {};
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      if (b >= from && b < to) multiply(queries, step[b], scores[2 * b], scores[2 * b + 1]);
    }
    float rescale[2];
    softmax.add(scores, queries.sees, first_key, scale, rescale);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) values[n][i] *= rescale[i / 2];
    }
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      if (b < from || b >= to) continue;
      // The lanes already hold the probabilities in the layout of the product's left operand.
      u32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&two)[4] = scores[2 * b + i / 2];
        split_bf16(two[i % 2 * 2], two[i % 2 * 2 + 1], high[i], low[i]);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        u32 of_values[4];
        step[b].values(of_values, n);
        const u32 b0[2] = {of_values[0], of_values[1]}, b1[2] = {of_values[2], of_values[3]};
        mma_bf16(values[2 * n], low, b0);
        mma_bf16(values[2 * n + 1], low, b1);
        mma_bf16(values[2 * n], high, b0);
        mma_bf16(values[2 * n + 1], high, b1);
      }
    }
  }

  // Writes the partial results of the queries that exist. `first_part` belongs to the warp's first query;
  // `left` is the number of queries from it on.
  __device__ __forceinline__ void write(float* first_part, u32 left, u32 kv_heads) {
    const u32 g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    softmax.add_lanes();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 q = g + 8 * r;
      if (q >= left) continue;
      float* to = first_part + (u64)q * kv_heads * part_len(HEAD_DIM);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        to[8 * n + 2 * t] = values[n][2 * r];
        to[8 * n + 2 * t + 1] = values[n][2 * r + 1];
      }
      if (t == 0) {
        to[HEAD_DIM] = softmax.maximum[r];
        to[HEAD_DIM + 1] = softmax.sum[r];
      }
    }
  }
};

// partial [parts][kv_heads][part_len] f32. own [blocks][kv_heads][K | V of 16 keys] bf16:
// blocks of single tree rows, of this layer, from block `first_own` of the pass on. Dynamic shared memory:
// STAGES steps. Grid (work, kv_heads), WARPS warps: tiles have up to 16 * WARPS queries.
// If tiles are merged here: arrived [tiles][kv_heads], zero before and after the launch -> out, rounded as
// those of attention_merge.
template <int HEAD_DIM, u32 WARPS>
__device__ __forceinline__ void attend(const float* qkv, const u32* positions, const bf16* kv, const bf16* own,
                                       const u32* tables, const AttentionTile* tiles, const AttentionWork* work,
                                       float* partial, u32* arrived, float* out, bf16* rounded, u32 first_own,
                                       u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale,
                                       u32 panels) {
  DYNAMIC_SHARED(memory);
  Stage<HEAD_DIM>* const ring = (Stage<HEAD_DIM>*)memory;
  __shared__ const bf16* blocks[RUN * SPLIT_BLOCKS];
  const AttentionWork run = work[blockIdx.x];
  if (run.split == NO_SPLIT) return;  // all threads of the block return
  const AttentionTile tile = tiles[run.tile];
  const u32 begin = tile.first_key > run.split * SPLIT_KEYS ? tile.first_key : run.split * SPLIT_KEYS;
  const u32 end = min(tile.end_key, run.end_split * SPLIT_KEYS);
  const u32 kv_head = blockIdx.y;
  const u32 kv_heads = gridDim.y;
  const u32 first_block = begin / 16, end_block = (end - 1) / 16 + 1;
  for (u32 i = first_block + threadIdx.x; i < end_block; i += WARPS * WARP) {
    const u32 id = tables[tile.table + i];
    blocks[i - first_block] = id & OWN ? own + kv_block((id & ~OWN) - first_own, 0, 1, kv_head, kv_heads, HEAD_DIM)
                                       : kv + kv_block(id, layer, layers, kv_head, kv_heads, HEAD_DIM);
  }
  __syncthreads();
  // Copies the blocks of a step, if there is one.
  auto copy_step = [&](u32 step) {
#pragma unroll 1
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      const u32 i = step * STEP_BLOCKS + b;
      if (i >= first_block && i < end_block) {
        ring[step % STAGES<WARPS> * STEP_BLOCKS + b].template copy<WARPS * WARP>(blocks[i - first_block]);
      }
    }
    cp_async_commit();
  };
  const u32 first_step = first_block / STEP_BLOCKS, end_step = (end_block - 1) / STEP_BLOCKS + 1;
  for (u32 step = first_step; step < first_step + STAGES<WARPS>; ++step) copy_step(step);
  const u32 first_query = threadIdx.x / WARP * 16;
  // A warp without queries only copies.
  const bool has_queries = first_query < tile.num_queries;
  const Queries<HEAD_DIM> queries(qkv, positions, tile, first_query, row_width, group, kv_head, window);
  SplitOfWarp<HEAD_DIM> split;
  split.begin();
  for (u32 step = first_step; step < end_step; ++step) {
    const u32 first_key = step * STEP_BLOCKS * 16;
    const Stage<HEAD_DIM>* const stage = ring + step % STAGES<WARPS> * STEP_BLOCKS;
    // This step has arrived for all threads.
    cp_async_wait<STAGES<WARPS> - 1>();
    __syncthreads();
    if (end < first_key + STEP_BLOCKS * 16 && end % 16 != 0) {
      // Slots past the sequence's end hold other data: zero times that may be NaN.
      ring[step % STAGES<WARPS> * STEP_BLOCKS + end % (STEP_BLOCKS * 16) / 16].template clear_values<WARPS * WARP>(end % 16);
      __syncthreads();
    }
    if (has_queries) {
      const u32 from = first_block > step * STEP_BLOCKS ? first_block - step * STEP_BLOCKS : 0;
      split.add(queries, stage, from, min(end_block - step * STEP_BLOCKS, STEP_BLOCKS), first_key, scale);
      // The last step of its split, or of the run.
      if ((step + 1) % (SPLIT_BLOCKS / STEP_BLOCKS) == 0 || step + 1 == end_step) {
        const u32 index = step * STEP_BLOCKS / SPLIT_BLOCKS;
        float* to = partial + part_of(tile, index, first_query, kv_heads, kv_head) * part_len(HEAD_DIM);
        split.write(to, tile.num_queries - first_query, kv_heads);
        split.begin();
      }
    }
    // All threads have read this step, which the next copy overwrites.
    __syncthreads();
    copy_step(step + STAGES<WARPS>);
  }
  // Loaded again, so that the loop needs no registers for what is used only here.
  const u32 index = work[blockIdx.x].tile;
  const AttentionTile merged = tiles[index];
  if (merged.num_runs == 0) return;  // all threads of the block return
  if (is_last_block(arrived + (u64)index * kv_heads + kv_head, merged.num_runs)) {
    constexpr u32 MAX_PARTS = STAGES<WARPS> * STEP_BLOCKS * Stage<HEAD_DIM>::CHUNKS / (part_len(HEAD_DIM) / 4);
    merge_tile<HEAD_DIM, WARPS, MAX_PARTS>(memory, partial, positions, merged, group, window, out, rounded, panels);
  }
}

#define ATTENTION(NAME, HEAD_DIM, WARPS, BLOCKS)                                                                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) NAME(                                               \
      const float* qkv, const u32* positions, const bf16* kv, const bf16* own, const u32* tables,                      \
      const AttentionTile* tiles, const AttentionWork* work, float* partial, u32* arrived, float* out, bf16* rounded,  \
      u32 first_own, u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale, u32 panels) {           \
    attend<HEAD_DIM, WARPS>(qkv, positions, kv, own, tables, tiles, work, partial, arrived, out, rounded, first_own,   \
                            row_width, group, layer, layers, window, scale, panels);                                   \
  }

ATTENTION(attention_16, 16, 1, 6)
ATTENTION(attention_32, 32, 1, 6)
ATTENTION(attention_64, 64, 1, 6)
ATTENTION(attention_96, 96, 1, 6)
ATTENTION(attention_128, 128, 1, 6)
ATTENTION(attention_pair_16, 16, 2, 4)
ATTENTION(attention_pair_32, 32, 2, 4)
ATTENTION(attention_pair_64, 64, 2, 4)
ATTENTION(attention_pair_96, 96, 2, 3)
ATTENTION(attention_pair_128, 128, 2, 3)
ATTENTION(attention_wide_16, 16, 4, 3)
ATTENTION(attention_wide_32, 32, 4, 3)
ATTENTION(attention_wide_64, 64, 4, 3)
ATTENTION(attention_wide_96, 96, 4, 2)
ATTENTION(attention_wide_128, 128, 4, 2)

// A query, the location of its partial results, and its highest score.
struct MergedQuery {
  AttentionTile tile;
  u32 q, first, end;  // range of the splits that its row needs
  const float* partial;
  u32 kv_head, kv_heads, width;
  u32 column;  // the lane's first value; lanes past the end take the last four
  float maximum;

  __device__ __forceinline__ const float* part(u32 split) const {
    return partial + part_of(tile, min(max_of(split, first), end - 1), q, kv_heads, kv_head) * width;
  }
  static __device__ __forceinline__ u32 max_of(u32 a, u32 b) { return a > b ? a : b; }

  __device__ __forceinline__ MergedQuery(const float* partial, const u32* positions, const AttentionTile* tiles,
                                         const u32* tile_of, u32 query, u32 group, u32 head_dim, u32 window)
      : tile(tiles[tile_of[query]]), partial(partial), kv_head(blockIdx.y), kv_heads(gridDim.y), width(part_len(head_dim)) {
    q = query - tile.first_query;
    column = LANE_DIMS * min(threadIdx.x % WARP, head_dim / LANE_DIMS - 1);
    const SplitRange needed(positions[query / group], window);
    first = needed.first;
    end = needed.end;
    float largest = NEG_INF;
    for (u32 split = first + threadIdx.x % WARP; split < end; split += WARP) {
      const float other = part(split)[head_dim];
      largest = other > largest ? other : largest;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
    maximum = largest;
  }
};

// Combines the splits of each of `queries` queries from `first_query` on.
//   partial, tiles as above, tile_of [queries]: the tile of a query -> out [rows, heads * head_dim] f32, and
//   rounded (bf16 or null): out as the input of a product (input_index)
// Grid (ceil(queries / 4), kv_heads), four warps, one per query; head_dim at most 128.
extern "C" __global__ void __launch_bounds__(128)
    attention_merge(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of, float* out,
                    bf16* rounded, u32 first_query, u32 queries, u32 group, u32 head_dim, u32 window, u32 panels) {
  const u32 index = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (index >= queries) return;  // the whole warp returns
  const u32 query = first_query + index;
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  SplitSum sums[SUMS] = {};
  for (u32 split = merged.first / SUMS * SUMS; split < merged.end; split += SUMS) {
#pragma unroll
    for (u32 a = 0; a < SUMS; ++a) {
      // Past the end of a short sequence nothing is loaded; a sum without splits stays zero.
      if (split + a >= merged.end) break;
      const float* part = merged.part(split + a);
      const bool exists = split + a >= merged.first;
      sums[a].add(part + merged.column, exp_f32(part[head_dim] - merged.maximum), part[head_dim + 1], exists);
    }
  }
  float all[SUMS], values[LANE_DIMS];
#pragma unroll
  for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a].sum;
  const float sum = tree(all);
#pragma unroll
  for (u32 j = 0; j < LANE_DIMS; ++j) {
#pragma unroll
    for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a].values[j];
    values[j] = tree(all) / sum;
  }
  const Merged to(out, rounded, query, group, head_dim, panels);
  if (LANE_DIMS * lane < head_dim) to.write(LANE_DIMS * lane, values[0], values[1], values[2], values[3]);
}

// The same with eight warps per query, one per sum: equal bits. Grid (queries, kv_heads), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_merge_long(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of,
                         float* out, bf16* rounded, u32 first_query, u32 queries, u32 group, u32 head_dim, u32 window,
                         u32 panels) {
  __shared__ float values[MAX_HEAD_DIM][SUMS + 1];
  __shared__ float sums[SUMS];
  if (blockIdx.x >= queries) return;
  const u32 query = first_query + blockIdx.x;
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  SplitSum mine = {};
  constexpr u32 AHEAD = 4;
  for (u32 split = merged.first / SUMS * SUMS + warp; split < merged.end; split += AHEAD * SUMS) {
#pragma unroll
    for (u32 a = 0; a < AHEAD; ++a) {
      const u32 at = split + a * SUMS;
      const float* part = merged.part(at);
      const bool exists = at >= merged.first && at < merged.end;
      mine.add(part + merged.column, exp_f32(part[head_dim] - merged.maximum), part[head_dim + 1], exists);
    }
  }
#pragma unroll
  for (u32 j = 0; j < LANE_DIMS; ++j) values[LANE_DIMS * lane + j][warp] = mine.values[j];
  if (lane == 0) sums[warp] = mine.sum;
  __syncthreads();
  if (LANE_DIMS * threadIdx.x >= head_dim) return;
  float all[SUMS], merged_values[LANE_DIMS];
#pragma unroll
  for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a];
  const float sum = tree(all);
#pragma unroll
  for (u32 j = 0; j < LANE_DIMS; ++j) {
#pragma unroll
    for (u32 a = 0; a < SUMS; ++a) all[a] = values[LANE_DIMS * threadIdx.x + j][a];
    merged_values[j] = tree(all) / sum;
  }
  const Merged to(out, rounded, query, group, head_dim, panels);
  to.write(LANE_DIMS * threadIdx.x, merged_values[0], merged_values[1], merged_values[2], merged_values[3]);
}
