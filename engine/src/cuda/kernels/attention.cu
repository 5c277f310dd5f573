// Attention over paged KV on tensor cores. Decode, verify and prefill rows run the same code, so that a row's
// bits do not depend on its kind (design I4).
//   qkv [rows, row_width] f32: a row begins with its query heads, after rotary embedding; positions [rows]
//   kv [blocks][layers][kv_heads][K: 16 x head_dim | V: head_dim x 16] bf16
//   tables: all block tables, concatenated
//   tiles [num_tiles]: up to 16 queries of one sequence that share a KV head; query q of a KV head is
//   (row q / group, head kv_head * group + q % group)
//
// Keys are cut at fixed absolute positions into splits of 128. A warp processes a split for 16 queries as
// FlashAttention-2 does (Dao 2023, arXiv 2307.08691): steps of 64 keys in order, rescaled by the running
// maximum. A merge combines a row's splits: each is weighted relative to the row's highest score; splits
// i, i + 8, i + 16 .. are added in order, and the contract's tree adds the eight sums. So several warps may
// share the splits, and a row's bits depend on its position alone. If a tile has few splits, the block that
// finishes it last merges them; otherwise a launch of `attention_merge` does. K and V are multiplied as
// stored. Queries and probabilities are each split into two bf16 (x = high + low, about 16 bits), so that
// both products match f32 products to about 2^-16. A key block outside a query's range adds exactly zero, so
// the other queries of a tile do not affect it. Twin: parity/attention/exact.rs, within its bound.
//
// The warps of a block share the keys and values in shared memory: a tile of 64 queries loads them once. A block
// processes a run of splits, so that it loads its queries once and copies the next step meanwhile.
//
// Rows of a token tree share all splits before the one in which the tree begins, in tiles as above. From
// there on each row has its own tile, whose block table ends with blocks that `gather_blocks` (trees.cu)
// assembled from the row's ancestors. So a warp reads the keys that a chain would have at each position, and
// sums the same numbers in the same order. A mask over the stored keys could not do that: ancestors would be
// in other blocks and lanes, and the order of the sums would differ. The cost: each row of a tree reads up to
// seven blocks of 16 keys that its neighbours also read.

#define SPLIT_KEYS 128
#define SPLIT_BLOCKS 8u
// Blocks of 16 keys of a step.
#define STEP_BLOCKS 4u
// Maximum number of splits in a run.
#define RUN 8
// Maximum number of splits of a tile that its last block merges.
#define LAST_BLOCK_SPLITS 16

// One tile of queries; written by `ops/attention.rs`.
struct AttentionTile {
  u32 first_query;  // row * group + head in group
  u32 num_queries;  // 1 to 16, 32 or 64: a warp has 16
  u32 table;        // offset of the sequence's block table
  u32 first_key;    // smallest key that a query of the tile attends to
  u32 end_key;      // one past the largest such key
  u32 first_part;   // index of its first partial result; there is one per query and split
  u32 part_stride;  // partial results per split: queries of the tile, or of the tile that contains it
  u32 num_runs;     // blocks per KV head that share the tile, the last of which merges; 0: none of them merges
};

// Flag in a block table: the block is in `own`, not in `kv`. Such blocks are numbered over the whole pass.
#define OWN 0x80000000u

// A run of splits of a tile; each split that a tile needs is in one run. `split` is NO_SPLIT in entries that
// pad the grid to a common size.
struct AttentionWork {
  u32 tile;
  u32 split, end_split;
};
#define NO_SPLIT 0xffffffffu

// Length of a partial result: the values, the maximum, the sum, and two numbers that align the next one.
__device__ __forceinline__ u32 part_len(u32 head_dim) { return head_dim + 4; }

// Index of the partial result of split `split` for query q of a tile and a KV head.
__device__ __forceinline__ u64 part_of(const AttentionTile& tile, u32 split, u32 q, u32 kv_heads, u32 kv_head) {
  const u32 part = tile.first_part + (split - tile.first_key / SPLIT_KEYS) * tile.part_stride + q;
  return (u64)part * kv_heads + kv_head;
}

// Splits two floats into bf16 high parts and bf16 remainders: together about 16 bits.
__device__ __forceinline__ void split_bf16(float x0, float x1, u32& high, u32& low) {
  high = narrow_two(x0, x1);
  low = narrow_two(x0 - __uint_as_float(high << 16), x1 - __uint_as_float(high & 0xffff0000u));
}

