// The coupled draw (docs/contract.md B2-B4): argmax over a row of logit / T + Gumbel noise, lowest id among
// equals; the plain argmax if T < 1e-5. The noise is Philox-4x32-10 of (seed, position, token, choice); its
// logarithms are speculation::math's, operation by operation. `filters.cu` has already masked the tokens that
// filters exclude. Each part of a row finds its best token; the best of the parts' results is the best of the
// row. Twin: speculation::acceptance, equal ids.

// No token.
constexpr u32 NO_TOKEN = 0xffffffffu;
// Below this temperature the draw is the most likely token.
constexpr float GREEDY_BELOW = 1e-5f;

// One row's draw; written by `ops/draw.rs`.
struct DrawRow {
  u64 seed;
  u32 choice;
  u32 position;
  float temperature;
  u32 purpose;
  u32 row;  // row of the logits, or NO_ROW: nothing is drawn
  u32 unused;
};
#define NO_ROW 0xffffffffu

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

// Noise bits m of two neighbours: an even token id and the next one.
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

// Best of a warp; every lane gets it. The order does not matter: no two candidates compare equal.
__device__ __forceinline__ Best best_of_warp(Best best) {
  for (int step = WARP / 2; step > 0; step /= 2) {
    const double score = __shfl_xor_sync(0xffffffffu, best.score, step);
    const u32 token_id = __shfl_xor_sync(0xffffffffu, best.token_id, step);
    offer(best, score, token_id);
  }
  return best;
}

// Best of a block of 256; every thread gets it.
__device__ __forceinline__ Best best_of_block(Best best, Best (&shared)[8]) {
  best = best_of_warp(best);
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
  __syncthreads();
  for (u32 w = 0; w < 8; ++w) offer(best, shared[w].score, shared[w].token_id);
  return best;
}

// Result of a part of a row.
struct DrawPart {
  double most_likely, best;  // highest logit, +infinity if a logit is NaN or +infinity; best score
  u32 most_likely_id, best_id;
};

// logits [*, stride] f32, of which the first `vocab` columns are used; draws [num_draws] -> parts [num_draws,
// num_parts]. Grid (num_draws, num_parts), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    draw_parts(const float* logits, const DrawRow* draws, DrawPart* parts, u32 vocab, u32 stride) {
  __shared__ uint4 chunks[PART_CHUNKS];
  __shared__ Best shared[8];
  const DrawRow row = draws[blockIdx.x];
  if (row.row == NO_ROW) return;
  const float* z = logits + (u64)row.row * stride;
  const Part part(z, blockIdx.y, vocab);
  load_part(z, part, chunks);
  const float* numbers = (const float*)chunks + part.late;

  // The most likely token, or the first whose logit is NaN or +infinity: its score is +infinity.
  Best most_likely = {(double)NEG_INF, NO_TOKEN};
  for (u32 i = threadIdx.x; i < part.end - part.begin; i += THREADS) {
    offer(most_likely, numbers[i] < POS_INF ? (double)numbers[i] : (double)POS_INF, part.begin + i);
  }
  most_likely = best_of_block(most_likely, shared);
  Best best = {(double)NEG_INF, NO_TOKEN};
  const bool is_usable = most_likely.score < (double)POS_INF && most_likely.score > (double)NEG_INF;
  if (is_usable && row.temperature >= GREEDY_BELOW) {
    const double temperature = (double)row.temperature;
    // Start from the most likely token's score: the bound excludes most other tokens without a logarithm.
    u64 m[2];
    noise_bits(row, most_likely.token_id / 2, m);
    best = {most_likely.score / temperature + gumbel(most_likely.token_id % 2 ? m[1] : m[0]), most_likely.token_id};
    for (u32 i = 2 * threadIdx.x; i < part.end - part.begin; i += 2 * THREADS) {
      noise_bits(row, (part.begin + i) / 2, m);
      for (u32 j = 0; j < 2 && part.begin + i + j < part.end; ++j) {
        const double x = (double)numbers[i + j] / temperature;
        if (x + gumbel_bound(m[j]) >= best.score) offer(best, x + gumbel(m[j]), part.begin + i + j);
      }
    }
    best = best_of_block(best, shared);
  }
  if (threadIdx.x == 0) {
    parts[(u64)blockIdx.x * gridDim.y + blockIdx.y] = {most_likely.score, best.score, most_likely.token_id, best.token_id};
  }
}

