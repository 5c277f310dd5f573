// How partial results of attention are merged into rows, by the last block of a tile or by a launch.

// Where the result of one query goes.
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
  // Writes dimensions i and i + 1; i is even.
  __device__ __forceinline__ void write(u32 i, float a, float b) const {
    *(u64*)(out + i) = (u64)__float_as_uint(b) << 32 | __float_as_uint(a);
    if (rounded) write_input_pair(rounded, row, column + i, width, panels, a, b);
  }
};

constexpr u32 MAX_HEAD_DIM = 128;
// Values of a partial result per lane.
constexpr u32 LANE_VALUES = MAX_HEAD_DIM / WARP;

// The result of some keys: four neighbouring values. It begins as that of no key.
struct Folded {
  float maximum = NEG_INF, sum = 0.0f;
  float values[LANE_VALUES] = {};

  // Loads a partial result: values `first .. first + 4`.
  __device__ __forceinline__ void load(const float* part, u32 first, u32 head_dim) {
    const uint4 four = *(const uint4*)(part + first);
    const u64 tail = *(const u64*)(part + head_dim);
    values[0] = __uint_as_float(four.x);
    values[1] = __uint_as_float(four.y);
    values[2] = __uint_as_float(four.z);
    values[3] = __uint_as_float(four.w);
    maximum = __uint_as_float((u32)tail);
    sum = __uint_as_float((u32)(tail >> 32));
  }
  // Adds the result of the next keys.
  __device__ __forceinline__ void fold(const Folded& part) {
    const Fold both = Fold::of(maximum, sum, part.maximum, part.sum);
    maximum = both.maximum;
    sum = both.sum;
#pragma unroll
    for (u32 j = 0; j < LANE_VALUES; ++j) values[j] = both.value(values[j], part.values[j]);
  }
  // Writes the row's result; `first` as above.
  __device__ __forceinline__ void write(const Merged& to, u32 first) const {
    const u32 dim = first / 16 * 16 + first % 16 / 2;
    to.write(dim, values[0] / sum, values[1] / sum);
    to.write(dim + 8, values[2] / sum, values[3] / sum);
  }
};

// Range of the partial results that a row needs, counted from position 0 on; 0 .. 1 if the tile has one.
struct PartRange {
  u32 first, end;
  __device__ __forceinline__ PartRange(u32 position, u32 window, u32 part_splits) {
    first = 0;
    end = 1;
    if (part_splits == 0) return;
    const u32 len = position + 1, keys = part_splits * SPLIT_KEYS;
    first = window != 0 && len > window ? (len - window) / keys : 0;
    end = (len + keys - 1) / keys;
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

// Merges the partial results of a tile. All its blocks have written them. Each is copied to shared memory
// once; copies for as many queries as fit are in flight together. A thread then merges four neighbouring
// values of a query. `memory` holds MAX_PARTS partial results; nothing else uses it any more.
template <int HEAD_DIM, u32 WARPS, u32 MAX_PARTS>
__device__ __forceinline__ void merge_tile(uint4* memory, const float* partial, const u32* positions,
                                           const AttentionTile& tile, u32 group, u32 window, float* out, bf16* rounded,
                                           u32 panels) {
  // Numbers of a partial result, and chunks of 16 bytes.
  constexpr u32 LEN = part_len(HEAD_DIM), CHUNKS = LEN / 4;
  static_assert(MAX_PARTS >= LAST_BLOCK_PARTS, "all partial results of a query fit in shared memory");
  u32 first_part = 0, parts = 1;
  if (tile.part_splits != 0) {
    const u32 part_keys = tile.part_splits * SPLIT_KEYS;
    first_part = tile.first_key / part_keys;
    parts = (tile.end_key + part_keys - 1) / part_keys - first_part;
  }
  const u32 at_once = MAX_PARTS / parts;
#pragma unroll 1
  for (u32 begin = 0; begin < tile.num_queries; begin += at_once) {
    const u32 end = min(begin + at_once, tile.num_queries);
#pragma unroll 1
    for (u32 q = begin + threadIdx.x / WARP; q < end; q += WARPS) {
#pragma unroll 1
      for (u32 part = 0; part < parts; ++part) {
        const uint4* const from = (const uint4*)(partial + part_of(tile, part, q, gridDim.y, blockIdx.y) * LEN);
        uint4* const to = memory + ((q - begin) * parts + part) * CHUNKS;
#pragma unroll
        for (u32 i = threadIdx.x % WARP; i < CHUNKS; i += WARP) cp_async_16(to + i, from + i, true);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    constexpr u32 LANES = HEAD_DIM / LANE_VALUES;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (end - begin) * LANES; i += WARPS * WARP) {
      const u32 first = i % LANES * LANE_VALUES, query = tile.first_query + begin + i / LANES;
      const PartRange needed(positions[query / group], window, tile.part_splits);
      const float* const of_query = (const float*)(memory + i / LANES * parts * CHUNKS);
      Folded row, of_group;
#pragma unroll 1
      for (u32 part = needed.first; part < needed.end; ++part) {
        Folded next;
        next.load(of_query + (part - first_part) * LEN, first, HEAD_DIM);
        of_group.fold(next);
        // The last part of its group, or of the row.
        if ((part + 1) * tile.part_splits % GROUP_SPLITS == 0 || part + 1 == needed.end) {
          row.fold(of_group);
          of_group = Folded();
        }
      }
      row.write(Merged(out, rounded, query, group, HEAD_DIM, panels), first);
    }
    // All threads have read these partial results, which the next copies overwrite.
    __syncthreads();
  }
}
