// GEMM of bf16 activations and FP8 weights with scales by block of 128 of K (docs/contract.md C1). A slice's part in
// one block is a chain; its sum is multiplied by the channel's scale there and added to the slice's.
//   x [rows, k] bf16, weights [n, row bytes], scales [chains, n], bias [n] f32 or null -> out [rows, n] f32
//   chains: first chain of each slice, of which it has at least one, and the number of all [9]; borders of the chains
//     along K, multiples of 8 [chains + 1]; their byte offsets in a row of weights [chains + 1]
// A chain of a row is a whole number of blocks of 64 weights, as a slice in fp8.cuh. k a multiple of 8.
// Twin: gemm_bf16_8 on the widened weights of each chain; the host scales and adds its sums: equal bits.

constexpr u32 MAX_CHAIN = 2 * BLOCK;

struct Chains {
  const u32 *first, *borders, *bytes;
  __device__ __forceinline__ Chains(const u32* chains)
      : first(chains), borders(chains + BORDERS), bytes(chains + BORDERS + chains[BORDERS - 1] + 1) {}
  __device__ __forceinline__ u32 row_bytes() const { return bytes[first[BORDERS - 1]]; }
};

template <int TILES, int HALVES>
__device__ __forceinline__ void sum_chains(float (&sums)[8][TILES][WARP][4], const bf16* x, const unsigned char* weights,
                                           const float* scales, const Chains chains, Sizes sizes, Cut cut) {
  // With several tiles of rows, all loads of a chain would take too many registers.
  constexpr int DEPTH = TILES > 1 ? 1 : 2;
  const u32 g = threadIdx.x % WARP / 4;
  const u32 offset = threadIdx.x % 4 * 8;
  const u32 part = threadIdx.x / WARP;
  const u32 first_column = min((blockIdx.y * cut.groups() + (part >> cut.log_slices)) * cut.channels, sizes.n - 1);
  const u32 first_row = blockIdx.x * 8 * TILES;
  const u32 row_bytes = chains.row_bytes();
  // Lanes past the last column or row load the last one again and store nothing.
  const u32 last = min(cut.channels, sizes.n - first_column) - 1;
  const u32 low = min(g, last) * row_bytes + 2 * offset, high = min(g + 8, last) * row_bytes + 2 * offset;
  const float* of_low = scales + first_column + min(g, last);
  const float* of_high = scales + first_column + min(g + 8, last);
  u32 in[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) in[tile] = min(8 * tile + g, sizes.rows - first_row - 1) * sizes.k + offset;
  float acc[TILES][4] = {};
  const u32 slice = cut.first + (part & (cut.slices() - 1));
  const u32 end = chains.first[slice + 1];
  u32 chain = chains.first[slice];
  const unsigned char* base = weights + (u64)first_column * row_bytes + chains.bytes[chain];
  const bf16* x_at = x + (u64)first_row * sizes.k + chains.borders[chain];
  u32 from = chains.borders[chain], to = chains.borders[chain + 1];
  for (; chain < end; ++chain) {
    // The next chain's end is loaded before its weights have to wait for it.
    const u32 len = to - from, next = chains.borders[min(chain + 2, end)];
    const float scale_low = of_low[(u64)chain * sizes.n], scale_high = of_high[(u64)chain * sizes.n];
    float of_chain[TILES][4] = {};
    if (len == MAX_CHAIN) {
#pragma unroll 1
      for (u32 at = 0; at < MAX_CHAIN; at += BLOCK * DEPTH) {
        add_blocks<TILES, HALVES, DEPTH>(of_chain, base + at, low, high, x_at + at, in);
      }
      base += MAX_CHAIN;
    } else {
#pragma unroll 1
      for (u32 at = 0; at < len; at += BLOCK, base += BLOCK) {
        add_short_block<TILES, HALVES>(of_chain, base, low, high, x_at + at, in, offset, len - at);
      }
    }
    x_at += len;
    from = to;
    to = next;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[tile][i] = fmaf(of_chain[tile][i], i < 2 ? scale_low : scale_high, acc[tile][i]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) sums[part][tile][threadIdx.x % WARP][i] = acc[tile][i];
  }
  __syncthreads();
}

// Grid as gemm_bf16's.
template <int TILES, int HALVES>
__device__ __forceinline__ void gemm_fp8_blocks(const bf16* x, const unsigned char* weights, const float* scales,
                                                const float* bias, const u32* chains, float* out, Sizes sizes, Cut cut) {
  __shared__ float sums[8][TILES][WARP][4];
  sum_chains<TILES, HALVES>(sums, x, weights, scales, chains, sizes, cut);
  for (u32 item = threadIdx.x; item < cut.groups() * TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item, sizes, cut);
    if (!at.is_out) continue;
    float parts[8];
    gather_slices(parts, sums, at, cut);
    out[(u64)at.row * sizes.n + at.column] = apply_epilogue(tree(parts), nullptr, bias, at.column);
  }
}

