// The CUDA driver on the host: the functions that the engine calls, with kernels that `emulator.hpp` runs.
// `host_driver.rs` builds it into a libcuda.so, so that `device.rs`, workers and `gpu-check` run completely
// without a GPU.
//
// Work completes as late as the real driver allows: work in a stream runs only when a caller waits for it,
// pinned memory is read only then, fresh memory holds garbage, freed memory is unmapped. So a missing wait, a
// staging buffer that is refilled too early, or uninitialized memory shows immediately as wrong numbers or a
// crash. It cannot test speed, concurrent kernels, or undocumented behaviour of the real driver.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

extern "C" {
void emulator_launch(void (*kernel)(void**), const uint32_t* shape, void** params, emulator::Waiting** waiting);
void* emulator_alloc(size_t bytes);
void emulator_free(void* memory, size_t bytes);
}

namespace driver {

// Values of CUresult in cuda.h.
enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  CAPTURE_UNSUPPORTED = 900,
  INVALID_CLUSTER_SIZE = 912,
};

constexpr size_t TOTAL_BYTES = 512u << 20;
constexpr uint8_t GARBAGE = 0xa5;

// Work in a stream. Returns false if it waits for work of another stream, and is then called again later.
using Work = std::function<bool()>;

struct Kernel {
  void (*entry)(void**);
  uint32_t num_params;
  uint32_t max_threads;
  // Blocks of a cluster.
  uint32_t cluster;
  // Maximum dynamic shared memory per block.
  uint32_t max_shared_bytes = 48 << 10;
};

struct Graph {
  std::deque<Work> work;
};

struct Stream {
  std::deque<Work> work;
  Graph* captured = nullptr;
  int device = 0;
};

// Completes once all work that was in its stream when it was recorded has run.
struct Event {
  std::shared_ptr<bool> done = std::make_shared<bool>(true);
  Stream* stream = nullptr;
};

// State is never destroyed: the process may exit while a thread still frees memory.
static std::recursive_mutex& turn = *new std::recursive_mutex;
static std::set<Stream*>& streams = *new std::set<Stream*>;
static std::map<uintptr_t, size_t>&device_memory = *new std::map<uintptr_t, size_t>, &pinned_memory = *new std::map<uintptr_t, size_t>;
// Notified when work is put into a stream.
static std::condition_variable_any& work_added = *new std::condition_variable_any;
// Counters of calls so far, in the order of `DriverCounts` of host_driver.rs, which has the bytes that
// kernels read as its last field.
static struct {
  uint64_t launches, copies_to_device, bytes_to_device, copies_from_device, bytes_from_device, allocations, bytes_from_ranks, waits;
} counted;
static thread_local int* current = nullptr;
// The contexts of devices; each holds the device's number.
constexpr int MAX_DEVICES = 8;
static int contexts[MAX_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};
static size_t held_bytes[MAX_DEVICES];
// Owner of the pool of each allocation, and the other devices that may access a pool: (owner, other).
static std::map<uintptr_t, int>& owners = *new std::map<uintptr_t, int>;
static std::set<std::pair<int, int>>& access_granted = *new std::set<std::pair<int, int>>;

static int device_count() {
  const char* count = std::getenv("OUTRIDER_HOST_DEVICES");
  return count ? std::atoi(count) : 1;
}

// Runs the work of a stream until `is_done`, or until work that waits. Returns whether it ran any.
template <typename IsDone>
static bool run_ready(Stream& stream, IsDone is_done) {
  bool ran = false;
  while (!is_done() && !stream.work.empty() && stream.work.front()()) {
    stream.work.pop_front();
    ran = true;
  }
  return ran;
}

// Runs the work of a stream until `is_done`, and the work of other streams where it waits for them. Returns
// false if it waits for work that is in no stream yet.
template <typename IsDone>
static bool run_until(Stream& stream, IsDone is_done) {
  for (;;) {
    run_ready(stream, is_done);
    if (is_done()) return true;
    bool ran = false;
    for (Stream* other : streams)
      if (other != &stream) ran |= run_ready(*other, [] { return false; });
    if (!ran) return false;
  }
}

static bool run_all(Stream& stream) {
  return run_until(stream, [&] { return stream.work.empty(); });
}

using Lock = std::unique_lock<std::recursive_mutex>;

// As calls that block: lets other threads put work into streams while it waits for that. Looks again now and
// then, because a kernel that waits also ends by the clock, or when the host tells it to.
template <typename IsDone>
static void block_until(Lock& lock, Stream& stream, IsDone is_done) {
  while (!run_until(stream, is_done)) work_added.wait_for(lock, std::chrono::milliseconds(5));
}

