// Merges partial results of attention into rows (attention.cuh), where blocks did not.
//   partial [parts][kv_heads][part_len] f32, tiles; tile_of [queries]: the tile of a query; positions [rows]
//   -> out [rows, heads * head_dim] f32, and rounded (bf16 or null): out as the input of a product (input_index)
// head_dim at most 128. Queries of tiles that their last blocks merge are left out, and those without a tile.

// A query and the location of its partial results.
struct MergedQuery {
  AttentionTile tile;
  u32 q, first, end;  // range of the parts that its row needs
  const float* partial;
  u32 head_dim;
  u32 value;  // the lane's first value; lanes past the end take the last four

  __device__ __forceinline__ MergedQuery(const float* partial, const u32* positions, const AttentionTile* tiles,
                                         const u32* tile_of, u32 query, u32 group, u32 head_dim, u32 window)
      : tile(tiles[tile_of[query]]), partial(partial), head_dim(head_dim) {
    q = query - tile.first_query;
    value = LANE_VALUES * min(threadIdx.x % WARP, head_dim / LANE_VALUES - 1);
    const PartRange needed(positions[query / group], window, tile.part_splits);
    first = needed.first;
    end = needed.end;
  }

  // Loads a part; of one that does not exist or is not needed, a result of no key.
  __device__ __forceinline__ Folded load(u32 part) const {
    const u32 inside = part < first ? first : part < end ? part : end - 1;
    const u64 index = part_of(tile, inside - tile.first_key / (tile.part_splits * SPLIT_KEYS), q, gridDim.y, blockIdx.y);
    Folded loaded;
    loaded.load(partial + index * part_len(head_dim), value, head_dim);
    if (part != inside) loaded.sum = 0.0f;
    return loaded;
  }

  // The result of group `i`: of its splits, all of which are loaded at once, or of one part.
  __device__ __forceinline__ Folded of_group(u32 i) const {
    if (tile.part_splits != 1) return load(i);
    Folded splits[GROUP_SPLITS], all;
#pragma unroll
    for (u32 a = 0; a < GROUP_SPLITS; ++a) splits[a] = load(i * GROUP_SPLITS + a);
#pragma unroll
    for (u32 a = 0; a < GROUP_SPLITS; ++a) all.fold(splits[a]);
    return all;
  }
  __device__ __forceinline__ u32 first_group() const { return first * tile.part_splits / GROUP_SPLITS; }
  __device__ __forceinline__ u32 end_group() const { return (end * tile.part_splits + GROUP_SPLITS - 1) / GROUP_SPLITS; }
};

// Each of `queries` queries from `first_query` on. Grid (ceil(queries / 4), kv_heads), four warps, one per
// query.
extern "C" __global__ void __launch_bounds__(128)
    attention_merge(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of, float* out,
                    bf16* rounded, u32 first_query, u32 queries, u32 group, u32 head_dim, u32 window, u32 panels) {
  const u32 index = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (index >= queries) return;  // the whole warp returns
  const u32 query = first_query + index;
  if (tile_of[query] == NO_TILE) return;  // the whole warp returns
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  if (merged.tile.num_runs != 0) return;  // the whole warp returns
  Folded row;
#pragma unroll 1
  for (u32 i = merged.first_group(); i < merged.end_group(); ++i) row.fold(merged.of_group(i));
  if (LANE_VALUES * lane < head_dim) row.write(Merged(out, rounded, query, group, head_dim, panels), merged.value);
}

// The same with eight warps per query, each of which loads every eighth group: equal bits. Grid (queries,
// kv_heads), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_merge_long(const float* partial, const u32* positions, const AttentionTile* tiles, const u32* tile_of,
                         float* out, bf16* rounded, u32 first_query, u32 queries, u32 group, u32 head_dim, u32 window,
                         u32 panels) {
  constexpr u32 WARPS = 8;
  // Two turns of eight groups: while one is folded, the next is loaded.
  __shared__ Folded groups[2][WARPS][WARP];
  const u32 query = first_query + blockIdx.x;
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (tile_of[query] == NO_TILE) return;  // all threads of the block return
  const MergedQuery merged(partial, positions, tiles, tile_of, query, group, head_dim, window);
  if (merged.tile.num_runs != 0) return;  // all threads of the block return
  Folded row;
#pragma unroll 1
  for (u32 first = merged.first_group(), turn = 0; first < merged.end_group(); first += WARPS, turn ^= 1) {
    if (first + warp < merged.end_group()) groups[turn][warp][lane] = merged.of_group(first + warp);
    __syncthreads();
    if (warp != 0) continue;
#pragma unroll 1
    for (u32 i = 0; i < min(WARPS, merged.end_group() - first); ++i) row.fold(groups[turn][i][lane]);
  }
  if (threadIdx.x < head_dim / LANE_VALUES) row.write(Merged(out, rounded, query, group, head_dim, panels), merged.value);
}
