// Attention of many queries of a sequence over paged KV, by warpgroup instructions of compute capability 9.0.
// What it computes: attention.cuh; equal bits to attention.cu, its twin.
//
// A block is three warpgroups. A warp of the first keeps a ring of stages full by bulk copies: a stage is a
// step of 64 keys and their values, and each block of 16 keys is two copies, because KV is stored in the
// order in which the instructions read it (kv.cuh). The others have 64 queries each, whose two bf16 parts are
// in shared memory. They share the stages and take turns: while one waits for products, the scores of a step
// and what the weights of the step before add to the result, the other turns its scores into weights.

constexpr u32 COPIERS = 128;
constexpr u32 MULTIPLIERS = 256;
constexpr u32 WARPGROUP_QUERIES = 64;
constexpr u32 STEP_KEYS = 16 * STEP_BLOCKS;
constexpr u32 SPLIT_STEPS = SPLIT_BLOCKS / STEP_BLOCKS, GROUP_STEPS = GROUP_SPLITS * SPLIT_STEPS;
// Bytes of a matrix of 8 rows x 8 bf16.
constexpr u32 MATRIX_BYTES = 128;

// Places in shared memory: stages of keys and values, the queries of both warpgroups, the results of their
// rows over all groups but the last, barriers.
template <u32 HEAD_DIM>
struct Places {
  // Of 16 keys or values, of a step's, of a warpgroup's queries in one of two parts.
  static constexpr u32 BLOCK_BYTES = 16 * HEAD_DIM * 2;
  static constexpr u32 HALF_BYTES = STEP_BLOCKS * BLOCK_BYTES;
  static constexpr u32 STAGE_BYTES = 2 * HALF_BYTES;
  static constexpr u32 PART_BYTES = WARPGROUP_QUERIES * HEAD_DIM * 2;
  static constexpr u32 STAGES = 384 / HEAD_DIM;
  static constexpr u32 QUERIES_AT = STAGES * STAGE_BYTES;
  // A multiplier has HEAD_DIM / 2 values.
  static constexpr u32 ROWS_AT = QUERIES_AT + 4 * PART_BYTES;
  static constexpr u32 BARRIERS_AT = ROWS_AT + MULTIPLIERS * HEAD_DIM / 2 * 4;
  // Keys and queries: 8 rows in HEAD_DIM / 8 matrices. Values: 8 dimensions in two matrices.
  static constexpr u32 KEYS_ACROSS = HEAD_DIM / 8 * MATRIX_BYTES, VALUES_ACROSS = 2 * MATRIX_BYTES;
};

// Barriers of a block: a stage has been filled or read; it is a warpgroup's turn; all multipliers are there.
template <u32 STAGES>
struct Barriers {
  SharedAddress first;

  __device__ __forceinline__ SharedAddress filled(u32 stage) const { return first + 16 * stage; }
  __device__ __forceinline__ SharedAddress read(u32 stage) const { return first + 16 * stage + 8; }
  __device__ __forceinline__ SharedAddress turn(u32 warpgroup) const { return first + 16 * STAGES + 8 * warpgroup; }
  __device__ __forceinline__ SharedAddress together() const { return turn(2); }
  __device__ __forceinline__ void init() const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      barrier_init(filled(stage), 1);
      barrier_init(read(stage), MULTIPLIERS / WARP);
    }
    barrier_init(turn(0), MULTIPLIERS / 2 / WARP);
    barrier_init(turn(1), MULTIPLIERS / 2 / WARP);
    barrier_init(together(), MULTIPLIERS / WARP);
    barriers_ready();
  }
};

// A warp arrives at a barrier.
__device__ __forceinline__ void arrive_as_warp(SharedAddress barrier) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) barrier_arrive(barrier);
}