static void block_until_empty(Lock& lock, Stream& stream) {
  block_until(lock, stream, [&] { return stream.work.empty(); });
}

static void put_work(Stream& stream, Work work) {
  (stream.captured ? stream.captured->work : stream.work).push_back(std::move(work));
  work_added.notify_all();
}

// Work that never waits.
template <typename Action>
static void put(Stream& stream, Action action) {
  put_work(stream, [action]() mutable { return action(), true; });
}

// Generated by `host_driver.rs`: returns null for an unknown kernel.
static Kernel* find(const char* name);

static bool contains_range(const std::map<uintptr_t, size_t>& memory, uintptr_t at, size_t bytes) {
  auto next = memory.upper_bound(at);
  if (next == memory.begin()) return false;
  --next;
  return at + bytes <= next->first + next->second;
}

static bool on_device(uint64_t at, size_t bytes) { return contains_range(device_memory, at, bytes); }
// The device whose pool has this memory; -1 if none has.
static int owner_of(uint64_t at) {
  auto next = owners.upper_bound(at);
  return next == owners.begin() ? -1 : std::prev(next)->second;
}
// Whether a device may access memory: its own, or that of a pool that was shared with it.
static bool may_touch(int device, uint64_t at) {
  const int owner = owner_of(at);
  return owner == device || access_granted.count({owner, device});
}
static bool is_pinned(const void* at, size_t bytes) { return contains_range(pinned_memory, (uintptr_t)at, bytes); }

static const char* name_of(int result) {
  switch (result) {
    case SUCCESS: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case INVALID_CLUSTER_SIZE: return "CUDA_ERROR_INVALID_CLUSTER_SIZE";
    case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    default: return "an error that the host's driver does not have";
  }
}

}  // namespace driver

// Locks the driver for one caller, whose thread must have a current context.
#define OUTRIDER_TURN              \
  driver::Lock lock(driver::turn); \
  if (!driver::current) return driver::INVALID_CONTEXT
// The same for calls that are not allowed during stream capture.
#define OUTRIDER_NO_CAPTURE(stream) \
  OUTRIDER_TURN;                    \
  if ((stream)->captured) return driver::CAPTURE_UNSUPPORTED

extern "C" {

using namespace driver;

int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) {
  const char* said = std::getenv("OUTRIDER_HOST_DRIVER_VERSION");
  return *version = said ? std::atoi(said) : 13000, SUCCESS;
}
int cuDeviceGetCount(int* count) { return *count = device_count(), SUCCESS; }
int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal >= 0 && ordinal < device_count() ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char* name, int len, int) {
  std::snprintf(name, (size_t)len, "the host (emulated, no GPU)");
  return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  // COMPUTE_CAPABILITY_MAJOR and _MINOR, MULTIPROCESSOR_COUNT, MEMORY_POOLS_SUPPORTED.
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 2 : attribute == 115 ? 1 : -1;
  return *value < 0 ? INVALID_VALUE : SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &contexts[device], SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(void* context) { return driver::current = (int*)context, SUCCESS; }
int cuCtxGetCurrent(void** context) { return *context = driver::current, SUCCESS; }
int cuGetErrorName(int result, const char** name) { return *name = name_of(result), SUCCESS; }
int cuGetErrorString(int result, const char** text) { return *text = name_of(result), SUCCESS; }

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  OUTRIDER_TURN;
  *total = TOTAL_BYTES;
  *free = TOTAL_BYTES - held_bytes[*driver::current];
  return SUCCESS;
}

int cuMemAllocAsync(uint64_t* address, size_t bytes, Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  if (bytes == 0) return INVALID_VALUE;
  if (held_bytes[stream->device] + bytes > TOTAL_BYTES) return OUT_OF_MEMORY;
  void* memory = emulator_alloc(bytes);
  if (!memory) return OUT_OF_MEMORY;
  held_bytes[stream->device] += bytes;
  std::memset(memory, GARBAGE, bytes);
  device_memory[(uintptr_t)memory] = bytes;
  owners[(uintptr_t)memory] = stream->device;
  ++counted.allocations;
  *address = (uintptr_t)memory;
  return SUCCESS;
}

int cuMemFreeAsync(uint64_t address, Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  if (!device_memory.count(address)) return INVALID_VALUE;
  put(*stream, [address] {
    const size_t bytes = device_memory[address];
    device_memory.erase(address);
    held_bytes[owners[address]] -= bytes;
    owners.erase(address);
    emulator_free((void*)address, bytes);
  });
  return SUCCESS;
}

