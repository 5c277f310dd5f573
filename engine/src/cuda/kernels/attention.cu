// Attention over paged KV on tensor cores: decode, verify and prefill rows alike, so that a row's bits do not
// depend on which of them it is (design I4).
//   qkv [rows, row_width] f32: a row begins with its query heads, turned; positions [rows]
//   kv [blocks][layers][kv_heads][K: 16 x head_dim | V: head_dim x 16] bf16; tables: block tables, one after another
//   tiles [num_tiles]: up to 16 queries of one sequence that share a KV head; query q of a KV head is
//   (row q / group, head kv_head * group + q % group)
//
// Keys are cut at fixed absolute positions into splits of 128. A warp sums one split of one tile as
// FlashAttention-2 does (Dao 2023, arXiv 2307.08691): blocks of 16 keys in order, each joined by the running maximum.
// `attention_merge` joins a row's splits: each is weighted by the row's highest score; splits i, i + 8, i + 16 .. are
// added in order, and the eight sums by the contract's tree. So several warps may take them, and a row's bits depend on
// its position alone. K and V are multiplied as stored; queries and
// probabilities are split into two bf16 each (x = high + low, about 16 bits), so that both products are as good as
// f32's to about 2^-16. A key block that a query may not see adds exactly nothing to it, so its tile mates do not
// matter. Twin: cpu_kernels::reference::attention, to tolerance.

#define SPLIT_KEYS 128

// One tile of queries; written by `ops/attention.rs`.
struct AttentionTile {
  u32 first_query;  // row * group + head in group
  u32 num_queries;  // 1 to 16
  u32 table;        // where the sequence's block table begins
  u32 first_key;    // smallest key that a query of the tile sees
  u32 end_key;      // one past the largest
  u32 first_part;   // where what its splits come to begins: a part for each query of each split
};

// A split of a tile; there is one for every split that a tile needs, and none where `split` is NO_SPLIT: grids of like
// sizes are made equal.
struct AttentionWork {
  u32 tile;
  u32 split;
};
#define NO_SPLIT 0xffffffffu

// What split `split` comes to for query q of a tile and a KV head: HEAD_DIM values, the maximum, the sum.
__device__ __forceinline__ u64 part_of(const AttentionTile& tile, u32 split, u32 q, u32 kv_heads, u32 kv_head) {
  const u32 part = tile.first_part + (split - tile.first_key / SPLIT_KEYS) * tile.num_queries + q;
  return (u64)part * kv_heads + kv_head;
}

// The two bf16 whose sum is x to about 16 bits.
__device__ __forceinline__ void halves(float x, bf16& high, bf16& low) {
  high = narrow(x);
  low = narrow(x - widen(high));
}

// A block of keys and values on its way through shared memory: 16 rows of keys, then HEAD_DIM rows of values
// of 16 keys, as they lie in global memory but for the order of 16-byte chunks inside a row, which spreads
// what lanes read together over all banks.
template <int HEAD_DIM>
struct Stage {
  static constexpr u32 KEY_CHUNKS = HEAD_DIM / 8;
  static constexpr u32 CHUNKS = 4 * HEAD_DIM;
  uint4 chunks[CHUNKS];

  // Rows of keys begin at one bank, two or four, by HEAD_DIM.
  static __device__ __forceinline__ u32 place_of_key(u32 row, u32 chunk) {
    const u32 turn = HEAD_DIM % 64 == 0 ? row % 8 : HEAD_DIM % 32 == 0 ? row / 2 % 4 : row / 4 % 2;
    return row * KEY_CHUNKS + (chunk ^ turn);
  }
  static __device__ __forceinline__ u32 place_of_value(u32 row, u32 chunk) {
    return 2 * HEAD_DIM + 2 * row + (chunk ^ row / 4 % 2);
  }

  // Starts to copy a block; the warp's lanes share the work.
  __device__ __forceinline__ void copy(const bf16* block) {
    const uint4* from = (const uint4*)block;
#pragma unroll
    for (u32 i = threadIdx.x; i < CHUNKS / 2; i += WARP) {
      cp_async_16(chunks + place_of_key(i / KEY_CHUNKS, i % KEY_CHUNKS), from + i, true);
    }
#pragma unroll
    for (u32 i = threadIdx.x; i < CHUNKS / 2; i += WARP) {
      cp_async_16(chunks + place_of_value(i / 2, i % 2), from + CHUNKS / 2 + i, true);
    }
  }

  // Numbers 2 t and 2 t + 1 of a chunk.
  __device__ __forceinline__ u32 key(u32 row, u32 chunk, u32 t) const {
    return ((const u32*)(chunks + place_of_key(row, chunk)))[t];
  }
  __device__ __forceinline__ u32 value(u32 row, u32 chunk, u32 t) const {
    return ((const u32*)(chunks + place_of_value(row, chunk)))[t];
  }
};

