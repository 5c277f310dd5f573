// Runs the kernels' own sources on the host. Every thread of a block is a fiber; at a barrier a fiber waits
// for the others. Blocks run one after another, those of a cluster together. Blocks of a grid, warps, and the
// lanes of a warp between two barriers run in random order. Slow and exact: it tests indices, barriers, bounds
// and arithmetic, but not speed. Tensor cores round as published models say (`fused_sum`).
//
// Built with CHECK_RACES and -fsanitize=thread it also records, for every byte, which thread of which block
// read and wrote it since the last barrier (races.hpp).
//
// Asynchronous copies complete as late as possible: their bytes arrive when the thread waits for them, and
// are garbage before.
//
// Built with -ffp-contract=off, which corresponds to --fmad=false of NVRTC. Allocations end at a protected
// page, so that a read or write past the end stops the process; so does a load of 8 or 16 bytes that is not
// aligned. Must never be linked into a server.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <sys/mman.h>
#include <time.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define EMULATED 1
#ifdef CHECK_RACES
// Marks functions that are not part of a kernel: the sanitizer does not instrument their accesses.
#define EMULATOR_ONLY __attribute__((no_sanitize("thread"), noinline))
// The same for small functions that only such functions call.
#define EMULATOR_INLINE __attribute__((no_sanitize("thread"), always_inline)) inline
#else
#define EMULATOR_ONLY
#define EMULATOR_INLINE inline
#endif
// Marks functions that switch fibers: other code runs before they return, so callers must not assume that
// they preserve registers.
#if defined(__GNUC__) && !defined(__clang__)
#define SWITCHES __attribute__((noipa))
#else
#define SWITCHES __attribute__((noinline))
#endif
#define WARP 32u
#define NEG_INF (-INFINITY)
#define POS_INF INFINITY
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
// A static variable can stand for shared memory, because blocks run one after another and all fibers on one
// thread. Kernels of clusters declare none.
#define __shared__ static

