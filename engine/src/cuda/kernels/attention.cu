// Attention over paged KV on tensor cores. Decode, verify and prefill rows run the same code, so that a row's
// bits do not depend on its kind (design I4).
//   qkv [rows, row_width] f32: a row begins with its query heads, after rotary embedding; positions [rows]
//   kv: kv.cuh
//   tables: all block tables, concatenated
//   tiles [num_tiles]: up to 16, 32 or 64 queries of one sequence that share a KV head; query q of a KV head is
//   (row q / group, head kv_head * group + q % group)
//
// What it computes: attention.cuh. A warp has 16 queries. The warps of a block share the keys and values in
// shared memory: a tile of 64 queries loads them once. A block processes a run of splits, so that it loads
// its queries once. The keys of the next step are copied while values are multiplied, its values while keys
// are.

// 16 keys, or their values, in shared memory, in the layout of global memory (kv.cuh).
template <int HEAD_DIM>
struct Stage {
  // Chunks of 16 bytes.
  static constexpr u32 CHUNKS = 2 * HEAD_DIM;
  uint4 chunks[CHUNKS];

  // Starts the copy; the threads of the CUDA block share the work.
  template <u32 THREADS>
  __device__ __forceinline__ void copy(const bf16* from) {
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i += THREADS) {
      if (CHUNKS % THREADS != 0 && i + threadIdx.x >= CHUNKS) break;
      cp_async_16(chunks + threadIdx.x + i, (const uint4*)from + threadIdx.x + i, true);
    }
  }

  // Zeroes the values from the `left`-th key on. Nothing else may access the stage meanwhile.
  template <u32 THREADS>
  __device__ __forceinline__ void clear_values(u32 left) {
    for (u32 i = threadIdx.x; i < 4 * CHUNKS; i += THREADS) {
      const u32 first = i / 32 % 2 * 8 + i % 4 * 2;
      ((u32*)chunks)[i] &= first + 1 < left ? 0xffffffffu : first < left ? 0xffffu : 0u;
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
    load_matrices(to, chunks + threadIdx.x % WARP + 32 * step);
  }
};

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
      sees[r].set(exists, exists ? positions[row] : 0, exists ? window : 0);
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const u64 bits = exists ? load_8((const u64*)(from + 8 * i)) : 0;
        const int at = r + 2 * (i % 2);
        split_bf16(__uint_as_float((u32)bits), __uint_as_float((u32)(bits >> 32)), high[i / 2][at], low[i / 2][at]);
      }
    }
  }
};

// Where a warp puts the results of its 16 queries: in partial results.
template <int HEAD_DIM>
struct PartSlot {
  float* first;  // of the warp's first query
  u32 stride;    // numbers from one query to the next
  u32 left;      // number of queries from the first one on

  static __device__ __forceinline__ u32 row(u32 r) { return threadIdx.x % WARP / 4 + 8 * r; }
  __device__ __forceinline__ bool has(u32 r) const { return row(r) < left; }
  // The lane's four values of dimensions 16 m .. + 15 of row g + 8 r, and its copy of that row's maximum and
  // sum.
  __device__ __forceinline__ uint4* values(u32 r, u32 m) const {
    return (uint4*)(first + (u64)row(r) * stride + 16 * m + threadIdx.x % 4 * 4);
  }
  __device__ __forceinline__ u64* tail(u32 r) const {
    return (u64*)(first + (u64)row(r) * stride + HEAD_DIM + threadIdx.x % 4 * 2);
  }
};

// Or in shared memory, every lane what it holds.
template <int HEAD_DIM>
struct SharedSlot {
  static constexpr u32 CHUNKS = 2 * (HEAD_DIM / 16 + 1) * WARP;
  uint4* first;

  __device__ __forceinline__ bool has(u32) const { return true; }
  __device__ __forceinline__ uint4* values(u32 r, u32 m) const {
    return first + (r * (HEAD_DIM / 16 + 1) + m) * WARP + threadIdx.x % WARP;
  }
  __device__ __forceinline__ u64* tail(u32 r) const { return (u64*)values(r, HEAD_DIM / 16); }
};

// Result of a warp's 16 queries over some keys, as a product leaves it: values[n][2 r + c] of row g + 8 r is
// dimension 8 n + 2 t + c.
template <int HEAD_DIM>
struct WarpResult {
  float values[HEAD_DIM / 8][4];
  Softmax softmax;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
    }
    softmax.begin();
  }

  // Computes the scores of a step of 64 keys. Those of blocks that are not in shared memory are any numbers: no
  // query sees them. Sums of different keys do not wait for each other.
  static __device__ __forceinline__ void multiply_keys(const Queries<HEAD_DIM>& queries, const Stage<HEAD_DIM>* keys,
                                                       float (&scores)[2 * STEP_BLOCKS][4]) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