// Combines the parts of each row; the order does not matter. parts [num_draws, num_parts] -> drawn
// [num_draws]. Grid (num_draws), one warp.
extern "C" __global__ void __launch_bounds__(32)
    draw_join(const DrawPart* parts, const DrawRow* draws, Drawn* drawn, u32 num_parts) {
  if (draws[blockIdx.x].row == NO_ROW) return;
  Best most_likely = {(double)NEG_INF, NO_TOKEN};
  Best best = most_likely;
  for (u32 i = threadIdx.x; i < num_parts; i += WARP) {
    const DrawPart part = parts[(u64)blockIdx.x * num_parts + i];
    offer(most_likely, part.most_likely, part.most_likely_id);
    offer(best, part.best, part.best_id);
  }
  most_likely = best_of_warp(most_likely);
  best = best_of_warp(best);
  if (threadIdx.x != 0) return;
  Drawn result = {most_likely.token_id, 0};
  if (most_likely.score == (double)POS_INF) {
    result.status = 1;
  } else if (most_likely.score == (double)NEG_INF) {
    result.status = 2;
  } else if (draws[blockIdx.x].temperature >= GREEDY_BELOW) {
    result.token_id = best.token_id;
  }
  drawn[blockIdx.x] = result;
}

// Number of candidates per row: speculation::tree::MAX_CANDIDATES.
constexpr u32 CANDIDATES = 8;

// A token with its score; NO_TOKEN marks unused entries.
struct Candidate {
  double score;
  u32 token_id, unused;
};

// Whether a token ranks below `other`: scores descend, ids ascend among equals.
__device__ __forceinline__ bool is_below(const Best& other, double score, u32 token_id) {
  return score < other.score || (score == other.score && token_id > other.token_id);
}

// Finds the best drawable tokens of each part of a row, by logit / T + noise, or by logit if T < 1e-5. logits
// [*, stride] f32, of which the first `vocab` columns are used; draws [num_draws] -> parts [num_draws,
// num_parts, CANDIDATES]. Twin: speculation::acceptance::guess_candidates, equal ids and scores. Grid
// (num_draws, num_parts), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    candidate_parts(const float* logits, const DrawRow* draws, Candidate* parts, u32 vocab, u32 stride) {
  __shared__ uint4 chunks[PART_CHUNKS];
  __shared__ Best shared[8];
  const DrawRow row = draws[blockIdx.x];
  const float* z = logits + (u64)row.row * stride;
  const Part part(z, blockIdx.y, vocab);
  load_part(z, part, chunks);
  const float* numbers = (const float*)chunks + part.late;
  const u32 size = part.end - part.begin;
  const bool is_greedy = row.temperature < GREEDY_BELOW;
  const double temperature = (double)row.temperature;

  // A thread handles pairs of neighbouring tokens: one Philox block gives the noise of both.
  constexpr u32 PAIRS = PART / THREADS / 2;
  double scores[2 * PAIRS];
#pragma unroll
  for (u32 j = 0; j < PAIRS; ++j) {
    const u32 i = 2 * (threadIdx.x + THREADS * j);
    u64 m[2] = {0, 0};
    if (!is_greedy) noise_bits(row, (part.begin + i) / 2, m);
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
      const double logit = i + k < size ? (double)numbers[i + k] : (double)NEG_INF;
      scores[2 * j + k] = is_greedy ? logit : logit / temperature + gumbel(m[k]);
    }
  }
  Best last = {(double)POS_INF, 0};
  Candidate* out = parts + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * CANDIDATES;
  for (u32 rank = 0; rank < CANDIDATES; ++rank) {
    Best best = {(double)NEG_INF, NO_TOKEN};
#pragma unroll
    for (u32 j = 0; j < 2 * PAIRS; ++j) {
      const u32 token_id = part.begin + 2 * (threadIdx.x + THREADS * (j / 2)) + j % 2;
      // A masked token's score is -infinity: it is never listed.
      if (scores[j] > (double)NEG_INF && is_below(last, scores[j], token_id)) offer(best, scores[j], token_id);
    }
    last = best_of_block(best, shared);
    if (threadIdx.x == 0) out[rank] = {last.score, last.token_id, 0};
  }
}

// Combines the parts of each row; the order does not matter. parts [num_draws, num_parts, CANDIDATES] ->
// found [num_draws, CANDIDATES]. Grid (num_draws), one warp.
extern "C" __global__ void __launch_bounds__(32) candidate_join(const Candidate* parts, Candidate* found, u32 num_parts) {
  Best last = {(double)POS_INF, 0};
  const Candidate* of_row = parts + (u64)blockIdx.x * num_parts * CANDIDATES;
  for (u32 rank = 0; rank < CANDIDATES; ++rank) {
    Best best = {(double)NEG_INF, NO_TOKEN};
    for (u32 i = threadIdx.x; i < num_parts * CANDIDATES; i += WARP) {
      const Candidate one = of_row[i];
      if (one.token_id != NO_TOKEN && is_below(last, one.score, one.token_id)) offer(best, one.score, one.token_id);
    }
    last = best_of_warp(best);
    if (threadIdx.x == 0) found[blockIdx.x * CANDIDATES + rank] = {last.score, last.token_id, 0};
  }
}