// Blocks of keys under way, the one that is summed included.
constexpr u32 RING = 3;

// partial [parts][kv_heads][HEAD_DIM + 2] f32: values, maximum, sum.
// Grid (work, kv_heads), one warp.
template <int HEAD_DIM>
__device__ __forceinline__ void attend(const float* qkv, const u32* positions, const bf16* kv, const u32* tables,
                                       const AttentionTile* tiles, const AttentionWork* work, float* partial,
                                       u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale) {
  constexpr int STEPS = HEAD_DIM / 16;
  constexpr int PITCH = HEAD_DIM + 8;  // bank conflicts
  __shared__ bf16 queries[2][16][PITCH];
  __shared__ Stage<HEAD_DIM> ring[RING];
  __shared__ u64 query_at[16];
  __shared__ u32 block_ids[SPLIT_KEYS / 16];
  const u32 split = work[blockIdx.x].split;
  if (split == NO_SPLIT) return;  // the whole warp
  const AttentionTile tile = tiles[work[blockIdx.x].tile];
  const u32 split_begin = split * SPLIT_KEYS;
  const u32 begin = tile.first_key > split_begin ? tile.first_key : split_begin;
  const u32 end = tile.end_key < split_begin + SPLIT_KEYS ? tile.end_key : split_begin + SPLIT_KEYS;

  const u32 kv_head = blockIdx.y;
  const u32 kv_heads = gridDim.y;
  const u32 lane = threadIdx.x;
  const u32 g = lane / 4;
  const u32 t = lane % 4;
  const u32 first_block = begin / 16;
  const u32 num_blocks = (end - 1) / 16 + 1 - first_block;
  if (lane < num_blocks) block_ids[lane] = tables[tile.table + first_block + lane];
  if (lane < 16) {
    const u32 query = tile.first_query + (lane < tile.num_queries ? lane : 0);
    query_at[lane] = (u64)(query / group) * row_width + (kv_head * group + query % group) * HEAD_DIM;
  }
  __syncthreads();
  auto copy_block = [&](u32 i) {
    if (i < num_blocks) {
      ring[i % RING].copy(kv + (((u64)block_ids[i] * layers + layer) * kv_heads + kv_head) * (u64)(32 * HEAD_DIM));
    }
    cp_async_commit();
  };
  for (u32 i = 0; i < RING - 1; ++i) copy_block(i);
#pragma unroll 4
  for (u32 i = lane; i < 16 * HEAD_DIM / 4; i += WARP) {
    const u32 q = i / (HEAD_DIM / 4);
    const u32 d = i % (HEAD_DIM / 4) * 4;
    const uint4 bits = load_16(qkv + query_at[q] + d);
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    for (u32 c = 0; c < 4; ++c) {
      halves(q < tile.num_queries ? __uint_as_float(words[c]) : 0.0f, queries[0][q][d + c], queries[1][q][d + c]);
    }
  }
  __syncthreads();

  // This lane's two queries, rows g and g + 8 of the tile: the keys that each may see.
  u32 see_first[2], see_end[2];
  for (int r = 0; r < 2; ++r) {
    const u32 q = g + 8 * r;
    const u32 position = q < tile.num_queries ? positions[(tile.first_query + q) / group] : 0;
    see_end[r] = q < tile.num_queries ? position + 1 : 0;
    see_first[r] = window != 0 && position + 1 > window ? position + 1 - window : 0;
  }

  float values[HEAD_DIM / 8][4] = {};
  float maximum[2] = {NEG_INF, NEG_INF};
  float sum[2] = {0.0f, 0.0f};  // over this lane's keys only, until the end
  for (u32 i = 0; i < num_blocks; ++i) {
    const u32 block = first_block + i;
    // This block has arrived for all lanes, and they are done with the one before, which the next copy
    // overwrites.
    cp_async_wait<RING - 2>();
    __syncthreads();
    copy_block(i + RING - 1);
    const Stage<HEAD_DIM>& stage = ring[i % RING];

    // scores[n]: queries x keys 8 n .. 8 n + 7
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 high[4], low[4];
      for (int i = 0; i < 4; ++i) {
        const u32 q = g + 8 * (i % 2);
        const u32 d = 16 * step + 2 * t + 8 * (i / 2);
        high[i] = *(const u32*)&queries[0][q][d];
        low[i] = *(const u32*)&queries[1][q][d];
      }
      for (int n = 0; n < 2; ++n) {
        const u32 b[2] = {stage.key(8 * n + g, 2 * step, t), stage.key(8 * n + g, 2 * step + 1, t)};
        mma_bf16(scores[n], low, b);
        mma_bf16(scores[n], high, b);
      }
    }

    // The running maximum of each query: over this lane's four keys, then over the four lanes that share it.
    u32 high[4], low[4];
    for (int r = 0; r < 2; ++r) {
      float largest = maximum[r];
      for (int n = 0; n < 2; ++n) {
        for (int c = 0; c < 2; ++c) {
          const u32 key = block * 16 + 8 * n + 2 * t + c;
          float& score = scores[n][2 * r + c];
          score = key >= see_first[r] && key < see_end[r] ? score * scale : NEG_INF;
          largest = score > largest ? score : largest;
        }
      }
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, step);
        largest = other > largest ? other : largest;
      }
      const float rescale = maximum[r] == NEG_INF ? 0.0f : exp_f32(maximum[r] - largest);
      maximum[r] = largest;
      sum[r] = sum[r] * rescale;
      for (int n = 0; n < 2; ++n) {
        bf16 h[2], l[2];
        for (int c = 0; c < 2; ++c) {
          const float score = scores[n][2 * r + c];
          const float p = score == NEG_INF ? 0.0f : exp_f32(score - largest);
          sum[r] = sum[r] + p;
          halves(p, h[c], l[c]);
        }
        // Scores lie in the lanes as the next product wants its left operand.
        high[r + 2 * n] = pack(h[0], h[1]);
        low[r + 2 * n] = pack(l[0], l[1]);
      }
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        values[n][2 * r] *= rescale;
        values[n][2 * r + 1] *= rescale;
      }
    }

    // What stands past the sequence's end is another's: nought times it may be NaN.
    const u32 left = end - block * 16;
    const u32 mask[2] = {2 * t + 1 < left ? 0xffffffffu : 2 * t < left ? 0xffffu : 0u,
                         2 * t + 9 < left ? 0xffffffffu : 2 * t + 8 < left ? 0xffffu : 0u};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const u32 b[2] = {stage.value(8 * n + g, 0, t) & mask[0], stage.value(8 * n + g, 1, t) & mask[1]};
      mma_bf16(values[n], low, b);
      mma_bf16(values[n], high, b);
    }
  }

  for (int r = 0; r < 2; ++r) {
    for (int step = 1; step < 4; step *= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    const u32 q = g + 8 * r;
    if (q < tile.num_queries) {
      float* to = partial + part_of(tile, split, q, kv_heads, kv_head) * (HEAD_DIM + 2);
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        to[8 * n + 2 * t] = values[n][2 * r];
        to[8 * n + 2 * t + 1] = values[n][2 * r + 1];
      }
      if (t == 0) {
        to[HEAD_DIM] = maximum[r];
        to[HEAD_DIM + 1] = sum[r];
      }
    }
  }
}