// A block of keys and values in shared memory: 16 rows of keys, then HEAD_DIM rows of 16 values. The layout
// is that of global memory except that the 16-byte chunks of a row are swizzled to avoid bank conflicts.
template <int HEAD_DIM>
struct Stage {
  static constexpr u32 KEY_CHUNKS = HEAD_DIM / 8;
  static constexpr u32 CHUNKS = 4 * HEAD_DIM;
  uint4 chunks[CHUNKS];

  // Swizzle of a row of keys. Rows begin at one, two or four different banks, depending on HEAD_DIM; the
  // pattern repeats after eight rows.
  static __device__ __forceinline__ u32 key_swizzle(u32 row) {
    return HEAD_DIM % 64 == 0 ? row % 8 : HEAD_DIM % 32 == 0 ? row / 2 % 4 : row / 4 % 2;
  }
  static __device__ __forceinline__ u32 place_of_key(u32 row, u32 chunk) {
    return row * KEY_CHUNKS + (chunk ^ key_swizzle(row));
  }
  static __device__ __forceinline__ u32 place_of_value(u32 row, u32 chunk) {
    return 2 * HEAD_DIM + 2 * row + (chunk ^ row / 4 % 2);
  }

  // Starts the copy of a block; the threads of the CUDA block share the work.
  template <u32 THREADS>
  __device__ __forceinline__ void copy(const bf16* block) {
    const uint4* from = (const uint4*)block + threadIdx.x;
// A warp alone copies in a loop: all its addresses at once would not fit in its registers.
#pragma unroll (THREADS == WARP ? 2 : 8)
    for (u32 first = 0; first < CHUNKS / 2; first += THREADS) {
      const u32 i = first + threadIdx.x;
      if (CHUNKS / 2 % THREADS != 0 && i >= CHUNKS / 2) break;
      // If THREADS is a multiple of the swizzle's period, places of later iterations differ by a constant.
      constexpr bool IS_WHOLE = THREADS % (8 * KEY_CHUNKS) == 0;
      const u32 of = IS_WHOLE ? threadIdx.x : i;
      const u32 place = place_of_key(of / KEY_CHUNKS, of % KEY_CHUNKS) + (IS_WHOLE ? first : 0);
      cp_async_16(chunks + place, from + first, true);
      const u32 value_place = place_of_value(threadIdx.x / 2, threadIdx.x % 2) + first;
      cp_async_16(chunks + value_place, from + CHUNKS / 2 + first, true);
    }
  }

  // Zeroes the values from the `left`-th key on. Nothing else may access the stage meanwhile.
  template <u32 THREADS>
  __device__ __forceinline__ void clear_values(u32 left) {
    for (u32 i = threadIdx.x; i < 8 * HEAD_DIM; i += THREADS) {
      const u32 first = i % 8 * 2;
      const u32 kept = first + 1 < left ? 0xffffffffu : first < left ? 0xffffu : 0u;
      ((u32*)(chunks + place_of_value(i / 8, i % 8 / 4)))[i % 4] &= kept;
    }
  }

  // Operands of products over 16 dimensions from 16 * step on: of keys 0 .. 7 (two registers) and 8 .. 15.
  __device__ __forceinline__ void keys(u32 (&to)[4], u32 step) const {
    const u32 matrix = threadIdx.x % WARP / 8, row = threadIdx.x % 8;
    load_matrices(to, chunks + place_of_key(matrix / 2 * 8 + row, 2 * step + matrix % 2));
  }
  // Operands of products over the 16 keys: of values of dimensions 16 * step .. + 7 (two registers) and the
  // next eight.
  __device__ __forceinline__ void values(u32 (&to)[4], u32 step) const {
    const u32 matrix = threadIdx.x % WARP / 8, row = threadIdx.x % 8;
    load_matrices(to, chunks + place_of_value(16 * step + matrix / 2 * 8 + row, matrix % 2));
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
  u32 see_first[2], see_end[2];

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
      const u32 position = exists ? positions[row] : 0;
      see_end[r] = exists ? position + 1 : 0;
      see_first[r] = window != 0 && position + 1 > window ? position + 1 - window : 0;
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
  float maximum[2];
  float sum[2];  // over this lane's keys only, until the end

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) values[n][i] = 0.0f;
    }
    for (int r = 0; r < 2; ++r) {
      maximum[r] = NEG_INF;
      sum[r] = 0.0f;
    }
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
    const u32 t = threadIdx.x % 4;
    float scores[2 * STEP_BLOCKS][4] = {};
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      if (b >= from && b < to) multiply(queries, step[b], scores[2 * b], scores[2 * b + 1]);
    }
    // The running maximum of each query: over this lane's keys, then over the four lanes that share the query.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = maximum[r];
      // The range of keys that the query sees, counted from this lane's first one.
      const i32 see_first = (i32)(queries.see_first[r] - first_key - 2 * t);
      const i32 see_end = (i32)(queries.see_end[r] - first_key - 2 * t);
