// Activations times weights: one tensor-core shape and one order of K at every row count, so that a row's
// result depends on that row alone (docs/contract.md C1, design I4).
//   x [rows, k] bf16, weights [n, k] bf16, bias [n] f32 or null, borders [9]: K-slices, ascending, multiples of 8
//   -> out [rows, n] f32
// Grid (ceil(n / 16), ceil(rows / (8 * TILES))), 8 warps: warp s sums slice s of K by itself, then the contract's
// tree joins them. k a multiple of 8. Twin: cpu::reference::Linear, to tolerance (the order inside a slice differs).
//
// The weights are the 16-row operand: up to 8 activation rows cost what one does. A lane reads 8 consecutive
// numbers (16 bytes) of each of its rows; which of them meet in one instruction is a permutation of K that both
// operands share, so it changes only the order of the sum.
// Steps of K whose weights are under way at a time: few rows are bound by how fast weights come.
#define DEPTH 4

// Two products: the first and the second half of each lane's 16 bytes.
__device__ __forceinline__ void multiply(float (&acc)[4], uint4 w_low, uint4 w_high, uint4 x) {
  const u32 first[4] = {w_low.x, w_high.x, w_low.y, w_high.y};
  const u32 second[4] = {w_low.z, w_high.z, w_low.w, w_high.w};
  const u32 x_first[2] = {x.x, x.y};
  const u32 x_second[2] = {x.z, x.w};
  mma_bf16(acc, first, x_first);
  mma_bf16(acc, second, x_second);
}

template <int TILES>
__device__ __forceinline__ void gemm_bf16(const bf16* x, const bf16* weights, const float* bias,
                                          const u32* borders, float* out, u32 rows, u32 n, u32 k) {
  __shared__ float sums[8][TILES][WARP][4];
  const u32 lane = threadIdx.x % WARP;
  const u32 slice = threadIdx.x / WARP;
  const u32 g = lane / 4;
  const u32 t = lane % 4;
  const u32 first_column = blockIdx.x * 16;
  const u32 first_row = blockIdx.y * 8 * TILES;
  const uint4 zeros = make_uint4(0, 0, 0, 0);

  const u32 end = borders[slice + 1];
  // Lanes past the last column or row read it again and store nothing: loads without a branch are under way together.
  const bf16* low = weights + (u64)min(first_column + g, n - 1) * k + 8 * t;
  const bf16* high = weights + (u64)min(first_column + g + 8, n - 1) * k + 8 * t;
  const bf16* in[TILES];
  for (int tile = 0; tile < TILES; ++tile) in[tile] = x + (u64)min(first_row + 8 * tile + g, rows - 1) * k + 8 * t;
  float acc[TILES][4] = {};
  u32 at = borders[slice];
  for (; at + 32 * DEPTH <= end; at += 32 * DEPTH) {
    uint4 w_low[DEPTH], w_high[DEPTH];
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      w_low[step] = *(const uint4*)(low + at + 32 * step);
      w_high[step] = *(const uint4*)(high + at + 32 * step);
    }
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      for (int tile = 0; tile < TILES; ++tile) {
        multiply(acc[tile], w_low[step], w_high[step], *(const uint4*)(in[tile] + at + 32 * step));
      }
    }
  }
  for (; at < end; at += 32) {
    // The slice is a multiple of 8: a lane's 8 numbers are in it, or none is.
    const bool inside = at + 8 * t < end;
    const uint4 w_low = inside ? *(const uint4*)(low + at) : zeros;
    const uint4 w_high = inside ? *(const uint4*)(high + at) : zeros;
    for (int tile = 0; tile < TILES; ++tile) {
      multiply(acc[tile], w_low, w_high, inside ? *(const uint4*)(in[tile] + at) : zeros);
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) sums[slice][tile][lane][i] = acc[tile][i];
  }
  __syncthreads();
  for (u32 item = threadIdx.x; item < TILES * WARP * 4; item += blockDim.x) {
    const u32 tile = item / (WARP * 4);
    const u32 from = item / 4 % WARP;
    const u32 i = item % 4;
    const u32 column = first_column + from / 4 + (i / 2) * 8;
    const u32 row = first_row + 8 * tile + from % 4 * 2 + i % 2;
    if (column >= n || row >= rows) continue;
    float parts[8];
    for (int s = 0; s < 8; ++s) parts[s] = sums[s][tile][from][i];
    const float sum = tree(parts);
    out[(u64)row * n + column] = bias ? sum + bias[column] : sum;
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
