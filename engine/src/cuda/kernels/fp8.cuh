// Products of FP8 (E4M3) weights: the code that fp8.cu and fp8_blocks.cu share.
//
// A slice of a row of weights is a whole number of blocks of 64 weights, the last one padded with zeros. A lane
// reads 16 bytes of a block: its eight weights of one step of K and its eight of the next, so that each instruction
// multiplies the same operands as in gemm_bf16. widen.cuh describes a word of four weights.

// Converts a lane's eight weights of a step to the bf16 numbers that it would load.
__device__ __forceinline__ uint4 widen(u32 low, u32 high) {
  return make_uint4(first_two(low), last_two(low), first_two(high), last_two(high));
}

constexpr u32 BLOCK = 64;
constexpr u32 STEPS_OF_BLOCK = 2;
constexpr u32 STEP = BLOCK / STEPS_OF_BLOCK;
constexpr u32 BORDERS = 9;

// Adds the products of COUNT whole blocks of a slice or chain, all loads first. `low`, `high` and `in` are a lane's
// offsets from `weights` and `x`.
template <int TILES, int HALVES, int COUNT>
__device__ __forceinline__ void add_blocks(float (&acc)[TILES][4], const unsigned char* weights, u32 low, u32 high, const bf16* x,
                                           const u32 (&in)[TILES]) {
  constexpr int STEPS = COUNT * STEPS_OF_BLOCK;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint4 w_low[COUNT], w_high[COUNT], rows[STEPS][TILES];
#pragma unroll
  for (int block = 0; block < COUNT; ++block) {
    w_low[block] = load_16(weights + low + BLOCK * block);
    w_high[block] = HALVES == 2 ? load_16(weights + high + BLOCK * block) : zeros;
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) rows[step][tile] = load_16(x + in[tile] + STEP * step);
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const uint4 l = w_low[step / 2], h = w_high[step / 2];
    const uint4 of_low = step % 2 ? widen(l.z, l.w) : widen(l.x, l.y);
    const uint4 of_high = HALVES == 1 ? zeros : step % 2 ? widen(h.z, h.w) : widen(h.x, h.y);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) multiply(acc[tile], of_low, of_high, rows[step][tile]);
  }
}

// Adds the products of a block of which only `left` weights belong to the slice or chain. `offset` is the lane's first
// weight of a step.
template <int TILES, int HALVES>
__device__ __forceinline__ void add_short_block(float (&acc)[TILES][4], const unsigned char* weights, u32 low, u32 high,
                                                const bf16* x, const u32 (&in)[TILES], u32 offset, u32 left) {
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  const uint4 l = load_16(weights + low);
  const uint4 h = HALVES == 2 ? load_16(weights + high) : zeros;
#pragma unroll
  for (int step = 0; step < STEPS_OF_BLOCK; ++step) {
    const uint4 of_low = step ? widen(l.z, l.w) : widen(l.x, l.y);
    const uint4 of_high = HALVES == 1 ? zeros : step ? widen(h.z, h.w) : widen(h.x, h.y);
    // A lane's 16 bytes are either all inside or all outside.
    const bool inside = STEP * step + offset < left;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      multiply(acc[tile], of_low, of_high, inside ? load_16(x + in[tile] + STEP * step) : zeros);
    }
  }
}

// Stages of a block in shared memory (see UniformOperands in tiled.cuh): 64 bytes of each channel and two steps of
// rows.
template <int NT>
struct WidenedOperands {
  typedef StepIterator Iterator;
  static constexpr u32 STEP_OF_K = BLOCK, STEPS_OF_STAGE = 1, NUM_BORDERS = 2 * BORDERS;
  static constexpr u32 CHUNKS = (TILE_CHANNELS + STEPS_OF_BLOCK * Tile<NT>::ROWS) * CHUNKS_OF_ROW;
  static constexpr u32 OF_WEIGHTS = TILE_CHANNELS * CHUNKS_OF_ROW / 256;
  const unsigned char* weights;
  u32 w_offset[OF_WEIGHTS];
  RowCopies<bf16, NT> rows;

  // Channels past the last are copies of it; their results are not stored.
  __device__ __forceinline__ WidenedOperands(const bf16* x, const unsigned char* all_weights, u32 row_bytes, Sizes sizes)
      : rows(x, sizes) {
    const u32 first_channel = blockIdx.y * TILE_CHANNELS;
    weights = all_weights + (u64)first_channel * row_bytes + threadIdx.x % CHUNKS_OF_ROW * 16;
    const u32 row = threadIdx.x / CHUNKS_OF_ROW;
#pragma unroll
    for (u32 c = 0; c < OF_WEIGHTS; ++c) w_offset[c] = min(64 * c + row, sizes.n - 1 - first_channel) * row_bytes;
  }

  __device__ __forceinline__ void start(uint4* to, u32 slice, u32 at, const u32* cuts) const {
    start_at(to, cuts[BORDERS + slice] + (at - cuts[slice]), at, cuts[slice + 1]);
  }

  // Starts the copies of the block at `at` of a slice that ends at `end`; `byte` is its place in a row of weights.
  __device__ __forceinline__ void start_at(uint4* to, u32 byte, u32 at, u32 end) const {
    const unsigned char* from = weights + byte;
#pragma unroll
    for (u32 c = 0; c < OF_WEIGHTS; ++c) cp_async_16(to + 256 * c + threadIdx.x, from + w_offset[c], true);
    to += 256 * OF_WEIGHTS;
#pragma unroll
    for (u32 step = 0; step < STEPS_OF_BLOCK; ++step) {
      rows.start(to + step * Tile<NT>::ROWS * CHUNKS_OF_ROW, at + STEP * step, end);
    }
  }

  static __device__ __forceinline__ void multiply_staged(Accumulators<float, NT>& acc, const uint4* staged) {
    const u32 warp = threadIdx.x / WARP;
    const uint2* w = (const uint2*)(staged + warp % 4 * 32 * CHUNKS_OF_ROW + threadIdx.x % WARP);
    const uint4* x = staged + (TILE_CHANNELS + warp / 4 * 8 * NT) * CHUNKS_OF_ROW + threadIdx.x % WARP;
// Not unrolled for NT > 5: the loads of the next step would take registers that a tile of 128 rows does not
// leave.
#pragma unroll (NT > 5 ? 1 : STEPS_OF_BLOCK)
    for (u32 step = 0; step < STEPS_OF_BLOCK; ++step) {
      uint4 low[2], high[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint2 l = w[2 * (2 * m) * 8 * CHUNKS_OF_ROW + step], h = w[2 * (2 * m + 1) * 8 * CHUNKS_OF_ROW + step];
        low[m] = widen(l.x, l.y);
        high[m] = widen(h.x, h.y);
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const uint4 of_rows = x[(step * Tile<NT>::ROWS + t * 8) * CHUNKS_OF_ROW];
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply(acc.of[m][t], low[m], high[m], of_rows);
      }
    }
  }
};
