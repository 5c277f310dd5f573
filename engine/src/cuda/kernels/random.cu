// Random weights from a seed, as bf16 or widened to f32. Every number is a function of its row's state and
// its column. Twin: weights::RandomTensors, equal bits.

// The finalizer of splitmix64.
__device__ __forceinline__ u64 mix(u64 x) {
  u64 z = x + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ bf16 random_number(u64 state, u32 column, float size) {
  // 24 bits give an exact number in [-1, 1).
  const float unit = (float)(u32)(mix(state + column) >> 40) / 8388608.0f - 1.0f;
  return narrow(unit * size);
}

// states [rows] -> out [rows, columns]; element i of a row is column first + i. Grid (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    random_bf16(const u64* states, bf16* out, u32 first, u32 columns, float size) {
  const u64 state = states[blockIdx.x];
  bf16* row = out + (u64)blockIdx.x * columns;
  for (u32 i = threadIdx.x; i < columns; i += blockDim.x) row[i] = random_number(state, first + i, size);
}

extern "C" __global__ void __launch_bounds__(256)
    random_f32(const u64* states, float* out, u32 first, u32 columns, float size) {
  const u64 state = states[blockIdx.x];
  float* row = out + (u64)blockIdx.x * columns;
  for (u32 i = threadIdx.x; i < columns; i += blockDim.x) row[i] = widen(random_number(state, first + i, size));
}
