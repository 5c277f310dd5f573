// Kernels that only read memory or only multiply: their rates are the roofline that a forward is compared
// with.

// words [4 * num] -> sums [gridDim.x]: the exclusive or of each block's words, so that the compiler cannot
// drop a load. Any grid, 256 threads; block b reads 16 bytes per thread from word 4 * 256 * b on, with a
// stride of gridDim.x blocks. Twin: the same on the host, equal bits.
extern "C" __global__ void __launch_bounds__(256) read_words(const uint4* words, u32* sums, u64 num) {
  __shared__ u32 warp_sums[8];
  const u64 stride = (u64)gridDim.x * blockDim.x;
  u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 sum = 0;
  for (; at + 3 * stride < num; at += 4 * stride) {
    uint4 read[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) read[i] = words[at + i * stride];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum ^= read[i].x ^ read[i].y ^ read[i].z ^ read[i].w;
  }
  for (; at < num; at += stride) {
    const uint4 read = words[at];
    sum ^= read.x ^ read.y ^ read.z ^ read.w;
  }
  for (int step = WARP / 2; step > 0; step /= 2) sum ^= __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < 8; ++w) sum ^= warp_sums[w];
    sums[blockIdx.x] = sum;
  }
}

// sums [gridDim.x]: the sum of each block's products of ones. Any grid, 256 threads. In each round a warp
// multiplies 16 x 16 by 16 x 8 eight times, into independent accumulators, so that no product waits for
// another. Accumulator i starts at i, so that the compiler cannot merge them. Twin: 8 * 8 * 16 * 8 * 16 *
// rounds + 256 * 4 * (0 + 1 + .. + 7) for every block, exact while a sum of 16 * rounds is.
extern "C" __global__ void __launch_bounds__(256) multiply_only(float* sums, u32 rounds) {
  __shared__ double warp_sums[8];
  const u32 ones = 0x3f803f80u;
  const u32 a[4] = {ones, ones, ones, ones};
  const u32 b[2] = {ones, ones};
  float d[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) d[i][0] = d[i][1] = d[i][2] = d[i][3] = (float)i;
  for (u32 round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) mma_bf16(d[i], a, b);
  }
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 4; ++j) sum += (double)d[i][j];
  }
  sum = block_sum(sum, warp_sums);
  if (threadIdx.x == 0) sums[blockIdx.x] = (float)sum;
}
