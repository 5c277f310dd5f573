// GEMM of bf16 activations and bf16 weights in panels; see panels.cuh.
//   weights: tiles of 128 channels x 64 of K, each 16 panels
// Twin: gemm_bf16_8, equal bits.

struct PanelWeights : PackedTiles {
  typedef FloatSums Sums;
  static constexpr u32 STEP_COLUMNS = STEP;
};

// CLUSTER: attributes of the kernel; ROW_TILES x CHANNEL_TILES: its blocks.
#define GEMM_PANELS(NAME, ROWS, STAGES, BLOCKS, CLUSTER, ROW_TILES, CHANNEL_TILES)                                  \
  extern "C" __global__ void CLUSTER __launch_bounds__(384, BLOCKS)                                                 \
      NAME(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, u32 rows, u32 n,  \
           u32 k, u32 first, u32 slices, u32 groups) {                                                              \
    gemm_of_panels<PanelWeights, ROWS, STAGES, BLOCKS == 1, Cluster<ROW_TILES, CHANNEL_TILES>>(                     \
        x, weights, nullptr, bias, borders, out, {rows, n, k, first, slices, groups});                              \
  }

GEMM_PANELS(gemm_panels_8, 8, 6, 2, , 1, 1)
GEMM_PANELS(gemm_panels_16, 16, 5, 2, , 1, 1)
GEMM_PANELS(gemm_panels_40, 40, 8, 1, , 1, 1)
GEMM_PANELS(gemm_panels_80, 80, 7, 1, , 1, 1)
GEMM_PANELS(gemm_panels_128, 128, 5, 1, , 1, 1)
GEMM_PANELS(gemm_panels_80_by_2, 80, 7, 1, __cluster_dims__(2, 1, 1), 2, 1)
GEMM_PANELS(gemm_panels_128_by_2, 128, 5, 1, __cluster_dims__(2, 1, 1), 2, 1)
GEMM_PANELS(gemm_panels_128_by_4, 128, 5, 1, __cluster_dims__(4, 1, 1), 2, 2)

// Adds the sums of `groups` (2, 4 or 8) groups of slices in the contract's tree, then scale and bias. Slices
// without numbers add zeros to the tree, which turns -0 into 0.
//   sums [groups][len] f32, scales, bias [n] f32 or null -> out [len] f32; len a multiple of n
// Grid (ceil(len / 256)), 256 threads. Twin: gemm_panels_8 with one group, equal bits.
extern "C" __global__ void __launch_bounds__(256) sum_groups(const float* sums, const float* scales, const float* bias,
                                                             float* out, u64 len, u32 n, u32 groups, u32 slices) {
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= len) return;
  float parts[8];
#pragma unroll
  for (u32 g = 0; g < 8; ++g) parts[g] = g < groups ? sums[g * len + i] : 0.0f;
  float sum = parts[0] + parts[1];
  if (groups > 2) sum = sum + (parts[2] + parts[3]);
  if (groups > 4) sum = sum + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
  if (slices < 8) sum = sum + 0.0f;
  if (scales) sum = sum * scales[i % n];
  out[i] = bias ? sum + bias[i % n] : sum;
}

// Packs rows of weights into tiles. from [rows, k], a multiple of 128 rows. Grid (k / 64, rows / 128), 256
// threads. Twin: the host's `panel_index`, equal bits.
extern "C" __global__ void __launch_bounds__(256) pack_panels(const bf16* from, bf16* to, u32 k) {
  const u64 first = ((u64)blockIdx.y * gridDim.x + blockIdx.x) * (CHANNELS * STEP);
  for (u32 i = threadIdx.x; i < CHANNELS * STEP / 4; i += 256) {
    const u32 row = i / (STEP / 4), column = i % (STEP / 4) * 4;
    const u64 four = load_8((const u64*)(from + (u64)(blockIdx.y * CHANNELS + row) * k + blockIdx.x * STEP + column));
    u32* words = (u32*)(to + first + panel_index(row, column, CHANNELS / 8));
    words[0] = (u32)four;
    words[32] = (u32)(four >> 32);
  }
}
