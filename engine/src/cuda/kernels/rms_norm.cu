// RMS norm: out = x / sqrt(mean(x^2) + eps) * weight, fused with a preceding add and a following rounding.
//   x [rows, width] f32; delta [groups][rows, width] f32 or null: a product's sums of groups of slices, or one
//   group, added to x first, in place; weight [width] f32
//   -> out [rows, width] f32, rounded (bf16 or null): out as the input of a product (input_index)
// Grid (rows), 256 threads. Twin: cpu_kernels::reference::rms_norm, to tolerance: the sum of squares is added
// in another order (thread i adds i, i + 256, ..; then a butterfly over each warp's lanes, then warps in
// order), the same at every row count. The sum and the rounding equal those of `add` and `to_bf16` bit for
// bit.

// Loads of a thread that are in flight together: a batch, every 256th number of the row.
constexpr u32 AHEAD = 8;
constexpr u32 BATCH = 256 * AHEAD;
// Batches whose numbers a thread keeps in registers; it reads those of longer rows again.
constexpr u32 KEPT = 2;

struct Batch {
  float of[AHEAD];

  // Zeros past the end of the row.
  __device__ __forceinline__ void load(const float* row, u32 base, u32 width) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) of[j] = base + 256 * j < width ? row[base + 256 * j] : 0.0f;
  }
  __device__ __forceinline__ void add(const Batch& other) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) of[j] = of[j] + other.of[j];
  }
};

// A product's sums of groups of slices, for one row; see sum_groups.
struct Delta {
  const float* row;
  u64 len;  // of a group
  u32 groups, slices;

  // The sums of a batch, pair by pair in the order of the tree.
  __device__ __forceinline__ void load(Batch& sum, u32 base, u32 width) const {
    sum.load(row, base, width);
    if (groups == 1) return;
    Batch later = {};
#pragma unroll 1
    for (u32 group = 0; group < groups; group += 2) {
      Batch pair, second;
      pair.load(row + group * len, base, width);
      second.load(row + (group + 1) * len, base, width);
      pair.add(second);
      Batch& to = group < 4 ? sum : later;
      if (group % 4 == 0) {
        to = pair;
      } else {
        to.add(pair);
      }
    }
    if (groups > 4) sum.add(later);
    if (slices < 8) sum.add({});
  }
};

// Loads a batch of the row. Adds delta to it, in place, if there is one.
__device__ __forceinline__ void load_sum(Batch& numbers, float* row, const Delta& delta, u32 base, u32 width) {
  numbers.load(row, base, width);
  if (!delta.row) return;
  Batch added;
  delta.load(added, base, width);
  numbers.add(added);
#pragma unroll
  for (u32 j = 0; j < AHEAD; ++j) {
    if (base + 256 * j < width) row[base + 256 * j] = numbers.of[j];
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    rms_norm(float* x, const float* delta, const float* weight, float* out, bf16* rounded, u32 width, float eps, u32 panels,
             u32 groups, u32 slices) {
  __shared__ float warp_sums[8];
  const u64 first = (u64)blockIdx.x * width;
  float* const row = x + first;
  const Delta of_row = {delta ? delta + first : nullptr, (u64)gridDim.x * width, groups, slices};
  float sum = 0.0f;
  Batch kept[KEPT], weights;
#pragma unroll
  for (u32 b = 0; b < KEPT; ++b) {
    if (b * BATCH >= width) break;
    load_sum(kept[b], row, of_row, b * BATCH + threadIdx.x, width);
    // Zeros past the end change nothing.
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) sum = fmaf(kept[b].of[j], kept[b].of[j], sum);
  }
  for (u32 base = KEPT * BATCH + threadIdx.x; base - threadIdx.x < width; base += BATCH) {
    Batch numbers;
    load_sum(numbers, row, of_row, base, width);
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) sum = fmaf(numbers.of[j], numbers.of[j], sum);
  }
  // In flight during the sum over the block.
  weights.load(weight, threadIdx.x, width);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
  for (u32 w = 0; w < 8; ++w) total += warp_sums[w];
  const float scale = 1.0f / sqrtf(total / (float)width + eps);
  auto write = [&](const Batch& numbers, u32 base) {
#pragma unroll
    for (u32 j = 0; j < AHEAD; ++j) {
      if (base + 256 * j >= width) break;
      const float normed = numbers.of[j] * scale * weights.of[j];
      out[first + base + 256 * j] = normed;
      if (rounded) rounded[input_index(blockIdx.x, base + 256 * j, width, panels)] = narrow(normed);
    }
  };
#pragma unroll
  for (u32 b = 0; b < KEPT; ++b) {
    if (b * BATCH >= width) break;
    if (b > 0) weights.load(weight, b * BATCH + threadIdx.x, width);
    write(kept[b], b * BATCH + threadIdx.x);
  }
  for (u32 base = KEPT * BATCH + threadIdx.x; base < width; base += BATCH) {
    Batch numbers;
    numbers.load(row, base, width);
    weights.load(weight, base, width);
    write(numbers, base);
  }
}
