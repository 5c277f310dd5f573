// Quantized products (docs/contract.md C1): activations to int8 by row and K-slice, exact i32 sums, scales after.
// Sums are exact and every float operation is the CPU's, so the bits are the CPU's at every row count.
// Twin: cpu::reference::QuantizedWeights, equal bits.

// x [rows, k] f32, borders [slices + 1] -> steps [rows, kept] int8 of columns first .. first + kept, scales [rows, slices]
// f32 of all columns. Grid (rows, slices), 128 threads. A number that is not finite makes its scale NaN.
extern "C" __global__ void __launch_bounds__(128)
    quantize_rows(const float* x, const u32* borders, signed char* steps, float* scales, u32 k, u32 first, u32 kept) {
  __shared__ float warp_largest[4];
  __shared__ u32 warp_bad[4];
  const u64 row = blockIdx.x;
  const u32 begin = borders[blockIdx.y];
  const u32 end = borders[blockIdx.y + 1];
  float largest = 0.0f;
  u32 bad = 0;
  for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const float size = fabsf(x[row * k + i]);
    bad |= !(size < POS_INF);
    largest = fmaxf(largest, size);
  }
  for (int step = WARP / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    bad |= __shfl_xor_sync(0xffffffffu, bad, step);
  }
  if (threadIdx.x % WARP == 0) {
    warp_largest[threadIdx.x / WARP] = largest;
    warp_bad[threadIdx.x / WARP] = bad;
  }
  __syncthreads();
  for (u32 w = 0; w < 4; ++w) {
    largest = fmaxf(largest, warp_largest[w]);
    bad |= warp_bad[w];
  }
  const bool counts = !bad && !(largest < 1e-30f);
  const float steps_per_unit = 127.0f / largest;
  for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const float step = fminf(fmaxf(rintf(x[row * k + i] * steps_per_unit), -127.0f), 127.0f);
    // Columns before the first wrap around.
    const u32 at = i - first;
    if (at < kept) steps[row * kept + at] = counts ? (signed char)(i32)step : 0;
  }
  if (threadIdx.x == 0) {
    const float scale = bad ? __uint_as_float(0x7fc00000u) : counts ? largest / 127.0f : 0.0f;
    scales[row * gridDim.y + blockIdx.y] = scale;
  }
}

// x [rows, k] int8 with scales [rows, slices], weights [n, k] int8 with channel_scales [n] or null (a rank's part of
// a sum: they come later), bias [n] or null, borders [9] multiples of 16 -> out [rows, n] f32.
// slices 1: the 8 parts of K are one exact sum; 8: each has its scale.
// Grid (ceil(n / 16), ceil(rows / (8 * TILES))), 8 warps, one for each part of K. k a multiple of 16, below 2^17.
template <int TILES>
__device__ __forceinline__ void gemm_int8(const signed char* x, const float* x_scales, const signed char* weights,
                                          const float* channel_scales, const float* bias, const u32* borders,
                                          float* out, u32 rows, u32 n, u32 k, u32 slices) {
  __shared__ i32 sums[8][TILES][WARP][4];
  sum_tiles(sums, x, weights, borders, rows, n, k);
  for (u32 item = threadIdx.x; item < TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item);
    if (at.column >= n || at.row >= rows) continue;
    float sum;
    if (slices == 1) {
      i32 exact = 0;
      for (int s = 0; s < 8; ++s) exact += sums[s][at.tile][at.lane][at.i];
      sum = (float)exact * x_scales[at.row];
    } else {
      float parts[8];
      for (int s = 0; s < 8; ++s) parts[s] = (float)sums[s][at.tile][at.lane][at.i] * x_scales[at.row * 8 + s];
      sum = tree(parts);
    }
    if (channel_scales) sum = sum * channel_scales[at.column];
    out[(u64)at.row * n + at.column] = bias ? sum + bias[at.column] : sum;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_int8_8(const signed char* x, const float* x_scales, const signed char* weights, const float* channel_scales,
                const float* bias, const u32* borders, float* out, u32 rows, u32 n, u32 k, u32 slices) {
  gemm_int8<1>(x, x_scales, weights, channel_scales, bias, borders, out, rows, n, k, slices);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_int8_32(const signed char* x, const float* x_scales, const signed char* weights, const float* channel_scales,
                 const float* bias, const u32* borders, float* out, u32 rows, u32 n, u32 k, u32 slices) {
  gemm_int8<4>(x, x_scales, weights, channel_scales, bias, borders, out, rows, n, k, slices);
}