// A place in the ring of stages.
template <u32 STAGES>
struct RingPlace {
  u32 stage, parity;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The keys of a run of splits, from block `first_block` of 16 on, and the steps of 64 that contain them.
struct RunOfKeys {
  u32 first_block, end;
  __device__ __forceinline__ RunOfKeys(const AttentionTile& tile, const AttentionWork& run) {
    end = uniform(min(tile.end_key, run.end_split * SPLIT_KEYS));
    first_block = uniform(max(tile.first_key, run.split * SPLIT_KEYS) / 16);
  }
  __device__ __forceinline__ u32 end_block() const { return (end + 15) / 16; }
  __device__ __forceinline__ u32 first_step() const { return first_block / STEP_BLOCKS; }
  __device__ __forceinline__ u32 end_step() const { return (end + STEP_KEYS - 1) / STEP_KEYS; }
  // Whether a step has other keys, too.
  __device__ __forceinline__ bool has_others(u32 step) const {
    return step * STEP_BLOCKS < first_block || (step + 1) * STEP_KEYS > end;
  }
};

// Where a layer's keys and values are.
struct PagedKv {
  const bf16* kv;
  const u32* tables;
  u32 layer, layers;
};

// Copies all steps of a run; one warp. Two lanes copy a block of 16 keys, one its keys and one its values.
template <u32 HEAD_DIM>
__device__ __forceinline__ void copy_steps(SharedAddress memory, const PagedKv& from, u32 table, const RunOfKeys& run) {
  typedef Places<HEAD_DIM> At;
  const Barriers<At::STAGES> barriers = {memory + At::BARRIERS_AT};
  const u32 lane = threadIdx.x, end_step = run.end_step();
  RingPlace<At::STAGES> at = {0, 0};
#pragma unroll 1
  for (u32 step = run.first_step(); step < end_step; ++step) {
    const u32 first = max(step * STEP_BLOCKS, run.first_block), end = min((step + 1) * STEP_BLOCKS, run.end_block());
    const u32 block = step * STEP_BLOCKS + lane / 2;
    const bool copies = lane < 2 * STEP_BLOCKS && block >= first && block < end;
    const u64 id = copies ? from.tables[table + block] : 0;
    barrier_wait(barriers.read(at.stage), at.parity ^ 1);
    if (lane == 0) barrier_expect(barriers.filled(at.stage), (end - first) * 2 * At::BLOCK_BYTES);
    __syncwarp();
    if (copies) {
      const u64 keys = kv_block(id, from.layer, from.layers, blockIdx.y, gridDim.y, HEAD_DIM);
      const u32 place = at.stage * At::STAGE_BYTES + lane % 2 * At::HALF_BYTES + lane / 2 * At::BLOCK_BYTES;
      const char* const half = (const char*)(from.kv + keys) + lane % 2 * At::BLOCK_BYTES;
      copy_bulk(memory + place, half, At::BLOCK_BYTES, barriers.filled(at.stage));
    }
    at.next();
  }
}

// The lane's part of the result of a warpgroup's queries over some keys, as a product leaves it: values[4 n +
// i] of row g + 8 (i / 2) is dimension 8 n + 2 t + i % 2.
template <u32 HEAD_DIM>
struct Result {
  static constexpr u32 LEN = HEAD_DIM / 2;
  float values[LEN];
  Softmax softmax;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (u32 i = 0; i < LEN; ++i) values[i] = 0.0f;
    softmax.begin();
  }

  // Becomes the result of earlier keys and of the next ones, whose numbers `i` are earlier(i) and later(i).
  // Sums are those of all lanes.
  template <typename Earlier, typename Later>
  __device__ __forceinline__ void fold(const Softmax& of_earlier, const Earlier& earlier, const Softmax& of_later,
                                       const Later& later) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const Fold fold = Fold::of(of_earlier.maximum[r], of_earlier.sum[r], of_later.maximum[r], of_later.sum[r]);
      softmax.maximum[r] = fold.maximum;
      softmax.sum[r] = fold.sum;
      if (fold.is_both()) {
#pragma unroll
        for (u32 i = 0; i < LEN; ++i) {
          if (i / 2 % 2 == r) values[i] = fold.both(earlier(i), later(i));
        }
      } else {
#pragma unroll
        for (u32 i = 0; i < LEN; ++i) {
          if (i / 2 % 2 == r) values[i] = fold.value(earlier(i), later(i));
        }
      }
    }
  }
};