#pragma unroll
      for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = 8 * n + c;
          float& score = scores[n][2 * r + c];
          score = key >= see_first && key < see_end ? score * scale : NEG_INF;
          largest = score > largest ? score : largest;
        }
      }
      for (int other_lane = 1; other_lane < 4; other_lane *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, other_lane);
        largest = other > largest ? other : largest;
      }
      // A query that has seen no key so far: every exponential below is that of -infinity, zero.
      const float base = largest == NEG_INF ? 0.0f : largest;
      const float rescale = exp_f32_below_zero(maximum[r] - base);
      maximum[r] = largest;
      sum[r] = sum[r] * rescale;
#pragma unroll
      for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[n][2 * r + c];
          score = exp_f32_below_zero(score - base);
          sum[r] = sum[r] + score;
        }
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        values[n][2 * r] *= rescale;
        values[n][2 * r + 1] *= rescale;
      }
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
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      for (int step = 1; step < 4; step *= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
      const u32 q = g + 8 * r;
      if (q >= left) continue;
      float* to = first_part + (u64)q * kv_heads * part_len(HEAD_DIM);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        to[8 * n + 2 * t] = values[n][2 * r];
        to[8 * n + 2 * t + 1] = values[n][2 * r + 1];
      }
      if (t == 0) {
        to[HEAD_DIM] = maximum[r];
        to[HEAD_DIM + 1] = sum[r];
      }
    }
  }
};

// Where the result of one query goes, as four neighbouring numbers of each lane.
struct Merged {
  float* out;
  bf16* rounded;
  u32 row, column, width, panels;

  // Query `query` of the block's KV head.
  __device__ __forceinline__ Merged(float* out, bf16* rounded, u32 query, u32 group, u32 head_dim, u32 panels)
      : rounded(rounded), row(query / group), width(gridDim.y * group * head_dim), panels(panels) {
    column = (blockIdx.y * group + query % group) * head_dim;
    this->out = out + (u64)row * width + column;
  }
  __device__ __forceinline__ void write(u32 i, float a, float b, float c, float d) const {
    *(uint4*)(out + i) = make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
    if (rounded) write_input(rounded, row, column + i, width, panels, a, b, c, d);
  }
};

// Number of sums that the contract's tree adds; split i goes to sum i % SUMS.
constexpr u32 SUMS = 8;
constexpr u32 MAX_HEAD_DIM = 128;
// Head dimensions per lane.
constexpr u32 LANE_DIMS = MAX_HEAD_DIM / WARP;

// Running sum of the splits that belong to one of the SUMS sums, in order: four neighbouring values per lane.
struct SplitSum {
  float sum;
  float values[LANE_DIMS];

  // `four_values` are the lane's values of a split.
  __device__ __forceinline__ void add(const float* four_values, float weight, float part_sum, bool exists) {
    const float kept = exists ? weight : 0.0f;
    sum = fmaf(exists ? part_sum : 0.0f, kept, sum);
    const uint4 four = *(const uint4*)four_values;
    values[0] = fmaf(exists ? __uint_as_float(four.x) : 0.0f, kept, values[0]);
    values[1] = fmaf(exists ? __uint_as_float(four.y) : 0.0f, kept, values[1]);
    values[2] = fmaf(exists ? __uint_as_float(four.z) : 0.0f, kept, values[2]);
    values[3] = fmaf(exists ? __uint_as_float(four.w) : 0.0f, kept, values[3]);
  }

  // A node of the contract's tree.
  __device__ __forceinline__ SplitSum operator+(const SplitSum& other) const {
    SplitSum both;
    both.sum = sum + other.sum;
#pragma unroll
    for (u32 j = 0; j < LANE_DIMS; ++j) both.values[j] = values[j] + other.values[j];
    return both;
  }
};

// Range of the splits that a row needs.
struct SplitRange {
  u32 first, end;
  __device__ __forceinline__ SplitRange(u32 position, u32 window) {
    const u32 len = position + 1;
    first = window != 0 && len > window ? (len - window) / SPLIT_KEYS : 0;
    end = (len + SPLIT_KEYS - 1) / SPLIT_KEYS;
  }
};

