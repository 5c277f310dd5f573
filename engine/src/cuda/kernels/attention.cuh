// What kernels of attention over paged KV share: tiles of queries, their work, the softmax of a step of keys.
//
// Keys are cut at fixed absolute positions into splits of 128, and eight splits from a multiple of 1,024 keys
// on are a group. A split is processed as FlashAttention-2 does (Dao 2023, arXiv 2307.08691): steps of 64
// keys in order, rescaled by the running maximum. Splits fold in order into the result of their group, and
// groups fold in order into that of the row, all by `Fold`. So a row's bits depend on its position alone,
// whoever folds: the block that processed the splits, the last block of a tile, or a launch of
// `attention_merge`. What lies between two of them in memory are partial results: of splits, of groups, or
// none.
//
// K and V are multiplied as stored. Queries and probabilities are each split into two bf16 (x = high + low,
// about 16 bits), so that both products match f32 products to about 2^-16. A key block outside a query's
// range adds exactly zero, so the other queries of a tile do not affect it. Twin: parity/attention/exact.rs,
// within its bound.
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
// Splits of a group.
#define GROUP_SPLITS 8u
// Maximum number of partial results of a query that the last block of its tile merges.
#define LAST_BLOCK_PARTS 16

// One tile of queries; written by `ops/tiling.rs`.
struct AttentionTile {
  u32 first_query;  // row * group + head in group
  u32 num_queries;  // 1 to 16, 32, 64 or 128: a warp has 16
  u32 table;        // offset of the sequence's block table
  u32 first_key;    // smallest key that a query of the tile attends to
  u32 end_key;      // one past the largest such key
  u32 first_part;   // index of its first partial result; part i of query q is first_part + i * part_stride + q
  u32 part_stride;  // queries of the tile, or of the tile that contains it
  // Splits of a partial result: 1, or GROUP_SPLITS. Or 0: a block processes all keys and merges its own part
  // 0. Unless there is only one split, it keeps the result of the group so far in part 1 (or in shared
  // memory). Tiles of more than 64 queries have no such parts (attention_panels.cu), and none of one split.
  u32 part_splits;
  u32 num_runs;  // blocks per KV head that share the tile, the last of which merges; 0: none of them merges
};

// Flag in a block table: the block is in `own`, not in `kv`. Such blocks are numbered over the whole pass.
#define OWN 0x80000000u

// A run of splits of a tile; each split that a tile needs is in one run, and so is every partial result.
// `split` is NO_SPLIT in entries that pad the grid to a common size.
struct AttentionWork {
  u32 tile;
  u32 split, end_split;
};
#define NO_SPLIT 0xffffffffu
// Tile of a query behind those of sequences: it has no result.
#define NO_TILE 0xffffffffu

// Length of a partial result: the values, then the maximum and the sum, four times. So each of the four lanes
// that hold a query's values after a product reads only what it has written itself: of each 16 values, lane t
// has four neighbouring ones from 4 t on, those of dimensions 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
constexpr __device__ __forceinline__ u32 part_len(u32 head_dim) { return head_dim + 8; }

// Index of a partial result: `part` of query q of a tile and a KV head.
__device__ __forceinline__ u64 part_of(const AttentionTile& tile, u32 part, u32 q, u32 kv_heads, u32 kv_head) {
  return (u64)(tile.first_part + part * tile.part_stride + q) * kv_heads + kv_head;
}

// How the result of some keys (`part`) is added to that of all keys before them (`state`), in the splits or
// groups that they belong to. One that has seen no key, whose sum is zero, changes nothing.
struct Fold {
  float maximum, sum;
  float of_state, of_part;
  bool keeps_state, takes_part;

  static __device__ __forceinline__ Fold of(float state_maximum, float state_sum, float part_maximum, float part_sum) {
    Fold fold;
    fold.keeps_state = part_sum == 0.0f;
    fold.takes_part = state_sum == 0.0f;
    fold.maximum = part_maximum > state_maximum ? part_maximum : state_maximum;
    fold.of_state = exp_f32_below_zero(state_maximum - fold.maximum);
    fold.of_part = exp_f32_below_zero(part_maximum - fold.maximum);
    fold.sum = fold.value(state_sum, part_sum);
    return fold;
  }
  // Whether both have seen keys.
  __device__ __forceinline__ bool is_both() const { return !keeps_state && !takes_part; }
  __device__ __forceinline__ float both(float state, float part) const { return fmaf(of_part, part, of_state * state); }
  __device__ __forceinline__ float value(float state, float part) const {
    return keeps_state ? state : takes_part ? part : both(state, part);
  }
};

