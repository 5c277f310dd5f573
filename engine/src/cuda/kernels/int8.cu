// Quantized products (docs/contract.md C1): activations are quantized to int8 per row and K-slice, sums are
// exact in i32, scales are applied afterwards. Every float operation is the CPU's too, so the bits equal the
// CPU's at every row count. Twin: cpu_kernels::reference::QuantizedWeights, equal bits.

// Index of the step of a row and column. If `panels` is 0, rows of `width` follow one another. Else rows are
// packed for int8_panels.cu, in tiles of `panels` panels: a tile is panels [width / 128][panels], and a panel is
// 8 rows x 128 columns, eight pieces of 16 columns of 8 rows.
__device__ __forceinline__ u64 step_index(u32 row, u32 column, u32 width, u32 panels) {
  if (panels == 0) return (u64)row * width + column;
  const u32 in_tile = row % (8 * panels);
  const u64 panel = (u64)(column / 128) * panels + in_tile / 8;
  return (u64)(row - in_tile) * width + panel * 1024 + column % 128 / 16 * 128 + row % 8 * 16 + column % 16;
}

// x [rows, k] f32, borders [slices + 1] -> steps [rows, kept] int8 (step_index) of columns first .. first + kept,
// scales [rows, slices] f32 of all columns. Grid (rows, slices), 128 threads. A number that is not finite makes
// its scale NaN.
extern "C" __global__ void __launch_bounds__(128)
    quantize_rows(const float* x, const u32* borders, signed char* steps, float* scales, u32 k, u32 first, u32 kept,
                  u32 panels) {
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
    // For columns before `first` the subtraction wraps around, so that the test below fails.
    const u32 at = i - first;
    if (at < kept) steps[step_index(row, at, kept, panels)] = counts ? (signed char)(i32)step : 0;
  }
  if (threadIdx.x == 0) {
    const float scale = bad ? __uint_as_float(0x7fc00000u) : counts ? largest / 127.0f : 0.0f;
    scales[row * gridDim.y + blockIdx.y] = scale;
  }
}

// x [rows, k] int8 with scales [rows, slices], weights [n, k] int8 with channel_scales [n] or null (for a
// rank's partial sum, which is scaled later), bias [n] or null, borders [9] multiples of 16 -> out [rows, n]
// f32. slices 1: the 8 parts of K are one exact sum; 8: each part has its own scale. k a multiple of 16,
// below 2^17.

// Applies the scale of the row and slice to an exact sum.
__device__ __forceinline__ float scaled(i32 sum, const float* x_scales, u32 row, u32 slice) {
  return (float)sum * x_scales[row * 8 + slice];
}

// Grid as gemm_bf16's. K-slices of other ranks contribute +0.
template <int TILES, int HALVES>
__device__ __forceinline__ void gemm_int8(const signed char* x, const float* x_scales, const signed char* weights,
                                          const float* channel_scales, const float* bias, const u32* borders,
                                          float* out, Sizes sizes, Cut cut, u32 scales_of_row) {
  __shared__ i32 sums[8][TILES][WARP][4];
  sum_tiles<signed char, i32, TILES, HALVES>(sums, x, weights, borders, sizes, cut);
  for (u32 item = threadIdx.x; item < cut.groups() * TILES * WARP * 4; item += blockDim.x) {
    const Place at = place_of<TILES>(item, sizes, cut);
    if (!at.is_out) continue;
    i32 exact[8];
    gather_slices(exact, sums, at, cut);
    float sum;
    if (scales_of_row == 1) {
      for (u32 s = 1; s < 8; ++s) exact[0] += exact[s];
      sum = (float)exact[0] * x_scales[at.row];
    } else {
      float parts[8];
      for (u32 s = 0; s < 8; ++s) parts[s] = scaled(exact[s], x_scales, at.row, s);
      sum = tree(parts);
    }
    out[(u64)at.row * sizes.n + at.column] = apply_epilogue(sum, channel_scales, bias, at.column);
  }
}

#define GEMM_INT8(NAME, TILES, HALVES, BLOCKS)                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                            \
      NAME(const signed char* x, const float* x_scales, const signed char* weights, const float* channel_scales,       \
           const float* bias, const u32* borders, float* out, u32 rows, u32 n, u32 k, u32 first, u32 log_slices,       \
           u32 channels, u32 scales_of_row) {                                                                          \
    gemm_int8<TILES, HALVES>(x, x_scales, weights, channel_scales, bias, borders, out, {rows, n, k},                   \
                             {first, log_slices, channels}, scales_of_row);                                            \
  }

GEMM_INT8(gemm_int8_8, 1, 2, 3)
GEMM_INT8(gemm_int8_8_narrow, 1, 1, 3)
GEMM_INT8(gemm_int8_32, 4, 2, 2)
GEMM_INT8(gemm_int8_32_narrow, 4, 1, 2)
