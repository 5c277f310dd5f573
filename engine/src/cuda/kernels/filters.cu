// Filters (docs/contract.md B2): min-p, top-k and top-p on rows that went through `edit_logits`. What they bar becomes
// -infinity, so that `draw` sees only what is kept. The kept tokens are the first of the order (likeliest first, lowest id first
// among equals); of that order the first CANDIDATES are sorted, and a row whose border lies further on, or too near a rounding
// to tell, is left as it is and said to be undecided: the host draws it.
// Twin: speculation::logits::keep, equal tokens.

constexpr u32 CANDIDATES = 1024;
constexpr u32 THREADS = 256;

// One row's filters; written by `ops/filters.rs`.
struct FilterRow {
  u32 row;      // of the logits
  u32 top_k;    // 0: none
  float top_p;  // 1 and above: none
  float temperature;
  double ln_min_p;  // -infinity: none
};

__device__ __forceinline__ float number_of(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The tokens from the first of the order to the `wanted`-th into `ranks`, in no order; how many they are. `border` is the
// greatest key that so many tokens reach.
__device__ __forceinline__ u32 gather(const float* z, u32 vocab, u32 border, u32 wanted, u64 (&ranks)[CANDIDATES],
                                      u32 (&above_of)[THREADS], u32 (&at_of)[THREADS]) {
  // Each thread takes neighbours, so that those at the border are counted by id.
  const u32 share = (vocab + THREADS - 1) / THREADS;
  const u32 begin = min(threadIdx.x * share, vocab);
  const u32 end = min(begin + share, vocab);
  u32 above = 0, at = 0;
  for (u32 v = begin; v < end; ++v) {
    const u32 key = key_of(z[v]);
    above += key > border;
    at += key == border;
  }
  above_of[threadIdx.x] = above;
  at_of[threadIdx.x] = at;
  __syncthreads();
  u32 all_above = 0, above_before = 0, at_before = 0;
  for (u32 t = 0; t < THREADS; ++t) {
    if (t == threadIdx.x) above_before = all_above;
    all_above += above_of[t];
    if (t < threadIdx.x) at_before += at_of[t];
  }
  const bool masked = border <= key_of(NEG_INF);
  const u32 room = masked ? 0 : wanted - all_above;
  u32 all_at = 0;
  for (u32 t = 0; t < THREADS; ++t) all_at += at_of[t];
  for (u32 v = begin; v < end; ++v) {
    const u32 key = key_of(z[v]);
    if (key > border) ranks[above_before++] = rank_of(key, v);
    if (key == border && at_before < room) ranks[all_above + at_before++] = rank_of(key, v);
  }
  return all_above + min(all_at, room);
}

// Sorts all of `ranks`, greatest first.
__device__ __forceinline__ void sort(u64 (&ranks)[CANDIDATES]) {
  for (u32 size = 2; size <= CANDIDATES; size *= 2) {
    for (u32 apart = size / 2; apart > 0; apart /= 2) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < CANDIDATES; i += THREADS) {
        const u32 other = i ^ apart;
        // The lower of the two owns the pair: the other one may not even read it.
        if (other < i) continue;
        const u64 a = ranks[i], b = ranks[other];
        const bool descending = (i & size) == 0;
        if (descending ? a < b : a > b) {
          ranks[i] = b;
          ranks[other] = a;
        }
      }
    }
  }
  __syncthreads();
}