// A warpgroup that multiplies. A lane has rows g and g + 8 of the 16 queries of its warp.
template <u32 HEAD_DIM>
struct Multiplier {
  typedef Places<HEAD_DIM> At;
  static constexpr u32 SETS = HEAD_DIM / 16;
  uint4* memory;
  Barriers<At::STAGES> barriers;
  RingPlace<At::STAGES> at;
  u32 turn_parity;
  KeyRange sees[2];
  // Of the group so far, and of the groups before, if there are any: the values of those are in shared
  // memory.
  Result<HEAD_DIM> group;
  Softmax row;

  __device__ __forceinline__ explicit Multiplier(uint4* memory) : memory(memory), at{0, 0} {
    barriers.first = shared_address(memory) + At::BARRIERS_AT;
    // The first warpgroup has the first turn.
    turn_parity = warpgroup() ^ 1;
  }

  static __device__ __forceinline__ u32 thread() { return threadIdx.x - COPIERS; }
  static __device__ __forceinline__ u32 warpgroup() { return thread() / 128; }
  // The lane's row g in the tile.
  static __device__ __forceinline__ u32 query() { return thread() / WARP * 16 + thread() % WARP / 4; }
  // Where the warpgroup's queries are: high parts, then low ones.
  static __device__ __forceinline__ u32 queries_at() { return At::QUERIES_AT + warpgroup() * (2 * At::PART_BYTES); }

  // Waits for all multipliers, which have done so `times` times. What they wrote to shared memory before is
  // visible to products that are started after.
  __device__ __forceinline__ void wait_together(u32 times) const {
    writes_ready();
    arrive_as_warp(barriers.together());
    barrier_wait(barriers.together(), times % 2);
  }

  // Writes the two parts of the warpgroup's queries to shared memory; queries that do not exist are zero.
  __device__ __forceinline__ void load_queries(const float* qkv, const AttentionTile& tile, u32 row_width, u32 group_len) const {
    uint4* const to = memory + queries_at() / 16;
#pragma unroll 1
    for (u32 i = thread() % 128; i < WARPGROUP_QUERIES * HEAD_DIM / 8; i += 128) {
      // Eight threads write a matrix.
      const u32 eight = i / 8 % (HEAD_DIM / 8), q = warpgroup() * WARPGROUP_QUERIES + i / HEAD_DIM * 8 + i % 8;
      uint4 first = make_uint4(0, 0, 0, 0), second = first, high, low;
      if (q < tile.num_queries) {
        const u32 of = tile.first_query + q;
        const float* const from =
            qkv + (u64)(of / group_len) * row_width + (blockIdx.y * group_len + of % group_len) * HEAD_DIM + 8 * eight;
        first = load_16(from);
        second = load_16(from + 4);
      }
      split_bf16(__uint_as_float(first.x), __uint_as_float(first.y), high.x, low.x);
      split_bf16(__uint_as_float(first.z), __uint_as_float(first.w), high.y, low.y);
      split_bf16(__uint_as_float(second.x), __uint_as_float(second.y), high.z, low.z);
      split_bf16(__uint_as_float(second.z), __uint_as_float(second.w), high.w, low.w);
      to[i] = high;
      to[At::PART_BYTES / 16 + i] = low;
    }
  }

