// Products of operands in panels (`panel_index`), by warpgroup instructions of compute capability 9.0, at every
// number of rows. Equal bits to gemm_bf16.cu: the same sets of 16 of K in the same order, and the same tree of
// slices. Inside a set this hardware adds before it rounds, so the order does not matter
// (docs/measurements/gpu.md). Sums of int8 are exact in any order.
//
// A block is three warpgroups. One thread of the first keeps a ring of stages full by bulk copies; the others
// multiply 64 channels each. A stage is a step of K (64 of bf16 or FP8, 128 of int8): 128 channels and ROWS
// rows, of which a panel holds eight in 1,024 bytes. Blocks stay and take units of work in turn: a row tile, a
// channel tile, and a group of slices. So the stages of the next unit are copied while the last one's sums are
// stored.
//
// The blocks of a cluster take neighbouring tiles at the same time. Each copies a part of what several of them
// read to all of these, so that less is read from the cache.
//
// `Weights` defines a tile of weights, 128 channels x STEP_COLUMNS of K: TILE_BYTES, how it is multiplied, and by
// `Sums` the type of the sums of a slice and how they become floats.

constexpr u32 PANEL_BYTES = 1024;
constexpr u32 CHANNELS = 128;
// Columns of a step of bf16 or FP8.
constexpr u32 STEP = 64;
constexpr u32 COPIERS = 128;
constexpr u32 MULTIPLIERS = 256;

// Sizes of a product, of slices `first .. first + slices` that hold numbers, in `groups` groups.
struct Product {
  u32 rows, n, k, first, slices, groups;
  __device__ __forceinline__ u32 panels() const { return (rows + 7) / 8; }
};

// The blocks of a cluster: ROW_TILES x CHANNEL_TILES tiles. Blocks of the same row share its rows, blocks of the
// same column its weights; `peer` lists the blocks that share either with this one, itself included.
template <u32 ROW_TILES, u32 CHANNEL_TILES>
struct Cluster {
  static constexpr u32 ROWS = ROW_TILES, CHANNELS = CHANNEL_TILES;
  static constexpr u32 SIZE = ROW_TILES * CHANNEL_TILES, PEERS = ROW_TILES + CHANNEL_TILES - 1;
  u32 row, column;

  __device__ __forceinline__ Cluster() {
    const u32 rank = SIZE > 1 ? cluster_rank() : 0;
    row = rank % ROW_TILES;
    column = rank / ROW_TILES;
  }
  __device__ __forceinline__ u32 peer(u32 i) const {
    if (i < ROW_TILES) return column * ROW_TILES + i;
    const u32 other = i - ROW_TILES;
    return (other < column ? other : other + 1) * ROW_TILES + row;
  }
  // Bits of the blocks that read the same weights, and the same rows.
  __device__ __forceinline__ u32 of_weights() const { return ((1u << ROW_TILES) - 1) << column * ROW_TILES; }
  __device__ __forceinline__ u32 of_rows() const {
    u32 blocks = 0;
    for (u32 i = 0; i < CHANNEL_TILES; ++i) blocks |= 1u << (i * ROW_TILES + row);
    return blocks;
  }
  __device__ __forceinline__ void sync() const {
    if (SIZE > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }
};

// The units of a block, in turn. Those of the cluster's other blocks are the neighbouring tiles of the same
// group; tiles past the last one are units without outputs.
template <u32 ROWS, typename Blocks>
struct Units {
  u32 row_tile, channel_tile, group;
  u32 number;
  __device__ __forceinline__ Units() : number(blockIdx.x / Blocks::SIZE) {}
  __device__ __forceinline__ bool find(const Product& of, const Blocks& blocks) {
    const u32 across = (of.rows + ROWS * Blocks::ROWS - 1) / (ROWS * Blocks::ROWS);
    const u32 down = (of.n + CHANNELS * Blocks::CHANNELS - 1) / (CHANNELS * Blocks::CHANNELS);
    row_tile = number % across * Blocks::ROWS + blocks.row;
    channel_tile = number / across % down * Blocks::CHANNELS + blocks.column;
    group = number / across / down;
    number += gridDim.x / Blocks::SIZE;
    return group < of.groups;
  }
};

// A ring of stages. Barriers: for each stage, one that is complete when it has been filled, one when all blocks to
// which this one copies have read it.
template <typename Weights, u32 ROWS, u32 STAGES, typename Blocks>
struct Ring {
  static constexpr u32 STAGE_BYTES = Weights::TILE_BYTES + ROWS / 8 * PANEL_BYTES;
  const uint4* memory;
  SharedAddress stages, barriers;
  u32 at, parity;

