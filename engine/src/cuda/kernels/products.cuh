// Matrix products on tensor cores: the code that bf16, fp8 and int8 share. `sources.rs` puts this text
// between the prelude and the file.
//
// The weights are the 16-row operand, so up to 8 activation rows cost the same as one. A lane reads 16 bytes
// of each of its rows: a step of K is 64 bytes of a row, four lanes wide, and takes two instructions. The
// numbers of K are permuted among the instructions, in the same way for both operands.
//
// Every kernel sums an output element in the same order: K is cut at borders[0 .. 9] into eight slices, a
// slice is a chain of steps from its start, the last step padded with zeros, and the tree of docs/contract.md
// C2 adds the slices. The number of other rows or channels that a warp computes does not change a bit of the
// element.

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(d, a, b); }
__device__ __forceinline__ void mma(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_int8(d, a, b); }

// One step: multiplies the first and then the second half of each lane's 16 bytes.
template <typename A>
__device__ __forceinline__ void multiply(A (&acc)[4], uint4 w_low, uint4 w_high, uint4 x) {
  const u32 first[4] = {w_low.x, w_high.x, w_low.y, w_high.y};
  const u32 second[4] = {w_low.z, w_high.z, w_low.w, w_high.w};
  const u32 x_first[2] = {x.x, x.y};
  const u32 x_second[2] = {x.z, x.w};
  mma(acc, first, x_first);
  mma(acc, second, x_second);
}

// Sizes of a product in elements: x [rows, k], weights [n, k].
struct Sizes {
  u32 rows, n, k;
};

// How the eight warps of a block divide the work. Of the eight slices, only the `slices` (1, 2, 4 or 8)
// slices from `first` on hold numbers. Warp w sums slice first + w % slices for channel group w / slices; a
// group has `channels` channels. `slices` is passed as its logarithm, because the compiler would implement a
// division by an unknown number with floats.
struct Cut {
  u32 first, log_slices, channels;
  __device__ __forceinline__ u32 slices() const { return 1u << log_slices; }
  __device__ __forceinline__ u32 groups() const { return 8u >> log_slices; }
};

// Output position of an item of a block; items are numbered up to groups * TILES * WARP * 4.
struct Place {
  u32 group, tile, lane, i, column, row;
  bool is_out;
};

template <int TILES>
__device__ __forceinline__ Place place_of(u32 item, Sizes sizes, Cut cut) {
  Place at;
  at.group = item / (TILES * WARP * 4);
  at.tile = item / (WARP * 4) % TILES;
  at.lane = item / 4 % WARP;
  at.i = item % 4;
  const u32 channel = at.lane / 4 + (at.i / 2) * 8;
  at.column = (blockIdx.y * cut.groups() + at.group) * cut.channels + channel;
  at.row = (blockIdx.x * TILES + at.tile) * 8 + at.lane % 4 * 2 + at.i % 2;
  at.is_out = channel < cut.channels && at.column < sizes.n && at.row < sizes.rows;
  return at;
}

// Collects the sums of all K-slices of a place; slices without numbers in this launch give zero.
template <typename A, int TILES>
__device__ __forceinline__ void gather_slices(A (&parts)[8], const A (&sums)[8][TILES][WARP][4], const Place& at, Cut cut) {
  for (u32 s = 0; s < 8; ++s) {
    const u32 of_group = s - cut.first;
    parts[s] = of_group < cut.slices() ? sums[(at.group << cut.log_slices) + of_group][at.tile][at.lane][at.i] : A(0);
  }
}

// Epilogue: applies the scale and the bias of a channel.
__device__ __forceinline__ float apply_epilogue(float sum, const float* channel_scales, const float* bias, u32 column) {
  if (channel_scales) sum = sum * channel_scales[column];
  return bias ? sum + bias[column] : sum;
}

// Computes the sums of all warps of a block: x from row blockIdx.x * 8 * TILES, weights from channel
// blockIdx.y * groups * channels. Ends with a barrier, so that all threads see the sums. HALVES is 2 for
// groups of 16 channels and 1 for groups of 8 or fewer: the upper half of the weights' operand is then zero,
// and twice as many steps are in flight. Products of few rows are limited by the loads of weights, so all
// loads of an iteration are issued before its first product (`make kernels-check` counts them in the machine
// code).
template <typename T, typename A, int TILES, int HALVES>
__device__ __forceinline__ void sum_tiles(A (&sums)[8][TILES][WARP][4], const T* x, const T* weights, const u32* borders,
                                          Sizes sizes, Cut cut) {
  constexpr u32 PER_LOAD = 16 / sizeof(T);
  constexpr u32 STEP = 4 * PER_LOAD;
  constexpr int DEPTH = HALVES == 2 || TILES > 1 ? 4 : 8;
  const u32 g = threadIdx.x % WARP / 4;
  const u32 offset = threadIdx.x % 4 * PER_LOAD;
  const u32 part = threadIdx.x / WARP;
  const u32 first_column = (blockIdx.y * cut.groups() + (part >> cut.log_slices)) * cut.channels;
  const u32 first_row = blockIdx.x * 8 * TILES;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  // Lanes past the last column or row load the last one again and store nothing: loads without branches stay
  // in flight together. Offsets are 32-bit, relative to a base per block, which takes fewer registers than
  // pointers.
  const u32 last = min(cut.channels, sizes.n - min(first_column, sizes.n - 1)) - 1;
  const T* base = weights + (u64)min(first_column, sizes.n - 1) * sizes.k;
  const u32 low = min(g, last) * sizes.k + offset;
  const u32 high = min(g + 8, last) * sizes.k + offset;
  const T* x_base = x + (u64)first_row * sizes.k;
  u32 in[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) in[tile] = min(8 * tile + g, sizes.rows - first_row - 1) * sizes.k + offset;
  A acc[TILES][4] = {};
  const u32 slice = cut.first + (part & (cut.slices() - 1));
  const u32 end = borders[slice + 1];
  u32 at = borders[slice];
  for (; at + STEP * DEPTH <= end; at += STEP * DEPTH) {
    const T* w_at = base + at;
    const T* x_at = x_base + at;
    uint4 w_low[DEPTH], w_high[DEPTH], rows[DEPTH][TILES];
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      w_low[step] = load_16(w_at + low + STEP * step);
      w_high[step] = HALVES == 2 ? load_16(w_at + high + STEP * step) : zeros;
    }
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) rows[step][tile] = load_16(x_at + in[tile] + STEP * step);
    }
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) multiply(acc[tile], w_low[step], w_high[step], rows[step][tile]);
    }
  }
  for (; at < end; at += STEP) {
    // A lane's 16 bytes are either all inside the slice or all outside.
    const bool inside = at + offset < end;
    const uint4 w_low = inside ? load_16(base + low + at) : zeros;
    const uint4 w_high = inside && HALVES == 2 ? load_16(base + high + at) : zeros;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      multiply(acc[tile], w_low, w_high, inside ? load_16(x_base + in[tile] + at) : zeros);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int i = 0; i < 4; ++i) sums[part][tile][threadIdx.x % WARP][i] = acc[tile][i];
  }
  __syncthreads();
}
