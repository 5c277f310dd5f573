// GEMM of bf16 activations in panels and FP8 weights, which are widened to bf16 in registers; see panels.cuh.
//   weights: tiles of 128 channels x 64 of K; a channel's 64 bytes are a block of fp8.cuh
// Twins: gemm_fp8_8, and gemm_panels_8 on the widened weights, then the scale: equal bits. With scales by block:
// gemm_fp8_blocks_8, equal bits.

struct Fp8Weights {
  typedef FloatSums Sums;
  static constexpr u32 STEP_COLUMNS = STEP, TILE_BYTES = CHANNELS * STEP;
  static constexpr bool COMPLETES = true;

  template <u32 ROWS, typename Ring>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS / 2], const Ring& ring) {
    constexpr u32 SET_BYTES = 256, CHUNKS_OF_CHANNEL = STEP / 16;
    const u32 thread = threadIdx.x - COPIERS;
    const uint4* const of_channel = ring.tile() + (thread / WARP * 16 + thread % WARP / 4) * CHUNKS_OF_CHANNEL + thread % 4;
    const uint4 low = of_channel[0], high = of_channel[8 * CHUNKS_OF_CHANNEL];
    // Word 2 h + s holds this lane's weights of set s of half h of the step.
    const u32 of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
    u32 weights[4][4];
#pragma unroll
    for (u32 set = 0; set < 4; ++set) {
      weights[set][0] = first_two(of_low[set]);
      weights[set][1] = first_two(of_high[set]);
      weights[set][2] = last_two(of_low[set]);
      weights[set][3] = last_two(of_high[set]);
    }
    order_registers(acc);
    products_begin();
#pragma unroll
    for (u32 set = 0; set < 4; ++set) multiply_lanes<ROWS>(acc, weights[set], panels_at(ring.rows() + set * SET_BYTES));
    products_commit();
    // The products read the weights' registers until they are complete.
    products_wait<0>();
    order_registers(acc);
  }
};

#define FP8_PANELS(NAME, ROWS, STAGES, BLOCKS, CLUSTER, ROW_TILES, CHANNEL_TILES)                                   \
  extern "C" __global__ void CLUSTER __launch_bounds__(384, BLOCKS)                                                 \
      NAME(const bf16* x, const unsigned char* weights, const float* channel_scales, const float* bias,             \
           const u32* borders, float* out, u32 rows, u32 n, u32 k, u32 first, u32 slices, u32 groups) {             \
    gemm_of_panels<Fp8Weights, ROWS, STAGES, BLOCKS == 1, Cluster<ROW_TILES, CHANNEL_TILES>>(                       \
        x, weights, channel_scales, bias, borders, out, {rows, n, k, first, slices, groups});                       \
  }

FP8_PANELS(fp8_panels_8, 8, 10, 2, , 1, 1)
FP8_PANELS(fp8_panels_16, 16, 9, 2, , 1, 1)
FP8_PANELS(fp8_panels_40, 40, 12, 1, , 1, 1)
FP8_PANELS(fp8_panels_80, 80, 9, 1, , 1, 1)
FP8_PANELS(fp8_panels_128, 128, 6, 1, , 1, 1)
FP8_PANELS(fp8_panels_80_by_2, 80, 9, 1, __cluster_dims__(2, 1, 1), 2, 1)
FP8_PANELS(fp8_panels_128_by_2, 128, 6, 1, __cluster_dims__(2, 1, 1), 2, 1)
FP8_PANELS(fp8_panels_128_by_4, 128, 6, 1, __cluster_dims__(4, 1, 1), 2, 2)

// Weights with scales by block, of which a slice's part is a chain (fp8_blocks.cu).
struct Fp8Blocks : Fp8Weights {
  typedef ChainSums Sums;
};

// block_scales [chains, n] f32, chains: as in gemm_fp8_blocks, borders of chains multiples of 64. There is no tile of
// 128 rows, whose sums of chains, slices and two levels of the tree would take more registers than there are.
#define FP8_BLOCK_PANELS(NAME, ROWS, STAGES, BLOCKS, CLUSTER, ROW_TILES)                                            \
  extern "C" __global__ void CLUSTER __launch_bounds__(384, BLOCKS)                                                 \
      NAME(const bf16* x, const unsigned char* weights, const float* bias, const u32* borders, float* out, u32 rows, \
           u32 n, u32 k, u32 first, u32 slices, u32 groups, const float* block_scales, const u32* chains) {         \
    gemm_of_panels<Fp8Blocks, ROWS, STAGES, BLOCKS == 1, Cluster<ROW_TILES, 1>>(                                    \
        x, weights, nullptr, bias, borders, out, {rows, n, k, first, slices, groups}, {block_scales, chains});      \
  }

FP8_BLOCK_PANELS(fp8_block_panels_8, 8, 10, 2, , 1)
FP8_BLOCK_PANELS(fp8_block_panels_16, 16, 9, 2, , 1)
FP8_BLOCK_PANELS(fp8_block_panels_40, 40, 12, 1, , 1)
FP8_BLOCK_PANELS(fp8_block_panels_80, 80, 9, 1, , 1)
FP8_BLOCK_PANELS(fp8_block_panels_80_by_2, 80, 9, 1, __cluster_dims__(2, 1, 1), 2)

// Packs rows of weights into tiles. from [rows, k] bytes, a multiple of 128 rows. Grid (k / 64, rows / 128), 256
// threads.
extern "C" __global__ void __launch_bounds__(256) pack_fp8(const unsigned char* from, uint4* to, u32 k) {
  const u64 first = ((u64)blockIdx.y * gridDim.x + blockIdx.x) * (CHANNELS * STEP / 16);
  for (u32 i = threadIdx.x; i < CHANNELS * STEP / 16; i += 256) {
    to[first + i] = load_16(from + (u64)(blockIdx.y * CHANNELS + i / 4) * k + blockIdx.x * STEP + i % 4 * 16);
  }
}
