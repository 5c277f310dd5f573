// The products of gemm_bf16.cu and int8.cu for many rows: same operands and same order of K, so equal bits.
// The warps of a block share operands (tiled.cuh). Grid (ceil(rows / (16 * NT)), ceil(n / 128)), 8 warps; row
// blocks of the same channels are neighbours in the grid. Dynamic shared memory: all stages. Twins:
// gemm_bf16_8 and gemm_int8_8, equal bits.

template <int NT>
__device__ __forceinline__ void gemm_bf16_tiled(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, Sizes sizes) {
  Accumulators<float, NT> acc = {};
  Tree<NT> tree;
  run_tiled<bf16>(acc, x, weights, borders, sizes, [&](u32 slice) {
    tree.add(slice, acc);
    acc = {};
  });
  write_tiled(tree.level[2], sizes, [&](float sum, u32 row, u32 column) {
    out[(u64)row * sizes.n + column] = bias ? sum + bias[column] : sum;
  });
}

// The same with one level of the tree in `out` (sum_parked).
template <int NT>
__device__ __forceinline__ void gemm_bf16_parked(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, Sizes sizes) {
  Accumulators<float, NT> acc = {};
  sum_parked(acc, UniformOperands<bf16, NT>(x, weights, sizes), borders, out, sizes, AsTheyAre(),
             [&](float sum, u32 column) { return bias ? sum + bias[column] : sum; });
}

// One scale per row: the sum over all slices is exact.
template <int NT>
__device__ __forceinline__ void exact_int8(Accumulators<float, NT>& sums, const signed char* x, const signed char* weights,
                                           const float* x_scales, const u32* borders, Sizes sizes) {
  Accumulators<i32, NT> acc = {};
  run_tiled<signed char>(acc, x, weights, borders, sizes, [](u32) {});
  for_each<NT>([&](int m, int t, int i) {
    const u32 row = min(tiled_row<NT>(t, i), sizes.rows - 1);
    sums.of[m][t][i] = (float)acc.of[m][t][i] * x_scales[row];
  });
}

// Applies the scales of rows to the exact sums of a slice.
template <int NT>
__device__ __forceinline__ Accumulators<float, NT> scale_slice(const Accumulators<i32, NT>& acc, const float* x_scales, u32 slice,
                                                               Sizes sizes) {
  // Hidden from the optimizer, as in sum_parked.
  const u32 first_row = opaque(tiled_row<NT>(0, 0)), last_row = opaque(sizes.rows) - 1;
  Accumulators<float, NT> sums;
  for_each<NT>([&](int m, int t, int i) {
    const u32 row = min(first_row + 8 * t + i % 2, last_row);
    sums.of[m][t][i] = (float)acc.of[m][t][i] * x_scales[row * 8 + slice];
  });
  return sums;
}

// One scale per row and slice.
template <int NT>
__device__ __forceinline__ void sliced_int8(Accumulators<float, NT>& sums, const signed char* x, const signed char* weights,
                                            const float* x_scales, const u32* borders, Sizes sizes) {
  Accumulators<i32, NT> acc = {};
  Tree<NT> tree;
  run_tiled<signed char>(acc, x, weights, borders, sizes, [&](u32 slice) {
    sums = scale_slice<NT>(acc, x_scales, slice, sizes);
    tree.add(slice, sums);
    acc = {};
  });
  sums = tree.level[2];
}

template <int NT, bool EXACT>
__device__ __forceinline__ void gemm_int8_tiled(const signed char* x, const float* x_scales, const signed char* weights,
                                                const float* channel_scales, const float* bias, const u32* borders,
                                                float* out, Sizes sizes) {
  Accumulators<float, NT> sums;
  if (EXACT) {
    exact_int8(sums, x, weights, x_scales, borders, sizes);
  } else {
    sliced_int8(sums, x, weights, x_scales, borders, sizes);
  }
  write_tiled(sums, sizes, [&](float sum, u32 row, u32 column) {
    out[(u64)row * sizes.n + column] = apply_epilogue(sum, channel_scales, bias, column);
  });
}

// One scale per row and slice, with one level of the tree in `out` (sum_parked).
template <int NT>
__device__ __forceinline__ void gemm_int8_parked(const signed char* x, const float* x_scales, const signed char* weights,
                                                 const float* channel_scales, const float* bias, const u32* borders,
                                                 float* out, Sizes sizes) {
  Accumulators<i32, NT> acc = {};
  sum_parked(
      acc, UniformOperands<signed char, NT>(x, weights, sizes), borders, out, sizes,
      [&](const Accumulators<i32, NT>& exact, u32 slice) { return scale_slice<NT>(exact, x_scales, slice, sizes); },
      [&](float sum, u32 column) { return apply_epilogue(sum, channel_scales, bias, column); });
}

#define GEMM_BF16_TILED(NAME, NT, GEMM)                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                              \
      NAME(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, u32 rows, u32 n,  \
           u32 k) {                                                                                                 \
    GEMM<NT>(x, weights, bias, borders, out, {rows, n, k});                                              \
  }

GEMM_BF16_TILED(gemm_bf16_tiled_64, 4, gemm_bf16_tiled)
GEMM_BF16_TILED(gemm_bf16_tiled_80, 5, gemm_bf16_tiled)
GEMM_BF16_TILED(gemm_bf16_tiled_128, 8, gemm_bf16_parked)

#define GEMM_INT8_TILED(NAME, GEMM)                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                              \
      NAME(const signed char* x, const float* x_scales, const signed char* weights, const float* channel_scales,    \
           const float* bias, const u32* borders, float* out, u32 rows, u32 n, u32 k) {                             \
    GEMM(x, x_scales, weights, channel_scales, bias, borders, out, {rows, n, k});                                   \
  }

GEMM_INT8_TILED(gemm_int8_tiled_64, (gemm_int8_tiled<4, true>))
GEMM_INT8_TILED(gemm_int8_tiled_80, (gemm_int8_tiled<5, true>))
GEMM_INT8_TILED(gemm_int8_tiled_128, (gemm_int8_tiled<8, true>))
GEMM_INT8_TILED(gemm_int8_sliced_64, (gemm_int8_tiled<4, false>))
GEMM_INT8_TILED(gemm_int8_sliced_80, (gemm_int8_tiled<5, false>))
GEMM_INT8_TILED(gemm_int8_sliced_128, gemm_int8_parked<8>)