#define GEMM_FP8_BLOCKS(NAME, TILES, HALVES, BLOCKS)                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                                  \
      NAME(const bf16* x, const unsigned char* weights, const float* scales, const float* bias, const u32* chains,           \
           float* out, u32 rows, u32 n, u32 k, u32 first, u32 log_slices, u32 channels) {                                    \
    gemm_fp8_blocks<TILES, HALVES>(x, weights, scales, bias, chains, out, {rows, n, k}, {first, log_slices, channels});      \
  }

GEMM_FP8_BLOCKS(gemm_fp8_blocks_8, 1, 2, 3)
GEMM_FP8_BLOCKS(gemm_fp8_blocks_8_narrow, 1, 1, 3)
GEMM_FP8_BLOCKS(gemm_fp8_blocks_32, 4, 2, 2)
GEMM_FP8_BLOCKS(gemm_fp8_blocks_32_narrow, 4, 1, 2)

// As StepIterator, with chains in the place of slices. Their borders are too many for a copy in shared memory.
struct ChainIterator {
  const u32* borders;
  u32 count, slice, at;
  __device__ __forceinline__ bool is_done() const { return slice == count; }
  __device__ __forceinline__ bool has_next() const { return slice < count; }
  __device__ __forceinline__ void begin(const u32* cuts, const u32* table) {
    borders = table + BORDERS;
    count = cuts[BORDERS - 1];
    slice = 0;
    at = borders[0];
    skip();
  }
  __device__ __forceinline__ void skip() {
    while (slice < count && at >= borders[slice + 1]) {
      ++slice;
      at = borders[slice];
    }
  }
  __device__ __forceinline__ void next(u32 step) {
    at += step;
    skip();
  }
};

template <int NT>
struct ChainOperands : WidenedOperands<NT> {
  typedef ChainIterator Iterator;
  static constexpr u32 NUM_BORDERS = BORDERS;
  const Chains chains;

  __device__ __forceinline__ ChainOperands(const bf16* x, const unsigned char* weights, const Chains& chains, Sizes sizes)
      : WidenedOperands<NT>(x, weights, chains.row_bytes(), sizes), chains(chains) {}

  __device__ __forceinline__ void start(uint4* to, u32 chain, u32 at, const u32* cuts) const {
    this->start_at(to, chains.bytes[chain] + (at - chains.borders[chain]), at, chains.borders[chain + 1]);
  }
};

// Tiles of 16 * NT rows by 128 channels. With the sums of slices besides those of chains, NT is at most 5.
template <int NT>
__device__ __forceinline__ void gemm_fp8_blocks_tiled(const bf16* x, const unsigned char* weights, const float* scales,
                                                      const float* bias, const u32* table, float* out, Sizes sizes) {
  Accumulators<float, NT> acc = {}, of_slice = {}, level[2];
  const Chains chains(table);
  u32 slice = 0;
  run_stages(acc, ChainOperands<NT>(x, weights, chains, sizes), table, [&](u32 chain) {
    const float* const of_chain = scales + (u64)chain * sizes.n;
    float of_channel[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) of_channel[m][half] = of_chain[min(tiled_column(m, 2 * half), sizes.n - 1)];
    }
    for_each<NT>([&](int m, int t, int i) {
      of_slice.of[m][t][i] = fmaf(acc.of[m][t][i], of_channel[m][i / 2], of_slice.of[m][t][i]);
    });
    acc = {};
    if (chain + 1 < chains.first[slice + 1]) return;
    add_parked(slice, of_slice, level, out, sizes, [&](float sum, u32 column) { return apply_epilogue(sum, nullptr, bias, column); });
    of_slice = {};
    ++slice;
  });
}

#define GEMM_FP8_BLOCKS_TILED(NAME, NT)                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                                       \
      NAME(const bf16* x, const unsigned char* weights, const float* scales, const float* bias, const u32* chains,           \
           float* out, u32 rows, u32 n, u32 k) {                                                                             \
    gemm_fp8_blocks_tiled<NT>(x, weights, scales, bias, chains, out, {rows, n, k});                                          \
  }

GEMM_FP8_BLOCKS_TILED(gemm_fp8_blocks_tiled_64, 4)
GEMM_FP8_BLOCKS_TILED(gemm_fp8_blocks_tiled_80, 5)
