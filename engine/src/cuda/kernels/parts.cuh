// Splits rows of logits into parts: a block handles PART consecutive numbers of a row, so that several blocks
// share a row, and reads each number of its part once.

constexpr u32 PART = 4096;
constexpr u32 THREADS = 256;
// Size of a part in shared memory in 16-byte chunks. The part may begin up to three numbers after the start
// of its first chunk.
constexpr u32 PART_CHUNKS = PART / 4 + 1;

// The part of a row that a block handles.
struct Part {
  u32 begin, end;  // token ids
  u32 late;        // numbers between the last 16-byte boundary and the part's first number

  __device__ __forceinline__ Part(const float* z, u32 index, u32 vocab) {
    begin = index * PART;
    end = min(begin + PART, vocab);
    late = (u32)((u64)(z + begin) / 4 % 4);
  }
  // Index of a token's number in shared memory.
  __device__ __forceinline__ u32 place(u32 token_id) const { return token_id - begin + late; }
  // Count of numbers before the first 16-byte boundary.
  __device__ __forceinline__ u32 head() const { return min((4 - late) % 4, end - begin); }
};

// Copies a part to shared memory; all 16-byte loads of a thread are in flight together.
__device__ __forceinline__ void load_part(const float* z, const Part& part, uint4 (&to)[PART_CHUNKS]) {
  constexpr u32 LOADS = PART / 4 / THREADS;
  const u32 first = part.begin + part.head();
  const u32 chunks = (part.end - first) / 4;
  uint4 loaded[LOADS] = {};
  if (chunks > 0) {
    // Past the end, the last chunk is loaded again: a conditional load would wait for the previous one.
#pragma unroll
    for (u32 j = 0; j < LOADS; ++j) loaded[j] = load_16(z + first + 4 * min(threadIdx.x + THREADS * j, chunks - 1));
  }
  uint4* chunk = to + part.place(first) / 4;
#pragma unroll
  for (u32 j = 0; j < LOADS; ++j) {
    const u32 i = threadIdx.x + THREADS * j;
    if (i < chunks) chunk[i] = loaded[j];
  }
  // The numbers before the first and after the last 16-byte boundary.
  float* numbers = (float*)to;
  const u32 last = first + 4 * chunks;
  if (threadIdx.x < part.head()) numbers[part.late + threadIdx.x] = load_4(z + part.begin + threadIdx.x);
  if (threadIdx.x < part.end - last) numbers[part.place(last + threadIdx.x)] = load_4(z + last + threadIdx.x);
  __syncthreads();
}
