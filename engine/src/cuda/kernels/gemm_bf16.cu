// GEMM of activations and weights: one tensor-core shape and one order of K at every row count, so that a
// row's result depends on that row alone (docs/contract.md C1, design I4).
//   x [rows, k] bf16, weights [n, k] bf16, bias [n] f32 or null -> out [rows, n] f32
//   borders [9]: K-slices, ascending, multiples of 8
// k a multiple of 8. Twin: exact sums, within the bound of parity/tensor_cores.rs.

// Grid (ceil(rows / (8 * TILES)), ceil(n / (groups * channels))), 8 warps: see Cut. Row blocks of the same
// channels are neighbours in the grid, so that they find the weights in the cache.
template <int TILES, int HALVES>
__device__ __forceinline__ void gemm_bf16(const bf16* x, const bf16* weights, const float* bias,
                                          const u32* borders, float* out, Sizes sizes, Cut cut) {
  __shared__ float sums[8][TILES][WARP][4];
  sum_tiles<bf16, float, TILES, HALVES>(sums, x, weights, borders, sizes, cut);
  for (u32 item = threadIdx.x; item < cut.groups() * TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item, sizes, cut);
    if (!at.is_out) continue;
    float parts[8];
    gather_slices(parts, sums, at, cut);
    const float sum = tree(parts);
    out[(u64)at.row * sizes.n + at.column] = bias ? sum + bias[at.column] : sum;
  }
}

#define GEMM_BF16(NAME, TILES, HALVES, BLOCKS)                                                                      \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                         \
      NAME(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, u32 rows, u32 n, \
           u32 k, u32 first, u32 log_slices, u32 channels) {                                                        \
    gemm_bf16<TILES, HALVES>(x, weights, bias, borders, out, {rows, n, k}, {first, log_slices, channels});          \
  }

GEMM_BF16(gemm_bf16_8, 1, 2, 3)
GEMM_BF16(gemm_bf16_8_narrow, 1, 1, 3)
GEMM_BF16(gemm_bf16_32, 4, 2, 2)
GEMM_BF16(gemm_bf16_32_narrow, 4, 1, 2)
