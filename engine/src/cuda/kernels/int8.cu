// Quantized products (docs/contract.md C1): activations to int8 by row and K-slice, exact i32 sums, scales after.
// Sums are exact and every float operation is the CPU's, so the bits are the CPU's at every row count.
// Twin: cpu::reference::QuantizedWeights, equal bits.

// x [rows, k] f32, borders [slices + 1] -> steps [rows, k] int8, scales [rows, slices] f32.
// Grid (rows, slices), 128 threads. A number that is not finite makes its scale NaN.
extern "C" __global__ void __launch_bounds__(128)
    quantize_rows(const float* x, const u32* borders, signed char* steps, float* scales, u32 k) {
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
    steps[row * k + i] = counts ? (signed char)(i32)step : 0;
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
// Steps of K whose weights are under way at a time: few rows are bound by how fast weights come.
#define DEPTH 4

// Two products: the first and the second half of each lane's 16 bytes.
__device__ __forceinline__ void multiply(i32 (&acc)[4], uint4 w_low, uint4 w_high, uint4 x) {
  const u32 first[4] = {w_low.x, w_high.x, w_low.y, w_high.y};
  const u32 second[4] = {w_low.z, w_high.z, w_low.w, w_high.w};
  const u32 x_first[2] = {x.x, x.y};
  const u32 x_second[2] = {x.z, x.w};
  mma_int8(acc, first, x_first);
  mma_int8(acc, second, x_second);
}

template <int TILES>
__device__ __forceinline__ void gemm_int8(const signed char* x, const float* x_scales, const signed char* weights,
                                          const float* channel_scales, const float* bias, const u32* borders,
                                          float* out, u32 rows, u32 n, u32 k, u32 slices) {
  __shared__ i32 sums[8][TILES][WARP][4];
  const u32 lane = threadIdx.x % WARP;
  const u32 part = threadIdx.x / WARP;
  const u32 g = lane / 4;
  const u32 t = lane % 4;
  const u32 first_column = blockIdx.x * 16;
  const u32 first_row = blockIdx.y * 8 * TILES;
  const uint4 zeros = make_uint4(0, 0, 0, 0);

  const u32 end = borders[part + 1];
  // Lanes past the last column or row read it again and store nothing: loads without a branch are under way together.
  const signed char* low = weights + (u64)min(first_column + g, n - 1) * k + 16 * t;
  const signed char* high = weights + (u64)min(first_column + g + 8, n - 1) * k + 16 * t;
  const signed char* in[TILES];
  for (int tile = 0; tile < TILES; ++tile) in[tile] = x + (u64)min(first_row + 8 * tile + g, rows - 1) * k + 16 * t;
  i32 acc[TILES][4] = {};
  u32 at = borders[part];
  for (; at + 64 * DEPTH <= end; at += 64 * DEPTH) {
    uint4 w_low[DEPTH], w_high[DEPTH];
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      w_low[step] = *(const uint4*)(low + at + 64 * step);
      w_high[step] = *(const uint4*)(high + at + 64 * step);
    }
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      for (int tile = 0; tile < TILES; ++tile) {
        multiply(acc[tile], w_low[step], w_high[step], *(const uint4*)(in[tile] + at + 64 * step));
      }
    }
  }
  for (; at < end; at += 64) {
    // The part is a multiple of 16: a lane's 16 numbers are in it, or none is.
    const bool inside = at + 16 * t < end;
    const uint4 w_low = inside ? *(const uint4*)(low + at) : zeros;
    const uint4 w_high = inside ? *(const uint4*)(high + at) : zeros;
    for (int tile = 0; tile < TILES; ++tile) {
      multiply(acc[tile], w_low, w_high, inside ? *(const uint4*)(in[tile] + at) : zeros);
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) sums[part][tile][lane][i] = acc[tile][i];
  }
  __syncthreads();
  for (u32 item = threadIdx.x; item < TILES * WARP * 4; item += blockDim.x) {
    const u32 tile = item / (WARP * 4);
    const u32 from = item / 4 % WARP;
    const u32 i = item % 4;
    const u32 column = first_column + from / 4 + (i / 2) * 8;
    const u32 row = first_row + 8 * tile + from % 4 * 2 + i % 2;
    if (column >= n || row >= rows) continue;
    float sum;
    if (slices == 1) {
      i32 exact = 0;
      for (int s = 0; s < 8; ++s) exact += sums[s][tile][from][i];
      sum = (float)exact * x_scales[row];
    } else {
      float parts[8];
      for (int s = 0; s < 8; ++s) parts[s] = (float)sums[s][tile][from][i] * x_scales[row * 8 + s];
      sum = tree(parts);
    }
    if (channel_scales) sum = sum * channel_scales[column];
    out[(u64)row * n + column] = bias ? sum + bias[column] : sum;
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
