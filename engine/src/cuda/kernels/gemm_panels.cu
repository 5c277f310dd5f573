// GEMM of bf16 activations and weights by warpgroup instructions, for compute capability 9.0, at every number
// of rows. Equal bits to gemm_bf16.cu: the same sets of 16 of K in the same order, and the same tree of
// slices. Inside a set the hardware adds exactly before it rounds, so the order does not matter
// (docs/measurements/gpu.md).
//
//   weights: panels [ceil(n / 128)][k / 64][16], x: panels [k / 64][ceil(rows / 8)]; a panel is 8 rows x 64 of
//   K (`panel_index`), so that the operands of a step are contiguous in memory
//   bias [n] f32 or null; borders [9]: K-slices, multiples of 64 -> out [rows, n] f32, or, if units divide the
//   slices, [groups][rows, n] sums of groups of slices, which `sum_groups` or the next norm adds
//
// A block is three warpgroups. One thread of the first keeps a ring of stages full by bulk copies; the others
// multiply 64 channels each. A stage is 64 of K: 128 channels and ROWS rows. Blocks stay and take units of
// work in turn: unit u is row tile u % row tiles, channels of u / row tiles, and a group of slices. So the
// stages of the next unit are copied while the last one's sums are stored.
//
// The slices' sums form the contract's tree like a binary counter: level 0 in registers, level 1 in shared
// memory, level 2 in `out`, each at the thread's own place.

constexpr u32 PANEL_BYTES = 1024;
constexpr u32 CHANNELS = 128;
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
template <u32 ROWS, u32 STAGES>
struct Ring {
  static constexpr u32 WEIGHT_BYTES = CHANNELS / 8 * PANEL_BYTES;
  static constexpr u32 STAGE_BYTES = WEIGHT_BYTES + ROWS / 8 * PANEL_BYTES;
  SharedAddress stages, barriers;
  u32 at, parity;