// logits [*, stride] f32, of whose rows the first `vocab` numbers count; filters [rows] -> undecided [rows]: 1 where the row was
// left as it is. Rows from which nothing can be drawn are left to `draw`. Grid (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 2)
    keep(float* logits, const FilterRow* filters, u32* undecided, u32 vocab, u32 stride) {
  __shared__ u64 ranks[CANDIDATES];
  __shared__ double weights[CANDIDATES];
  __shared__ u32 counts[8];
  __shared__ double sums[8];
  __shared__ u32 above_of[THREADS], at_of[THREADS];
  __shared__ u32 kept;
  const FilterRow filter = filters[blockIdx.x];
  float* z = logits + (u64)filter.row * stride;
  u32 bad = 0, allowed = 0;
  for (u32 v = threadIdx.x; v < vocab; v += THREADS) {
    bad += !(z[v] < POS_INF);
    allowed += z[v] > NEG_INF;
  }
  bad = block_sum(bad, counts);
  allowed = block_sum(allowed, counts);
  if (threadIdx.x == 0) undecided[blockIdx.x] = 0;
  if (bad || !allowed) return;

  // The greatest key that enough tokens reach, bit by bit.
  const bool top_k_fits = filter.top_k > 0 && filter.top_k <= CANDIDATES;
  const u32 wanted = top_k_fits ? filter.top_k : CANDIDATES;
  u32 border = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const u32 higher = border | 1u << bit;
    u32 reach = 0;
    for (u32 v = threadIdx.x; v < vocab; v += THREADS) reach += key_of(z[v]) >= higher;
    if (block_sum(reach, counts) >= wanted) border = higher;
  }
  // What is masked is never a candidate.
  if (border < key_of(NEG_INF)) border = key_of(NEG_INF);
  for (u32 i = threadIdx.x; i < CANDIDATES; i += THREADS) ranks[i] = 0;
  __syncthreads();
  const u32 num = gather(z, vocab, border, wanted, ranks, above_of, at_of);
  sort(ranks);

  const double temperature = (double)filter.temperature;
  const double max = (double)number_of((u32)(ranks[0] >> 32)) / temperature;
  for (u32 i = threadIdx.x; i < CANDIDATES; i += THREADS) {
    const double x = (double)number_of((u32)(ranks[min(i, num - 1)] >> 32)) / temperature;
    weights[i] = exp_below_zero(x - max);
  }
  const double floor = max + filter.ln_min_p;
  u32 reach = 0;
  for (u32 i = threadIdx.x; i < num; i += THREADS) {
    const double x = (double)number_of((u32)(ranks[i] >> 32)) / temperature;
    reach += x >= floor || x == max;
  }
  // They stand in order, so that those that reach the floor are the first.
  const u32 left = block_sum(reach, counts);
  // Whether nobody is left behind the candidates.
  const bool closed = left < num || num == allowed || top_k_fits;
  const bool no_other = filter.top_k == 0 && filter.ln_min_p == (double)NEG_INF;
  double sum = 0.0;
  if (filter.top_p < 1.0f && !closed && no_other) {
    for (u32 v = threadIdx.x; v < vocab; v += THREADS) {
      if (z[v] > NEG_INF) sum += exp_below_zero((double)z[v] / temperature - max);
    }
  }
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) {
    kept = closed ? left : 0;
    if (filter.top_p < 1.0f && closed) {
      double total = 0.0, running = 0.0;
      for (u32 i = 0; i < left; ++i) total += weights[i];
      const double enough = (double)filter.top_p * total;
      for (u32 i = 0; i < left; ++i) {
        running += weights[i];
        if (running >= enough) {
          kept = i + 1;
          break;
        }
      }
    } else if (filter.top_p < 1.0f && no_other) {
      // The sum of all is of another order than the definition's: it decides where it is not too near.
      const double slack = 16.0 * ((double)vocab + 16.0) * 2.220446049250313e-16;
      const double share = (double)filter.top_p * sum;
      double running = 0.0;
      for (u32 i = 0; i < num; ++i) {
        running += weights[i];
        if (running >= share * (1.0 + slack)) {
          kept = i + 1;
          break;
        }
        if (running > share * (1.0 - slack)) break;
      }
    }
    if (kept == 0) undecided[blockIdx.x] = 1;
  }
  __syncthreads();
  if (kept == 0) return;
  const u64 last = ranks[kept - 1];
  for (u32 v = threadIdx.x; v < vocab; v += THREADS) {
    if (rank_of(key_of(z[v]), v) < last) z[v] = NEG_INF;
  }
}
