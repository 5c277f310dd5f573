// Products of operands in panels (`panel_index`), by warpgroup instructions of compute capability 9.0, at every
// number of rows. Equal bits to gemm_bf16.cu: the same sets of 16 of K in the same order, and the same tree of
// slices. Inside a set the hardware adds before it rounds, so the order does not matter
// (docs/measurements/gpu.md). Sums of int8 are exact in any order.
//
// A block is three warpgroups. One thread of the first keeps a ring of stages full by bulk copies; the others
// multiply 64 channels each. A stage is a step of K (64 of bf16 or FP8, 128 of int8): 128 channels and ROWS
// rows, of which a panel holds eight in 1,024 bytes. Blocks stay and take units of
// work in turn: unit u is row tile u % row tiles, channels of u / row tiles, and a group of slices. So the
// stages of the next unit are copied while the last one's sums are stored.
//
// The slices' sums form the contract's tree like a binary counter: level 0 in registers, level 1 in shared
// memory, level 2 in `out`, each at the thread's own place.
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

template <u32 ROWS>
struct Unit {
  u32 row_tile, channel_tile, group;
  __device__ __forceinline__ Unit(u32 number, const Product& of) {
    const u32 row_tiles = (of.rows + ROWS - 1) / ROWS, channel_tiles = (of.n + CHANNELS - 1) / CHANNELS;
    row_tile = number % row_tiles;
    channel_tile = number / row_tiles % channel_tiles;
    group = number / row_tiles / channel_tiles;
  }
  static __device__ __forceinline__ u32 count(const Product& of) {
    return (of.rows + ROWS - 1) / ROWS * ((of.n + CHANNELS - 1) / CHANNELS) * of.groups;
  }
};

// A ring of stages. Barriers: for each stage, one that is complete when it has been filled, one when it has been
// read.
template <typename Weights, u32 ROWS, u32 STAGES>
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
      barrier_init(barriers + 16 * stage + 8, MULTIPLIERS);
    }
    barriers_ready();
  }
  __device__ __forceinline__ SharedAddress stage() const { return stages + at * STAGE_BYTES; }
  __device__ __forceinline__ SharedAddress rows() const { return stage() + Weights::TILE_BYTES; }
  // The stage's weights, for loads by threads.
  __device__ __forceinline__ const uint4* tile() const { return memory + at * (STAGE_BYTES / 16); }
  __device__ __forceinline__ SharedAddress filled() const { return barriers + 16 * at; }
  __device__ __forceinline__ SharedAddress read(u32 stage) const { return barriers + 16 * stage + 8; }
  __device__ __forceinline__ void next() {
    if (++at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Copies the operands of all units of this block; one thread. cuts [9]: borders of the slices in steps.
template <typename Weights, u32 ROWS, u32 STAGES>
__device__ __forceinline__ void copy_operands(Ring<Weights, ROWS, STAGES> ring, const void* x, const void* weights, const u32* cuts,
                                              const Product& of) {
  const u32 steps = of.k / Weights::STEP_COLUMNS, count = of.slices / of.groups;
  for (u32 number = blockIdx.x; number < Unit<ROWS>::count(of); number += gridDim.x) {
    const Unit<ROWS> unit(number, of);
    const u32 first_panel = unit.row_tile * (ROWS / 8);
    const u32 row_bytes = min(ROWS / 8, of.panels() - first_panel) * PANEL_BYTES;
    const u32 first = of.first + unit.group * count;
    const u32 end = cuts[first + count];
    for (u32 step = cuts[first]; step < end; ++step) {
      barrier_wait(ring.read(ring.at), ring.parity ^ 1);
      barrier_expect(ring.filled(), Weights::TILE_BYTES + row_bytes);
      copy_bulk(ring.stage(), (const char*)weights + ((u64)unit.channel_tile * steps + step) * Weights::TILE_BYTES,
                Weights::TILE_BYTES, ring.filled());
      copy_bulk(ring.rows(), (const char*)x + ((u64)step * of.panels() + first_panel) * PANEL_BYTES, row_bytes, ring.filled());
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
  // How many of a group's `count` slices are summed as one.
  __device__ __forceinline__ u32 joined(u32 count) const { return 1; }
  template <u32 ROWS>
  __device__ __forceinline__ void to_floats(float (&to)[ROWS / 2], const float (&sums)[ROWS / 2], const Unit<ROWS>& unit,
                                            const Product& of, u32 slice) const {
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i) to[i] = sums[i];
  }
};

// Computes the sums of a slice of `steps` steps. A stage is released when its products are complete: those of
// weights in shared memory while the next ones are computed.
template <typename Weights, u32 ROWS, u32 STAGES>
__device__ __forceinline__ void sum_slice(typename Weights::Sums::Sum (&acc)[ROWS / 2], Ring<Weights, ROWS, STAGES>& ring,
                                          u32 steps) {
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) acc[i] = 0;
  u32 before = 0;
  for (u32 step = 0; step < steps; ++step) {
    barrier_wait(ring.filled(), ring.parity);
    Weights::template multiply<ROWS>(acc, ring);
    if (Weights::COMPLETES) {
      barrier_arrive(ring.read(ring.at));
    } else if (step > 0) {
      products_wait<1>();
      barrier_arrive(ring.read(before));
    }
    before = ring.at;
    ring.next();
  }
  products_wait<0>();
  order_registers(acc);
  if (!Weights::COMPLETES && steps > 0) barrier_arrive(ring.read(before));
}

// Stores a thread's sums, or adds them to those that `out` holds of the slices before.
template <u32 ROWS>
__device__ __forceinline__ void store_sums(const float (&acc)[ROWS / 2], const Unit<ROWS>& unit, const Product& of, float* out,
                                           const float* scales, const float* bias, bool adds) {
  // Hidden from the optimizer, which would otherwise keep every element's address in registers during the loop
  // over K.
  const u32 n = opaque(of.n), rows = opaque(of.rows), thread = opaque(threadIdx.x - COPIERS);
  const u32 channel = unit.channel_tile * CHANNELS + thread / WARP * 16 + thread % WARP / 4;
  const u32 row = unit.row_tile * ROWS + thread % 4 * 2;
  float* to = out + (u64)row * n + channel;
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) {
    const u32 down = i / 4 * 8 + i % 2, right = i / 2 % 2 * 8;
    if (row + down < rows && channel + right < n) {
      float* at = to + (i % 2) * n + right;
      float sum = adds ? *at + acc[i] : acc[i];
      if (scales) sum = sum * scales[channel + right];
      *at = bias ? sum + bias[channel + right] : sum;
    }
    if (i % 4 == 3) to += 8 * n;
  }
}

// Multiplies all units of this block.
template <typename Weights, u32 ROWS, u32 STAGES>
__device__ __forceinline__ void multiply_units(Ring<Weights, ROWS, STAGES> ring, float* level_1, const float* scales,
                                               const float* bias, const u32* cuts, float* out, const Product& of,
                                               const typename Weights::Sums& sums) {
  const u32 count = of.slices / of.groups, joined = sums.joined(count);
  typename Weights::Sums::Sum of_slice[ROWS / 2];
  float acc[ROWS / 2], level_0[ROWS / 2];
  for (u32 number = blockIdx.x; number < Unit<ROWS>::count(of); number += gridDim.x) {
    const Unit<ROWS> unit(number, of);
    float* to = out + (u64)unit.group * of.rows * of.n;
    for (u32 i = 0; i < count; i += joined) {
      const u32 slice = of.first + unit.group * count + i;
      sum_slice(of_slice, ring, cuts[slice + joined] - cuts[slice]);
      sums.to_floats(acc, of_slice, unit, of, slice);
      const bool is_last = i + joined == count;
      if (!(i & 1) && !is_last) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) level_0[j] = acc[j];
        continue;
      }
      if (i & 1) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) acc[j] = level_0[j] + acc[j];
      }
      if (!(i & 2) && !is_last) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) level_1[j * MULTIPLIERS] = acc[j];
        continue;
      }
      if (i & 2) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) acc[j] = level_1[j * MULTIPLIERS] + acc[j];
      }
      // The tree also adds the zeros of slices without numbers, which turn -0 into 0. Joined slices have no tree.
      if (is_last && of.slices < 8 && joined == 1) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) acc[j] = acc[j] + 0.0f;
      }
      const bool is_whole = is_last && of.groups == 1;
      store_sums<ROWS>(acc, unit, of, to, is_whole ? scales : nullptr, is_whole ? bias : nullptr, i & 4);
    }
  }
}

