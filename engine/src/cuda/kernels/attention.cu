// Attention over paged KV on tensor cores: decode, verify and prefill rows alike, so that a row's bits do not
// depend on which of them it is (design I4).
//   qkv [rows, row_width] f32: a row begins with its query heads, turned; positions [rows]
//   kv [blocks][layers][kv_heads][K: 16 x head_dim | V: head_dim x 16] bf16; tables: block tables, one after another
//   tiles [num_tiles]: up to 16 queries of one sequence that share a KV head; query q of a KV head is
//   (row q / group, head kv_head * group + q % group)
//
// Keys are cut at fixed absolute positions into splits of 128. A warp sums one split of one tile as
// FlashAttention-2 does (Dao 2023, arXiv 2307.08691): blocks of 16 keys in order, each joined by the running maximum.
// `attention_merge` joins a row's splits in order of position. K and V are multiplied as stored; queries and
// probabilities are split into two bf16 each (x = high + low, about 16 bits), so that both products are as good as
// f32's to about 2^-16. A key block that a query may not see adds exactly nothing to it, so its tile mates do not
// matter. Twin: cpu::reference::attention, to tolerance.

#define SPLIT_KEYS 128

// One tile of queries; written by `ops/attention.rs`.
struct AttentionTile {
  u32 first_query;  // row * group + head in group
  u32 num_queries;  // 1 to 16
  u32 table;        // where the sequence's block table begins
  u32 first_key;    // smallest key that a query of the tile sees
  u32 end_key;      // one past the largest
};

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

// partial [rows * kv_heads * group][splits_max][HEAD_DIM + 2] f32: values, running maximum, sum.
// Grid (num_tiles, kv_heads, splits_max), one warp.
template <int HEAD_DIM>
__device__ __forceinline__ void attend(const float* qkv, const u32* positions, const bf16* kv, const u32* tables,
                                       const AttentionTile* tiles, float* partial, u32 row_width, u32 group,
                                       u32 layer, u32 layers, u32 window, float scale) {
  constexpr int STEPS = HEAD_DIM / 16;
  constexpr int PITCH = HEAD_DIM + 8;  // bank conflicts
  __shared__ bf16 queries[2][16][PITCH];
  __shared__ Stage<HEAD_DIM> ring[RING];
  __shared__ u64 query_at[16];
  __shared__ u32 block_ids[SPLIT_KEYS / 16];
  const AttentionTile tile = tiles[blockIdx.x];
  const u32 split_begin = blockIdx.z * SPLIT_KEYS;
  const u32 begin = tile.first_key > split_begin ? tile.first_key : split_begin;
  const u32 end = tile.end_key < split_begin + SPLIT_KEYS ? tile.end_key : split_begin + SPLIT_KEYS;
  if (begin >= end) return;  // the whole warp

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
      const u32 query = tile.first_query + q;
      const u64 head = (u64)(query / group) * kv_heads * group + kv_head * group + query % group;
      float* to = partial + (head * gridDim.z + blockIdx.z) * (HEAD_DIM + 2);
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

#define ATTENTION(HEAD_DIM)                                                                                      \
  extern "C" __global__ void __launch_bounds__(32) attention_##HEAD_DIM(                                        \
      const float* qkv, const u32* positions, const bf16* kv, const u32* tables, const AttentionTile* tiles,    \
      float* partial, u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale) {               \
    attend<HEAD_DIM>(qkv, positions, kv, tables, tiles, partial, row_width, group, layer, layers, window, scale); \
  }

ATTENTION(16)
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)

// Joins the splits of each query, in order of position.
//   partial as above, positions [rows] -> out [rows, heads * head_dim] f32, and rounded bf16 or null: out as a product
//   reads it
// Grid (rows, heads), one warp; head_dim at most 128.
extern "C" __global__ void __launch_bounds__(32)
    attention_merge(const float* partial, const u32* positions, float* out, bf16* rounded, u32 head_dim, u32 splits_max,
                    u32 window) {
  const u64 head = (u64)blockIdx.x * gridDim.y + blockIdx.y;
  const float* from = partial + head * splits_max * (head_dim + 2);
  const u32 len = positions[blockIdx.x] + 1;
  const u32 first = window != 0 && len > window ? (len - window) / SPLIT_KEYS : 0;

  // Splits are joined one by one in order, and read several at a time.
  constexpr u32 AHEAD = 8;
  const u32 end = (len + SPLIT_KEYS - 1) / SPLIT_KEYS;
  float maximum = NEG_INF, sum = 0.0f;
  float values[4] = {};
  for (u32 split = first; split < end; split += AHEAD) {
    float maxima[AHEAD], sums[AHEAD], parts[AHEAD][4];
#pragma unroll
    for (u32 a = 0; a < AHEAD; ++a) {
      // Splits past the last are read as the last, and left out below.
      const float* part = from + min(split + a, end - 1) * (head_dim + 2);
      maxima[a] = part[head_dim];
      sums[a] = part[head_dim + 1];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) parts[a][j] = part[min(threadIdx.x + WARP * j, head_dim - 1)];
    }
#pragma unroll
    for (u32 a = 0; a < AHEAD; ++a) {
      if (split + a >= end) break;
      const float largest = maxima[a] > maximum ? maxima[a] : maximum;
      const float old_weight = maximum == NEG_INF ? 0.0f : exp_f32(maximum - largest);
      const float weight = exp_f32(maxima[a] - largest);
      maximum = largest;
      sum = fmaf(sum, old_weight, sums[a] * weight);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) values[j] = fmaf(values[j], old_weight, parts[a][j] * weight);
    }
  }
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    const u32 i = threadIdx.x + WARP * j;
    if (i >= head_dim) break;
    const float x = values[j] / sum;
    out[head * head_dim + i] = x;
    if (rounded) rounded[head * head_dim + i] = narrow(x);
  }
}
