// Weights out of a seed, made where they are used: weights::random's rows, number by number.
// Twin: weights::RandomTensors, equal bits.
__device__ __forceinline__ u64 mix(u64 x) {
  u64 z = x + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// name [name_len] bytes; row_hash is mixed with it as the twin does; size is sqrt(3 / len).
__device__ __forceinline__ bf16 random_number(const unsigned char* name, u32 name_len, u64 seed, u64 row, u64 i,
                                              float size) {
  u64 state = mix(seed ^ mix(row));
  for (u32 c = 0; c < name_len; ++c) state = mix(state ^ (u64)name[c]);
  const float unit = (float)(mix(state + i) >> 40) / 8388608.0f - 1.0f;
  return narrow(unit * size);
}

// out [rows, len]: rows first_row.. of a tensor. Grid (ceil(len / 256), rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    random_f32(const unsigned char* name, float* out, u64 seed, u64 first_row, u32 name_len, u32 len, float size) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= len) return;
  out[(u64)blockIdx.y * len + i] = widen(random_number(name, name_len, seed, first_row + blockIdx.y, i, size));
}

extern "C" __global__ void __launch_bounds__(256)
    random_bf16(const unsigned char* name, bf16* out, u64 seed, u64 first_row, u32 name_len, u32 len, float size) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= len) return;
  out[(u64)blockIdx.y * len + i] = random_number(name, name_len, seed, first_row + blockIdx.y, i, size);
}