// A pool's handle is its device's context.
int cuDeviceGetDefaultMemPool(int** pool, int device) { return *pool = &contexts[device], SUCCESS; }
int cuMemPoolSetAttribute(int*, int attribute, void*) { return attribute == 4 ? SUCCESS : INVALID_VALUE; }
int cuMemPoolTrimTo(int*, size_t) { return SUCCESS; }
// OUTRIDER_HOST_ISOLATED: the number of a device that no other one reaches.
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  const char* isolated = std::getenv("OUTRIDER_HOST_ISOLATED");
  const int alone = isolated ? std::atoi(isolated) : -1;
  return *can = device != peer && device != alone && peer != alone, SUCCESS;
}

// Each description: type of the location (1: a device), its number, access (3: read and write).
int cuMemPoolSetAccess(int* pool, const int (*descriptions)[3], size_t count) {
  OUTRIDER_TURN;
  for (size_t i = 0; i < count; ++i) {
    if (descriptions[i][0] != 1 || descriptions[i][2] != 3) return INVALID_VALUE;
    access_granted.insert({*pool, descriptions[i][1]});
  }
  return SUCCESS;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  OUTRIDER_TURN;
  *memory = emulator_alloc(bytes);
  if (!*memory) return OUT_OF_MEMORY;
  pinned_memory[(uintptr_t)*memory] = bytes;
  return SUCCESS;
}

int cuMemFreeHost(void* memory) {
  OUTRIDER_TURN;
  auto found = pinned_memory.find((uintptr_t)memory);
  if (found == pinned_memory.end()) return INVALID_VALUE;
  emulator_free(memory, found->second);
  pinned_memory.erase(found);
  return SUCCESS;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream* stream) {
  OUTRIDER_TURN;
  if (!on_device(to, bytes)) return INVALID_VALUE;
  put(*stream, [=] { std::memset((void*)to, value, bytes); });
  return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
  OUTRIDER_TURN;
  if (!on_device(to, bytes)) return INVALID_VALUE;
  ++counted.copies_to_device;
  counted.bytes_to_device += bytes;
  if (is_pinned(from, bytes)) {
    put(*stream, [=] { std::memcpy((void*)to, from, bytes); });
    return SUCCESS;
  }
  if (stream->captured) return CAPTURE_UNSUPPORTED;
  // Pageable memory is copied to a buffer before the call returns.
  auto aside = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + bytes);
  put(*stream, [=] { std::memcpy((void*)to, aside->data(), bytes); });
  return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  if (!on_device(from, bytes)) return INVALID_VALUE;
  ++counted.copies_from_device;
  counted.bytes_from_device += bytes;
  put(*stream, [=] { std::memcpy(to, (const void*)from, bytes); });
  // For pageable memory the call returns after the copy has completed.
  if (!is_pinned(to, bytes)) block_until_empty(lock, *stream);
  return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
  OUTRIDER_TURN;
  if (!on_device(to, bytes) || !on_device(from, bytes)) return INVALID_VALUE;
  if (!may_touch(stream->device, to) || !may_touch(stream->device, from)) return ILLEGAL_ADDRESS;
  put(*stream, [=] { std::memmove((void*)to, (const void*)from, bytes); });
  return SUCCESS;
}

int cuStreamCreate(Stream** stream, unsigned) {
  OUTRIDER_TURN;
  streams.insert(*stream = new Stream);
  (*stream)->device = *driver::current;
  return SUCCESS;
}

// Drops work that waits for work in no stream.
int cuStreamDestroy_v2(Stream* stream) {
  OUTRIDER_TURN;
  run_all(*stream);
  streams.erase(stream);
  delete stream;
  return SUCCESS;
}

int cuStreamSynchronize(Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  ++counted.waits;
  block_until_empty(lock, *stream);
  return SUCCESS;
}

// Returns NOT_READY once if work is pending, and runs that work.
int cuStreamQuery(Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  if (stream->work.empty()) return SUCCESS;
  run_all(*stream);
  return NOT_READY;
}

int cuProfilerStart() { return SUCCESS; }
int cuProfilerStop() { return SUCCESS; }

int cuCtxSynchronize() {
  OUTRIDER_TURN;
  const std::set<Stream*> all = streams;
  for (Stream* stream : all) {
    if (stream->device != *driver::current) continue;
    if (stream->captured) return CAPTURE_UNSUPPORTED;
    block_until_empty(lock, *stream);
  }
  return SUCCESS;
}

int cuEventCreate(Event** event, unsigned) {
  OUTRIDER_TURN;
  *event = new Event;
  return SUCCESS;
}

int cuEventDestroy_v2(Event* event) {
  OUTRIDER_TURN;
  delete event;
  return SUCCESS;
}

int cuEventRecord(Event* event, Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  auto done = std::make_shared<bool>(false);
  event->done = done;
  event->stream = stream;
  put(*stream, [done] { *done = true; });
  return SUCCESS;
}