  // Finds the keys that the lane's queries see.
  __device__ __forceinline__ void find_ranges(const u32* positions, const AttentionTile& tile, u32 group_len, u32 window) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 q = query() + 8 * r;
      const bool exists = q < tile.num_queries;
      sees[r].set(exists, exists ? positions[(tile.first_query + q) / group_len] : 0, exists ? window : 0);
    }
  }

  // Zeroes the values of a stage that are not those of keys of the run: of blocks that were not copied, and
  // of slots past the sequence's end, which hold other data. Their weights are zero, but zero times them may
  // be NaN.
  __device__ __forceinline__ void clear_values(u32 step, const RunOfKeys& run) const {
    u32* const pairs = (u32*)(memory + (at.stage * At::STAGE_BYTES + At::HALF_BYTES) / 16);
#pragma unroll 1
    for (u32 i = thread(); i < At::HALF_BYTES / 4; i += MULTIPLIERS) {
      const u32 key = step * STEP_KEYS + i / (At::BLOCK_BYTES / 4) * 16 + i / 32 % 2 * 8 + i % 4 * 2;
      const bool exists = key >= run.first_block * 16;
      pairs[i] &= exists && key + 1 < run.end ? 0xffffffffu : exists && key < run.end ? 0xffffu : 0u;
    }
    // They waited for their queries, and may have done so in the first step.
    wait_together(step > run.first_step() && run.has_others(run.first_step()) ? 2 : 1);
  }

  // Waits until a step's stage is in shared memory, and for the warpgroup's turn.
  __device__ __forceinline__ void wait_for(u32 step, const RunOfKeys& run) {
    barrier_wait(barriers.filled(at.stage), at.parity);
    if (run.has_others(step)) clear_values(step, run);
    barrier_wait(barriers.turn(warpgroup()), turn_parity);
    turn_parity ^= 1;
  }

  // Starts the scores of a stage, which are added to `scores`.
  __device__ __forceinline__ void multiply_keys(float (&scores)[STEP_KEYS / 2]) const {
    const SharedAddress first = shared_address(memory);
    const Operand queries = operand_at<MATRIX_BYTES, At::KEYS_ACROSS>(first + uniform(queries_at()));
    const Operand keys = operand_at<MATRIX_BYTES, At::KEYS_ACROSS>(first + at.stage * At::STAGE_BYTES);
#pragma unroll
    for (u32 set = 0; set < SETS; ++set) {
      const Operand of_keys = operand_after(keys, set * (2 * MATRIX_BYTES));
      multiply_panels<STEP_KEYS>(scores, operand_after(queries, At::PART_BYTES + set * (2 * MATRIX_BYTES)), of_keys);
      multiply_panels<STEP_KEYS>(scores, operand_after(queries, set * (2 * MATRIX_BYTES)), of_keys);
    }
  }

  // Starts the products of weights, as two bf16 each, with the values of a stage.
  __device__ __forceinline__ void multiply_values(float (&acc)[HEAD_DIM / 2], const u32 (&high)[STEP_BLOCKS][4],
                                                  const u32 (&low)[STEP_BLOCKS][4], u32 stage) const {
    const SharedAddress values = shared_address(memory) + stage * At::STAGE_BYTES + At::HALF_BYTES;
    const Operand all_values = operand_at<MATRIX_BYTES, At::VALUES_ACROSS>(values);
#pragma unroll
    for (u32 b = 0; b < STEP_BLOCKS; ++b) {
      const Operand of_values = operand_after(all_values, b * At::BLOCK_BYTES);
      multiply_lanes<HEAD_DIM>(acc, low[b], of_values);
      multiply_lanes<HEAD_DIM>(acc, high[b], of_values);
    }
  }

  // The next turn is the other warpgroup's: its products follow those that have been started.
  __device__ __forceinline__ void end_turn() const {
    products_commit();
    arrive_as_warp(barriers.turn(warpgroup() ^ 1));
    products_wait<0>();
  }

  // Turns a step's scores into weights, each two bf16: they already are where the product's left operand has
  // them.
  __device__ __forceinline__ void weigh(Softmax& softmax, float (&scores)[STEP_KEYS / 2], u32 first_key, float scale,
                                        float (&rescale)[2], u32 (&high)[STEP_BLOCKS][4], u32 (&low)[STEP_BLOCKS][4]) const {
    auto& of_keys = reinterpret_cast<float(&)[2 * STEP_BLOCKS][4]>(scores);
    softmax.add(of_keys, sees, all_see(sees, first_key), first_key, scale, rescale);
#pragma unroll
    for (u32 i = 0; i < 4 * STEP_BLOCKS; ++i) split_bf16(scores[2 * i], scores[2 * i + 1], high[i / 4][i % 4], low[i / 4][i % 4]);
  }

  // Adds a split's result to that of its group.
  __device__ __forceinline__ void end_split(const float (&values)[HEAD_DIM / 2], Softmax& softmax) {
    softmax.add_lanes();
    group.fold(group.softmax, [&](u32 i) { return group.values[i]; }, softmax, [&](u32 i) { return values[i]; });
    order_registers(group.values);
  }

  // Ends a group: puts the result of the rows so far in shared memory, a lane where only it reads.
  __device__ __forceinline__ void end_group(bool is_first) {
    float* const of_row = row_values();
    if (!is_first) {
      group.fold(row, [&](u32 i) { return of_row[i * MULTIPLIERS]; }, group.softmax, [&](u32 i) { return group.values[i]; });
    }
#pragma unroll
    for (u32 i = 0; i < HEAD_DIM / 2; ++i) of_row[i * MULTIPLIERS] = group.values[i];
    row = group.softmax;
  }
  __device__ __forceinline__ float* row_values() const { return (float*)(memory + At::ROWS_AT / 16) + thread(); }

  template <u32 LEN>
  static __device__ __forceinline__ void set_zero(float (&sums)[LEN]) {
#pragma unroll
    for (u32 i = 0; i < LEN; ++i) sums[i] = 0.0f;
  }

  // Processes a run of keys. It leaves the result of the last group, and that of the rows before it.
  __device__ __forceinline__ void multiply_run(const RunOfKeys& run, float scale) {
    float scores[STEP_KEYS / 2], values[HEAD_DIM / 2], rescale[2];
    u32 high[STEP_BLOCKS][4], low[STEP_BLOCKS][4];
    Softmax softmax;
    softmax.begin();
    group.begin();
    u32 step = run.first_step();
    const u32 end_step = run.end_step();
    wait_for(step, run);
    set_zero(scores);
    order_registers(scores);
    products_begin();
    multiply_keys(scores);
    end_turn();
    order_registers(scores);
    weigh(softmax, scores, step * STEP_KEYS, scale, rescale, high, low);
    set_zero(values);
#pragma unroll 1
    for (++step; step < end_step; ++step) {
      const u32 stage_before = at.stage;
      at.next();
      wait_for(step, run);
      set_zero(scores);
      order_registers(scores);
      order_registers(values);
      products_begin();
      multiply_keys(scores);
      multiply_values(values, high, low, stage_before);
      end_turn();
      order_registers(scores);
      order_registers(values);
      arrive_as_warp(barriers.read(stage_before));
      if (step % SPLIT_STEPS == 0) {
        end_split(values, softmax);
        if (step % GROUP_STEPS == 0) {
          end_group(step / GROUP_STEPS - 1 == run.first_step() / GROUP_STEPS);
          group.begin();
          order_registers(group.values);
        }
        softmax.begin();
        // Rescaled like a result of other keys.
        set_zero(values);
      }
      weigh(softmax, scores, step * STEP_KEYS, scale, rescale, high, low);
#pragma unroll
      for (u32 i = 0; i < HEAD_DIM / 2; ++i) values[i] *= rescale[i / 2 % 2];
    }
    order_registers(values);
    products_begin();
    multiply_values(values, high, low, at.stage);
    products_commit();
    products_wait<0>();
    order_registers(values);
    end_split(values, softmax);
  }

  // Writes the rows of the queries that exist, of which this block has processed all keys.
  __device__ __forceinline__ void write_rows(const AttentionTile& tile, const AttentionWork& run, float* out, bf16* rounded,
                                             u32 group_len, u32 panels) {
    end_group(run.split / GROUP_SPLITS == (run.end_split - 1) / GROUP_SPLITS);
    // From shared memory in a loop: a division takes many instructions.
    const float* const of_row = row_values();
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 q = query() + 8 * r;
      if (q >= tile.num_queries) continue;
      const Merged to(out, rounded, tile.first_query + q, group_len, HEAD_DIM, panels);
      const float sum = row.sum[r];
#pragma unroll 1
      for (u32 n = 0; n < HEAD_DIM / 8; ++n) {
        const float* const two = of_row + (4 * n + 2 * r) * MULTIPLIERS;
        to.write(8 * n + threadIdx.x % 4 * 2, two[0] / sum, two[MULTIPLIERS] / sum);
      }
    }
  }

  // Writes the group's partial results of the queries that exist, number `part` of each.
  __device__ __forceinline__ void write_part(const AttentionTile& tile, u32 part, float* partial) const {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 q = query() + 8 * r;
      if (q >= tile.num_queries) continue;
      float* const to = partial + part_of(tile, part, q, gridDim.y, blockIdx.y) * part_len(HEAD_DIM);
#pragma unroll
      for (u32 m = 0; m < HEAD_DIM / 16; ++m) {
        const float* const of_lane = group.values + 8 * m + 2 * r;
        *(uint4*)(to + 16 * m + 4 * t) = make_uint4(__float_as_uint(of_lane[0]), __float_as_uint(of_lane[1]),
                                                    __float_as_uint(of_lane[4]), __float_as_uint(of_lane[5]));
      }
      const float maximum = group.softmax.maximum[r], sum = group.softmax.sum[r];
      *(u64*)(to + HEAD_DIM + 2 * t) = (u64)__float_as_uint(sum) << 32 | __float_as_uint(maximum);
    }
  }
};