#pragma unroll
      for (u32 b = 0; b < STEP_BLOCKS; ++b) {
        u32 of_keys[4];
        keys[b].keys(of_keys, step);
        const u32 b0[2] = {of_keys[0], of_keys[1]}, b1[2] = {of_keys[2], of_keys[3]};
        if (step == 0) {
          mma_bf16_first(scores[2 * b], queries.low[step], b0);
          mma_bf16_first(scores[2 * b + 1], queries.low[step], b1);
        } else {
          mma_bf16(scores[2 * b], queries.low[step], b0);
          mma_bf16(scores[2 * b + 1], queries.low[step], b1);
        }
        mma_bf16(scores[2 * b], queries.high[step], b0);
        mma_bf16(scores[2 * b + 1], queries.high[step], b1);
      }
    }
  }

  // Turns the scores into weights of the step's keys, and rescales the result so far. `is_first`: it is zero.
  __device__ __forceinline__ void weigh(float (&scores)[2 * STEP_BLOCKS][4], const Queries<HEAD_DIM>& queries, bool is_first,
                                        u32 first_key, float scale) {
    float rescale[2];
    softmax.add(scores, queries.sees, all_see(queries.sees, first_key), first_key, scale, rescale);
    if (is_first) return;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) values[n][i] *= rescale[i / 2];
    }
  }

  // Adds the step's weighted values.
  __device__ __forceinline__ void multiply_values(const float (&weights)[2 * STEP_BLOCKS][4], const Stage<HEAD_DIM>* stages,
                                                  u32 from, u32 to) {
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      if (b < from || b >= to) continue;
      // The lanes already hold the weights in the layout of the product's left operand.
      u32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&two)[4] = weights[2 * b + i / 2];
        split_bf16(two[i % 2 * 2], two[i % 2 * 2 + 1], high[i], low[i]);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        u32 of_values[4];
        stages[b].values(of_values, n);
        const u32 b0[2] = {of_values[0], of_values[1]}, b1[2] = {of_values[2], of_values[3]};
        mma_bf16(values[2 * n], low, b0);
        mma_bf16(values[2 * n + 1], low, b1);
        mma_bf16(values[2 * n], high, b0);
        mma_bf16(values[2 * n + 1], high, b1);
      }
    }
  }

  // Adds this to the result of the keys before, which this warp has put in `slot`. Sums are those of all lanes.
  template <typename Slot>
  __device__ __forceinline__ void fold_after(const Slot& slot) {
    Fold folds[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u64 tail = slot.has(r) ? *slot.tail(r) : 0;
      const float earlier_maximum = __uint_as_float((u32)tail), earlier_sum = __uint_as_float((u32)(tail >> 32));
      folds[r] = Fold::of(earlier_maximum, earlier_sum, softmax.maximum[r], softmax.sum[r]);
      softmax.maximum[r] = folds[r].maximum;
      softmax.sum[r] = folds[r].sum;
    }
    // Most folds of a warp are of two results that have seen keys.
    const bool is_both = (folds[0].is_both() || !slot.has(0)) && (folds[1].is_both() || !slot.has(1));
    if (__all_sync(0xffffffffu, is_both)) {
      fold_values(slot, [&](u32 r, float state, float part) { return folds[r].both(state, part); });
    } else {
      fold_values(slot, [&](u32 r, float state, float part) { return folds[r].value(state, part); });
    }
  }
  template <typename Slot, typename Value>
  __device__ __forceinline__ void fold_values(const Slot& slot, const Value& value) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      if (!slot.has(r)) continue;
#pragma unroll
      for (int m = 0; m < HEAD_DIM / 16; ++m) {
        const uint4 state = *slot.values(r, m);
        float (&first)[4] = values[2 * m], (&second)[4] = values[2 * m + 1];
        first[2 * r] = value(r, __uint_as_float(state.x), first[2 * r]);
        first[2 * r + 1] = value(r, __uint_as_float(state.y), first[2 * r + 1]);
        second[2 * r] = value(r, __uint_as_float(state.z), second[2 * r]);
        second[2 * r + 1] = value(r, __uint_as_float(state.w), second[2 * r + 1]);
      }
    }
  }

  // Puts the results of the queries that exist in `slot`.
  template <typename Slot>
  __device__ __forceinline__ void store(const Slot& slot) const {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      if (!slot.has(r)) continue;
#pragma unroll
      for (int m = 0; m < HEAD_DIM / 16; ++m) {
        *slot.values(r, m) = make_uint4(__float_as_uint(values[2 * m][2 * r]), __float_as_uint(values[2 * m][2 * r + 1]),
                                        __float_as_uint(values[2 * m + 1][2 * r]), __float_as_uint(values[2 * m + 1][2 * r + 1]));
      }
      *slot.tail(r) = (u64)__float_as_uint(softmax.sum[r]) << 32 | __float_as_uint(softmax.maximum[r]);
    }
  }
};

