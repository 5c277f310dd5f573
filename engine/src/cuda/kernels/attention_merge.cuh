// How partial results of attention are merged into rows, by the last block of a tile or by a launch.

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
// `attention_merge`. `memory` holds `MAX_PARTS` partial results; nothing else uses it any more.
template <int HEAD_DIM, u32 WARPS, u32 MAX_PARTS>
__device__ __forceinline__ void merge_tile(uint4* memory, const float* partial, const u32* positions,
                                           const AttentionTile& tile, u32 group, u32 window, float* out, bf16* rounded,
                                           u32 panels) {
  // Numbers of a partial result, and chunks of 16 bytes.
  constexpr u32 LEN = HEAD_DIM + 4, CHUNKS = LEN / 4;
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
