// What reading costs: a kernel that does nothing else, for whoever compares a forward with it.

// words [4 * num] -> sums [gridDim.x]: each block's words by exclusive or, so that none can be left out. Grid (any),
// 256 threads; block b takes 16 bytes a thread from word 4 * 256 * b on, then those of gridDim.x blocks further.
// Twin: the same on the host, equal bits.
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
