// The emulator's version of kernels/warpgroup.cuh. Bulk copies arrive when a thread waits for their barrier,
// and products are computed when the thread waits for them: as late as a device may do it. Sets of 16 bf16 are
// summed as `mma` does, sets of 32 int8 exactly. The race check does not see these copies and products.
#pragma once

typedef char* SharedAddress;
// A place in shared memory, and the distances between its matrices of 8 rows x 16 bytes; see warpgroup.cuh.
struct Operand {
  const char* at;
  uint32_t along_k, across;
};

namespace emulator {

// A barrier, at its place in shared memory.
struct PhaseBarrier {
  uint16_t expected, pending;
  int32_t bytes_and_phase;  // bytes on their way, times two, plus the parity of the phase
};
static_assert(sizeof(PhaseBarrier) == 8, "");
struct BulkCopy {
  char* to;
  const void* from;
  uint32_t bytes;
  char* barrier;
};
struct PanelProduct {
  void* acc;  // floats, or i32 if the operands are int8
  Operand weights, rows;
  uint32_t of_lane[4];  // the weights, if those of shared memory are null
  uint32_t num_rows, group;
  bool is_int8;
};
constexpr uint32_t MAX_BULK_COPIES = 256, MAX_PRODUCTS = 32, MOST_FRUITLESS_TURNS = 1u << 10;
static BulkCopy bulk_copies[MAX_BULK_COPIES];
static uint32_t num_bulk_copies;
static PanelProduct panel_products[MAX_THREADS][MAX_PRODUCTS];
static uint32_t num_products[MAX_THREADS], committed[MAX_THREADS];

EMULATOR_ONLY static inline PhaseBarrier& phases_at(char* at) { return *(PhaseBarrier*)at; }

EMULATOR_ONLY static inline void complete_if_done(PhaseBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes_and_phase >> 1 != 0) return;
  barrier.pending = barrier.expected;
  barrier.bytes_and_phase ^= 1;
}

EMULATOR_ONLY static inline void arrive(char* at, uint32_t bytes) {
  PhaseBarrier& barrier = phases_at(at);
  barrier.bytes_and_phase += 2 * (int32_t)bytes;
  --barrier.pending;
  complete_if_done(barrier);
}

EMULATOR_ONLY static inline void finish_bulk_copies(char* at) {
  uint32_t left = 0;
  for (uint32_t i = 0; i < num_bulk_copies; ++i) {
    const BulkCopy copy = bulk_copies[i];
    if (copy.barrier != at) {
      bulk_copies[left++] = copy;
      continue;
    }
    std::memcpy(copy.to, copy.from, copy.bytes);
    phases_at(at).bytes_and_phase -= 2 * (int32_t)copy.bytes;
    complete_if_done(phases_at(at));
  }
  num_bulk_copies = left;
}

EMULATOR_ONLY static bool is_phase_over(char* at, uint32_t parity) { return (uint32_t)(phases_at(at).bytes_and_phase & 1) != parity; }

EMULATOR_ONLY static void wait_for_phase(char* at, uint32_t parity) {
  for (uint32_t tries = 0; !is_phase_over(at, parity); ++tries) {
    finish_bulk_copies(at);
    if (is_phase_over(at, parity)) return;
    if (tries == MOST_FRUITLESS_TURNS) {
      std::fprintf(stderr, "emulator: a thread waits for a phase that is never complete\n");
      std::abort();
    }
    turn.is_polling = true;
    yield();
  }
}

// Word `word` of a row, or of a channel of weights.
EMULATOR_ONLY static inline uint32_t word_of(const Operand& operand, uint32_t row, uint32_t word) {
  uint32_t x;
  std::memcpy(&x, operand.at + row / 8 * operand.across + row % 8 * 16 + word / 4 * operand.along_k + word % 4 * 4, 4);
  return x;
}

// Computes product `index` of this warp: for every eight rows an `mma` of its 16 channels, whose fragments are
// those of this product. Weights in registers are those of the four lanes of a channel.
template <typename D>
EMULATOR_ONLY static void multiply_now(uint32_t index) {
  const PanelProduct(*const of_lanes)[MAX_PRODUCTS] = panel_products + current / 32 * 32;
  const PanelProduct& product = of_lanes[0][index];
  Tile<D> tile;
  for (uint32_t channel = 0; channel < 16; ++channel) {
    for (uint32_t word = 0; word < 8; ++word) {
      tile.a[channel][word] = product.weights.at ? word_of(product.weights, current % 128 / 32 * 16 + channel, word)
                                              : of_lanes[channel % 8 * 4 + word % 4][index].of_lane[word / 4 * 2 + channel / 8];
    }
  }
  for (uint32_t group = 0; group < product.num_rows / 8; ++group) {
    for (uint32_t word = 0; word < 8; ++word) {
      for (uint32_t row = 0; row < 8; ++row) tile.b[word][row] = word_of(product.rows, 8 * group + row, word);
    }
    for (uint32_t i = 0; i < 128; ++i) sum_of_lane(tile, i / 4, i % 4) = ((const D*)of_lanes[i / 4][index].acc)[4 * group + i % 4];
    multiply(tile);
    for (uint32_t i = 0; i < 128; ++i) ((D*)of_lanes[i / 4][index].acc)[4 * group + i % 4] = sum_of_lane(tile, i / 4, i % 4);
  }
}

