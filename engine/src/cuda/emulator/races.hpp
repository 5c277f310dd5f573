// Finds data races in kernels that `emulator.hpp` runs. The compiler's thread sanitizer inserts a call before
// every load and store of a kernel; this file implements these calls. It is a race if two threads of a block
// access a byte between the same two barriers, or two blocks of a launch access it, and at least one access
// is a write: on a GPU the order is undefined. Shuffles and tensor-core instructions do not order memory
// accesses here, as on a GPU.
//
// Blocks of a launch are ordered by counters (`count`), as the PTX memory model orders them by a chain of
// atomic operations with fences. A thread that fences and then increments a counter publishes what its block
// accessed before the block's latest barrier. A thread that increments the counter later and then fences has
// found all that was published at it; its block knows that from its next barrier on. A counter is accessed by
// nothing else in a launch. Whatever this does not cover is reported, even if a GPU would order it.
#pragma once

#include <unordered_map>
#include <vector>

namespace emulator {

static bool is_stack(uintptr_t at);
// Whether blocks share this memory: they share device memory; shared memory is separate for every block.
static bool is_device_memory(uintptr_t at);
// Number of allocations and frees so far.
static uint64_t regions_changed = 1;

namespace races {

constexpr uint16_t SEVERAL = 0xffff;
constexpr uintptr_t PAGE = 4096;

// The latest access to a byte. The interval between barriers determines conflicts between threads, the launch
// those between blocks.
struct Access {
  uint32_t interval = 0, launch = 0, block = 0;
  uint16_t thread = 0;
};
struct Byte {
  Access read, written;
  // The latest increment of the counter that has this byte.
  Access counted;
  // Whether more than one block of the launch has read it.
  bool read_by_several = false;
};
struct Page {
  Byte bytes[PAGE];
  uintptr_t number = 0;
  // Whether blocks share this page, as of allocation change number `regions_at`.
  uint64_t regions_at = 0;
  bool is_device_memory = false;
};

// Never destroyed: the process may exit while a thread still runs a kernel.
static std::unordered_map<uintptr_t, Page*>& pages = *new std::unordered_map<uintptr_t, Page*>;
constexpr uintptr_t NEAR = 1024;
static Page* near_pages[NEAR];
// The block that runs, its place in the cluster, and the interval of each block of the cluster.
static uint32_t last_interval = 1, launch = 0, block = 0, rank = 0;
static uint32_t intervals[MAX_CLUSTER];

// What a block accessed before one of its intervals.
struct Published {
  uint32_t block, before;
};
// What was published at a counter in a launch.
struct Counter {
  uint32_t launch = 0;
  std::vector<Published> published;
};
constexpr uint32_t NOBODY = ~0u;
// What a block of the cluster knows of other blocks.
struct Knowledge {
  // The thread that fenced latest, and when.
  uint32_t fencer = NOBODY, fenced_in = 0;
  // The thread that incremented a counter since the latest barrier, what it found there, and whether it has
  // fenced since.
  uint32_t finder = NOBODY;
  bool has_fenced = false;
  std::vector<Published> found;
  // For each other block the interval before which its accesses are known to be complete.
  std::unordered_map<uint32_t, uint32_t> complete_before;
};
static std::unordered_map<uintptr_t, Counter>& counters = *new std::unordered_map<uintptr_t, Counter>;
static Knowledge* const knowledge = new Knowledge[MAX_CLUSTER];
// Whether a kernel is running; only then are accesses checked.
static bool is_running = false;
static char found[256];

EMULATOR_INLINE static Page& page_of(uintptr_t at) {
  const uintptr_t number = at / PAGE;
  Page*& near_page = near_pages[number % NEAR];
  if (!near_page || near_page->number != number) {
    Page*& page = pages[number];
    if (!page) page = new Page;
    page->number = number;
    near_page = page;
  }
  if (near_page->regions_at != regions_changed) {
    near_page->regions_at = regions_changed;
    near_page->is_device_memory = is_device_memory(number * PAGE);
  }
  return *near_page;
}

EMULATOR_ONLY static void report(const char* what, uintptr_t at, const Access& other) {
  if (found[0]) return;
  char by[32] = "several threads";
  if (other.thread != SEVERAL) std::snprintf(by, sizeof(by), "thread %u", other.thread);
  std::snprintf(found, sizeof(found), "%s at %#lx: thread %u of block %u and %s of block %u, no barrier between", what,
                (unsigned long)at, current, block, by, other.block);
}

// Whether an access of another block is known to be complete.
EMULATOR_INLINE static bool is_complete(const Access& other) {
  const auto& known = knowledge[rank].complete_before;
  const auto found = known.find(other.block);
  return found != known.end() && other.interval < found->second;
}

EMULATOR_INLINE static bool conflicts(const Access& other, bool common) {
  if (other.launch != launch) return false;
  if (other.block != block) return common && !is_complete(other);
  return other.interval == intervals[rank] && other.thread != current;
}

EMULATOR_ONLY static void touch(void* address, size_t bytes, bool writes) {
  const uintptr_t first = (uintptr_t)address;
  if (!is_running || is_stack(first)) return;
  // Functions called from here are instrumented too.
  is_running = false;
  const Access now = {intervals[rank], launch, block, (uint16_t)current};
  Page* of_page = &page_of(first);
  for (uintptr_t at = first; at < first + bytes; ++at) {
    if (at % PAGE == 0) of_page = &page_of(at);
    Page& page = *of_page;
    Byte& byte = page.bytes[at % PAGE];
    if (byte.counted.launch == launch) report("an access beside a count", at, byte.counted);
    if (conflicts(byte.written, page.is_device_memory)) report(writes ? "two writes" : "a read beside a write", at, byte.written);
    const bool same_launch = byte.read.launch == launch;
    if (writes) {
      const bool by_blocks = page.is_device_memory && same_launch && byte.read_by_several;
      if (by_blocks || conflicts(byte.read, page.is_device_memory)) report("a write beside a read", at, byte.read);
      byte.written = now;
      continue;
    }
    byte.read_by_several = same_launch && (byte.read_by_several || byte.read.block != block);
    const bool same_interval = same_launch && byte.read.block == block && byte.read.interval == intervals[rank];
    const bool by_several = same_interval && byte.read.thread != current;
    byte.read = now;
    if (by_several) byte.read.thread = SEVERAL;
  }
  is_running = true;
}

// A fence of the current thread.
EMULATOR_ONLY static void fence() {
  Knowledge& mine = knowledge[rank];
  mine.fencer = current;
  mine.fenced_in = intervals[rank];
  mine.has_fenced |= mine.finder == current;
}

// The current thread increments a counter.
EMULATOR_ONLY static void count(const uint32_t* at) {
  is_running = false;
  const uintptr_t first = (uintptr_t)at;
  for (uintptr_t i = first; i < first + sizeof(*at); ++i) {
    Byte& byte = page_of(i).bytes[i % PAGE];
    for (const Access* other : {&byte.read, &byte.written}) {
      if (other->launch == launch) report("a count beside an access", i, *other);
    }
    byte.counted = {intervals[rank], launch, block, (uint16_t)current};
  }
  Knowledge& mine = knowledge[rank];
  Counter& counter = counters[first];
  if (counter.launch != launch) counter = {launch, {}};
  mine.finder = current;
  mine.has_fenced = false;
  mine.found = counter.published;
  const bool publishes = mine.fencer == current && mine.fenced_in == intervals[rank];
  if (publishes) counter.published.push_back({block, intervals[rank]});
  is_running = true;
}

// A barrier of a block of the cluster: all its threads learn what one of them has found.
EMULATOR_ONLY static void learn(uint32_t of) {
  Knowledge& mine = knowledge[of];
  if (mine.finder == NOBODY) return;
  const bool was_running = is_running;
  is_running = false;
  for (size_t i = 0; mine.has_fenced && i < mine.found.size(); ++i) {
    uint32_t& before = mine.complete_before[mine.found[i].block];
    before = mine.found[i].before > before ? mine.found[i].before : before;
  }
  mine.found.clear();
  mine.finder = NOBODY;
  mine.has_fenced = false;
  is_running = was_running;
}

// The blocks of a cluster begin.
EMULATOR_ONLY static void forget() {
  for (uint32_t of = 0; of < MAX_CLUSTER; ++of) {
    Knowledge& mine = knowledge[of];
    mine.fencer = mine.finder = NOBODY;
    mine.has_fenced = false;
    mine.found.clear();
    mine.complete_before.clear();
  }
}

}  // namespace races
}  // namespace emulator

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define OUTRIDER_TOUCH(bytes)                                                                                         \
  EMULATOR_ONLY void __tsan_read##bytes(void* at) { emulator::races::touch(at, bytes, false); }                       \
  EMULATOR_ONLY void __tsan_write##bytes(void* at) { emulator::races::touch(at, bytes, true); }                       \
  EMULATOR_ONLY void __tsan_unaligned_read##bytes(void* at) { emulator::races::touch(at, bytes, false); }             \
  EMULATOR_ONLY void __tsan_unaligned_write##bytes(void* at) { emulator::races::touch(at, bytes, true); }
OUTRIDER_TOUCH(1)
OUTRIDER_TOUCH(2)
OUTRIDER_TOUCH(4)
OUTRIDER_TOUCH(8)
OUTRIDER_TOUCH(16)
#undef OUTRIDER_TOUCH

EMULATOR_ONLY void __tsan_read_range(void* at, size_t bytes) { emulator::races::touch(at, bytes, false); }
EMULATOR_ONLY void __tsan_write_range(void* at, size_t bytes) { emulator::races::touch(at, bytes, true); }

// Moves the description of the first race since the last call to `to`; returns whether there was one.
EMULATOR_ONLY bool emulator_take_race(char* to, size_t bytes) {
  std::snprintf(to, bytes, "%s", emulator::races::found);
  emulator::races::found[0] = 0;
  return to[0] != 0;
}
}