// Whether this block is the last of the `blocks` blocks of a launch that call this with one counter, which is
// zero before and after the launch. If so, it may read what the others wrote to global memory before they
// called. The counter is incremented by atomics only.
__device__ __forceinline__ bool is_last_block(u32* counter, u32 blocks) {
  __shared__ u32 num_earlier;
  __syncthreads();
  if (blocks == 1) return true;
  if (threadIdx.x == 0) {
    __threadfence();
    num_earlier = atomicInc(counter, blocks - 1);  // the last one sets it to zero
    __threadfence();
  }
  __syncthreads();
  return num_earlier == blocks - 1;
}

// Merges the splits of a tile. All blocks of the tile have written their partial results, each of which is
// copied to shared memory once; copies for as many queries as fit are in flight together. A thread then
// merges four neighbouring values of a query. It computes one sum at a time: few registers, and the bits of
// `attention_merge`. `memory` holds STAGES steps, which nothing else uses any more.
template <int HEAD_DIM, u32 WARPS>
__device__ __forceinline__ void merge_tile(uint4* memory, const float* partial, const u32* positions,
                                           const AttentionTile& tile, u32 group, u32 window, float* out, bf16* rounded,
                                           u32 panels) {
  // Numbers of a partial result, and chunks of 16 bytes.
  constexpr u32 LEN = HEAD_DIM + 4, CHUNKS = LEN / 4;
  constexpr u32 MAX_PARTS = STAGES<WARPS> * STEP_BLOCKS * Stage<HEAD_DIM>::CHUNKS / CHUNKS;
  static_assert(MAX_PARTS >= LAST_BLOCK_SPLITS, "all splits of a query fit in shared memory");
  const u32 first_split = tile.first_key / SPLIT_KEYS;
  const u32 splits = (tile.end_key + SPLIT_KEYS - 1) / SPLIT_KEYS - first_split;
  const u32 at_once = MAX_PARTS / splits;
#pragma unroll 1
  for (u32 begin = 0; begin < tile.num_queries; begin += at_once) {
    const u32 end = min(begin + at_once, tile.num_queries);
#pragma unroll 1
    for (u32 q = begin + threadIdx.x / WARP; q < end; q += WARPS) {
#pragma unroll 1
      for (u32 split = 0; split < splits; ++split) {
        const u64 part = part_of(tile, first_split + split, q, gridDim.y, blockIdx.y);
        const uint4* const from = (const uint4*)(partial + part * LEN);
        uint4* const to = memory + ((q - begin) * splits + split) * CHUNKS;
#pragma unroll
        for (u32 i = threadIdx.x % WARP; i < CHUNKS; i += WARP) cp_async_16(to + i, from + i, true);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    constexpr u32 LANES = HEAD_DIM / LANE_DIMS;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (end - begin) * LANES; i += WARPS * WARP) {
      const u32 column = i % LANES * LANE_DIMS, query = tile.first_query + begin + i / LANES;
      const SplitRange needed(positions[query / group], window);
      const float* const parts = (const float*)(memory + i / LANES * splits * CHUNKS);
      float maximum = NEG_INF;
#pragma unroll 1
      for (u32 split = needed.first; split < needed.end; ++split) {
        const float other = parts[(split - first_split) * LEN + HEAD_DIM];
        maximum = other > maximum ? other : maximum;
      }
      auto sum = [&](u32 number) {
        SplitSum splits_in_order = {};
#pragma unroll 1
        for (u32 split = needed.first + (number - needed.first) % SUMS; split < needed.end; split += SUMS) {
          const float* const part = parts + (split - first_split) * LEN;
          splits_in_order.add(part + column, exp_f32(part[HEAD_DIM] - maximum), part[HEAD_DIM + 1], true);
        }
        return splits_in_order;
      };
      const SplitSum all = ((sum(0) + sum(1)) + (sum(2) + sum(3))) + ((sum(4) + sum(5)) + (sum(6) + sum(7)));
      const Merged to(out, rounded, query, group, HEAD_DIM, panels);
      to.write(column, all.values[0] / all.sum, all.values[1] / all.sum, all.values[2] / all.sum, all.values[3] / all.sum);
    }
    // All threads have read these partial results, which the next copies overwrite.
    __syncthreads();
  }
}

// partial [parts][kv_heads][part_len] f32. own [blocks][kv_heads][K: 16 x HEAD_DIM | V: HEAD_DIM x 16] bf16:
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
    const u64 block = id & OWN ? (id & ~OWN) - first_own : (u64)id * layers + layer;
    blocks[i - first_block] = (id & OWN ? own : kv) + (block * kv_heads + kv_head) * (u64)(32 * HEAD_DIM);
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
    merge_tile<HEAD_DIM, WARPS>(memory, partial, positions, merged, group, window, out, rounded, panels);
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