  __device__ __forceinline__ Ring(const uint4* memory) : memory(memory), at(0), parity(0) {
    stages = shared_address(memory);
    barriers = shared_address(memory + (STAGES * STAGE_BYTES + ROWS * CHANNELS * 4) / 16);
  }
  __device__ __forceinline__ void init() const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      barrier_init(barriers + 16 * stage, 1);
      barrier_init(barriers + 16 * stage + 8, Blocks::PEERS * MULTIPLIERS / WARP);
    }
    barriers_ready();
  }
  __device__ __forceinline__ SharedAddress stage() const { return stages + at * STAGE_BYTES; }
  __device__ __forceinline__ SharedAddress rows() const { return stage() + Weights::TILE_BYTES; }
  // The stage's weights, for loads by threads.
  __device__ __forceinline__ const uint4* tile() const { return memory + at * (STAGE_BYTES / 16); }
  __device__ __forceinline__ SharedAddress filled() const { return barriers + 16 * at; }
  __device__ __forceinline__ SharedAddress read(u32 stage) const { return barriers + 16 * stage + 8; }
  // Tells the blocks that copy to this stage that a warp has read it.
  __device__ __forceinline__ void release(u32 stage, const Blocks& blocks) const {
    __syncwarp();
    const u32 lane = threadIdx.x % WARP;
    if (Blocks::SIZE == 1) {
      if (lane == 0) barrier_arrive(read(stage));
    } else if (lane < Blocks::PEERS) {
      barrier_arrive_in(blocks.peer(lane), read(stage));
    }
  }
  __device__ __forceinline__ void next() {
    if (++at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }
};

struct Part {
  u32 begin, bytes;
};

// Copies a part of what SHARING blocks read to all of them.
template <u32 SHARING>
__device__ __forceinline__ void copy_part(u32 blocks, SharedAddress to, const char* from, Part part, SharedAddress barrier) {
  if (part.bytes == 0) return;
  if (SHARING == 1) {
    copy_bulk(to, from, part.bytes, barrier);
  } else {
    copy_bulk_to(blocks, to + part.begin, from + part.begin, part.bytes, barrier);
  }
}

// Copies this block's part of the operands of all units; one thread. cuts [9]: borders of the slices in steps.
template <typename Weights, u32 ROWS, u32 STAGES, typename Blocks>
__device__ __forceinline__ void copy_operands(Ring<Weights, ROWS, STAGES, Blocks> ring, const void* x, const void* weights,
                                              const u32* cuts, const Product& of) {
  constexpr u32 TILE_PART = Weights::TILE_BYTES / Blocks::ROWS, PANELS_PART = ROWS / 8 / Blocks::CHANNELS;
  const Blocks blocks;
  const u32 steps = of.k / Weights::STEP_COLUMNS, count = of.slices / of.groups;
  Units<ROWS, Blocks> unit;
  while (unit.find(of, blocks)) {
    const u32 first_panel = unit.row_tile * (ROWS / 8), panels = min(ROWS / 8, max(of.panels(), first_panel) - first_panel);
    const u32 skipped = blocks.column * PANELS_PART, part_bytes = min(PANELS_PART, max(panels, skipped) - skipped) * PANEL_BYTES;
    // A channel tile past the last one multiplies the weights of that.
    const u32 channel_tile = min(unit.channel_tile, (of.n - 1) / CHANNELS);
    const u32 first = of.first + unit.group * count;
    const u32 end = cuts[first + count];
#pragma unroll 1
    for (u32 step = cuts[first]; step < end; ++step) {
      const char* const tile = (const char*)weights + ((u64)channel_tile * steps + step) * Weights::TILE_BYTES;
      const char* const rows = (const char*)x + ((u64)step * of.panels() + first_panel) * PANEL_BYTES;
      barrier_wait(ring.read(ring.at), ring.parity ^ 1);
      barrier_expect(ring.filled(), Weights::TILE_BYTES + panels * PANEL_BYTES);
      copy_part<Blocks::ROWS>(blocks.of_weights(), ring.stage(), tile, {blocks.row * TILE_PART, TILE_PART}, ring.filled());
      copy_part<Blocks::CHANNELS>(blocks.of_rows(), ring.rows(), rows, {skipped * PANEL_BYTES, part_bytes}, ring.filled());
      ring.next();
    }
  }
}

