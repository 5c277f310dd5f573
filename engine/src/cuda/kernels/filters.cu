// Filters (docs/contract.md B2): min-p, top-k and top-p on rows after `edit_logits`. Excluded tokens get the
// logit -infinity, so that draws see only the kept ones. The kept tokens are a prefix of the order (most
// likely first, lowest id first among equals), of which the first CANDIDATES are sorted. If the border of a
// row lies beyond them, or is too close to a rounding error to decide, the row is left unchanged and reported
// as undecided: the host draws it. Three kernels, which read a row twice: `keep_parts` sorts the candidates
// of each part of a row, `keep_join` merges them in one block and finds the last kept token, `keep_mask`
// masks the tokens after it. Twin: speculation::logits::apply_filters, equal tokens.

constexpr u32 CANDIDATES = 1024;

// One row's filters; written by `ops/filters.rs`.
struct FilterRow {
  u32 row;      // row of the logits
  u32 top_k;    // 0: no filter
  float top_p;  // 1 and above: no filter
  float temperature;
  double ln_min_p;  // -infinity: no filter
};

__device__ __forceinline__ float number_of(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Summary of a part besides its candidates.
struct FilterPart {
  double max, sum;  // highest logit / T of the part; sum of exp(logit / T - max), if needs_sum
  u32 bad, allowed;  // count of NaN or +infinity; tokens above -infinity
  u32 num;           // candidates
  u32 unused;
};

// Number of candidates that a row needs.
__device__ __forceinline__ u32 candidates_of(const FilterRow& filter) {
  return filter.top_k > 0 && filter.top_k <= CANDIDATES ? filter.top_k : CANDIDATES;
}

// Whether the sum over all tokens may be needed: top-p is the only filter.
__device__ __forceinline__ bool needs_sum(const FilterRow& filter) {
  return filter.top_p < 1.0f && filter.top_k == 0 && filter.ln_min_p == (double)NEG_INF;
}

// Width of the bitonic sort for `num` ranks: a power of two.
__device__ __forceinline__ u32 sort_width(u32 num) {
  u32 width = 2;
  while (width < num) width *= 2;
  return width;
}

// One step of a bitonic sort of `width` ranks: compares and exchanges ranks whose indices differ by `apart`.
// Blocks of `size` ranks are descending and ascending alternately.
__device__ __forceinline__ void exchange(u64 (&ranks)[CANDIDATES], u32 width, u32 size, u32 apart) {
  __syncthreads();
  for (u32 i = threadIdx.x; i < width; i += THREADS) {
    const u32 other = i ^ apart;
    // Only the thread of the lower index may access the pair.
    if (other < i) continue;
    const u64 a = ranks[i], b = ranks[other];
    const bool descending = (i & size) == 0;
    if (descending ? a < b : a > b) {
      ranks[i] = b;
      ranks[other] = a;
    }
  }
}

// Sorts the first `width` ranks in descending order.
__device__ __forceinline__ void sort(u64 (&ranks)[CANDIDATES], u32 width) {
  for (u32 size = 2; size <= width; size *= 2) {
    for (u32 apart = size / 2; apart > 0; apart /= 2) exchange(ranks, width, size, apart);
  }
  __syncthreads();
}

// Numbers of a part per thread: thread t holds those at t + THREADS * j.
constexpr u32 PER_THREAD = PART / THREADS;

// The greatest key that at least `wanted` of a block's keys reach, found two bits per round. The block has at
// least `wanted` keys.
__device__ __forceinline__ u32 border_of(const u32 (&keys)[PER_THREAD], u32 wanted, u64 (&counts)[8]) {
  u32 border = 0;
  for (int bit = 30; bit >= 0; bit -= 2) {
    const u32 step = 1u << bit;
    // Three counts of at most PART, packed into one word.
    u64 reach = 0;
#pragma unroll
    for (u32 j = 0; j < PER_THREAD; ++j) {
      const u32 key = keys[j];
      reach += (u64)(key >= border + step) + ((u64)(key >= border + 2 * step) << 20) +
               ((u64)(key >= border + 3 * step) << 40);
    }
    reach = block_sum(reach, counts);
    const u32 mask = (1u << 20) - 1;
    if ((u32)(reach >> 40) >= wanted) {
      border += 3 * step;
    } else if (((u32)(reach >> 20) & mask) >= wanted) {
      border += 2 * step;
    } else if (((u32)reach & mask) >= wanted) {
      border += step;
    }
  }
  return border;
}

// logits [*, stride] f32, of which the first `vocab` columns are used; filters [rows] -> parts [rows,
// num_parts] and the first candidates of each part in order: ranks [rows, num_parts, CANDIDATES]. Grid (rows,
// num_parts), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 3)
    keep_parts(const float* logits, const FilterRow* filters, FilterPart* parts, u64* ranks, u32 vocab, u32 stride) {
  __shared__ uint4 chunks[PART_CHUNKS];
  __shared__ u64 chosen[CANDIDATES];
  __shared__ u64 counts[8];
  __shared__ u32 warps[8];
  __shared__ double sums[8];
  const FilterRow filter = filters[blockIdx.x];
  const float* z = logits + (u64)filter.row * stride;
  const Part part(z, blockIdx.y, vocab);
  load_part(z, part, chunks);
  const float* numbers = (const float*)chunks + part.late;
  const u32 len = part.end - part.begin;

  u32 keys[PER_THREAD];
  u32 bad = 0, allowed = 0;
#pragma unroll
  for (u32 j = 0; j < PER_THREAD; ++j) {
    const u32 i = threadIdx.x + THREADS * j;
    keys[j] = 0;  // below the key of every number
    if (i < len) {
      keys[j] = key_of(numbers[i]);
      bad += !(numbers[i] < POS_INF);
      allowed += numbers[i] > NEG_INF;
    }
  }
  bad = block_sum(bad, warps);
  allowed = block_sum(allowed, warps);

  // Masked tokens are never candidates. Among equals at the border the lowest ids are: those before `cut`.
  const u32 wanted = candidates_of(filter);
  u32 border = key_of(NEG_INF);
  u32 cut = 0;
  if (allowed > wanted) {
    border = border_of(keys, wanted, counts);
    // Two counts of at most PART, packed into one word.
    u32 reach = 0;
#pragma unroll
    for (u32 j = 0; j < PER_THREAD; ++j) reach += (u32)(keys[j] > border) + ((u32)(keys[j] == border) << 16);
    reach = block_sum(reach, warps);
    const u32 room = wanted - (reach & 0xffffu);
    cut = PART;
    if (reach >> 16 > room) {
      cut = 0;
      for (u32 step = PART / 2; step > 0; step /= 2) {
        u32 before = 0;
#pragma unroll
        for (u32 j = 0; j < PER_THREAD; ++j) before += keys[j] == border && threadIdx.x + THREADS * j < cut + step;
        if (block_sum(before, warps) <= room) cut += step;
      }
    }
  }
  u32 mine = 0;
#pragma unroll
  for (u32 j = 0; j < PER_THREAD; ++j) {
    mine += keys[j] > border || (keys[j] == border && threadIdx.x + THREADS * j < cut);
  }
  u32 place = sum_before(mine, warps);
  const u32 num = min(allowed, wanted);
  const u32 width = sort_width(num);
  for (u32 i = num + threadIdx.x; i < width; i += THREADS) chosen[i] = 0;
  if (!bad) {
#pragma unroll
    for (u32 j = 0; j < PER_THREAD; ++j) {
      const u32 i = threadIdx.x + THREADS * j;
      if (keys[j] > border || (keys[j] == border && i < cut)) chosen[place++] = rank_of(keys[j], part.begin + i);
    }
  }
  sort(chosen, width);

  FilterPart result = {(double)NEG_INF, 0.0, bad, allowed, num, 0};
  if (!bad && num > 0) {
    const double temperature = (double)filter.temperature;
    result.max = (double)number_of((u32)(chosen[0] >> 32)) / temperature;
    if (needs_sum(filter)) {
      double sum = 0.0;
      for (u32 i = threadIdx.x; i < len; i += THREADS) {
        if (numbers[i] > NEG_INF) sum += exp_below_zero((double)numbers[i] / temperature - result.max);
      }
      result.sum = block_sum(sum, sums);
    }
    u64* to = ranks + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * CANDIDATES;
    for (u32 i = threadIdx.x; i < num; i += THREADS) to[i] = chosen[i];
  }
  if (threadIdx.x == 0) parts[(u64)blockIdx.x * gridDim.y + blockIdx.y] = result;
}

// Number of kept candidates among the first `left`, in order of weight: those up to the one at which the
// running sum reaches top_p of the total. Both sums are in the order of the definition, one term at a time.
__device__ __forceinline__ u32 nucleus(const double (&weights)[CANDIDATES], u32 left, double top_p) {
  double total = 0.0, running = 0.0;
#pragma unroll 8
  for (u32 i = 0; i < left; ++i) total += weights[i];
  const double enough = top_p * total;
  for (u32 i = 0; i < left; ++i) {
    running += weights[i];
    if (running >= enough) return i + 1;
  }
  return left;
}

// The same if the candidates are not all tokens: `share` is top_p times the total, which was summed in
// another order than the definition's. Returns 0 if the border is within `slack` of a rounding error or
// beyond the candidates.
__device__ __forceinline__ u32 nucleus_of(const double (&weights)[CANDIDATES], u32 num, double share, double slack) {
  double running = 0.0;
  for (u32 i = 0; i < num; ++i) {
    running += weights[i];
    if (running >= share * (1.0 + slack)) return i + 1;
    if (running > share * (1.0 - slack)) return 0;
  }
  return 0;
}

// parts and ranks as written by `keep_parts` -> last [rows]: the rank of the last kept token, 0 if nothing is
// masked; undecided [rows]: 1 if the host must draw the row. Rows without a valid draw are left to the draw
// kernel. Grid (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    keep_join(const FilterPart* parts, const u64* ranks, const FilterRow* filters, u64* last, u32* undecided, u32 vocab,
              u32 num_parts) {
  __shared__ u64 best[CANDIDATES];
  __shared__ double weights[CANDIDATES];
  __shared__ u32 counts[8];
  const FilterRow filter = filters[blockIdx.x];
  const FilterPart* mine = parts + (u64)blockIdx.x * num_parts;
  const u64* from = ranks + (u64)blockIdx.x * num_parts * CANDIDATES;
  if (threadIdx.x == 0) last[blockIdx.x] = undecided[blockIdx.x] = 0;
  u32 bad = 0, allowed = 0;
  for (u32 p = 0; p < num_parts; ++p) {
    bad += mine[p].bad;
    allowed += mine[p].allowed;
  }
  if (bad || !allowed) return;

  // Merge of two sorted lists: the maxima of element i of one and element i from the end of the other are the
  // greatest of both, and form a bitonic sequence. The last round of the sort puts them in order.
  const u32 wanted = candidates_of(filter);
  const u32 num = min(wanted, allowed);
  const u32 width = sort_width(num);
  for (u32 i = threadIdx.x; i < width; i += THREADS) best[i] = i < mine[0].num ? load_8(from + i) : 0;
  for (u32 p = 1; p < num_parts; ++p) {
    const u32 others = mine[p].num;
    if (others == 0) continue;
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += THREADS) {
      const u32 at = width - 1 - i;
      const u64 other = at < others ? load_8(from + (u64)p * CANDIDATES + at) : 0;
      best[i] = other > best[i] ? other : best[i];
    }
    for (u32 apart = width / 2; apart > 0; apart /= 2) exchange(best, width, width, apart);
  }
  __syncthreads();

  const double temperature = (double)filter.temperature;
  const double max = (double)number_of((u32)(best[0] >> 32)) / temperature;
  const double floor = max + filter.ln_min_p;
  u32 reach = 0;
  for (u32 i = threadIdx.x; i < num; i += THREADS) {
    const double x = (double)number_of((u32)(best[i] >> 32)) / temperature;
    weights[i] = exp_below_zero(x - max);
    reach += x >= floor || x == max;
  }
  // The weights are sorted, so those that reach the floor come first.
  const u32 left = block_sum(reach, counts);
  if (threadIdx.x != 0) return;
  // Whether no token beyond the candidates can be kept.
  const bool closed = left < num || num == allowed || num == filter.top_k;
  u32 kept = closed ? left : 0;
  if (filter.top_p < 1.0f && closed) {
    kept = nucleus(weights, left, (double)filter.top_p);
  } else if (needs_sum(filter)) {
    double sum = 0.0;
    for (u32 p = 0; p < num_parts; ++p) sum += mine[p].sum * exp_below_zero(mine[p].max - max);
    const double slack = 16.0 * ((double)vocab + 16.0) * 2.220446049250313e-16;
    kept = nucleus_of(weights, num, (double)filter.top_p * sum, slack);
  }
  if (kept == 0) {
    undecided[blockIdx.x] = 1;
  } else {
    last[blockIdx.x] = best[kept - 1];
  }
}

// Masks all tokens after the last kept one. Grid (rows, num_parts), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    keep_mask(float* logits, const FilterRow* filters, const u64* last, u32 vocab, u32 stride) {
  __shared__ uint4 chunks[PART_CHUNKS];
  const u64 border = last[blockIdx.x];
  if (border == 0) return;
  float* z = logits + (u64)filters[blockIdx.x].row * stride;
  const Part part(z, blockIdx.y, vocab);
  load_part(z, part, chunks);
  const float* numbers = (const float*)chunks + part.late;
  for (u32 i = threadIdx.x; i < part.end - part.begin; i += THREADS) {
    const u32 token_id = part.begin + i;
    if (rank_of(key_of(numbers[i]), token_id) < border) z[token_id] = NEG_INF;
  }
}