// Runs the event's stream up to the event.
int cuEventSynchronize(Event* event) {
  OUTRIDER_TURN;
  const std::shared_ptr<bool> done = event->done;
  if (!*done) block_until(lock, *event->stream, [&] { return *done; });
  return SUCCESS;
}

// Returns NOT_READY once if work is pending, and runs that work.
int cuEventQuery(Event* event) {
  OUTRIDER_TURN;
  const std::shared_ptr<bool> done = event->done;
  if (*done) return SUCCESS;
  run_until(*event->stream, [&] { return *done; });
  return NOT_READY;
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  OUTRIDER_NO_CAPTURE(stream);
  const std::shared_ptr<bool> done = event->done;
  put_work(*stream, [done] { return *done; });
  return SUCCESS;
}

// Machine code is not read, because its kernels are linked in here; data that is not an image is refused.
int cuModuleLoadData(void** module, const void* image) {
  OUTRIDER_TURN;
  const bool is_elf = std::memcmp(image, "\x7f" "ELF", 4) == 0;
  if (!is_elf && std::strncmp((const char*)image, "host kernels", 12) != 0) return INVALID_IMAGE;
  return *module = &contexts[0], SUCCESS;
}

int cuModuleUnload(void*) { return SUCCESS; }

int cuModuleGetFunction(Kernel** function, void*, const char* name) {
  OUTRIDER_TURN;
  return *function = find(name), *function ? SUCCESS : NOT_FOUND;
}

// Supports only MAX_DYNAMIC_SHARED_SIZE_BYTES, up to the limit of a block on an H100.
int cuFuncSetAttribute(Kernel* kernel, int attribute, int value) {
  OUTRIDER_TURN;
  if (attribute != 8 || value < 0 || value > 227 << 10) return INVALID_VALUE;
  kernel->max_shared_bytes = (uint32_t)value;
  return SUCCESS;
}

int cuLaunchKernel(Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                   unsigned shared_bytes, Stream* stream, void** params, void** extra) {
  OUTRIDER_TURN;
  const bool grid_fits = x > 0 && y > 0 && z > 0 && x <= 0x7fffffffu && y <= 65535 && z <= 65535;
  const bool block_fits = threads > 0 && threads <= kernel->max_threads && threads_y == 1 && threads_z == 1;
  if (!grid_fits || !block_fits || shared_bytes > kernel->max_shared_bytes || extra) return INVALID_VALUE;
  if (x % kernel->cluster != 0) return INVALID_CLUSTER_SIZE;
  ++counted.launches;
  std::vector<uint64_t> values(kernel->num_params);
  for (uint32_t i = 0; i < kernel->num_params; ++i) std::memcpy(&values[i], params[i], 8);
  // A kernel that waits for another device is called again until it has ended, after pauses as long as its
  // tries: other threads need the driver too.
  emulator::Waiting* waiting = nullptr;
  uint64_t next_try = 0;
  put_work(*stream, [=]() mutable {
    const uint64_t began = nanoseconds();
    if (waiting && began < next_try) return false;
    std::vector<void*> places;
    for (uint64_t& value : values) places.push_back(&value);
    const uint32_t shape[6] = {x, y, z, threads, shared_bytes, kernel->cluster};
    emulator_launch(kernel->entry, shape, places.data(), &waiting);
    next_try = 2 * nanoseconds() - began;
    return !waiting;
  });
  return SUCCESS;
}

int cuStreamBeginCapture_v2(Stream* stream, int) {
  OUTRIDER_NO_CAPTURE(stream);
  stream->captured = new Graph;
  return SUCCESS;
}

int cuStreamEndCapture(Stream* stream, Graph** graph) {
  OUTRIDER_TURN;
  if (!stream->captured) return INVALID_VALUE;
  *graph = stream->captured;
  stream->captured = nullptr;
  return SUCCESS;
}

int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  OUTRIDER_TURN;
  return *executable = new Graph(*graph), SUCCESS;
}

int cuGraphLaunch(Graph* executable, Stream* stream) {
  OUTRIDER_NO_CAPTURE(stream);
  for (const Work& work : executable->work) put_work(*stream, work);
  return SUCCESS;
}

// Not part of the driver's API: copies the counters.
void outrider_counts(uint64_t* to) {
  std::memcpy(to, &counted, sizeof(counted));
  to[sizeof(counted) / sizeof(*to)] = emulator::global_bytes;
}

int cuGraphDestroy(Graph* graph) {
  OUTRIDER_TURN;
  delete graph;
  return SUCCESS;
}

int cuGraphExecDestroy(Graph* executable) { return cuGraphDestroy(executable); }

}