// Grid (work, kv_heads), 384 threads; tiles have up to 128 queries, and a run is a group of splits or all
// splits of its tile. Dynamic shared memory: Places.
template <u32 HEAD_DIM>
__device__ __forceinline__ void attend(const float* qkv, const u32* positions, const PagedKv& kv, const AttentionTile* tiles,
                                       const AttentionWork* work, float* partial, float* out, bf16* rounded, u32 row_width,
                                       u32 group, u32 window, float scale, u32 panels) {
  // No shared memory is declared beside it: bulk copies to addresses that are no multiples of 128 are slower.
  DYNAMIC_SHARED(memory);
  const AttentionWork item = work[blockIdx.x];
  if (item.split == NO_SPLIT) return;  // all threads of the block return
  const AttentionTile tile = tiles[item.tile];
  const RunOfKeys run(tile, item);
  typedef Places<HEAD_DIM> At;
  if (threadIdx.x == 0) Barriers<At::STAGES>{shared_address(memory) + At::BARRIERS_AT}.init();
  __syncthreads();
  if (threadIdx.x < COPIERS) {
    release_registers<24>();
    if (threadIdx.x < WARP) copy_steps<HEAD_DIM>(shared_address(memory), kv, tile.table, run);
    return;
  }
  take_registers<240>();
  Multiplier<HEAD_DIM> multiplier(memory);
  multiplier.load_queries(qkv, tile, row_width, group);
  multiplier.find_ranges(positions, tile, group, window);
  multiplier.wait_together(0);
  multiplier.multiply_run(run, scale);
  // Loaded again, so that the loop needs no registers for what is used only here.
  const AttentionWork done = work[opaque(blockIdx.x)];
  const AttentionTile of = tiles[done.tile];
  if (of.part_splits == 0) {
    multiplier.write_rows(of, done, out, rounded, group, panels);
  } else {
    multiplier.write_part(of, done.split / GROUP_SPLITS - of.first_key / SPLIT_KEYS / GROUP_SPLITS, partial);
  }
}

// Parameters of attention.cu, of which this needs no blocks of its own and no counters.
#define ATTENTION_PANELS(NAME, HEAD_DIM)                                                                               \
  extern "C" __global__ void __launch_bounds__(384, 1) NAME(                                                           \
      const float* qkv, const u32* positions, const bf16* kv, const bf16* own, const u32* tables,                      \
      const AttentionTile* tiles, const AttentionWork* work, float* partial, u32* arrived, float* out, bf16* rounded,  \
      u32 first_own, u32 row_width, u32 group, u32 layer, u32 layers, u32 window, float scale, u32 panels) {           \
    attend<HEAD_DIM>(qkv, positions, {kv, tables, layer, layers}, tiles, work, partial, out, rounded, row_width,       \
                     group, window, scale, panels);                                                                    \
  }

ATTENTION_PANELS(attention_panels_64, 64)
ATTENTION_PANELS(attention_panels_128, 128)
