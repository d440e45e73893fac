// The calls of the stand-in for NCCL. One mutex guards everything; the
// emulator's own is taken before it (by whoever runs a stream), never after.
// Ranks are threads of this process, or processes (processes.h).

#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "tests/cuda/stand_in/communicator.h"
#include "tests/cuda/stand_in/processes.h"
#include "tests/cuda/stand_in/stand_in.h"
#include "tests/cuda/stand_in/state.h"

namespace stand_in {
namespace {

thread_local std::string last_error;
thread_local int group_depth = 0;
thread_local std::vector<std::pair<ncclComm_t, Launch>> group;

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  last_error = text;
  return result;
}

// The failure that a test has planted for this call.
ncclResult_t planted(const char* function) {
  const auto found = state().planted.find(function);
  if (found == state().planted.end() || --found->second.first > 0) {
    return ncclSuccess;
  }
  const ncclResult_t error = found->second.second;
  state().planted.erase(found);
  return refuse(error, "planted by a test");
}

// All ranks have begun to end their communicator, as NCCL wants it.
bool all_end(const ncclComm& comm) {
  if (are_processes()) return all_have_ended(*comm.clique);
  return std::all_of(comm.clique->members.begin(), comm.clique->members.end(),
                     [](const auto& member) {
                       return member.second->is_finalized ||
                              member.second->is_aborted;
                     });
}

// What is wrong with the communicator for a new call; expects the lock.
std::string why_not_ready(ncclComm& comm) {
  if (state().live.count(&comm) == 0) {
    return "the communicator was destroyed or aborted";
  }
  if (!is_complete(comm) || comm.pending || comm.is_splitting) {
    return "a call was made while another one is in progress";
  }
  return comm.error_text;
}

ncclResult_t launch_group(ncclComm_t comm, Launch launch) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  (void)cudaStreamIsCapturing(launch.stream, &status);
  if (status != cudaStreamCaptureStatusNone) {
    return refuse(ncclInvalidUsage, "this stand-in records no graphs");
  }
  const Lock lock(state().mutex);
  const std::string wrong = why_not_ready(*comm);
  if (!wrong.empty()) return refuse(ncclInvalidUsage, wrong);
  for (Operation& operation : launch.operations) {
    if (!operation.is_message()) {
      operation.number = comm->num_collectives++;
      continue;
    }
    const std::pair<int, int> way = operation.kind == Kind::kSend
                                        ? std::pair(comm->rank, operation.peer)
                                        : std::pair(operation.peer, comm->rank);
    // A rank that sends to itself counts both ends.
    const std::pair<int, int> seat = {
        way.first * 2 + (operation.kind == Kind::kSend), way.second};
    operation.number = comm->num_messages[seat]++;
  }
  ++comm->num_running;
  comm->pending = std::make_shared<Launch>(std::move(launch));
  comm->was_asked = false;
  return ncclInProgress;
}

ncclComm_t make_comm(int rank, int device) {
  auto comm = std::make_unique<ncclComm>();
  comm->rank = rank;
  comm->device = device;
  state().live.insert(comm.get());
  state().comms.push_back(std::move(comm));
  return state().comms.back().get();
}

// Other processes wake nobody here: who waits for them looks again and again.
void begin_to_look() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([] {
      for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        emulator::wake();
      }
    }).detach();
  });
}

// The same of all_have_joined: this rank's part of a split among processes.
void look_at_split(ncclComm& comm) {
  if (!are_processes() || !comm.is_splitting) return;
  SplitPart part;
  if (!find_part(*comm.clique, comm.rank, comm.num_splits - 1, part)) return;
  comm.is_splitting = false;
  if (part.rank < 0) return;
  auto clique = std::make_shared<Clique>();
  clique->id = part.id;
  clique->size = part.size;
  ncclComm_t child = make_comm(part.rank, comm.device);
  child->clique = clique;
  child->is_complete = true;
  clique->members[part.rank] = child;
  *comm.child = child;
  ++state().num_split;
}