// Splits of the work of a block, in order, for one warp.
template <int HEAD_DIM, u32 WARPS>
struct Folding {
  // A tile of 64 queries keeps the result of the group so far in shared memory; fewer queries, whose results
  // are few bytes beside those of keys, in partial results.
  static constexpr bool IS_SHARED = WARPS == 4;

  float* partial;
  uint4* shared;
  u32 first_query;  // of the warp, in the tile
  AttentionWork run;

  __device__ __forceinline__ PartSlot<HEAD_DIM> part(const AttentionTile& tile, u32 i) const {
    const u64 index = part_of(tile, i, first_query, gridDim.y, blockIdx.y);
    return {partial + index * part_len(HEAD_DIM), gridDim.y * part_len(HEAD_DIM), tile.num_queries - first_query};
  }

  // Folds the result of a split into those before, and puts it where it belongs.
  __device__ __forceinline__ void end_split(WarpResult<HEAD_DIM>& result, const AttentionTile& tile, u32 split) const {
    result.softmax.add_lanes();
    const u32 first_split = tile.first_key / SPLIT_KEYS;
    u32 to = split - first_split;
    if (tile.part_splits != 1) {
      to = tile.part_splits == 0 ? 1 : split / GROUP_SPLITS - first_split / GROUP_SPLITS;
      const bool begins_group = split % GROUP_SPLITS == 0 || split == run.split;
      const bool ends_group = (split + 1) % GROUP_SPLITS == 0 || split + 1 == run.end_split;
      if constexpr (IS_SHARED) {
        const SharedSlot<HEAD_DIM> slot = {shared};
        if (!begins_group) result.fold_after(slot);
        if (!ends_group) {
          result.store(slot);
          return;
        }
      } else if (!begins_group) {
        result.fold_after(part(tile, to));
      }
      if (tile.part_splits == 0 && ends_group) {
        to = 0;
        if (split / GROUP_SPLITS != run.split / GROUP_SPLITS) result.fold_after(part(tile, to));
      }
    }
    result.store(part(tile, to));
  }
};

// partial [parts][kv_heads][part_len] f32. own [blocks][kv_heads][K | V of 16 keys] bf16: blocks of single
// tree rows, of this layer, from block `first_own` of the pass on. Dynamic shared memory: keys and values of
// a step and, for tiles of 64 queries, SharedSlots. Grid (work, kv_heads), WARPS warps: tiles have up to 16 *
// WARPS queries. If tiles are merged here: arrived [tiles][kv_heads], zero before and after the launch ->
// out, rounded as those of attention_merge.
template <int HEAD_DIM, u32 WARPS>
__device__ __forceinline__ void attend(const float* qkv, const u32* positions, const bf16* kv, const bf16* own,
                                       const u32* tables, const AttentionTile* tiles, const AttentionWork* work,
                                       float* partial, u32* arrived, float* out, bf16* rounded, u32 first_own,
                                       u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale,
                                       u32 panels) {
  constexpr u32 THREADS = WARPS * WARP, STEP_CHUNKS = 2 * STEP_BLOCKS * Stage<HEAD_DIM>::CHUNKS;
  constexpr u32 GROUP_BLOCKS = GROUP_SPLITS * SPLIT_BLOCKS, SPLIT_STEPS = SPLIT_BLOCKS / STEP_BLOCKS;
  DYNAMIC_SHARED(memory);
  Stage<HEAD_DIM>* const keys = (Stage<HEAD_DIM>*)memory;
  Stage<HEAD_DIM>* const values = keys + STEP_BLOCKS;
  // Addresses of the blocks of two groups.
  __shared__ const bf16* blocks[2 * GROUP_BLOCKS];
  const AttentionWork run = work[blockIdx.x];
  if (run.split == NO_SPLIT) return;  // all threads of the block return
  const AttentionTile tile = tiles[run.tile];
  const u32 begin = tile.first_key > run.split * SPLIT_KEYS ? tile.first_key : run.split * SPLIT_KEYS;
  const u32 end = min(tile.end_key, run.end_split * SPLIT_KEYS);
  const u32 kv_head = blockIdx.y;
  const u32 kv_heads = gridDim.y;
  const u32 first_block = begin / 16, end_block = (end - 1) / 16 + 1;
  auto find_blocks = [&](u32 of_group) {
    for (u32 i = threadIdx.x; i < GROUP_BLOCKS; i += THREADS) {
      const u32 b = of_group * GROUP_BLOCKS + i;
      if (b < first_block || b >= end_block) continue;
      const u32 id = tables[tile.table + b];
      blocks[b % (2 * GROUP_BLOCKS)] = id & OWN ? own + kv_block((id & ~OWN) - first_own, 0, 1, kv_head, kv_heads, HEAD_DIM)
                                                : kv + kv_block(id, layer, layers, kv_head, kv_heads, HEAD_DIM);
    }
  };
  // Copies the keys of a step, or its values, if there is such a step.
  auto copy = [&](Stage<HEAD_DIM>* to, u32 step, u32 offset) {
    // Before the copies, which order all accesses of memory.
    const bf16* of_step[STEP_BLOCKS];
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) of_step[b] = blocks[step * STEP_BLOCKS % (2 * GROUP_BLOCKS) + b];
    const i32 from = (i32)(first_block - step * STEP_BLOCKS), end = (i32)(end_block - step * STEP_BLOCKS);
#pragma unroll
    for (i32 b = 0; b < (i32)STEP_BLOCKS; ++b) {
      if (b >= from && b < end) to[b].template copy<THREADS>(of_step[b] + offset);
    }
    cp_async_commit();
  };
  const u32 first_group = run.split / GROUP_SPLITS;
  find_blocks(first_group);
  find_blocks(first_group + 1);
  __syncthreads();
  copy(keys, first_block / STEP_BLOCKS, 0);
  const u32 first_query = threadIdx.x / WARP * 16;
  // A warp without queries only copies.
  const bool has_queries = first_query < tile.num_queries;
  const Queries<HEAD_DIM> queries(qkv, positions, tile, first_query, row_width, group, kv_head, window);
  const Folding<HEAD_DIM, WARPS> folding = {
      partial, memory + STEP_CHUNKS + threadIdx.x / WARP * SharedSlot<HEAD_DIM>::CHUNKS, first_query, run};
  WarpResult<HEAD_DIM> result;
