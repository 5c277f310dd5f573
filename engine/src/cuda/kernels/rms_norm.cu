// RMS norm: out = x / sqrt(mean(x^2) + eps) * weight, fused with a preceding add and a following rounding.
//   x [rows, width] f32; delta [groups][rows, width] f32 or null: a product's sums of groups of slices, or one
//   group, added to x first, in place; weight [width] f32
//   -> out [rows, width] f32, rounded (bf16 or null): out as the input of a product (input_index)
// Grid (rows), 256 threads. Twin: cpu_kernels::reference::rms_norm, to tolerance: the sum of squares is added
// in another order (thread i adds i, i + 256, ..; then a butterfly over each warp's lanes, then warps in
// order), the same at every row count. The sum and the rounding equal those of `add` and `to_bf16` bit for
// bit.
extern "C" __global__ void __launch_bounds__(256, 2)
    rms_norm(float* x, const float* delta, const float* weight, float* out, bf16* rounded, u32 width, float eps, u32 panels,
             u32 groups, u32 slices) {
  // Loads of a thread that are in flight together. A thread keeps its numbers of the first KEPT batches in
  // registers, and reads those of longer rows again.
  constexpr u32 AHEAD = 8, BATCH = 256 * AHEAD, KEPT = 4;
  __shared__ float warp_sums[8];
  const u64 first = (u64)blockIdx.x * width;
  float* row = x + first;
  float sum = 0.0f;
  // Loads a batch, adds delta to it, and adds its squares to `sum`.
  auto load_batch = [&](float (&numbers)[AHEAD], u32 base) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) numbers[j] = base + 256 * j < width ? row[base + 256 * j] : 0.0f;
    if (delta) {
      float added[AHEAD];
#pragma unroll
      for (u32 j = 0; j < AHEAD; ++j) {
        added[j] = base + 256 * j < width
                       ? sum_of_groups(delta, (u64)gridDim.x * width, first + base + 256 * j, groups, slices)
                       : 0.0f;
      }
#pragma unroll
      for (u32 j = 0; j < AHEAD; ++j) {
        numbers[j] = numbers[j] + added[j];
        if (base + 256 * j < width) row[base + 256 * j] = numbers[j];
      }
    }
    // Zeros past the end change nothing.
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) sum = fmaf(numbers[j], numbers[j], sum);
  };
  auto load_weights = [&](float (&weights)[AHEAD], u32 base) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) weights[j] = weight[min(base + 256 * j, width - 1)];
  };
  float kept[KEPT][AHEAD], weights[AHEAD];
#pragma unroll
  for (u32 b = 0; b < KEPT; ++b) {
    if (b * BATCH < width) load_batch(kept[b], b * BATCH + threadIdx.x);
  }
  for (u32 base = KEPT * BATCH + threadIdx.x; base < width; base += BATCH) {
    float numbers[AHEAD];
    load_batch(numbers, base);
  }
  // In flight during the sum over the block.
  load_weights(weights, threadIdx.x);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
  for (u32 w = 0; w < 8; ++w) total += warp_sums[w];
  const float scale = 1.0f / sqrtf(total / (float)width + eps);
  auto write_batch = [&](const float (&numbers)[AHEAD], u32 base) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) {
      if (base + 256 * j >= width) break;
      const float normed = numbers[j] * scale * weights[j];
      out[first + base + 256 * j] = normed;
      if (rounded) rounded[input_index(blockIdx.x, base + 256 * j, width, panels)] = narrow(normed);
    }
  };
#pragma unroll
  for (u32 b = 0; b < KEPT; ++b) {
    if (b * BATCH >= width) break;
    if (b > 0) load_weights(weights, b * BATCH + threadIdx.x);
    write_batch(kept[b], b * BATCH + threadIdx.x);
  }
  for (u32 base = KEPT * BATCH + threadIdx.x; base < width; base += BATCH) {
    float numbers[AHEAD];
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) numbers[j] = row[min(base + 256 * j, width - 1)];
    load_weights(weights, base);
    write_batch(numbers, base);
  }
}
