// The coupled draw (docs/contract.md B2-B4): argmax over a row of logit / T + Gumbel noise, lowest id among equals;
// the plain argmax where T < 1e-5. The noise is Philox-4x32-10 of (seed, position, token, choice), its logarithms
// speculation::math's, operation by operation. Where there are filters `keep` has masked what they bar.
// Twin: speculation::acceptance, equal ids.

// One row's draw; written by `ops/draw.rs`.
struct DrawRow {
  u64 seed;
  u32 choice;
  u32 position;
  float temperature;
  u32 purpose;
  u32 row;  // of the logits
  u32 unused;
};

__device__ __forceinline__ void philox(u32 (&words)[4], u32 key_low, u32 key_high) {
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)words[0] * 0xd2511f53u;
    const u64 b = (u64)words[2] * 0xcd9e8d57u;
    words[0] = (u32)(b >> 32) ^ words[1] ^ key_low;
    words[1] = (u32)b;
    words[2] = (u32)(a >> 32) ^ words[3] ^ key_high;
    words[3] = (u32)a;
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
}

__device__ __forceinline__ double gumbel(u64 m) {
  const double uniform = ((double)m + 0.5) * (1.0 / 4503599627370496.0);
  return -ln(-ln(uniform));
}

// speculation::noise::gumbel_bound: never below gumbel(m), without a logarithm.
__device__ __forceinline__ double gumbel_bound(u64 m) {
  const u64 mantissa = (1ull << 52) - 1;
  const u64 one = 0x3ff0000000000000ull;
  const double y = (__longlong_as_double((i64)(one | (mantissa - m))) - 1.0) + 0.5 / 4503599627370496.0;
  const i32 fixed_point = (i32)(one >> 32) - (i32)(u32)((u64)__double_as_longlong(y) >> 32);
  return (double)fixed_point * (0.693147180559945309417232121458 / 1048576.0) + 1e-9;
}

// m of two neighbours, an even token id and the next.
__device__ __forceinline__ void noise_bits(const DrawRow& row, u32 pair, u64 (&m)[2]) {
  u32 words[4] = {row.position, pair, row.choice, row.purpose};
  philox(words, (u32)row.seed, (u32)(row.seed >> 32));
  m[0] = ((u64)words[0] | (u64)words[1] << 32) >> 12;
  m[1] = ((u64)words[2] | (u64)words[3] << 32) >> 12;
}

struct Best {
  double score;
  u32 token_id;
};

__device__ __forceinline__ void offer(Best& best, double score, u32 token_id) {
  if (score > best.score || (score == best.score && token_id < best.token_id)) {
    best.score = score;
    best.token_id = token_id;
  }
}

// The block's best; every thread gets it. Order does not matter: the rule has no ties.
__device__ __forceinline__ Best best_of_block(Best best, Best (&shared)[8]) {
  for (int step = WARP / 2; step > 0; step /= 2) {
    const double score = __shfl_xor_sync(0xffffffffu, best.score, step);
    const u32 token_id = __shfl_xor_sync(0xffffffffu, best.token_id, step);
    offer(best, score, token_id);
  }
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
  __syncthreads();
  for (u32 w = 0; w < 8; ++w) offer(best, shared[w].score, shared[w].token_id);
  return best;
}

// logits [*, vocab_stride] f32, of whose rows the first `vocab` numbers count; draws [num_draws] -> drawn [num_draws].
// Grid (num_draws), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    draw(const float* logits, const DrawRow* draws, Drawn* drawn, u32 vocab, u32 vocab_stride) {
  __shared__ Best shared[8];
  const DrawRow row = draws[blockIdx.x];
  const float* z = logits + (u64)row.row * vocab_stride;
  const u32 nobody = 0xffffffffu;

  // The likeliest token, and the first that is no number: +infinity in score stands for it.
  Best likeliest = {(double)NEG_INF, nobody};
  for (u32 v = threadIdx.x; v < vocab; v += blockDim.x) {
    offer(likeliest, z[v] < POS_INF ? (double)z[v] : (double)POS_INF, v);
  }
  likeliest = best_of_block(likeliest, shared);
  Drawn result = {likeliest.token_id, 0};
  if (likeliest.score == (double)POS_INF) {
    result.status = 1;
  } else if (likeliest.score == (double)NEG_INF) {
    result.status = 2;
  } else if (row.temperature >= 1e-5f) {
    const double temperature = (double)row.temperature;
    // The likeliest token's score is one that most others cannot reach.
    u64 m[2];
    noise_bits(row, likeliest.token_id / 2, m);
    const double start = likeliest.score / temperature + gumbel(m[likeliest.token_id % 2]);
    Best best = {start, likeliest.token_id};
    for (u32 pair = threadIdx.x; 2 * pair < vocab; pair += blockDim.x) {
      noise_bits(row, pair, m);
      for (u32 i = 0; i < 2; ++i) {
        const u32 v = 2 * pair + i;
        if (v >= vocab) continue;
        const double x = (double)z[v] / temperature;
        if (x + gumbel_bound(m[i]) >= best.score) offer(best, x + gumbel(m[i]), v);
      }
    }
    result.token_id = best_of_block(best, shared).token_id;
  }
  if (threadIdx.x == 0) drawn[blockIdx.x] = result;
}
