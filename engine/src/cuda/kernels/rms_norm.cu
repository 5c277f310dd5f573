// Adds a delta to the residual stream and normalises the sum: out = h / sqrt(mean(h^2) + eps) * weight.
//   hidden [*, width] f32 (gets the sum), delta [*, width] f32 or null, weight [width] f32,
//   row_map [rows] or null: output row i is of hidden row row_map[i] -> out [rows, width] f32 or bf16
// Grid (rows), 256 threads; a row of row_map occurs once. Twins: cpu::reference::rms_norm, cpu `Backend::add`. The
// sum of squares has an order of its own: thread i takes i, i + 256, .., then warps by halves, then warps in order.
template <typename Out>
__device__ __forceinline__ Out to_format(float x);
template <>
__device__ __forceinline__ float to_format<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 to_format<bf16>(float x) {
  return narrow(x);
}

template <typename Out>
__device__ __forceinline__ void rms_norm(float* hidden, const float* delta, const float* weight,
                                         const u32* row_map, Out* out, u32 width, float eps) {
  __shared__ float warp_sums[8];
  const u64 out_row = blockIdx.x;
  const u64 row = row_map ? row_map[out_row] : out_row;
  float* h = hidden + row * width;

  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    float x = h[i];
    if (delta) {
      x += delta[row * width + i];
      h[i] = x;
    }
    sum = fmaf(x, x, sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
  for (u32 w = 0; w < 8; ++w) total += warp_sums[w];
  const float scale = 1.0f / sqrtf(total / (float)width + eps);
  // Each thread reads back what it wrote itself.
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    out[out_row * width + i] = to_format<Out>(h[i] * scale * weight[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_f32(float* hidden, const float* delta, const float* weight, const u32* row_map, float* out,
                 u32 width, float eps) {
  rms_norm<float>(hidden, delta, weight, row_map, out, width, eps);
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_bf16(float* hidden, const float* delta, const float* weight, const u32* row_map, bf16* out,
                  u32 width, float eps) {
  rms_norm<bf16>(hidden, delta, weight, row_map, out, width, eps);
}
