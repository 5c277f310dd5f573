// Products of many rows: a block computes a tile of 128 channels x 16 * NT rows, and its warps share the
// operands that it loads. A warp computes 32 channels and half of the rows. Asynchronous copies bring
// operands to shared memory in a ring of stages, all but one of which are in flight. A stage is two steps of
// K. A step is the 64 bytes of K that a step of sum_tiles is, so every element is summed in the order of
// products.cuh.
//
// In shared memory a step is rows of 64 bytes, weights first. Eight lanes that read 16 bytes each, four lanes
// per row of two neighbouring rows, read 128 consecutive bytes, so there are no bank conflicts.
//
// The slices' sums are added in the contract's tree as they become available, like a binary counter that
// holds up to three levels.
constexpr u32 TILE_CHANNELS = 128;
template <int NT>
constexpr u32 STAGES = NT > 4 ? 3 : 4;
constexpr u32 CHUNKS_OF_ROW = 4;

template <int NT>
struct Tile {
  static constexpr u32 ROWS = 16 * NT;
  static constexpr u32 CHUNKS = (TILE_CHANNELS + ROWS) * CHUNKS_OF_ROW;
};

// Iterates over the steps of all slices in order. `cuts` is the copy of the borders in shared memory.
struct StepIterator {
  const u32* borders;
  u32 slice, at;
  __device__ __forceinline__ bool is_done() const { return slice == 8; }
  __device__ __forceinline__ bool has_next() const { return slice < 8; }
  __device__ __forceinline__ void begin(const u32* cuts, const u32* table) {
    borders = cuts;
    slice = 0;
    at = borders[0];
    skip();
  }
  // Advances to the next slice with numbers left; 8 if there is none.
  __device__ __forceinline__ void skip() {
    while (slice < 8 && at >= borders[slice + 1]) {
      ++slice;
      at = borders[slice];
    }
  }
  __device__ __forceinline__ void next(u32 step) {
    at += step;
    skip();
  }
};

// Accumulators of a warp: two groups of 16 channels, NT groups of 8 rows.
template <typename A, int NT>
struct Accumulators {
  A of[2][NT][4];
};

// Calls `f(m, t, i)` for each of a lane's accumulators.
template <int NT, typename F>
__device__ __forceinline__ void for_each(F f) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(m, t, i);
    }
  }
}

// Three levels of the tree; after slice 7 the highest level holds the complete sum.
template <int NT>
struct Tree {
  Accumulators<float, NT> level[3];

  // Adds the sums of a slice; slices come in order, each once.
  __device__ __forceinline__ void add(u32 slice, Accumulators<float, NT>& sums) {
    if (!(slice & 1)) {
      level[0] = sums;
    } else if (!(slice & 2)) {
      join<1>(level[1], sums);
    } else if (!(slice & 4)) {
      join<2>(level[2], sums);
    } else {
      join<3>(level[2], sums);
    }
  }

  // Adds the lowest LEVELS levels to the sums, each of slices before theirs.
  template <int LEVELS>
  __device__ __forceinline__ void join(Accumulators<float, NT>& to, const Accumulators<float, NT>& sums) {
    for_each<NT>([&](int m, int t, int i) {
      float sum = level[0].of[m][t][i] + sums.of[m][t][i];
      if (LEVELS > 1) sum = level[1].of[m][t][i] + sum;
      if (LEVELS > 2) sum = level[2].of[m][t][i] + sum;
      to.of[m][t][i] = sum;
    });
  }
};

// For sum_parked: sums that are floats already.
struct AsTheyAre {
  template <int NT>
  __device__ __forceinline__ const Accumulators<float, NT>& operator()(const Accumulators<float, NT>& sums, u32) const {
    return sums;
  }
};

// Output column and row of a warp's element.
__device__ __forceinline__ u32 tiled_column(int m, int i) {
  return blockIdx.y * TILE_CHANNELS + threadIdx.x / WARP % 4 * 32 + 16 * m + threadIdx.x % WARP / 4 + (i / 2) * 8;
}
template <int NT>
__device__ __forceinline__ u32 tiled_row(int t, int i) {
  return blockIdx.x * Tile<NT>::ROWS + threadIdx.x / (4 * WARP) * 8 * NT + 8 * t + threadIdx.x % 4 * 2 + i % 2;
}

// The rows that a thread copies for each step: 16 bytes at each of these offsets from the block's first row.
template <typename T, int NT>
struct RowCopies {
  static constexpr u32 PER_LOAD = 16 / sizeof(T);
  static constexpr u32 OF_ROWS = (Tile<NT>::ROWS * CHUNKS_OF_ROW + 255) / 256;
  const T* x;
  u32 column, x_offset[OF_ROWS];