#pragma unroll 1
  for (u32 split = run.split; split < run.end_split; ++split) {
    // Those of the group before are no longer needed.
    if (split % GROUP_SPLITS == 0 && split > run.split) find_blocks(split / GROUP_SPLITS + 1);
    result.begin();
    const u32 first_step = split == run.split ? first_block / STEP_BLOCKS : split * SPLIT_STEPS;
    const u32 end_step = min((split + 1) * SPLIT_STEPS, (end_block - 1) / STEP_BLOCKS + 1);
#pragma unroll 1
    for (u32 step = first_step; step < end_step; ++step) {
      const u32 first_key = step * STEP_BLOCKS * 16;
      const u32 from = first_block > step * STEP_BLOCKS ? first_block - step * STEP_BLOCKS : 0;
      const u32 to = min(end_block - step * STEP_BLOCKS, STEP_BLOCKS);
      // The keys of this step have arrived for all threads, which have read the values of the one before.
      cp_async_wait<0>();
      __syncthreads();
      copy(values, step, 16 * HEAD_DIM);
      float scores[2 * STEP_BLOCKS][4];
      if (has_queries) result.multiply_keys(queries, keys, scores);
      __syncthreads();
      copy(keys, step + 1, 0);
      if (has_queries) result.weigh(scores, queries, step == first_step, first_key, scale);
      cp_async_wait<1>();
      __syncthreads();
      if (end < first_key + STEP_BLOCKS * 16 && end % 16 != 0) {
        // Slots past the sequence's end hold other data: zero times that may be NaN.
        values[end % (STEP_BLOCKS * 16) / 16].template clear_values<THREADS>(end % 16);
        __syncthreads();
      }
      if (has_queries) result.multiply_values(scores, values, from, to);
    }
    // Loaded again, so that the loop needs no registers for what is used only here.
    if (has_queries) folding.end_split(result, tiles[work[blockIdx.x].tile], split);
  }
  const u32 index = work[blockIdx.x].tile;
  const AttentionTile merged = tiles[index];
  if (merged.num_runs == 0) return;  // all threads of the block return
  if (is_last_block(arrived + (u64)index * kv_heads + kv_head, merged.num_runs)) {
    constexpr u32 MAX_PARTS = STEP_CHUNKS / (part_len(HEAD_DIM) / 4);
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
ATTENTION(attention_pair_96, 96, 2, 4)
ATTENTION(attention_pair_128, 128, 2, 4)
ATTENTION(attention_wide_16, 16, 4, 3)
ATTENTION(attention_wide_32, 32, 4, 3)
ATTENTION(attention_wide_64, 64, 4, 3)
ATTENTION(attention_wide_96, 96, 4, 2)
ATTENTION(attention_wide_128, 128, 4, 2)