// Weights that are panels, too.
struct PackedTiles {
  static constexpr u32 TILE_BYTES = CHANNELS / 8 * PANEL_BYTES;
  static constexpr bool COMPLETES = false;

  // Multiplies the four sets of a stage.
  template <u32 ROWS, typename Sum, typename Ring>
  static __device__ __forceinline__ void multiply(Sum (&acc)[ROWS / 2], const Ring& ring) {
    constexpr u32 SET_BYTES = 256;
    const u32 channels = (threadIdx.x - COPIERS) / 128 * (64 / 8 * PANEL_BYTES);
    order_registers(acc);
    products_begin();
#pragma unroll
    for (u32 set = 0; set < 4; ++set) {
      multiply_panels<ROWS>(acc, panels_at(ring.stage() + channels + set * SET_BYTES), panels_at(ring.rows() + set * SET_BYTES));
    }
    products_commit();
  }
};

// Sums in f32, which need no conversion: each slice is a leaf of the tree.
struct FloatSums {
  typedef float Sum;
  static constexpr bool HAS_CHAINS = false;
  // How many of a group's `count` slices are summed as one.
  __device__ __forceinline__ u32 joined(u32 count) const { return 1; }
  __device__ __forceinline__ bool has_tree() const { return true; }
  template <u32 LEN, typename Unit>
  __device__ __forceinline__ void to_floats(float (&to)[LEN], const float (&sums)[LEN], const Unit& unit, const Product& of,
                                            u32 slice) const {
#pragma unroll
    for (u32 i = 0; i < LEN; ++i) to[i] = sums[i];
  }
};

// Computes the sums of a slice of `steps` steps. A stage is released when its products are complete: those of
// weights in shared memory while the next ones are computed.
template <typename Weights, u32 ROWS, u32 STAGES, typename Blocks>
__device__ __forceinline__ void sum_slice(typename Weights::Sums::Sum (&acc)[ROWS / 2],
                                          Ring<Weights, ROWS, STAGES, Blocks>& ring, u32 steps, const Blocks& blocks) {
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) acc[i] = 0;
  u32 before = 0;
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step) {
    barrier_wait(ring.filled(), ring.parity);
    Weights::template multiply<ROWS>(acc, ring);
    if (Weights::COMPLETES) {
      ring.release(ring.at, blocks);
    } else if (step > 0) {
      products_wait<1>();
      ring.release(before, blocks);
    }
    before = ring.at;
    ring.next();
  }
  products_wait<0>();
  order_registers(acc);
  if (!Weights::COMPLETES && steps > 0) ring.release(before, blocks);
}

// Sums of slices whose chains have scales of their own.
struct ChainSums : FloatSums {
  static constexpr bool HAS_CHAINS = true;
  const float* scales;  // [chains][n]
  const u32* chains;    // first chain of each slice, and the number of all [9]; borders of chains along K

  __device__ __forceinline__ ChainSums(const float* scales, const u32* chains) : scales(scales), chains(chains) {}
};

