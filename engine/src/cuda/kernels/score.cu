// Log probabilities of raw rows, as reported to clients: the row's highest logit, the logarithm of the sum of
// all exp(logit - highest), the logit of the drawn or given token, and the most likely tokens with their
// logits. The sum has the twin's order (thread id % 256 adds ids in order, a butterfly over each warp's
// lanes, warps in order), so that the host computes the same bits from these numbers. Twin:
// speculation::logits::score, equal bits.

// Request for one row; written by `ops/score.rs`.
struct ScoreRow {
  u32 draw;   // index of the draw whose token is scored; 0xffffffff: `given`
  u32 top_n;  // at most `width`, and at most `vocab`
  u32 given;
};

// Result for one row.
struct Scored {
  double max;
  double log_sum;  // NaN where a logit is NaN or +infinity, or all are -infinity
  float logit;     // of the token
  u32 unused;
};

struct TopToken {
  u32 token_id;
  float logit;
};

// Greatest rank of a block; every thread gets it.
__device__ __forceinline__ u64 block_greatest(u64 x, u64 (&shared)[8]) {
  for (int step = WARP / 2; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
  __syncthreads();
  for (u32 w = 0; w < 8; ++w) x = shared[w] > x ? shared[w] : x;
  return x;
}

// raw [num, stride] f32, of which the first `vocab` columns are used; rows [num], drawn [*] -> scored [num],
// top [num, width]. Grid (num), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    score(const float* raw, const ScoreRow* rows, const Drawn* drawn, Scored* scored, TopToken* top, u32 vocab, u32 stride,
          u32 width) {
  __shared__ u64 ranks[8];
  __shared__ u32 counts[8];
  __shared__ double sums[8];
  const ScoreRow row = rows[blockIdx.x];
  const float* z = raw + (u64)blockIdx.x * stride;
  u32 bad = 0, allowed = 0;
  u64 rank = 0;
  for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) {
    bad += !(z[v] < POS_INF);
    allowed += z[v] > NEG_INF;
    const u64 mine = rank_of(key_of(z[v]), v);
    rank = mine > rank ? mine : rank;
  }
  bad = block_sum(bad, counts);
  allowed = block_sum(allowed, counts);
  rank = block_greatest(rank, ranks);
  Scored result = {0.0, __longlong_as_double(0x7ff8000000000000ll), 0.0f, 0};
  if (!bad && allowed) {
    result.max = (double)(z[~(u32)rank] + 0.0f);
    double sum = 0.0;
    for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) sum += exp_below_zero((double)z[v] - result.max);
    result.log_sum = ln(block_sum(sum, sums));
    const u32 token_id = row.draw == 0xffffffffu ? row.given : drawn[row.draw].token_id;
    result.logit = token_id < vocab ? z[token_id] : NEG_INF;
    // Finds one token per pass: all found so far rank above all others.
    for (u32 i = 0; i < row.top_n; ++i) {
      if (i > 0) {
        u64 next = 0;
        for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) {
          const u64 mine = rank_of(key_of(z[v]), v);
          next = mine < rank && mine > next ? mine : next;
        }
        rank = block_greatest(next, ranks);
      }
      const u32 likely = ~(u32)rank;
      if (threadIdx.x == 0) top[(u64)blockIdx.x * width + i] = {likely, z[likely]};
    }
  }
  if (threadIdx.x == 0) scored[blockIdx.x] = result;
}
