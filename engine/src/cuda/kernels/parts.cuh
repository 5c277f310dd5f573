// Rows of logits in parts: a block takes PART neighbours of a row, so that several blocks share a row, and reads
// each number of its part once.

constexpr u32 PART = 4096;
constexpr u32 THREADS = 256;
// A part in shared memory; it may begin up to three numbers later than its first 16 bytes do.
constexpr u32 PART_CHUNKS = PART / 4 + 1;

// The part of a row that a block takes.
struct Part {
  u32 begin, end;  // token ids
  u32 late;        // numbers between the 16-byte border before the part's first number and that number

  __device__ __forceinline__ Part(const float* z, u32 index, u32 vocab) {
    begin = index * PART;
    end = min(begin + PART, vocab);
    late = (u32)((u64)(z + begin) / 4 % 4);
  }
  // Where a token's number lies in shared memory.
  __device__ __forceinline__ u32 place(u32 token_id) const { return token_id - begin + late; }
  // Numbers before the first 16-byte border.
  __device__ __forceinline__ u32 head() const { return min((4 - late) % 4, end - begin); }
};

// Copies a part to shared memory; all 16-byte loads of a thread are under way together.
__device__ __forceinline__ void load_part(const float* z, const Part& part, uint4 (&to)[PART_CHUNKS]) {
  constexpr u32 LOADS = PART / 4 / THREADS;
  const u32 first = part.begin + part.head();
  const u32 chunks = (part.end - first) / 4;
  uint4 loaded[LOADS] = {};
  if (chunks > 0) {
    // Behind the last the last again, for a load under a condition would wait for the one before it.
#pragma unroll
    for (u32 j = 0; j < LOADS; ++j) loaded[j] = load_16(z + first + 4 * min(threadIdx.x + THREADS * j, chunks - 1));
  }
  uint4* chunk = to + part.place(first) / 4;
#pragma unroll
  for (u32 j = 0; j < LOADS; ++j) {
    const u32 i = threadIdx.x + THREADS * j;
    if (i < chunks) chunk[i] = loaded[j];
  }
  // What lies before the first and behind the last border.
  float* numbers = (float*)to;
  const u32 last = first + 4 * chunks;
  if (threadIdx.x < part.head()) numbers[part.late + threadIdx.x] = load_4(z + part.begin + threadIdx.x);
  if (threadIdx.x < part.end - last) numbers[part.place(last + threadIdx.x)] = load_4(z + last + threadIdx.x);
  __syncthreads();
}