// Computes the sums of a slice as floats: that of its `steps` steps, or those of its chains, each times the scales
// of its channels, added in order of K.
template <typename Weights, u32 ROWS, u32 STAGES, typename Blocks>
__device__ __forceinline__ void sum_leaf(float (&to)[ROWS / 2], typename Weights::Sums::Sum (&leaf)[ROWS / 2],
                                         Ring<Weights, ROWS, STAGES, Blocks>& ring, u32 steps, const Blocks& blocks,
                                         const Units<ROWS, Blocks>& unit, const Product& of, u32 slice,
                                         const typename Weights::Sums& sums) {
  if constexpr (Weights::Sums::HAS_CHAINS) {
    const u32 thread = threadIdx.x - COPIERS, last = of.n - 1;
    const u32 channel = unit.channel_tile * CHANNELS + thread / WARP * 16 + thread % WARP / 4;
    const u32* const borders = sums.chains + 9;
    const u32 end = sums.chains[slice + 1];
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i) to[i] = 0.0f;
#pragma unroll 1
    for (u32 chain = sums.chains[slice]; chain < end; ++chain) {
      const float* const of_chain = sums.scales + (u64)chain * of.n;
      const float scales[2] = {of_chain[min(channel, last)], of_chain[min(channel + 8, last)]};
      sum_slice(leaf, ring, (borders[chain + 1] - borders[chain]) / Weights::STEP_COLUMNS, blocks);
#pragma unroll
      for (u32 i = 0; i < ROWS / 2; ++i) to[i] = fmaf(leaf[i], scales[i / 2 % 2], to[i]);
    }
  } else {
    sum_slice(leaf, ring, steps, blocks);
    sums.to_floats(to, leaf, unit, of, slice);
  }
}

// Applies scales and bias, if there are any, to a thread's sums, and stores them.
template <u32 ROWS, typename Blocks>
__device__ __forceinline__ void store_sums(float (&acc)[ROWS / 2], const Units<ROWS, Blocks>& unit, const Product& of,
                                           float* out, const float* scales, const float* bias) {
  // Hidden from the optimizer, which would otherwise keep every element's address in registers during the loop
  // over K.
  const u32 n = opaque(of.n), rows = opaque(of.rows), thread = opaque(threadIdx.x - COPIERS);
  const u32 channel = unit.channel_tile * CHANNELS + thread / WARP * 16 + thread % WARP / 4;
  const u32 row = unit.row_tile * ROWS + thread % 4 * 2;
  const bool is_channel[2] = {channel < n, channel + 8 < n};
  if (scales) {
    const float of_channel[2] = {is_channel[0] ? scales[channel] : 0.0f, is_channel[1] ? scales[channel + 8] : 0.0f};
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i) acc[i] = acc[i] * of_channel[i / 2 % 2];
  }
  if (bias) {
    const float of_channel[2] = {is_channel[0] ? bias[channel] : 0.0f, is_channel[1] ? bias[channel + 8] : 0.0f};
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i) acc[i] = acc[i] + of_channel[i / 2 % 2];
  }
  float* to = out + (u64)row * n + channel;
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) {
    if (row + i / 4 * 8 + i % 2 < rows && is_channel[i / 2 % 2]) to[i % 2 * n + i / 2 % 2 * 8] = acc[i];
    if (i % 4 == 3) to += 8 * n;
  }
}

