// NCCL on the host: the functions that `ranks/library.rs` resolves, between devices of `driver.hpp`. A call
// puts work into its stream; the work is done when every message of it has met its counterpart, so the ranks
// wait for each other as on GPUs, and a missing rank is waited for until its communicator is aborted.
//
// Stricter than the library: it refuses memory that is not the device's or too short, pools without peer
// access, lengths that differ between the two ends, and calls under capture. It cannot test the library's own
// faults, its buffers or its speed.
#include <array>

namespace nccl {

using driver::Stream;

// Values of ncclResult_t in nccl.h.
enum Result { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

constexpr int VERSION = 22304;
constexpr int FLOAT32 = 7;

enum Kind { POINT_TO_POINT, ALL_GATHER };

// One end of a message, and the number of its group's ends that have not been copied yet.
struct End {
  uint64_t address;
  size_t bytes;
  std::shared_ptr<size_t> num_open;
};

// What one call sends to or receives from one rank.
struct Part {
  Kind kind;
  bool is_sent;
  int peer;
  uint64_t address;
  size_t bytes;
};

struct Comm;

struct Clique {
  std::vector<Comm*> comms;
  // Ends without a counterpart, by kind, sender and receiver, oldest first.
  std::map<std::array<int, 3>, std::deque<End>> sent, received;
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank, device;
  Result error = SUCCESS;
  bool is_aborted = false;
};

struct Call {
  Comm* comm;
  Stream* stream;
  Part part;
};

static auto& comms = *new std::map<Comm*, std::shared_ptr<Comm>>;
static thread_local std::string last_error;
static thread_local int depth = 0;
static thread_local std::vector<Call> grouped;

static Result refuse(Result result, const char* reason) {
  last_error = reason;
  return result;
}

// Copies messages of which both ends are there.
static void match(Clique& clique, const std::array<int, 3>& key) {
  auto &sent = clique.sent[key], &received = clique.received[key];
  while (!sent.empty() && !received.empty()) {
    const End from = sent.front(), to = received.front();
    Comm &sender = *clique.comms[(size_t)key[1]], &receiver = *clique.comms[(size_t)key[2]];
    Result result = from.bytes == to.bytes ? SUCCESS : INVALID_USAGE;
    if (!driver::may_touch(receiver.device, from.address) || !driver::may_touch(sender.device, to.address))
      result = UNHANDLED_CUDA_ERROR;
    if (result) {
      sender.error = receiver.error = result;
      return;
    }
    std::memmove((void*)to.address, (const void*)from.address, from.bytes);
    if (key[1] != key[2]) driver::counted.bytes_from_ranks += from.bytes;
    --*from.num_open;
    --*to.num_open;
    sent.pop_front();
    received.pop_front();
  }
}

static Result check(const Comm& comm, const Stream& stream, const Part& part) {
  if (stream.captured) return refuse(INVALID_USAGE, "the host's nccl cannot be captured in a graph");
  if (stream.device != comm.device) return refuse(INVALID_ARGUMENT, "the stream is of another device");
  if (part.peer < 0 || (size_t)part.peer >= comm.clique->comms.size()) return refuse(INVALID_ARGUMENT, "no such rank");
  if (!driver::on_device(part.address, part.bytes) || driver::owner_of(part.address) != comm.device)
    return refuse(INVALID_ARGUMENT, "a buffer is too short, or not of the communicator's device");
  return SUCCESS;
}

static Result refuse_aborted() { return refuse(INVALID_ARGUMENT, "the communicator was aborted, or never made"); }

// Puts the calls of one group, all with the same communicator, into their stream.
static Result submit(const std::vector<Call>& calls) {
  if (calls.empty()) return SUCCESS;
  auto found = comms.find(calls[0].comm);
  if (found == comms.end()) return refuse_aborted();
  const std::shared_ptr<Comm> comm = found->second;
  std::vector<Part> parts;
  for (const Call& call : calls) {
    if (call.comm != comm.get() || call.stream != calls[0].stream)
      return refuse(INVALID_USAGE, "the host's nccl supports one communicator and stream in a group");
    if (Result result = check(*comm, *call.stream, call.part)) return result;
    if (call.part.bytes) parts.push_back(call.part);
  }
  const auto num_open = std::make_shared<size_t>(parts.size());
  bool is_posted = false;
  driver::put_work(*calls[0].stream, [=]() mutable {
    if (!is_posted && !comm->is_aborted) {
      is_posted = true;
      for (const Part& part : parts) {
        const int from = part.is_sent ? comm->rank : part.peer, to = part.is_sent ? part.peer : comm->rank;
        const std::array<int, 3> key = {part.kind, from, to};
        (part.is_sent ? comm->clique->sent : comm->clique->received)[key].push_back({part.address, part.bytes, num_open});
        match(*comm->clique, key);
      }
    }
    return comm->is_aborted || *num_open == 0;
  });
  return SUCCESS;
}

// Submits the calls of this thread's group unless the group goes on.
static Result submit_group() {
  return depth > 0 ? SUCCESS : submit(std::exchange(grouped, {}));
}

static Result call(Comm* comm, Stream* stream, int type, const std::vector<Part>& parts) {
  driver::Lock lock(driver::turn);
  if (type != FLOAT32) return refuse(INVALID_ARGUMENT, "the host's nccl moves f32");
  for (const Part& part : parts) grouped.push_back({comm, stream, part});
  return submit_group();
}

}  // namespace nccl

extern "C" {

int ncclGetVersion(int* version) { return *version = nccl::VERSION, nccl::SUCCESS; }
const char* ncclGetLastError(nccl::Comm*) { return nccl::last_error.c_str(); }

const char* ncclGetErrorString(int result) {
  switch (result) {
    case nccl::SUCCESS: return "no error";
    case nccl::UNHANDLED_CUDA_ERROR: return "unhandled cuda error";
    case nccl::INVALID_ARGUMENT: return "invalid argument";
    default: return "invalid usage";
  }
}

int ncclCommInitAll(nccl::Comm** out, int count, const int* devices) {
  driver::Lock lock(driver::turn);
  if (std::set<int>(devices, devices + count).size() != (size_t)count)
    return nccl::refuse(nccl::INVALID_USAGE, "a device is named twice");
  auto clique = std::make_shared<nccl::Clique>();
  for (int rank = 0; rank < count; ++rank) {
    if (devices[rank] < 0 || devices[rank] >= driver::device_count()) return nccl::refuse(nccl::INVALID_ARGUMENT, "no such device");
    clique->comms.push_back(new nccl::Comm{clique, rank, devices[rank]});
  }
  for (int rank = 0; rank < count; ++rank) nccl::comms.emplace(out[rank] = clique->comms[(size_t)rank], out[rank]);
  return nccl::SUCCESS;
}

// Ends what waits in this rank's stream. Other ranks wait on for messages of this one.
int ncclCommAbort(nccl::Comm* comm) {
  driver::Lock lock(driver::turn);
  auto found = nccl::comms.find(comm);
  if (found == nccl::comms.end()) return nccl::refuse_aborted();
  comm->is_aborted = true;
  for (auto& [key, ends] : comm->clique->sent)
    if (key[1] == comm->rank) ends.clear();
  for (auto& [key, ends] : comm->clique->received)
    if (key[2] == comm->rank) ends.clear();
  nccl::comms.erase(found);
  driver::work_added.notify_all();
  return nccl::SUCCESS;
}

int ncclCommGetAsyncError(nccl::Comm* comm, int* error) {
  driver::Lock lock(driver::turn);
  if (!nccl::comms.count(comm)) return nccl::refuse_aborted();
  return *error = comm->error, nccl::SUCCESS;
}

int ncclSend(const void* from, size_t count, int type, int peer, nccl::Comm* comm, driver::Stream* stream) {
  return nccl::call(comm, stream, type, {{nccl::POINT_TO_POINT, true, peer, (uint64_t)from, 4 * count}});
}

int ncclRecv(void* to, size_t count, int type, int peer, nccl::Comm* comm, driver::Stream* stream) {
  return nccl::call(comm, stream, type, {{nccl::POINT_TO_POINT, false, peer, (uint64_t)to, 4 * count}});
}

int ncclAllGather(const void* from, void* to, size_t count, int type, nccl::Comm* comm, driver::Stream* stream) {
  driver::Lock lock(driver::turn);
  if (!nccl::comms.count(comm)) return nccl::refuse_aborted();
  const uint64_t bytes = 4 * count, own = (uint64_t)to + (uint64_t)comm->rank * bytes;
  const uint64_t ranks = comm->clique->comms.size();
  const bool overlaps = (uint64_t)from + bytes > (uint64_t)to && (uint64_t)from < (uint64_t)to + ranks * bytes;
  if (overlaps && (uint64_t)from != own) return nccl::refuse(nccl::INVALID_USAGE, "the buffers overlap");
  std::vector<nccl::Part> parts;
  for (int peer = 0; peer < (int)ranks; ++peer) {
    parts.push_back({nccl::ALL_GATHER, true, peer, (uint64_t)from, bytes});
    parts.push_back({nccl::ALL_GATHER, false, peer, (uint64_t)to + (uint64_t)peer * bytes, bytes});
  }
  return nccl::call(comm, stream, type, parts);
}

int ncclGroupStart() { return ++nccl::depth, nccl::SUCCESS; }

int ncclGroupEnd() {
  driver::Lock lock(driver::turn);
  if (nccl::depth == 0) return nccl::refuse(nccl::INVALID_USAGE, "no group was started");
  --nccl::depth;
  return nccl::submit_group();
}

}