#define ATTENTION(HEAD_DIM)                                                                                       \
  extern "C" __global__ void __launch_bounds__(32) attention_##HEAD_DIM(                                         \
      const float* qkv, const u32* positions, const bf16* kv, const u32* tables, const AttentionTile* tiles,     \
      const AttentionWork* work, float* partial, u32 row_width, u32 group, u32 layer, u32 layers, u32 window,    \
      float scale) {                                                                                             \
    attend<HEAD_DIM>(qkv, positions, kv, tables, tiles, work, partial, row_width, group, layer, layers, window, scale); \
  }

ATTENTION(16)
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)

// What `attention_merge` writes of a query.
struct Merged {
  float* out;
  bf16* rounded;
  __device__ __forceinline__ void write(u32 i, float x) const {
    out[i] = x;
    if (rounded) rounded[i] = narrow(x);
  }
};

// Sums that the contract's tree joins: splits go to them by turns.
constexpr u32 SUMS = 8;
constexpr u32 MAX_HEAD_DIM = 128;
// Dimensions of a head that a lane takes.
constexpr u32 LANE_DIMS = MAX_HEAD_DIM / WARP;

// What splits come to that go to the same sum, in order: AHEAD of them are read at a time.
struct SplitSum {
  float sum;
  float values[LANE_DIMS];
  __device__ __forceinline__ void add(const float* part, float weight, float part_sum, u32 head_dim, bool is_there) {
    const float kept = is_there ? weight : 0.0f;
    sum = fmaf(is_there ? part_sum : 0.0f, kept, sum);
#pragma unroll
    for (u32 j = 0; j < LANE_DIMS; ++j) {
      const float x = part[min(threadIdx.x % WARP + WARP * j, head_dim - 1)];
      values[j] = fmaf(is_there ? x : 0.0f, kept, values[j]);
    }
  }
};

