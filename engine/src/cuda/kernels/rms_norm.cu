// Root mean square norm: out = x / sqrt(mean(x^2) + eps) * weight.
//   x [rows, width] f32, weight [width] f32 -> out [rows, width] f32
// Grid (rows), 256 threads. Twin: cpu::reference::rms_norm, to tolerance: the sum of squares has an order of its own
// (thread i takes i, i + 256, ..; then lanes by halves, then warps in order), the same at every row count.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float* x, const float* weight, float* out, u32 width, float eps) {
  __shared__ float warp_sums[8];
  const float* row = x + (u64)blockIdx.x * width;
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
  for (u32 w = 0; w < 8; ++w) total += warp_sums[w];
  const float scale = 1.0f / sqrtf(total / (float)width + eps);
  for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
    out[(u64)blockIdx.x * width + i] = row[i] * scale * weight[i];
  }
}