// Completes this warp's products of all but the last `left` groups.
EMULATOR_ONLY static void finish_products(uint32_t left) {
  PanelProduct* const mine = panel_products[current];
  uint32_t done = 0;
  // All lanes have started theirs.
  wait(warp_barriers[warp()]);
  for (; done < num_products[current] && mine[done].group + left < committed[current]; ++done) {
    // One lane computes for all.
    if (lane() != 0) continue;
    if (mine[done].is_int8) {
      multiply_now<int32_t>(done);
    } else {
      multiply_now<float>(done);
    }
  }
  // All products are computed.
  wait(warp_barriers[warp()]);
  for (uint32_t i = done; i < num_products[current]; ++i) mine[i - done] = mine[i];
  num_products[current] -= done;
  wait(warp_barriers[warp()]);
}

EMULATOR_ONLY static void start_product(void* acc, Operand weights, const uint32_t* of_lane, Operand rows, uint32_t num_rows,
                                        bool is_int8 = false) {
  if (num_products[current] == MAX_PRODUCTS) {
    std::fprintf(stderr, "emulator: more products under way than it keeps\n");
    std::abort();
  }
  PanelProduct& product = panel_products[current][num_products[current]++];
  product = {acc, weights, rows, {}, num_rows, committed[current], is_int8};
  if (of_lane) std::memcpy(product.of_lane, of_lane, sizeof(product.of_lane));
}

// The place in block `to` of the cluster that corresponds to one in this block.
EMULATOR_ONLY static char* place_in(char* at, uint32_t to) { return shared_of_blocks[to] + (at - shared_of_blocks[rank()]); }

EMULATOR_ONLY static void start_bulk_copy(char* to, const void* from, uint32_t bytes, char* barrier, uint32_t blocks) {
  // On a device the copy would touch more sectors of the cache. Dynamic shared memory begins at such a multiple.
  if ((to - shared_of_blocks[rank()]) % 128 != 0) {
    std::fprintf(stderr, "emulator: a bulk copy to an address that is no multiple of 128\n");
    std::abort();
  }
  global_bytes += bytes;
  note_read(from, bytes);
  for (uint32_t block = 0; blocks >> block != 0; ++block) {
    if (!(blocks >> block & 1)) continue;
    if (num_bulk_copies == MAX_BULK_COPIES) {
      std::fprintf(stderr, "emulator: more bulk copies under way than it keeps\n");
      std::abort();
    }
    std::memset(place_in(to, block), 0xa5, bytes);
    bulk_copies[num_bulk_copies++] = {place_in(to, block), from, bytes, place_in(barrier, block)};
  }
}

EMULATOR_ONLY static void init_phases(char* at, uint32_t arrivals) {
  phases_at(at) = {(uint16_t)arrivals, (uint16_t)arrivals, 0};
}

EMULATOR_ONLY static void commit_products() { ++committed[current]; }

}  // namespace emulator

static inline SharedAddress shared_address(const void* at) { return (char*)at; }
static inline void barrier_init(SharedAddress at, uint32_t arrivals) { emulator::init_phases(at, arrivals); }
static inline void barriers_ready() {}
static inline void barrier_arrive(SharedAddress at) { emulator::arrive(at, 0); }
static inline void barrier_arrive_in(uint32_t block, SharedAddress at) { emulator::arrive(emulator::place_in(at, block), 0); }
static inline uint32_t cluster_rank() { return emulator::rank(); }
static inline void cluster_sync() { emulator::wait(emulator::cluster_barrier); }
static inline void barrier_expect(SharedAddress at, uint32_t bytes) { emulator::arrive(at, bytes); }
static inline void barrier_wait(SharedAddress at, uint32_t parity) { emulator::wait_for_phase(at, parity); }
static inline void copy_bulk(SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  emulator::start_bulk_copy(to, from, bytes, barrier, 1u << emulator::rank());
}
static inline void copy_bulk_to(uint32_t blocks, SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  emulator::start_bulk_copy(to, from, bytes, barrier, blocks);
}
template <int COUNT>
static inline void take_registers() {}
template <int COUNT>
static inline void release_registers() {}
EMULATOR_ONLY static inline uint32_t uniform(uint32_t x) {
  const uint32_t of_first = emulator::shuffle(x, 0);
  if (of_first == x) return x;
  std::fprintf(stderr, "emulator: lanes of a warp have %u and %u where they should have the same\n", of_first, x);
  std::abort();
}
static inline void writes_ready() {}
template <uint32_t ALONG_K, uint32_t ACROSS>
static inline Operand operand_at(SharedAddress at) {
  return {at, ALONG_K, ACROSS};
}
static inline Operand operand_after(Operand operand, uint32_t bytes) {
  return {operand.at + bytes, operand.along_k, operand.across};
}
static inline Operand panels_at(SharedAddress at) { return operand_at<128, 1024>(at); }
template <typename Sum, int LEN>
static inline void order_registers(Sum (&)[LEN]) {}
static inline void products_begin() {}
static inline void products_commit() { emulator::commit_products(); }
template <int LEFT>
static inline void products_wait() {
  emulator::finish_products(LEFT);
}
template <int ROWS>
static inline void multiply_panels(float (&acc)[ROWS / 2], Operand weights, Operand rows) {
  emulator::start_product(acc, weights, nullptr, rows, ROWS);
}
template <int ROWS>
static inline void multiply_panels(int32_t (&acc)[ROWS / 2], Operand weights, Operand rows) {
  emulator::start_product(acc, weights, nullptr, rows, ROWS, true);
}
template <int ROWS>
static inline void multiply_lanes(float (&acc)[ROWS / 2], const uint32_t (&weights)[4], Operand rows) {
  emulator::start_product(acc, {}, weights, rows, ROWS);
}