  // Rows past the last are copies of it; their results are not stored.
  __device__ __forceinline__ RowCopies(const T* all_x, Sizes sizes) {
    const u32 first_row = blockIdx.x * Tile<NT>::ROWS;
    x = all_x + (u64)first_row * sizes.k;
    column = threadIdx.x % CHUNKS_OF_ROW * PER_LOAD;
    const u32 row = threadIdx.x / CHUNKS_OF_ROW;
#pragma unroll
    for (u32 c = 0; c < OF_ROWS; ++c) x_offset[c] = min(64 * c + row, sizes.rows - 1 - first_row) * sizes.k;
  }

  // Starts the copies of the step at `at` of a slice that ends at `end`; zeros after the end.
  __device__ __forceinline__ void start(uint4* to, u32 at, u32 end) const {
    const bool inside = at + column < end;
    const u32 from = inside ? at + column : at;
#pragma unroll
    for (u32 c = 0; c < OF_ROWS; ++c) {
      const u32 chunk = 256 * c + threadIdx.x;
      if (chunk < Tile<NT>::ROWS * CHUNKS_OF_ROW) cp_async_16(to + chunk, x + from + x_offset[c], inside);
    }
  }
};

template <typename A, int NT>
__device__ __forceinline__ void multiply_step(Accumulators<A, NT>& acc, const uint4* step);

// Operands of one type: weights and rows of a step are adjacent in shared memory.
template <typename T, int NT>
struct UniformOperands {
  typedef StepIterator Iterator;
  static constexpr u32 STEP_OF_K = 4 * (16 / sizeof(T)), STEPS_OF_STAGE = 2, NUM_BORDERS = 9;
  static constexpr u32 CHUNKS = Tile<NT>::CHUNKS;
  static constexpr u32 OF_WEIGHTS = TILE_CHANNELS * CHUNKS_OF_ROW / 256;
  const T* weights;
  u32 w_offset[OF_WEIGHTS];
  RowCopies<T, NT> rows;

  // Channels past the last are copies of it; their results are not stored.
  __device__ __forceinline__ UniformOperands(const T* x, const T* all_weights, Sizes sizes) : rows(x, sizes) {
    const u32 first_channel = blockIdx.y * TILE_CHANNELS;
    weights = all_weights + (u64)first_channel * sizes.k;
    const u32 row = threadIdx.x / CHUNKS_OF_ROW;
#pragma unroll
    for (u32 c = 0; c < OF_WEIGHTS; ++c) w_offset[c] = min(64 * c + row, sizes.n - 1 - first_channel) * sizes.k;
  }

  // Starts the copies of the step at `at` of a slice.
  __device__ __forceinline__ void start(uint4* to, u32 slice, u32 at, const u32* cuts) const {
    const u32 end = cuts[slice + 1];
    const bool inside = at + rows.column < end;
    const u32 from = inside ? at + rows.column : at;
#pragma unroll
    for (u32 c = 0; c < OF_WEIGHTS; ++c) cp_async_16(to + 256 * c + threadIdx.x, weights + from + w_offset[c], inside);
    rows.start(to + 256 * OF_WEIGHTS, at, end);
  }

  // Multiplies the step at `staged`.
  template <typename A>
  static __device__ __forceinline__ void multiply_staged(Accumulators<A, NT>& acc, const uint4* staged) { multiply_step(acc, staged); }
};

// Multiplies one step.
template <typename A, int NT>
__device__ __forceinline__ void multiply_step(Accumulators<A, NT>& acc, const uint4* step) {
  const u32 warp = threadIdx.x / WARP;
  const uint4* w = step + warp % 4 * 32 * CHUNKS_OF_ROW + threadIdx.x % WARP;
  const uint4* x = step + (TILE_CHANNELS + warp / 4 * 8 * NT) * CHUNKS_OF_ROW + threadIdx.x % WARP;
  uint4 low[2], high[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    low[m] = w[(2 * m) * 8 * CHUNKS_OF_ROW];
    high[m] = w[(2 * m + 1) * 8 * CHUNKS_OF_ROW];
  }
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    const uint4 of_rows = x[t * 8 * CHUNKS_OF_ROW];
#pragma unroll
    for (int m = 0; m < 2; ++m) multiply(acc.of[m][t], low[m], high[m], of_rows);
  }
}