// All ranks have called: makes the parts.
void finish_split(Clique& clique, std::int64_t number) {
  std::map<std::pair<int, int>, std::vector<int>> parts;  // (color, key): ranks
  std::map<int, std::shared_ptr<Clique>> cliques;         // by color
  for (const auto& [rank, part] : clique.splits[number]) {
    if (part.color >= 0) parts[{part.color, part.key}].push_back(rank);
  }
  for (const auto& [order, ranks] : parts) {
    auto& made = cliques[order.first];
    if (made == nullptr) made = std::make_shared<Clique>();
    for (const int rank : ranks) {
      const int position = made->size++;
      ncclComm_t child = make_comm(position, clique.members[rank]->device);
      child->clique = made;
      made->members[position] = child;
      *clique.splits[number][rank].child = child;
      ++state().num_split;
    }
  }
  for (const auto& [rank, comm] : clique.members) comm->is_splitting = false;
  clique.splits.erase(number);
}

}  // namespace

ncclResult_t call(const char* function, ncclComm_t comm, cudaStream_t stream,
                  Operation operation) {
  {
    const Lock lock(state().mutex);
    const ncclResult_t error = planted(function);
    if (error != ncclSuccess) return error;
    const bool has_peer = operation.kind == Kind::kBroadcast ||
                          operation.kind == Kind::kReduce ||
                          operation.is_message();
    if (has_peer &&
        (operation.peer < 0 || operation.peer >= comm->clique->size)) {
      return refuse(ncclInvalidArgument,
                    "there is no rank " + std::to_string(operation.peer));
    }
    if (operation.count == 0) {
      return refuse(ncclInvalidArgument, "nothing to move");
    }
  }
  Launch launch;
  launch.stream = stream;
  launch.operations = {operation};
  if (group_depth == 0) return launch_group(comm, std::move(launch));
  for (auto& [other, existing] : group) {
    if (other != comm || existing.stream != stream) continue;
    existing.operations.push_back(operation);
    return ncclSuccess;
  }
  group.emplace_back(comm, std::move(launch));
  return ncclSuccess;
}

void fail_call(const std::string& function, int nth, ncclResult_t error) {
  const Lock lock(state().mutex);
  state().planted[function] = {nth, error};
}

void fail_async(int device, const std::string& text) {
  const Lock lock(state().mutex);
  state().lost[device] = text;
}

void reset() {
  const Lock lock(state().mutex);
  state().planted.clear();
  state().lost.clear();
}

Counts counts() {
  const Lock lock(state().mutex);
  return {state().num_joined, state().num_split, state().num_aborted,
          static_cast<std::int64_t>(state().live.size())};
}

}  // namespace stand_in

using stand_in::Clique;
using stand_in::Kind;
using stand_in::Lock;
using stand_in::refuse;
using stand_in::state;