// Splits two floats into bf16 high parts and bf16 remainders: together about 16 bits.
__device__ __forceinline__ void split_bf16(float x0, float x1, u32& high, u32& low) {
  high = narrow_two(x0, x1);
  low = narrow_two(x0 - __uint_as_float(high << 16), x1 - __uint_as_float(high & 0xffff0000u));
}

// Range of the keys that a query sees. One that does not exist sees all, so that no step is masked for it.
struct KeyRange {
  u32 first, end;

  __device__ __forceinline__ void set(bool exists, u32 position, u32 window) {
    end = exists ? position + 1 : 0x7fffffffu;
    first = window != 0 && position + 1 > window ? position + 1 - window : 0;
  }
};

// Whether all queries of a warp, two of which each lane has, see all keys of a step.
__device__ __forceinline__ bool all_see(const KeyRange (&sees)[2], u32 first_key) {
  const bool first_sees = sees[0].first <= first_key && first_key + 16 * STEP_BLOCKS <= sees[0].end;
  const bool second_sees = sees[1].first <= first_key && first_key + 16 * STEP_BLOCKS <= sees[1].end;
  return __all_sync(0xffffffffu, first_sees && second_sees);
}

// Running maximum and sum of the weights of a lane's two queries, rows g and g + 8 of a product's result.
struct Softmax {
  float maximum[2];
  float sum[2];  // over this lane's keys only, until `add_lanes`

  __device__ __forceinline__ void begin() {
    for (int r = 0; r < 2; ++r) {
      maximum[r] = NEG_INF;
      sum[r] = 0.0f;
    }
  }

  // Adds a step of 64 keys from `first_key` on: scores[n][2 r + c] of row g + 8 r is of key 8 n + 2 t + c. It
  // becomes the weight of that key. What was added before is to be multiplied by `rescale[r]`. `sees_all`: every
  // query sees all these keys. A score that is not a number becomes the maximum, and rescales all to NaN.
  __device__ __forceinline__ void add(float (&scores)[2 * STEP_BLOCKS][4], const KeyRange (&sees)[2], bool sees_all,
                                      u32 first_key, float scale, float (&rescale)[2]) {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
      for (int i = 0; i < 4; ++i) scores[n][i] = scores[n][i] * scale;
    }
    if (!sees_all) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The range of keys that the query sees, counted from this lane's first one.
        const i32 see_first = (i32)(sees[r].first - first_key - 2 * t);
        const i32 see_end = (i32)(sees[r].end - first_key - 2 * t);
#pragma unroll
        for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int key = 8 * n + c;
            float& score = scores[n][2 * r + c];
            score = key >= see_first && key < see_end ? score : NEG_INF;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The maximum over this lane's keys, then over the four lanes that share the query.
      float largest = maximum[r];
#pragma unroll
      for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
        largest = max_or_nan(max_or_nan(largest, scores[n][2 * r]), scores[n][2 * r + 1]);
      }
      for (int other_lane = 1; other_lane < 4; other_lane *= 2) {
        largest = max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, other_lane));
      }
      // A query that has seen no key so far: every exponential below is that of -infinity, zero.
      const float base = largest == NEG_INF ? 0.0f : largest;
      rescale[r] = exp_f32_below_zero(maximum[r] - base);
      maximum[r] = largest;
      sum[r] = sum[r] * rescale[r];
#pragma unroll
      for (int n = 0; n < 2 * STEP_BLOCKS; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[n][2 * r + c];
          score = exp_f32_of_number(score - base);
          sum[r] = sum[r] + score;
        }
      }
    }
  }

  // Adds the sums of the four lanes that share a query: every one of them has it.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      for (int step = 1; step < 4; step *= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    }
  }
};