// Runs over all of K and calls `finish(slice)` after each slice of the iterator, when `acc` holds the slice's sums.
// The next slice continues from the values that `finish` leaves in `acc`. Operands define how a step of K is
// copied to shared memory and multiplied: see UniformOperands.
template <typename Operands, typename A, int NT, typename Finish>
__device__ __forceinline__ void run_stages(Accumulators<A, NT>& acc, const Operands operands, const u32* borders, Finish finish) {
  constexpr u32 STEP = Operands::STEP_OF_K, STEPS_OF_STAGE = Operands::STEPS_OF_STAGE;
  DYNAMIC_SHARED(stages);
  __shared__ u32 cuts[Operands::NUM_BORDERS];
  if (threadIdx.x < Operands::NUM_BORDERS) cuts[threadIdx.x] = borders[threadIdx.x];
  __syncthreads();
  typename Operands::Iterator ahead, here;
  ahead.begin(cuts, borders);
  here.begin(cuts, borders);
  u32 to = 0, from = 0;
  auto copy_stage = [&] {
    for (u32 step = 0; step < STEPS_OF_STAGE && ahead.has_next(); ++step) {
      operands.start(stages + (to * STEPS_OF_STAGE + step) * Operands::CHUNKS, ahead.slice, ahead.at, cuts);
      ahead.next(STEP);
    }
    cp_async_commit();
    to = to + 1 == STAGES<NT> ? 0 : to + 1;
  };
  for (u32 stage = 0; stage < STAGES<NT> - 1; ++stage) copy_stage();
  u32 done = 0, step = 0;
  for (;;) {
    for (; done < here.slice; ++done) finish(done);
    if (here.is_done()) break;
    do {
      if (step == 0) {
        // This stage has arrived for all threads, and all of them have finished the previous one, which the
        // next copies overwrite.
        cp_async_wait<STAGES<NT> - 2>();
        __syncthreads();
        copy_stage();
      }
      operands.multiply_staged(acc, stages + (from * STEPS_OF_STAGE + step) * Operands::CHUNKS);
      here.next(STEP);
      step = step + 1 == STEPS_OF_STAGE ? 0 : step + 1;
      if (step == 0) from = from + 1 == STAGES<NT> ? 0 : from + 1;
    } while (here.slice == done);
  }
  cp_async_wait<0>();
}

// run_stages with operands of one type.
template <typename T, typename A, int NT, typename Finish>
__device__ __forceinline__ void run_tiled(Accumulators<A, NT>& acc, const T* x, const T* weights, const u32* borders, Sizes sizes,
                                          Finish finish) {
  run_stages(acc, UniformOperands<T, NT>(x, weights, sizes), borders, finish);
}

// Calls `write(sum, row, column)` for each element of the block's tile.
template <int NT, typename Write>
__device__ __forceinline__ void write_tiled(const Accumulators<float, NT>& sums, Sizes sizes, Write write) {
  for_each<NT>([&](int m, int t, int i) {
    const u32 column = tiled_column(m, i), row = tiled_row<NT>(t, i);
    if (column < sizes.n && row < sizes.rows) write(sums.of[m][t][i], row, column);
  });
}

// Adds the sums of a slice to a tree with only two levels in registers. The third level, which is written once and
// read once, is kept in `out`, at the place where the thread will store `finish(sum, column)`.
template <int NT, typename Finish>
__device__ __forceinline__ void add_parked(u32 slice, const Accumulators<float, NT>& sums, Accumulators<float, NT> (&level)[2],
                                           float* out, Sizes sizes, Finish finish) {
  if (!(slice & 1)) {
    level[0] = sums;
  } else if (!(slice & 2)) {
    for_each<NT>([&](int m, int t, int i) { level[1].of[m][t][i] = level[0].of[m][t][i] + sums.of[m][t][i]; });
  } else {
    // Hidden from the optimizer, which would otherwise keep every element's address in registers during the
    // loop over K.
    const u32 n = opaque(sizes.n), rows = opaque(sizes.rows);
    const u32 first_column = opaque(tiled_column(0, 0)), first_row = opaque(tiled_row<NT>(0, 0));
    for_each<NT>([&](int m, int t, int i) {
      const u32 column = first_column + 16 * m + i / 2 * 8, row = first_row + 8 * t + i % 2;
      if (column >= n || row >= rows) return;
      float* to = out + (u64)row * n + column;
      float sum = level[1].of[m][t][i] + (level[0].of[m][t][i] + sums.of[m][t][i]);
      *to = slice == 7 ? finish(*to + sum, column) : sum;
    });
  }
}

// The whole product by such a tree. `to_floats(acc, slice)` returns the sums of a slice.
template <typename Operands, typename A, int NT, typename ToFloats, typename Finish>
__device__ __forceinline__ void sum_parked(Accumulators<A, NT>& acc, const Operands operands, const u32* borders, float* out,
                                           Sizes sizes, ToFloats to_floats, Finish finish) {
  Accumulators<float, NT> level[2];
  run_stages(acc, operands, borders, [&](u32 slice) {
    const Accumulators<float, NT> sums = to_floats(acc, slice);
    add_parked(slice, sums, level, out, sizes, finish);
    acc = {};
  });
}
