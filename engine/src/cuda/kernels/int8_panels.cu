// GEMM of int8 activations and weights in panels of 8 rows x 128 columns (`step_index` in int8.cu); see
// panels.cuh.
//   x_scales [rows, scales_of_row] f32: 1 scale for a row, or 8, one for each slice of K
//   weights: tiles of 128 channels x 128 of K, each 16 panels
// Twin: gemm_int8_8, equal bits: sums are exact in i32, and what follows is computed in the same order.

// Exact sums. With 1 scale for a row all slices are one sum. Groups of it are stored as integers (their bits in
// the floats of `out`), because floats would round them; sum_int8_groups adds them.
struct Int8Sums {
  typedef i32 Sum;
  static constexpr bool HAS_CHAINS = false;
  const float* x_scales;
  u32 scales_of_row;

  __device__ __forceinline__ bool is_one_sum() const { return scales_of_row == 1; }
  __device__ __forceinline__ u32 joined(u32 count) const { return is_one_sum() ? count : 1; }
  __device__ __forceinline__ bool has_tree() const { return !is_one_sum(); }

  // Scales the sums of a thread, whose rows are those of store_sums. Rows past the last take its scales.
  template <u32 LEN, typename Unit>
  __device__ __forceinline__ void to_floats(float (&to)[LEN], const i32 (&sums)[LEN], const Unit& unit, const Product& of,
                                            u32 slice) const {
    if (is_one_sum() && of.groups > 1) {
#pragma unroll
      for (u32 i = 0; i < LEN; ++i) to[i] = __uint_as_float((u32)sums[i]);
      return;
    }
    const float* const of_slice = x_scales + (is_one_sum() ? 0 : slice);
    const u32 row = opaque(unit.row_tile * (2 * LEN) + threadIdx.x % 4 * 2), last = of.rows - 1;
#pragma unroll
    for (u32 i = 0; i < LEN; i += 4) {
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        const float scale = of_slice[(u64)min(row + 2 * i + j, last) * scales_of_row];
        to[i + j] = (float)sums[i + j] * scale;
        to[i + j + 2] = (float)sums[i + j + 2] * scale;
      }
    }
  }
};

struct Int8Weights : PackedTiles {
  typedef Int8Sums Sums;
  static constexpr u32 STEP_COLUMNS = 2 * STEP;
};

#define INT8_PANELS(NAME, ROWS, STAGES, BLOCKS, CLUSTER, ROW_TILES, CHANNEL_TILES)                                  \
  extern "C" __global__ void CLUSTER __launch_bounds__(384, BLOCKS)                                                 \
      NAME(const signed char* x, const float* x_scales, const signed char* weights, const float* channel_scales,    \
           const float* bias, const u32* borders, float* out, u32 rows, u32 n, u32 k, u32 first, u32 slices,        \
           u32 groups, u32 scales_of_row) {                                                                         \
    gemm_of_panels<Int8Weights, ROWS, STAGES, BLOCKS == 1, Cluster<ROW_TILES, CHANNEL_TILES>>(                      \
        x, weights, channel_scales, bias, borders, out, {rows, n, k, first, slices, groups},                        \
        {x_scales, scales_of_row});                                                                                 \
  }

INT8_PANELS(int8_panels_8, 8, 6, 2, , 1, 1)
INT8_PANELS(int8_panels_16, 16, 5, 2, , 1, 1)
INT8_PANELS(int8_panels_48, 48, 8, 1, , 1, 1)
INT8_PANELS(int8_panels_80, 80, 7, 1, , 1, 1)
INT8_PANELS(int8_panels_128, 128, 5, 1, , 1, 1)
INT8_PANELS(int8_panels_80_by_2, 80, 7, 1, __cluster_dims__(2, 1, 1), 2, 1)
INT8_PANELS(int8_panels_128_by_2, 128, 5, 1, __cluster_dims__(2, 1, 1), 2, 1)
INT8_PANELS(int8_panels_128_by_4, 128, 5, 1, __cluster_dims__(4, 1, 1), 2, 2)

// Adds `groups` groups of exact sums, then scales and bias.
//   sums [groups][len] i32, x_scales [len / n], scales, bias [n] f32 or null -> out [len] f32; len a multiple of n
// Grid (ceil(len / 256)), 256 threads. Twin: int8_panels_8 with one group, equal bits.
extern "C" __global__ void __launch_bounds__(256)
    sum_int8_groups(const i32* sums, const float* x_scales, const float* scales, const float* bias, float* out, u64 len,
                    u32 n, u32 groups) {
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= len) return;
  i32 exact = sums[i];
  for (u32 g = 1; g < groups; ++g) exact += sums[g * len + i];
  float sum = (float)exact * x_scales[i / n];
  if (scales) sum = sum * scales[i % n];
  out[i] = bias ? sum + bias[i % n] : sum;
}