// A query, where its splits lie, and its highest score.
struct MergedQuery {
  AttentionTile tile;
  u32 q, first, end;  // splits that its row needs
  const float* partial;
  u32 kv_head, kv_heads, width;
  float maximum;

  __device__ __forceinline__ const float* part(u32 split) const {
    return partial + part_of(tile, min(max_of(split, first), end - 1), q, kv_heads, kv_head) * width;
  }
  static __device__ __forceinline__ u32 max_of(u32 a, u32 b) { return a > b ? a : b; }

  __device__ __forceinline__ MergedQuery(const float* partial, const u32* positions, const AttentionTile* tiles,
                                         const u32* tile_of, u32 query, u32 group, u32 head_dim, u32 window)
      : tile(tiles[tile_of[query]]), partial(partial), kv_head(blockIdx.y), kv_heads(gridDim.y), width(head_dim + 2) {
    q = query - tile.first_query;
    const u32 len = positions[query / group] + 1;
    first = window != 0 && len > window ? (len - window) / SPLIT_KEYS : 0;
    end = (len + SPLIT_KEYS - 1) / SPLIT_KEYS;
    float largest = NEG_INF;
    for (u32 split = first + threadIdx.x % WARP; split < end; split += WARP) {
      const float other = part(split)[head_dim];
      largest = other > largest ? other : largest;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
    maximum = largest;
  }

  __device__ __forceinline__ Merged to(float* out, bf16* rounded, u32 query, u32 group, u32 head_dim) const {
    const u64 head = ((u64)(query / group) * kv_heads + kv_head) * group + query % group;
    return {out + head * head_dim, rounded ? rounded + head * head_dim : nullptr};
  }
};

// Joins the splits of each query from `first_query` on.
//   partial, tiles as above, tile_of [queries]: the tile of a query -> out [rows, heads * head_dim] f32, and rounded bf16 or
//   null: out as a product reads it
// Grid (queries, kv_heads), one warp; head_dim at most 128.
extern "C" __global__ void __launch_bounds__(32)
    attention_merge(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of, float* out,
                    bf16* rounded, u32 first_query, u32 group, u32 head_dim, u32 window) {
  const u32 query = first_query + blockIdx.x;
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  SplitSum sums[SUMS] = {};
  for (u32 split = merged.first / SUMS * SUMS; split < merged.end; split += SUMS) {
#pragma unroll
    for (u32 a = 0; a < SUMS; ++a) {
      const float* part = merged.part(split + a);
      const bool is_there = split + a >= merged.first && split + a < merged.end;
      sums[a].add(part, exp_f32(part[head_dim] - merged.maximum), part[head_dim + 1], head_dim, is_there);
    }
  }
  float all[SUMS];
#pragma unroll
  for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a].sum;
  const float sum = tree(all);
  const Merged to = merged.to(out, rounded, query, group, head_dim);
#pragma unroll
  for (u32 j = 0; j < LANE_DIMS; ++j) {
    const u32 i = threadIdx.x + WARP * j;
    if (i >= head_dim) break;
#pragma unroll
    for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a].values[j];
    to.write(i, tree(all) / sum);
  }
}

// The same by eight warps, one for each sum: equal bits. Grid (queries, kv_heads), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_merge_long(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of,
                         float* out, bf16* rounded, u32 first_query, u32 group, u32 head_dim, u32 window) {
  __shared__ float values[MAX_HEAD_DIM][SUMS + 1];
  __shared__ float sums[SUMS];
  const u32 query = first_query + blockIdx.x;
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  SplitSum mine = {};
  constexpr u32 AHEAD = 4;
  for (u32 split = merged.first / SUMS * SUMS + warp; split < merged.end; split += AHEAD * SUMS) {
#pragma unroll
    for (u32 a = 0; a < AHEAD; ++a) {
      const u32 at = split + a * SUMS;
      const float* part = merged.part(at);
      const bool is_there = at >= merged.first && at < merged.end;
      mine.add(part, exp_f32(part[head_dim] - merged.maximum), part[head_dim + 1], head_dim, is_there);
    }
  }
#pragma unroll
  for (u32 j = 0; j < LANE_DIMS; ++j) values[lane + WARP * j][warp] = mine.values[j];
  if (lane == 0) sums[warp] = mine.sum;
  __syncthreads();
  if (threadIdx.x >= head_dim) return;
  float all[SUMS];
#pragma unroll
  for (u32 a = 0; a < SUMS; ++a) all[a] = sums[a];
  const float sum = tree(all);
#pragma unroll
  for (u32 a = 0; a < SUMS; ++a) all[a] = values[threadIdx.x][a];
  merged.to(out, rounded, query, group, head_dim).write(threadIdx.x, tree(all) / sum);
}