  __device__ __forceinline__ Ring(uint4* memory) : at(0), parity(0) {
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
  __device__ __forceinline__ SharedAddress filled() const { return barriers + 16 * at; }
  static __device__ __forceinline__ SharedAddress read(SharedAddress barriers, u32 stage) { return barriers + 16 * stage + 8; }
  __device__ __forceinline__ void next() {
    if (++at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Copies the operands of all units of this block; one thread. cuts [9]: borders of the slices in steps.
template <u32 ROWS, u32 STAGES>
__device__ __forceinline__ void copy_operands(Ring<ROWS, STAGES> ring, const bf16* x, const bf16* weights, const u32* cuts,
                                              const Product& of) {
  constexpr u32 PANEL = PANEL_BYTES / sizeof(bf16);
  const u32 steps = of.k / STEP, count = of.slices / of.groups;
  for (u32 number = blockIdx.x; number < Unit<ROWS>::count(of); number += gridDim.x) {
    const Unit<ROWS> unit(number, of);
    const u32 first_panel = unit.row_tile * (ROWS / 8);
    const u32 row_bytes = min(ROWS / 8, of.panels() - first_panel) * PANEL_BYTES;
    const u32 first = of.first + unit.group * count;
    const u32 end = cuts[first + count];
    for (u32 step = cuts[first]; step < end; ++step) {
      barrier_wait(Ring<ROWS, STAGES>::read(ring.barriers, ring.at), ring.parity ^ 1);
      barrier_expect(ring.filled(), Ring<ROWS, STAGES>::WEIGHT_BYTES + row_bytes);
      copy_bulk(ring.stage(), weights + ((u64)unit.channel_tile * steps + step) * (CHANNELS / 8 * PANEL),
                Ring<ROWS, STAGES>::WEIGHT_BYTES, ring.filled());
      copy_bulk(ring.stage() + Ring<ROWS, STAGES>::WEIGHT_BYTES, x + ((u64)step * of.panels() + first_panel) * PANEL, row_bytes,
                ring.filled());
      ring.next();
    }
  }
}

// Computes the sums of a slice of `steps` steps.
template <u32 ROWS, u32 STAGES>
__device__ __forceinline__ void sum_slice(float (&acc)[ROWS / 2], Ring<ROWS, STAGES>& ring, u32 steps) {
  constexpr u32 SET_BYTES = 256;
  const u32 channels = (threadIdx.x - COPIERS) / 128 * (64 / 8 * PANEL_BYTES);
#pragma unroll
  for (u32 i = 0; i < ROWS / 2; ++i) acc[i] = 0.0f;
  u32 before = 0;
  for (u32 step = 0; step < steps; ++step) {
    barrier_wait(ring.filled(), ring.parity);
    order_registers(acc);
    products_begin();
#pragma unroll
    for (u32 set = 0; set < 4; ++set) {
      multiply_panels<ROWS>(acc, panels_at(ring.stage() + channels + set * SET_BYTES),
                            panels_at(ring.stage() + Ring<ROWS, STAGES>::WEIGHT_BYTES + set * SET_BYTES));
    }
    products_commit();
    if (step > 0) {
      products_wait<1>();
      barrier_arrive(Ring<ROWS, STAGES>::read(ring.barriers, before));
    }
    before = ring.at;
    ring.next();
  }
  products_wait<0>();
  order_registers(acc);
  if (steps > 0) barrier_arrive(Ring<ROWS, STAGES>::read(ring.barriers, before));
}

// Stores a thread's sums, or adds them to those that `out` holds of the slices before.
template <u32 ROWS>
__device__ __forceinline__ void store_sums(const float (&acc)[ROWS / 2], const Unit<ROWS>& unit, const Product& of, float* out,
                                           const float* bias, bool adds) {
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
      const float sum = adds ? *at + acc[i] : acc[i];
      *at = bias ? sum + bias[channel + right] : sum;
    }
    if (i % 4 == 3) to += 8 * n;
  }
}

// Multiplies all units of this block.
template <u32 ROWS, u32 STAGES>
__device__ __forceinline__ void multiply_units(Ring<ROWS, STAGES> ring, float* level_1, const float* bias, const u32* cuts,
                                               float* out, const Product& of) {
  const u32 count = of.slices / of.groups;
  float acc[ROWS / 2], level_0[ROWS / 2];
  for (u32 number = blockIdx.x; number < Unit<ROWS>::count(of); number += gridDim.x) {
    const Unit<ROWS> unit(number, of);
    float* to = out + (u64)unit.group * of.rows * of.n;
    for (u32 i = 0; i < count; ++i) {
      const u32 slice = of.first + unit.group * count + i;
      sum_slice(acc, ring, cuts[slice + 1] - cuts[slice]);
      const bool is_last = i + 1 == count;
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
      // The tree also adds the zeros of slices without numbers, which turn -0 into 0.
      if (is_last && of.slices < 8) {
#pragma unroll
        for (u32 j = 0; j < ROWS / 2; ++j) acc[j] = acc[j] + 0.0f;
      }
      store_sums<ROWS>(acc, unit, of, to, is_last && of.groups == 1 ? bias : nullptr, i & 4);
    }
  }
}

template <u32 ROWS, u32 STAGES, bool MOVES_REGISTERS>
__device__ __forceinline__ void gemm_panels(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out,
                                            const Product& of) {
  DYNAMIC_SHARED(memory);
  __shared__ u32 cuts[9];
  Ring<ROWS, STAGES> ring(memory);
  if (threadIdx.x == 0) ring.init();
  if (threadIdx.x < 9) cuts[threadIdx.x] = borders[threadIdx.x] / STEP;
  __syncthreads();
  if (threadIdx.x < COPIERS) {
    if (MOVES_REGISTERS) release_registers<40>();
    if (threadIdx.x == 0) copy_operands(ring, x, weights, cuts, of);
  } else {
    if (MOVES_REGISTERS) take_registers<232>();
    float* level_1 = (float*)(memory + STAGES * Ring<ROWS, STAGES>::STAGE_BYTES / 16) + (threadIdx.x - COPIERS);
    multiply_units(ring, level_1, bias, cuts, out, of);
  }
}

// Grid: blocks that run at the same time, at most one per unit; 384 threads. Dynamic shared memory: stages, sums
// of level 1, barriers (`shared_bytes` in sources.rs). Twin: gemm_bf16_8, equal bits.
#define GEMM_PANELS(NAME, ROWS, STAGES, BLOCKS)                                                                     \
  extern "C" __global__ void __launch_bounds__(384, BLOCKS)                                                         \
      NAME(const bf16* x, const bf16* weights, const float* bias, const u32* borders, float* out, u32 rows, u32 n,  \
           u32 k, u32 first, u32 slices, u32 groups) {                                                              \
    gemm_panels<ROWS, STAGES, BLOCKS == 1>(x, weights, bias, borders, out, {rows, n, k, first, slices, groups});    \
  }

GEMM_PANELS(gemm_panels_8, 8, 6, 2)
GEMM_PANELS(gemm_panels_16, 16, 5, 2)
GEMM_PANELS(gemm_panels_40, 40, 8, 1)
GEMM_PANELS(gemm_panels_80, 80, 7, 1)
GEMM_PANELS(gemm_panels_128, 128, 5, 1)

// Adds the sums of `groups` (2, 4 or 8) groups of slices in the contract's tree, and the bias.
//   sums [groups][len] f32, bias [n] f32 or null -> out [len] f32; len a multiple of n
// Grid (ceil(len / 256)), 256 threads. Twin: the host's tree of gemm_panels_8 with one group, equal bits.
extern "C" __global__ void __launch_bounds__(256)
    sum_groups(const float* sums, const float* bias, float* out, u64 len, u32 n, u32 groups, u32 slices) {
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= len) return;
  const float sum = sum_of_groups(sums, len, i, groups, slices);
  out[i] = bias ? sum + bias[i % n] : sum;
}

// Packs rows of weights into panels. from [rows, k], a multiple of 128 rows -> to: panels. Grid (k / 64, rows /
// 128), 256 threads. Twin: the host's `panel_index`, equal bits.
extern "C" __global__ void __launch_bounds__(256) pack_panels(const bf16* from, bf16* to, u32 k) {
  const u64 first = ((u64)blockIdx.y * gridDim.x + blockIdx.x) * (CHANNELS * STEP);
  for (u32 i = threadIdx.x; i < CHANNELS * STEP / 4; i += 256) {
    const u32 row = i / (STEP / 4), column = i % (STEP / 4) * 4;
    const u64* numbers = (const u64*)(from + (u64)(blockIdx.y * CHANNELS + row) * k + blockIdx.x * STEP + column);
    *(u64*)(to + first + panel_index(row, column, CHANNELS / 8)) = load_8(numbers);
  }
}
