// GEMM of bf16 activations and FP8 (E4M3) weights (docs/contract.md C1): each weight is converted to the bf16
// number that equals it, sums are those of gemm_bf16.cu and gemm_tiled.cu, and the channel's scale multiplies
// the finished sum.
//   x [rows, k] bf16, weights [n, row bytes], bias [n] f32 or null, borders [18] -> out [rows, n] f32
//   channel_scales [n] f32, or null for a rank's partial sum, which is scaled later
// k a multiple of 8. Twins: gemm_bf16_8 on the widened weights, then the scale: equal bits.
//
// borders: nine borders of K as in gemm_bf16, then nine byte offsets in a row of weights (fp8.cuh).

// sum_tiles of products.cuh with weights that are widened in registers; an iteration covers the same number
// of elements of K.
template <int TILES, int HALVES>
__device__ __forceinline__ void sum_widened(float (&sums)[8][TILES][WARP][4], const bf16* x, const unsigned char* weights,
                                            const u32* borders, Sizes sizes, Cut cut) {
  constexpr int DEPTH = HALVES == 2 || TILES > 1 ? 2 : 4;
  const u32 g = threadIdx.x % WARP / 4;
  const u32 lane = threadIdx.x % 4;
  const u32 part = threadIdx.x / WARP;
  const u32 first_column = (blockIdx.y * cut.groups() + (part >> cut.log_slices)) * cut.channels;
  const u32 first_row = blockIdx.x * 8 * TILES;
  const u32 row_bytes = borders[2 * BORDERS - 1];
  // Lanes past the last column or row load the last one again and store nothing.
  const u32 last = min(cut.channels, sizes.n - min(first_column, sizes.n - 1)) - 1;
  const unsigned char* base = weights + (u64)min(first_column, sizes.n - 1) * row_bytes;
  const u32 low = min(g, last) * row_bytes + 16 * lane;
  const u32 high = min(g + 8, last) * row_bytes + 16 * lane;
  const bf16* x_base = x + (u64)first_row * sizes.k;
  const u32 offset = 8 * lane;
  u32 in[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) in[tile] = min(8 * tile + g, sizes.rows - first_row - 1) * sizes.k + offset;
  float acc[TILES][4] = {};
  const u32 slice = cut.first + (part & (cut.slices() - 1));
  const u32 end = borders[slice + 1];
  u32 at = borders[slice];
  base += borders[BORDERS + slice];
  for (; at + BLOCK * DEPTH <= end; at += BLOCK * DEPTH, base += BLOCK * DEPTH) {
    add_blocks<TILES, HALVES, DEPTH>(acc, base, low, high, x_base + at, in);
  }
  for (; at < end; at += BLOCK, base += BLOCK) {
    add_short_block<TILES, HALVES>(acc, base, low, high, x_base + at, in, offset, end - at);
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) sums[part][tile][threadIdx.x % WARP][i] = acc[tile][i];
  }
  __syncthreads();
}

// Grid as gemm_bf16's.
template <int TILES, int HALVES>
__device__ __forceinline__ void gemm_fp8(const bf16* x, const unsigned char* weights, const float* channel_scales,
                                         const float* bias, const u32* borders, float* out, Sizes sizes, Cut cut) {
  __shared__ float sums[8][TILES][WARP][4];
  sum_widened<TILES, HALVES>(sums, x, weights, borders, sizes, cut);
  for (u32 item = threadIdx.x; item < cut.groups() * TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item, sizes, cut);
    if (!at.is_out) continue;
    float parts[8];
    gather_slices(parts, sums, at, cut);
    out[(u64)at.row * sizes.n + at.column] = apply_epilogue(tree(parts), channel_scales, bias, at.column);
  }
}

#define GEMM_FP8(NAME, TILES, HALVES, BLOCKS)                                                                                \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                                  \
      NAME(const bf16* x, const unsigned char* weights, const float* channel_scales, const float* bias, const u32* borders,  \
           float* out, u32 rows, u32 n, u32 k, u32 first, u32 log_slices, u32 channels) {                                    \
    gemm_fp8<TILES, HALVES>(x, weights, channel_scales, bias, borders, out, {rows, n, k}, {first, log_slices, channels});    \
  }

GEMM_FP8(gemm_fp8_8, 1, 2, 3)
GEMM_FP8(gemm_fp8_8_narrow, 1, 1, 3)
GEMM_FP8(gemm_fp8_32, 4, 2, 2)
GEMM_FP8(gemm_fp8_32_narrow, 4, 1, 2)

template <int NT>
__device__ __forceinline__ void gemm_fp8_tiled(const bf16* x, const unsigned char* weights, const float* channel_scales,
                                               const float* bias, const u32* borders, float* out, Sizes sizes) {
  Accumulators<float, NT> acc = {};
  Tree<NT> tree;
  run_stages(acc, WidenedOperands<NT>(x, weights, borders[2 * BORDERS - 1], sizes), borders, [&](u32 slice) {
    tree.add(slice, acc);
    acc = {};
  });
  write_tiled(tree.level[2], sizes, [&](float sum, u32 row, u32 column) {
    out[(u64)row * sizes.n + column] = apply_epilogue(sum, channel_scales, bias, column);
  });
}

template <int NT>
__device__ __forceinline__ void gemm_fp8_parked(const bf16* x, const unsigned char* weights, const float* channel_scales,
                                                const float* bias, const u32* borders, float* out, Sizes sizes) {
  Accumulators<float, NT> acc = {};
  sum_parked(acc, WidenedOperands<NT>(x, weights, borders[2 * BORDERS - 1], sizes), borders, out, sizes, AsTheyAre(),
             [&](float sum, u32 column) { return apply_epilogue(sum, channel_scales, bias, column); });
}

#define GEMM_FP8_TILED(NAME, NT, GEMM)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                                       \
      NAME(const bf16* x, const unsigned char* weights, const float* channel_scales, const float* bias, const u32* borders,  \
           float* out, u32 rows, u32 n, u32 k) {                                                                             \
    GEMM<NT>(x, weights, channel_scales, bias, borders, out, {rows, n, k});                                                  \
  }

GEMM_FP8_TILED(gemm_fp8_tiled_64, 4, gemm_fp8_tiled)
GEMM_FP8_TILED(gemm_fp8_tiled_80, 5, gemm_fp8_tiled)
GEMM_FP8_TILED(gemm_fp8_tiled_128, 8, gemm_fp8_parked)