// Multiplies all units of this block. The sums of slices form the contract's tree like a binary counter: levels 0
// and 1 in registers, level 2 in shared memory at the thread's own place.
template <typename Weights, u32 ROWS, u32 STAGES, typename Blocks>
__device__ __forceinline__ void multiply_units(Ring<Weights, ROWS, STAGES, Blocks> ring, float* level_2, const float* scales,
                                               const float* bias, const u32* cuts, float* out, const Product& of,
                                               const typename Weights::Sums& sums) {
  constexpr u32 LEN = ROWS / 2;
  const Blocks blocks;
  const u32 count = of.slices / of.groups, joined = sums.joined(count), leaves = count / joined;
  typename Weights::Sums::Sum leaf[LEN];
  float acc[LEN], level_0[LEN], level_1[LEN];
  Units<ROWS, Blocks> unit;
  while (unit.find(of, blocks)) {
    const u32 first = of.first + unit.group * count;
#pragma unroll 1
    for (u32 i = 0; i < leaves; i += 2) {
      sum_leaf(acc, leaf, ring, cuts[first + i + joined] - cuts[first + i], blocks, unit, of, first + i, sums);
      if (leaves > 1) {
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) level_0[j] = acc[j];
        sum_leaf(acc, leaf, ring, cuts[first + i + 2] - cuts[first + i + 1], blocks, unit, of, first + i + 1, sums);
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) acc[j] = level_0[j] + acc[j];
      }
      if (i & 2) {
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) acc[j] = level_1[j] + acc[j];
      } else {
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) level_1[j] = acc[j];
      }
      if (i == 6) {
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) acc[j] = level_2[j * MULTIPLIERS] + acc[j];
      } else if (i == 2) {
#pragma unroll
        for (u32 j = 0; j < LEN; ++j) level_2[j * MULTIPLIERS] = acc[j];
      }
    }
    // The tree also adds the zeros of slices without numbers, which turn -0 into 0.
    if (sums.has_tree() && of.slices < 8) {
#pragma unroll
      for (u32 j = 0; j < LEN; ++j) acc[j] = acc[j] + 0.0f;
    }
    const bool is_whole = of.groups == 1;
    store_sums(acc, unit, of, out + (u64)unit.group * of.rows * of.n, is_whole ? scales : nullptr, is_whole ? bias : nullptr);
  }
}

// x: panels [k / step][ceil(rows / 8)]; weights: tiles [ceil(n / 128)][k / step]; scales, bias [n] f32 or
// null; borders [9]: K-slices, multiples of a step -> out [rows, n] f32, or, if units divide the slices, [groups]
// [rows, n] sums of groups of slices, without scale and bias.
// Grid: clusters that run at the same time, at most one for as many units; 384 threads. Dynamic shared memory: stages, sums
// of level 2, barriers, borders (`ring_bytes` in sources.rs).
template <typename Weights, u32 ROWS, u32 STAGES, bool MOVES_REGISTERS, typename Blocks>
__device__ __forceinline__ void gemm_of_panels(const void* x, const void* weights, const float* scales, const float* bias,
                                               const u32* borders, float* out, const Product& of,
                                               const typename Weights::Sums& sums = {}) {
  // No shared memory is declared beside it: the stages must begin at a multiple of 128 bytes, or the copies of
  // each stage touch a half more of the cache's sectors.
  DYNAMIC_SHARED(memory);
  Ring<Weights, ROWS, STAGES, Blocks> ring(memory);
  constexpr u32 RING_BYTES = STAGES * Ring<Weights, ROWS, STAGES, Blocks>::STAGE_BYTES;
  u32* const cuts = (u32*)(memory + (RING_BYTES + ROWS * CHANNELS * 4) / 16 + STAGES);
  if (threadIdx.x == 0) ring.init();
  if (threadIdx.x < 9) cuts[threadIdx.x] = borders[threadIdx.x] / Weights::STEP_COLUMNS;
  Blocks().sync();
  if (threadIdx.x < COPIERS) {
    if (MOVES_REGISTERS) release_registers<40>();
    if (threadIdx.x == 0) copy_operands(ring, x, weights, cuts, of);
  } else {
    if (MOVES_REGISTERS) take_registers<232>();
    float* level_2 = (float*)(memory + RING_BYTES / 16) + (threadIdx.x - COPIERS);
    multiply_units(ring, level_2, scales, bias, cuts, out, of, sums);
  }
  // Until here other blocks may copy to this one and arrive at its barriers.
  if (Blocks::SIZE > 1) Blocks().sync();
}