struct Dim3 {
  uint32_t x, y, z;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr uint32_t MAX_CLUSTER = 4;
// Of all blocks of a cluster.
constexpr uint32_t MAX_THREADS = MAX_CLUSTER * 384;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t MOST_TURNS_OF_A_WARP = 16;

// Saved context of a fiber or of the scheduler: the buffer of GCC's and Clang's __builtin_setjmp. The C
// library's setjmp checks more on each jump.
using SavedContext = void* [5];

// Barrier among fibers; `expected` decreases as threads return.
struct Barrier {
  uint32_t expected = 0, arrived = 0, generation = 0;
};

static Barrier cluster_barrier, block_barriers[MAX_CLUSTER], warp_barriers[MAX_THREADS / 32];
static SavedContext scheduler, fibers[MAX_THREADS];
// A fiber is created once per process, and runs one thread of each cluster after another.
static uint32_t num_created, num_fibers;
static bool done[MAX_THREADS];
constexpr uint32_t NO_FIBER = ~0u;
// The turn of a warp: the order of its lanes, how many ran, how many of these returned, and whether one looked
// for something that no barrier announces and did not find it.
static struct {
  uint32_t warp, first_lane, step, lanes_tried, ran, returned;
  bool is_polling;
} turn;
// The barrier that a fiber waits for, and the generation that must end first.
static Barrier* awaited[MAX_THREADS];
static uint32_t awaited_generation[MAX_THREADS];
// Fiber r * block_threads + t is thread t of block r of the cluster, whose first block is number `cluster_first`.
static uint32_t current, block_threads, cluster_first;
// The block of each fiber in the cluster, and the place of these blocks in the grid.
static uint8_t ranks[MAX_THREADS];
static Dim3 places[MAX_CLUSTER];
static void (*body)(void**);
static void** body_params;
// What lanes give each other between two barriers of their warp; see `slot`.
static uint64_t exchange[2][MAX_THREADS / 32][32];
// Asynchronous copies of a thread, in order; `sizes` holds the sizes of its groups, the open group last. Like
// all state here it is never destroyed: the process may exit while a thread still runs a kernel.
struct Copy {
  void* to;
  const void* from;  // null: zeros
};
struct Copies {
  static constexpr uint32_t MAX_COPIES = 256, MAX_GROUPS = 16;
  Copy copies[MAX_COPIES];
  uint32_t sizes[MAX_GROUPS];
  uint32_t first, under_way, first_group, groups;
};
static Copies copies[MAX_THREADS];
// Shared memory of each block of the cluster, whose size is a launch parameter; it ends at a protected page.
static char* shared_of_blocks[MAX_CLUSTER];
// Bytes that kernels have read from global memory by load_16, load_8, load_4 and cp_async_16.
static uint64_t global_bytes;
// Stacks of all fibers.
static char stacks[MAX_THREADS * STACK_BYTES];
// State of the SplitMix64 generator (Steele et al. 2014) that orders threads and blocks: similar seeds give
// unrelated orders.
static uint64_t order = 1;
// Compute capability of the device whose tensor cores are emulated, times ten: 80, 89 or 90.
static uint32_t capability = 90;

// A launch of which some clusters wait for another launch. Only one launch runs at a time, so these clusters
// end, and run again from their beginning when others have had a turn. To the race check a block that runs
// again belongs to a new launch: its accesses are not compared with those of earlier tries.
struct Waiting {
  std::vector<uint64_t> clusters;
  // When the launch began, by `nanoseconds`.
  uint64_t began;
};
static uint64_t launch_began;
// Whether the cluster that runs has to run again.
static bool cluster_runs_again;

EMULATOR_ONLY static uint32_t random_below(uint32_t end) {
  uint64_t x = order += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (uint32_t)((x >> 32) * end >> 32);
}

#ifdef CHECK_RACES
}  // namespace emulator
#include "races.hpp"
namespace emulator {
// Allocated memory: start addresses and sizes in bytes.
static std::map<uintptr_t, size_t>& regions = *new std::map<uintptr_t, size_t>;
EMULATOR_ONLY static bool is_stack(uintptr_t at) { return at >= (uintptr_t)stacks && at < (uintptr_t)stacks + sizeof(stacks); }
EMULATOR_ONLY static bool is_device_memory(uintptr_t page) {
  // An allocation ends at a page boundary.
  auto next = regions.upper_bound(page + 4095);
  if (next == regions.begin()) return false;
  --next;
  for (const char* shared : shared_of_blocks) {
    if ((const char*)next->first == shared) return false;
  }
  return page < next->first + next->second;
}
EMULATOR_ONLY static void note_region(uintptr_t at, size_t bytes) {
  ++regions_changed;
  if (bytes) {
    regions[at] = bytes;
  } else {
    regions.erase(at);
  }
}
EMULATOR_ONLY static void note_barrier(uint32_t rank) {
  races::learn(rank);
  races::intervals[rank] = ++races::last_interval;
}
EMULATOR_ONLY static void note_launch() { ++races::launch; }
EMULATOR_ONLY static void note_begin() {
  for (uint32_t& interval : races::intervals) interval = ++races::last_interval;
  races::forget();
  races::is_running = true;
}
EMULATOR_ONLY static void note_turn(uint32_t block, uint32_t rank) {
  races::block = block;
  races::rank = rank;
}
EMULATOR_ONLY static void note_end() { races::is_running = false; }
// Records a write that the emulator makes for a thread.
EMULATOR_ONLY static void note_write(void* to, size_t bytes) { races::touch(to, bytes, true); }
EMULATOR_ONLY static void note_read(const void* from, size_t bytes) { races::touch((void*)from, bytes, false); }
EMULATOR_ONLY static void note_fence() { races::fence(); }
EMULATOR_ONLY static void note_count(const uint32_t* at) { races::count(at); }
#else
EMULATOR_ONLY static void note_region(uintptr_t, size_t) {}
EMULATOR_ONLY static void note_barrier(uint32_t) {}
EMULATOR_ONLY static void note_launch() {}
EMULATOR_ONLY static void note_begin() {}
EMULATOR_ONLY static void note_turn(uint32_t, uint32_t) {}
EMULATOR_ONLY static void note_end() {}
EMULATOR_ONLY static void note_write(void*, size_t) {}
EMULATOR_ONLY static void note_read(const void*, size_t) {}
EMULATOR_ONLY static void note_fence() {}
EMULATOR_ONLY static void note_count(const uint32_t*) {}
#endif

EMULATOR_ONLY static inline void start_copy(Copy copy) {
  Copies& mine = copies[current];
  if (mine.under_way == Copies::MAX_COPIES) {
    std::fprintf(stderr, "emulator: more asynchronous copies under way than it keeps\n");
    std::abort();
  }
  mine.copies[(mine.first + mine.under_way++) % Copies::MAX_COPIES] = copy;
  ++mine.sizes[(mine.first_group + mine.groups) % Copies::MAX_GROUPS];
}

EMULATOR_ONLY static inline void commit_copies() {
  Copies& mine = copies[current];
  if (mine.groups + 1 == Copies::MAX_GROUPS) {
    std::fprintf(stderr, "emulator: more groups of copies under way than it keeps\n");
    std::abort();
  }
  ++mine.groups;
  mine.sizes[(mine.first_group + mine.groups) % Copies::MAX_GROUPS] = 0;
}

EMULATOR_ONLY static inline void finish_groups(uint32_t left) {
  Copies& mine = copies[current];
  for (; mine.groups > left; --mine.groups) {
    for (uint32_t i = 0; i < mine.sizes[mine.first_group]; ++i) {
      const Copy copy = mine.copies[mine.first];
      note_write(copy.to, 16);
      if (copy.from) {
        note_read(copy.from, 16);
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
      mine.first = (mine.first + 1) % Copies::MAX_COPIES;
      --mine.under_way;
    }
    mine.first_group = (mine.first_group + 1) % Copies::MAX_GROUPS;
  }
}

// A separate function, because a longjmp must not be in the function that called setjmp.
EMULATOR_ONLY SWITCHES __attribute__((noreturn)) static void jump(SavedContext& to) { __builtin_longjmp(to, 1); }

EMULATOR_ONLY static bool is_waiting(uint32_t fiber) {
  return awaited[fiber] && awaited[fiber]->generation == awaited_generation[fiber];
}

// The next lane of the warp's turn that waits for nothing, or NO_FIBER.
EMULATOR_ONLY static uint32_t next_lane() {
  while (turn.lanes_tried < 32) {
    const uint32_t fiber = turn.warp * 32 + (turn.first_lane + turn.lanes_tried++ * turn.step) % 32;
    if (fiber < num_fibers && !done[fiber] && !is_waiting(fiber)) return fiber;
  }
  return NO_FIBER;
}

// Makes `fiber` the one that runs.
EMULATOR_ONLY static void enter(uint32_t fiber) {
  current = fiber;
  ++turn.ran;
  threadIdx = {fiber - ranks[fiber] * block_threads, 0, 0};
  blockIdx = places[ranks[fiber]];
  note_turn(cluster_first + ranks[fiber], ranks[fiber]);
  awaited[fiber] = nullptr;
}

// Switches to the next lane of the warp, or to the scheduler; returns when this fiber is resumed.
EMULATOR_ONLY SWITCHES static void yield() {
  if (__builtin_setjmp(fibers[current])) return;
  const uint32_t next = next_lane();
  if (next == NO_FIBER) jump(scheduler);
  enter(next);
  jump(fibers[next]);
}

EMULATOR_ONLY static inline void release_if_full(Barrier& barrier) {
  if (barrier.expected > 0 && barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    for (uint32_t rank = 0; rank < MAX_CLUSTER; ++rank) {
      if (&barrier == &block_barriers[rank] || &barrier == &cluster_barrier) note_barrier(rank);
    }
  }
}

EMULATOR_ONLY static inline void wait(Barrier& barrier) {
  const uint32_t generation = barrier.generation;
  ++barrier.arrived;
  release_if_full(barrier);
  if (barrier.generation != generation) return;
  awaited[current] = &barrier;
  awaited_generation[current] = generation;
  yield();
}

EMULATOR_ONLY static inline uint32_t lane() { return current % 32; }
// Warps are counted through the blocks of the cluster.
EMULATOR_ONLY static inline uint32_t warp() { return current / 32; }
EMULATOR_ONLY static inline uint32_t rank() { return ranks[current]; }

// The place where a fiber waits for its first thread.
EMULATOR_ONLY SWITCHES static void stand_by() {
  if (!__builtin_setjmp(fibers[current])) jump(scheduler);
}

// Main function of a fiber, on the fiber's stack; never returns. Each iteration runs one thread of one block.
EMULATOR_ONLY static void fiber_main() {
  for (stand_by();; yield()) {
    body(body_params);
    // Copies that the thread did not wait for never arrive.
    Copies& mine = copies[current];
    mine.first = mine.under_way = mine.first_group = mine.groups = mine.sizes[0] = 0;
    done[current] = true;
    ++turn.returned;
    for (Barrier* barrier : {&cluster_barrier, &block_barriers[rank()], &warp_barriers[warp()]}) {
      --barrier->expected;
      release_if_full(*barrier);
    }
  }
}

EMULATOR_ONLY SWITCHES static void create(uint32_t fiber) {
  current = fiber;
  if (__builtin_setjmp(scheduler)) return;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = &stacks[fiber * STACK_BYTES];
  // Stack tops a power of two apart would share few cache lines, so they are staggered.
  context.uc_stack.ss_size = STACK_BYTES - fiber % 128 * 192;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

// Runs the lanes of a warp that wait for nothing, in random order, until each waits or has returned: a lane
// hands over to the next. Returns whether the warp may get further if it runs again.
EMULATOR_ONLY SWITCHES static bool run_warp(uint32_t warp) {
  turn = {warp, random_below(32), 2 * random_below(16) + 1, 0, 0, 0, false};
  const uint32_t first = next_lane();
  if (first == NO_FIBER) return false;
  if (__builtin_setjmp(scheduler)) return !turn.is_polling;
  enter(first);
  jump(fibers[first]);
}

EMULATOR_ONLY static void run_cluster(uint32_t blocks) {
  const uint32_t threads = blocks * block_threads, warps = (threads + 31) / 32;
  for (; num_created < threads; ++num_created) create(num_created);
  num_fibers = threads;
  cluster_barrier = {threads, 0, 0};
  for (uint32_t rank = 0; rank < blocks; ++rank) {
    block_barriers[rank] = {block_threads, 0, 0};
    const uint32_t block = cluster_first + rank;
    places[rank] = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
  }
  static uint32_t order_of_warps[MAX_THREADS / 32];
  for (uint32_t w = 0; w < warps; ++w) {
    warp_barriers[w] = {threads - w * 32 < 32 ? threads - w * 32 : 32, 0, 0};
    order_of_warps[w] = w;
  }
  for (uint32_t i = 0; i < threads; ++i) {
    done[i] = false;
    awaited[i] = nullptr;
    ranks[i] = (uint8_t)(i / block_threads);
  }
  uint32_t held_block = 0, held_turns = 0;
  for (uint32_t left = threads; left > 0;) {
    for (uint32_t i = warps - 1; i > 0; --i) {
      // Not std::swap, whose accesses would count as the thread's.
      const uint32_t other = random_below(i + 1), kept = order_of_warps[i];
      order_of_warps[i] = order_of_warps[other];
      order_of_warps[other] = kept;
    }
    // Now and then a block of a cluster stands still for a while, and the others go on.
    if (blocks > 1 && held_turns == 0 && random_below(16) == 0) {
      held_block = random_below(blocks);
      held_turns = random_below(64);
    }
    bool resumed = false;
    for (uint32_t i = 0; i < warps; ++i) {
      const uint32_t w = order_of_warps[i];
      if (held_turns > 0 && ranks[w * 32] == held_block) continue;
      // A warp gets ahead of the others by a random number of its barriers: the stacks of all warps together
      // would not fit in the first-level cache.
      bool goes_on = true;
      for (uint32_t again = 1 + random_below(MOST_TURNS_OF_A_WARP); goes_on && again > 0; --again) {
        goes_on = run_warp(w);
        resumed |= turn.ran > 0;
        left -= turn.returned;
      }
    }
    if (held_turns > 0) {
      held_turns = resumed ? held_turns - 1 : 0;
      continue;
    }
    if (!resumed) {
      std::fprintf(stderr, "emulator: threads of block (%u, %u, %u) wait for a barrier that not all reach\n",
                   blockIdx.x, blockIdx.y, blockIdx.z);
      std::abort();
    }
  }
}

// The buffer of a warp's next exchange. Exchanges alternate between two buffers, so that one barrier suffices:
// lanes write a buffer again after the following barrier, which all lanes reach after they have read it.
EMULATOR_ONLY static inline uint32_t slot() { return warp_barriers[warp()].generation % 2; }

// Returns the value of lane `from`.
template <typename T>
EMULATOR_ONLY static inline T shuffle(T value, uint32_t from) {
  static_assert(sizeof(T) <= 8, "");
  uint64_t(&values)[32] = exchange[slot()][warp()];
  std::memcpy(&values[lane()], &value, sizeof(T));
  wait(warp_barriers[warp()]);
  T result;
  std::memcpy(&result, &values[from], sizeof(T));
  return result;
}

// See prelude.cuh. No lane goes on before all have read.
EMULATOR_ONLY static inline void read_matrices(uint32_t (&to)[4], const void* row) {
  uint64_t(&rows)[32] = exchange[slot()][warp()];
  std::memcpy(&rows[lane()], &row, sizeof(row));
  wait(warp_barriers[warp()]);
  for (uint32_t m = 0; m < 4; ++m) {
    const char* of_matrix;
    std::memcpy(&of_matrix, &rows[8 * m + lane() / 4], sizeof(of_matrix));
    note_read(of_matrix + lane() % 4 * 4, 4);
    std::memcpy(&to[m], of_matrix + lane() % 4 * 4, 4);
  }
  wait(warp_barriers[warp()]);
}

// Number `part` of a word: one of two bf16 as f64, or one of four int8 as i32.
template <typename Number>
EMULATOR_INLINE static Number number(uint32_t word, uint32_t part) {
  if constexpr (std::is_same<Number, double>::value) {
    const uint32_t bits = (part ? word >> 16 : word & 0xffffu) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  } else {
    return (int8_t)(word >> (8 * part));
  }
}

// Eight numbers, computed together.
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef double HalfDoubles __attribute__((vector_size(32)));
typedef int64_t HalfLongs __attribute__((vector_size(32)));
typedef int32_t HalfInts __attribute__((vector_size(16)));
typedef float HalfFloats __attribute__((vector_size(16)));

// Numbers as tensor cores align them: significand times 2^exponent. Significands are in [1, 2), below 1 in
// subnormal numbers, with a sign. A zero has an exponent below all others, so that it aligns nothing.
struct Parts {
  Floats significands;
  Ints exponents;
};

EMULATOR_INLINE static Ints larger(Ints a, Ints b) { return a > b ? a : b; }
EMULATOR_INLINE static bool any(Ints mask) {
  uint64_t words[4];
  std::memcpy(words, &mask, sizeof(words));
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}
// Bits of bf16 `part` of each word, as f32.
EMULATOR_INLINE static Ints bits_of(Ints words, uint32_t part) { return part ? words & (int32_t)0xffff0000u : words << 16; }
EMULATOR_INLINE static Ints are_special(Ints bits) { return (bits & 0x7f800000) == 0x7f800000; }
EMULATOR_INLINE static Parts parts(Ints bits) {
  const Ints field = bits >> 23 & 255, is_small = field == 0;
  const Floats normal = (Floats)((bits & (int32_t)0x807fffffu) | 0x3f800000), small = (Floats)bits * 0x1p126f;
  const Ints exponents = larger(field, Ints{} + 1) - 127;
  return {is_small ? small : normal, (bits & 0x7fffffff) == 0 ? Ints{} - 512 : exponents};
}

// Place of a set's number in `fused_sum`: the numbers of words 0 to 3 come first. Inside a block the order does
// not matter.
EMULATOR_INLINE static constexpr uint32_t place(uint32_t word, uint32_t part) { return word / 4 * 8 + part * 4 + word % 4; }

// Cuts numbers toward zero to multiples of 2^(largest - BITS), and returns how many of these they are;
// `shift` is BITS + 127 - largest.
EMULATOR_INLINE static Ints cut(Floats significands, Ints exponents, Ints shift) {
  const Ints field = larger(exponents + shift, Ints{} + 64);
  return __builtin_convertvector(significands * (Floats)(field << 23), Ints);
}

// c + a[0] b[0] + .. of finite bf16 numbers and f32 sums, as a tensor core adds a block of COUNT products at
// once; in eight lanes, with the same `a`. Products are exact. They and c are cut toward zero, to BITS bits
// after the binary point of the largest exponent among them, where the exponent of a product is the sum of
// those of its factors. The cut numbers are added exactly, and the sum is cut to f32, toward zero. By compute
// capability:
//   8.0, 8.9: 24 bits, blocks of 8: an instruction over 16 of K adds two blocks, one after the other
//   9.0: 25 bits, blocks of 16, by mma.sync and by wgmma
// The authors of these models compared them with GPUs, bit for bit on random numbers: MMA-Sim (Xie et al.
// 2025, arXiv 2511.10909) and Khattak and Mikaitis (2025, arXiv 2512.07004), who agree, for A100, Ada and
// H100; after Fasi et al. (2021, PeerJ CS 7:e330), who found the cuts, the blocks of A100 and that subnormal
// numbers count. Here, the model of 9.0 gives the differences that an H200 reported (parity/tensor_cores.rs);
// that of 8.0 was compared with no GPU.
// Uncertain, because the sources differ or do not say: zeros (here they align nothing), exponents below -126
// (here all numbers align to -126 at least), sums beyond the largest f32 (here infinity), the sign of a zero
// sum (here +). That FP8 sums keep about 14 bits (DeepSeek-V3, 2024, arXiv 2412.19437) concerns FP8 operands:
// our kernels widen FP8 weights to bf16.
template <int32_t BITS, uint32_t COUNT>
EMULATOR_INLINE static Floats fused_sum(const float* a, const int32_t* a_exponents, const Parts* b, Floats addends) {
  const Parts c = parts((Ints)addends);
  Ints largest = larger(c.exponents, Ints{} - 126);
  for (uint32_t k = 0; k < COUNT; ++k) largest = larger(largest, b[k].exponents + a_exponents[k]);
  const Ints shift = BITS + 127 - largest;
  // Below 2^31: at most 16 products below 4 times 2^25, and those of bf16 significands are at most 3.97.
  Ints products = {};
  for (uint32_t k = 0; k < COUNT; ++k) products += cut(b[k].significands * a[k], b[k].exponents + a_exponents[k], shift);
  const Ints cut_c = cut(c.significands, c.exponents, shift);
  HalfDoubles sums[2];
  HalfFloats rounded[2];
  for (uint32_t half = 0; half < 2; ++half) {
    HalfInts of_products, of_c, exponents;
    std::memcpy(&of_products, (const char*)&products + 16 * half, 16);
    std::memcpy(&of_c, (const char*)&cut_c + 16 * half, 16);
    std::memcpy(&exponents, (const char*)&largest + 16 * half, 16);
    const HalfDoubles exact = __builtin_convertvector(of_products, HalfDoubles) + __builtin_convertvector(of_c, HalfDoubles);
    // The 24 highest bits.
    const HalfDoubles high = (HalfDoubles)((HalfLongs)exact & ~((int64_t(1) << 29) - 1));
    sums[half] = high * (HalfDoubles)((__builtin_convertvector(exponents, HalfLongs) + (1023 - BITS)) << 52);
    rounded[half] = __builtin_convertvector(sums[half], HalfFloats);
  }
  Floats result;
  std::memcpy(&result, rounded, sizeof(result));
  const Ints may_be_subnormal = largest < BITS - 126;
  for (uint32_t i = 0; any(may_be_subnormal) && i < 8; ++i) {
    // The conversion rounded a subnormal number to nearest.
    const double sum = sums[i / 4][i % 4];
    if (may_be_subnormal[i] && std::fabs((double)result[i]) > std::fabs(sum)) result[i] = std::nextafter(result[i], 0.0f);
  }
  return result;
}

// c + a b over a set of 16 of K.
EMULATOR_INLINE static Floats multiply_set(const float* a, const int32_t* a_exponents, const Parts* b, Floats c) {
  if (capability >= 90) return fused_sum<25, 16>(a, a_exponents, b, c);
  const Floats first = fused_sum<24, 8>(a, a_exponents, b, c);
  return are_special((Ints)first) ? first : fused_sum<24, 8>(a + 8, a_exponents + 8, b + 8, first);
}

// Operands and sums of a warp's `mma`, as lanes hold them: 8 words of a row of `a` and of a column of `b`.
template <typename D>
struct alignas(32) Tile {
  uint32_t a[16][8], b[8][8];
  D d[16][8];
};

// Sum `i` of a lane; see prelude.cuh for the fragment layout.
template <typename D>
EMULATOR_INLINE static D& sum_of_lane(Tile<D>& tile, uint32_t lane, uint32_t i) {
  return tile.d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

// d += a b of bf16.
EMULATOR_ONLY static void multiply(Tile<float>& tile) {
  Parts b[16];
  Ints special_columns = {};
  for (uint32_t word = 0; word < 8; ++word) {
    Ints words;
    std::memcpy(&words, tile.b[word], sizeof(words));
    for (uint32_t part = 0; part < 2; ++part) {
      b[place(word, part)] = parts(bits_of(words, part));
      special_columns |= are_special(bits_of(words, part));
    }
  }
  for (uint32_t row = 0; row < 16; ++row) {
    float a[16];
    int32_t a_exponents[16];
    Ints words, special_numbers = {};
    std::memcpy(&words, tile.a[row], sizeof(words));
    for (uint32_t part = 0; part < 2; ++part) {
      const Parts of_part = parts(bits_of(words, part));
      special_numbers |= are_special(bits_of(words, part));
      for (uint32_t half = 0; half < 2; ++half) {
        std::memcpy(a + place(4 * half, part), (const char*)&of_part.significands + 16 * half, 16);
        std::memcpy(a_exponents + place(4 * half, part), (const char*)&of_part.exponents + 16 * half, 16);
      }
    }
    Floats c;
    std::memcpy(&c, tile.d[row], sizeof(c));
    Floats sums = multiply_set(a, a_exponents, b, c);
    Ints are_specials = special_columns | are_special((Ints)c);
    if (any(special_numbers)) are_specials = Ints{} - 1;
    for (uint32_t n = 0; any(are_specials) && n < 8; ++n) {
      if (!are_specials[n]) continue;
      // Infinite, or no number.
      double sum = c[n];
      for (uint32_t k = 0; k < 16; ++k) sum += number<double>(tile.a[row][k / 2], k % 2) * number<double>(tile.b[k / 2][n], k % 2);
      sums[n] = (float)sum;
    }
    std::memcpy(tile.d[row], &sums, sizeof(sums));
  }
}

// d += a b of int8, exact. Written so that the sums of a row stay in registers.
EMULATOR_ONLY static void multiply(Tile<int32_t>& tile) {
  Ints b[32];
  for (uint32_t k = 0; k < 32; ++k) {
    for (uint32_t n = 0; n < 8; ++n) b[k][n] = number<int32_t>(tile.b[k / 4][n], k % 4);
  }
  for (uint32_t row = 0; row < 16; ++row) {
    Ints sums;
    std::memcpy(&sums, tile.d[row], sizeof(sums));
#pragma GCC unroll 32
    for (uint32_t k = 0; k < 32; ++k) sums += number<int32_t>(tile.a[row][k / 4], k % 4) * b[k];
    std::memcpy(tile.d[row], &sums, sizeof(sums));
  }
}

// d[16 x 8] += a b; see prelude.cuh for the fragment layout. The last lane that arrives multiplies for all.
template <typename D>
EMULATOR_ONLY static inline void mma(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static Tile<D> tiles[2][MAX_THREADS / 32];
  Tile<D>& tile = tiles[slot()][warp()];
  const uint32_t g = lane() / 4, t = lane() % 4;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) {
    tile.a[g + 8 * (i % 2)][i / 2 * 4 + t] = a[i];
    sum_of_lane(tile, lane(), i) = d[i];
  }
  tile.b[t][g] = b[0];
  tile.b[4 + t][g] = b[1];
  Barrier& barrier = warp_barriers[warp()];
  if (barrier.arrived + 1 == barrier.expected) multiply(tile);
  wait(barrier);
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) d[i] = sum_of_lane(tile, lane(), i);
}

// A GPU faults at global memory that is not aligned to the size of the access.
EMULATOR_INLINE static void check_aligned(const void* at, uintptr_t bytes) {
  if ((uintptr_t)at % bytes == 0) return;
  std::fprintf(stderr, "emulator: %u bytes are read at an address that is no multiple of that\n", (unsigned)bytes);
  std::abort();
}

template <typename T>
static T parameter(void* place) {
  T value;
  std::memcpy(&value, place, sizeof(T));
  return value;
}

template <auto KERNEL, typename... Args, size_t... I>
static void call(void (*)(Args...), void** params, std::index_sequence<I...>) {
  KERNEL(parameter<Args>(params[I])...);
}

template <auto KERNEL, typename... Args>
static void unpack(void (*as_function)(Args...), void** params) {
  call<KERNEL>(as_function, params, std::index_sequence_for<Args...>{});
}

// Wraps a kernel so that it takes its parameters as in cuLaunchKernel: an array of pointers to them.
template <auto KERNEL>
static void entry(void** params) {
  unpack<KERNEL>(KERNEL, params);
}

template <typename... Args>
constexpr uint32_t num_params(void (*)(Args...)) {
  return sizeof...(Args);
}

}  // namespace emulator

static inline void __syncthreads() { emulator::wait(emulator::block_barriers[emulator::rank()]); }
static inline void __syncwarp() { emulator::wait(emulator::warp_barriers[emulator::warp()]); }
static inline void __threadfence() { emulator::note_fence(); }
// Increments a counter whose largest value is `last`, after which zero follows; returns its value before.
// Fibers run on one thread, so it is atomic.
EMULATOR_ONLY static inline uint32_t atomicInc(uint32_t* counter, uint32_t last) {
  emulator::note_count(counter);
  const uint32_t before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
template <typename T>
static inline T __shfl_xor_sync(uint32_t, T value, uint32_t with) {
  return emulator::shuffle(value, emulator::lane() ^ with);
}
static inline int __all_sync(uint32_t, int is_true) {
  for (uint32_t with = 1; with < 32; with *= 2) is_true &= emulator::shuffle(is_true, emulator::lane() ^ with);
  return is_true;
}
// Lanes below `by` keep their own value.
template <typename T>
static inline T __shfl_up_sync(uint32_t, T value, uint32_t by) {
  return emulator::shuffle(value, emulator::lane() >= by ? emulator::lane() - by : emulator::lane());
}
// Accesses that order memory between devices and with the host's threads. They are not part of the race
// check, which compares accesses of one launch.
EMULATOR_ONLY static inline uint32_t load_acquire_system(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
EMULATOR_ONLY static inline void store_release_system(uint32_t* to, uint32_t x) { __atomic_store_n(to, x, __ATOMIC_RELEASE); }
EMULATOR_ONLY static inline uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
EMULATOR_ONLY static inline uint64_t wait_began() { return emulator::launch_began; }
// Whether the block ends now and runs again later; see `Waiting`. What it has written until then, it writes
// again.
EMULATOR_ONLY static inline bool runs_again() { return emulator::cluster_runs_again = true; }
EMULATOR_ONLY static inline uint4 load_16(const void* from) {
  emulator::check_aligned(from, 16);
  emulator::global_bytes += 16;
  emulator::note_read(from, 16);
  return *(const uint4*)from;
}
EMULATOR_ONLY static inline unsigned long long load_8(const unsigned long long* from) {
  emulator::check_aligned(from, 8);
  emulator::global_bytes += 8;
  emulator::note_read(from, 8);
  return *from;
}
EMULATOR_ONLY static inline float load_4(const float* from) {
  emulator::global_bytes += 4;
  emulator::note_read(from, 4);
  return *from;
}
EMULATOR_ONLY static inline void cp_async_16(void* to, const void* from, bool inside) {
  if (inside) {
    emulator::check_aligned(from, 16);
    emulator::global_bytes += 16;
  }
  emulator::note_write(to, 16);
  std::memset(to, 0xa5, 16);
  emulator::start_copy({to, inside ? from : nullptr});
}
static inline void load_matrices(uint32_t (&to)[4], const uint4* row) { emulator::read_matrices(to, row); }
static inline void cp_async_commit() { emulator::commit_copies(); }
template <int LEFT>
static inline void cp_async_wait() {
  emulator::finish_groups(LEFT);
}
#define DYNAMIC_SHARED(name) uint4* name = (uint4*)emulator::shared_of_blocks[emulator::rank()]
static inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::mma(d, a, b);
}
static inline void mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::mma(d, a, b);
}

#include "warpgroup.hpp"

template <typename To, typename From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
static inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
static inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
static inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
static inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
static inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }

extern "C" {

// Allocates memory that ends at a protected page.
void* emulator_alloc(size_t bytes) {
  const size_t page = 4096;
  const size_t room = (bytes + 15) / 16 * 16;
  const size_t pages = (room + page - 1) / page * page;
  char* base = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == (char*)MAP_FAILED) return nullptr;
  mprotect(base + pages, page, PROT_NONE);
  emulator::note_region((uintptr_t)(base + pages - room), room);
  return base + pages - room;
}

void emulator_free(void* memory, size_t bytes) {
  const size_t page = 4096;
  const size_t pages = ((bytes + 15) / 16 * 16 + page - 1) / page * page;
  munmap((void*)((uintptr_t)memory / page * page), pages + page);
  emulator::note_region((uintptr_t)memory, 0);
}

// Bytes that kernels have read from global memory so far, by the functions that count them.
uint64_t emulator_global_bytes() { return emulator::global_bytes; }

// Sets the seed of the order in which threads and blocks run from now on.
void emulator_order(uint64_t seed) { emulator::order = seed; }

// Sets the compute capability whose tensor cores are emulated from now on, times ten.
void emulator_capability(uint32_t capability) { emulator::capability = capability; }

// Runs a kernel over its grid. `shape`: the grid, threads per block, bytes of dynamic shared memory per
// block, and blocks of a cluster, which divide the grid's x. *waiting: null at first, and again when all
// clusters have run. Until then the launch is to be called again, with the same parameters.
void emulator_launch(void (*kernel)(void**), const uint32_t* shape, void** params, emulator::Waiting** waiting) {
  const uint32_t* grid = shape;
  const uint32_t threads = shape[3], shared_bytes = shape[4], cluster = shape[5];
  if (cluster > emulator::MAX_CLUSTER || cluster * threads > emulator::MAX_THREADS || grid[0] % cluster != 0) {
    std::fprintf(stderr, "emulator: %u blocks of %u threads are not in clusters of %u\n", grid[0], threads, cluster);
    std::abort();
  }
  // Only the blocks of a cluster have memory: a copy to another one is noticed.
  for (uint32_t rank = 0; shared_bytes && rank < cluster; ++rank) {
    emulator::shared_of_blocks[rank] = (char*)emulator_alloc(shared_bytes);
  }
  emulator::body = kernel;
  emulator::body_params = params;
  emulator::block_threads = threads;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  emulator::note_launch();
  std::vector<uint64_t> again;
  const auto run = [&](uint64_t number) {
    emulator::cluster_first = (uint32_t)number * cluster;
    // Shared memory starts with garbage in every block.
    for (uint32_t rank = 0; shared_bytes && rank < cluster; ++rank) {
      std::memset(emulator::shared_of_blocks[rank], 0xa5, shared_bytes);
    }
    emulator::cluster_runs_again = false;
    emulator::note_begin();
    emulator::run_cluster(cluster);
    emulator::note_end();
    if (emulator::cluster_runs_again) again.push_back(number);
  };
  emulator::launch_began = *waiting ? (*waiting)->began : nanoseconds();
  if (*waiting) {
    for (uint64_t number : (*waiting)->clusters) run(number);
  } else {
    // Visits clusters with a random stride that is coprime to their number.
    const uint64_t clusters = (uint64_t)grid[0] * grid[1] * grid[2] / cluster;
    uint64_t step = 1 + emulator::random_below(1u << 20);
    while (std::gcd(step, clusters) != 1) ++step;
    uint64_t next = emulator::random_below((uint32_t)std::min<uint64_t>(clusters, 1u << 30));
    for (uint64_t i = 0; i < clusters; ++i) {
      run(next);
      next = (next + step) % clusters;
    }
  }
  delete *waiting;
  *waiting = again.empty() ? nullptr : new emulator::Waiting{again, emulator::launch_began};
  for (uint32_t rank = 0; shared_bytes && rank < cluster; ++rank) {
    emulator_free(emulator::shared_of_blocks[rank], shared_bytes);
    emulator::shared_of_blocks[rank] = nullptr;
  }
}

}