ncclResult_t ncclGetVersion(int* version) {
  *version = 22803;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock(state().mutex);
  *id = {};
  const std::string text = "stand-in-" + std::to_string(getpid()) + "-" +
                           std::to_string(state().num_ids++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const kTexts[] = {
      "no error",
      "unhandled cuda error",
      "system error",
      "internal error",
      "invalid argument",
      "invalid usage",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return kTexts[result];
}

const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string text;
  const Lock lock(state().mutex);
  text = comm != nullptr && !comm->error_text.empty() ? comm->error_text
                                                      : stand_in::last_error;
  return text.c_str();
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id,
                                    int rank, ncclConfig_t* config) {
  int device = 0;
  cudaGetDevice(&device);
  const Lock lock(state().mutex);
  const ncclResult_t error = stand_in::planted("ncclCommInitRankConfig");
  if (error != ncclSuccess) return error;
  if (config->blocking != 0) {
    return refuse(ncclInvalidArgument, "only blocking = 0 is known");
  }
  auto& clique = state().cliques[std::string(id.internal, sizeof(id))];
  if (clique == nullptr) {
    clique = std::make_shared<Clique>();
    clique->id = id.internal;
    clique->size = size;
  }
  if (clique->size != size || rank < 0 || rank >= size ||
      clique->members.count(rank) > 0) {
    return refuse(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                           std::to_string(size) +
                                           " does not fit the others");
  }
  *comm = stand_in::make_comm(rank, device);
  (*comm)->clique = clique;
  clique->members[rank] = *comm;
  ++state().num_joined;
  if (stand_in::are_processes()) {
    stand_in::begin_to_look();
    stand_in::write_join(*clique, rank, device);
  }
  for (const auto& [other, theirs] : clique->members) {
    if (other == rank || theirs->device != device) continue;
    stand_in::break_all(*clique, "duplicate GPU: rank " +
                                     std::to_string(other) + " and rank " +
                                     std::to_string(rank) + " both on device " +
                                     std::to_string(device));
  }
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                           ncclComm_t* child, ncclConfig_t*) {
  const Lock lock(state().mutex);
  const ncclResult_t error = stand_in::planted("ncclCommSplit");
  if (error != ncclSuccess) return error;
  const std::string wrong = stand_in::why_not_ready(*comm);
  if (!wrong.empty()) return refuse(ncclInvalidUsage, wrong);
  if (comm->num_running > 0) {
    return refuse(ncclInvalidUsage, "calls are in flight on the parent");
  }
  *child = nullptr;
  comm->is_splitting = true;
  const std::int64_t number = comm->num_splits++;
  if (stand_in::are_processes()) {
    comm->child = child;
    stand_in::write_split(*comm->clique, comm->rank, number, color, key);
    return ncclInProgress;
  }
  auto& called = comm->clique->splits[number];
  called[comm->rank] = {color, key, child};
  if (static_cast<int>(called.size()) == comm->clique->size) {
    stand_in::finish_split(*comm->clique, number);
  }
  return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock(state().mutex);
  comm->is_finalized = true;
  if (stand_in::are_processes()) {
    stand_in::write_end(*comm->clique, comm->rank);
  }
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock(state().mutex);
  if (state().live.erase(comm) == 0) {
    return refuse(ncclInvalidArgument, "the communicator is gone already");
  }
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const Lock lock(state().mutex);
    if (state().live.erase(comm) == 0) {
      return refuse(ncclInvalidArgument, "the communicator is gone already");
    }
    comm->is_aborted = true;
    ++state().num_aborted;
    if (stand_in::are_processes()) {
      stand_in::write_end(*comm->clique, comm->rank);
    }
  }
  emulator::wake();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  std::shared_ptr<stand_in::Launch> launch;
  {
    const Lock lock(state().mutex);
    const auto lost = state().lost.find(comm->device);
    if (lost != state().lost.end() && comm->error == ncclSuccess) {
      comm->error = ncclRemoteError;
      comm->error_text = lost->second;
    }
    *error = comm->error;
    if (*error != ncclSuccess) return ncclSuccess;
    *error = ncclInProgress;
    stand_in::look_at_split(*comm);
    if (!stand_in::is_complete(*comm) || comm->is_splitting) return ncclSuccess;
    if (comm->is_finalized && !stand_in::all_end(*comm)) return ncclSuccess;
    if (comm->pending != nullptr) {
      if (!std::exchange(comm->was_asked, true)) return ncclSuccess;
      launch = std::move(comm->pending);
      comm->pending = nullptr;
    }
    *error = ncclSuccess;
  }
  if (launch != nullptr) {
    emulator::enqueue(
        launch->stream, launch->operations.front().text(),
        [comm, launch] { return stand_in::poll(*comm, *launch); },
        /*opens_memory=*/false);
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++stand_in::group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (stand_in::group_depth == 0) {
    return refuse(ncclInvalidUsage, "no group was started");
  }
  if (--stand_in::group_depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (auto& [comm, launch] : std::exchange(stand_in::group, {})) {
    const ncclResult_t each = stand_in::launch_group(comm, std::move(launch));
    if (result == ncclSuccess || result == ncclInProgress) result = each;
  }
  return result;
}
