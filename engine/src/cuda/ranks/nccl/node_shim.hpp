// The two functions of NCCL by which ranks of several nodes find each other, for nodes that are threads of one
// process: when all ranks of an id have come, the host's NCCL (emulator/nccl.hpp) connects their devices.
// Every other function is passed on to it.
#include <condition_variable>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct Id {
  char internal[128];
};

struct Clique {
  std::vector<void**> comms;
  std::vector<int> devices;
  int num_come = 0, result = 0;
};

static std::mutex turn;
static std::condition_variable changed;
static auto& cliques = *new std::map<std::string, Clique>;
static thread_local int depth = 0;
static thread_local std::vector<std::string> begun;

using Function = void* (*)(void*, void*, void*, void*, void*, void*);

// A function of the host's driver, which contains the host's NCCL.
static Function host(const char* name) {
  static void* driver = dlopen("libcuda.so", RTLD_NOW);
  return (Function)dlsym(driver, name);
}

static int wait_for_all(const std::string& id) {
  std::unique_lock<std::mutex> lock(turn);
  Clique& clique = cliques[id];
  changed.wait(lock, [&] { return clique.num_come == (int)clique.comms.size(); });
  return clique.result;
}

extern "C" {

int ncclGetUniqueId(Id* id) {
  static int count = 0;
  std::unique_lock<std::mutex> lock(turn);
  std::memset(id->internal, ++count, sizeof id->internal);
  return 0;
}

int ncclCommInitRank(void** comm, int num_ranks, Id id, int rank) {
  int* device = nullptr;
  host("cuCtxGetCurrent")(&device, 0, 0, 0, 0, 0);
  const std::string key(id.internal, sizeof id.internal);
  {
    std::unique_lock<std::mutex> lock(turn);
    Clique& clique = cliques[key];
    clique.comms.resize((size_t)num_ranks);
    clique.devices.resize((size_t)num_ranks);
    if (!device || rank < 0 || rank >= num_ranks || clique.comms[(size_t)rank]) return 4;
    clique.comms[(size_t)rank] = comm;
    clique.devices[(size_t)rank] = *device;
    if (clique.num_come + 1 == num_ranks) {
      std::vector<void*> made((size_t)num_ranks);
      void* count = (void*)(long)num_ranks;
      clique.result = (int)(long)host("ncclCommInitAll")(made.data(), count, clique.devices.data(), 0, 0, 0);
      for (size_t i = 0; i < made.size(); ++i) *clique.comms[i] = made[i];
    }
    ++clique.num_come;
    changed.notify_all();
  }
  if (depth == 0) return wait_for_all(key);
  begun.push_back(key);
  return 0;
}

int ncclGroupStart() { return ++depth, (int)(long)host("ncclGroupStart")(0, 0, 0, 0, 0, 0); }

int ncclGroupEnd() {
  int result = (int)(long)host("ncclGroupEnd")(0, 0, 0, 0, 0, 0);
  if (--depth > 0) return result;
  for (const std::string& id : std::exchange(begun, {}))
    if (int failed = wait_for_all(id)) result = failed;
  return result;
}

#define PASS_ON(name) \
  void* name(void* a, void* b, void* c, void* d, void* e, void* f) { return host(#name)(a, b, c, d, e, f); }
PASS_ON(ncclGetVersion)
PASS_ON(ncclGetErrorString)
PASS_ON(ncclGetLastError)
PASS_ON(ncclCommInitAll)
PASS_ON(ncclCommAbort)
PASS_ON(ncclCommGetAsyncError)
PASS_ON(ncclAllGather)
PASS_ON(ncclSend)
PASS_ON(ncclRecv)
}
