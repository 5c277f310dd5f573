// Activations times weights: one tensor-core shape and one order of K at every row count, so that a row's
// result depends on that row alone (docs/contract.md C1, design I4).
//   x [rows, k] bf16, weights [n, k] bf16, bias [n] f32 or null, borders [9]: K-slices, ascending, multiples of 8
//   -> out [rows, n] f32
// Grid (ceil(n / 16), ceil(rows / (8 * TILES))), 8 warps: warp s sums slice s of K by itself, then the contract's
// tree joins them. k a multiple of 8. Twin: cpu::reference::Linear, to tolerance (the order inside a slice differs).
template <int TILES>
__device__ __forceinline__ void gemm_bf16(const bf16* x, const bf16* weights, const float* bias,
                                          const u32* borders, float* out, u32 rows, u32 n, u32 k) {
  __shared__ float sums[8][TILES][WARP][4];
  sum_tiles(sums, x, weights, borders, rows, n, k);
  for (u32 item = threadIdx.x; item < TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item);
    if (at.column >= n || at.row >= rows) continue;
    float parts[8];
    for (int s = 0; s < 8; ++s) parts[s] = sums[s][at.tile][at.lane][at.i];
    const float sum = tree(parts);
    out[(u64)at.row * n + at.column] = bias ? sum + bias[at.column] : sum;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_bf16_8(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out,
                u32 rows, u32 n, u32 k) {
  gemm_bf16<1>(x, weights, bias, borders, out, rows, n, k);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_bf16_32(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out,
                 u32 rows, u32 n, u32 k) {
  gemm_bf16<4>(x, weights, bias, borders, out, rows, n, k);
}