// x: panels [k / step][ceil(rows / 8)]; weights: tiles [ceil(n / 128)][k / step]; scales, bias [n] f32 or
// null; borders [9]: K-slices, multiples of a step -> out [rows, n] f32, or, if units divide the slices, [groups]
// [rows, n] sums of groups of slices, without scale and bias.
// Grid: blocks that run at the same time, at most one per unit; 384 threads. Dynamic shared memory: stages, sums
// of level 1, barriers, borders (`ring_bytes` in sources.rs).
template <typename Weights, u32 ROWS, u32 STAGES, bool MOVES_REGISTERS>
__device__ __forceinline__ void gemm_of_panels(const void* x, const void* weights, const float* scales, const float* bias,
                                               const u32* borders, float* out, const Product& of,
                                               const typename Weights::Sums& sums = {}) {
  // No shared memory is declared beside it: the stages must begin at a multiple of 128 bytes, or the copies of
  // each stage touch a half more of the cache's sectors.
  DYNAMIC_SHARED(memory);
  Ring<Weights, ROWS, STAGES> ring(memory);
  u32* const cuts = (u32*)(memory + (STAGES * Ring<Weights, ROWS, STAGES>::STAGE_BYTES + ROWS * CHANNELS * 4) / 16 + STAGES);
  if (threadIdx.x == 0) ring.init();
  if (threadIdx.x < 9) cuts[threadIdx.x] = borders[threadIdx.x] / Weights::STEP_COLUMNS;
  __syncthreads();
  if (threadIdx.x < COPIERS) {
    if (MOVES_REGISTERS) release_registers<40>();
    if (threadIdx.x == 0) copy_operands(ring, x, weights, cuts, of);
  } else {
    if (MOVES_REGISTERS) take_registers<232>();
    float* level_1 = (float*)(memory + STAGES * Ring<Weights, ROWS, STAGES>::STAGE_BYTES / 16) + (threadIdx.x - COPIERS);
    multiply_units(ring, level_1, scales, bias, cuts, out, of, sums);
  }
}
