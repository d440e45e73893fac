// The calls of the stand-in for NCCL. Ranks are threads of this process, or
// processes: they meet on a board (board.h).

#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "tests/cuda/stand_in/board.h"
#include "tests/cuda/stand_in/stand_in.h"

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

const char* type_name(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64:
      return "f64";
    case ncclFloat32:
      return "f32";
    case ncclFloat16:
      return "f16";
    case ncclBfloat16:
      return "bf16";
    case ncclInt64:
      return "i64";
    default:
      return "i32";
  }
}

// Whether all ranks are there; expects the lock.
bool is_complete(ncclComm& comm) {
  if (!comm.is_complete) comm.is_complete = all_have_joined(comm);
  return comm.is_complete;
}

// One look at a launch that is first on its stream; true when it is done.
bool poll(ncclComm& comm, Launch& launch) {
  const Lock lock(state().mutex);
  if (comm.is_aborted || launch.is_done) return true;
  // Messages of a group run together, collectives one after the other. The second
  // look finds the messages that this rank has taken from itself in the first.
  for (int look = 0; look < 2; ++look) {
    for (Operation& operation : launch.operations) {
      if (operation.is_done) continue;
      const std::string wrong = look_at(comm, operation);
      if (!wrong.empty() && comm.error == ncclSuccess) {
        // As with NCCL, the call never ends.
        comm.error = ncclInvalidUsage;
        comm.error_text = "calls differ: " + wrong;
      }
      if (!operation.is_done && !operation.is_message()) return false;
    }
  }
  launch.is_done =
      std::all_of(launch.operations.begin(), launch.operations.end(),
                  [](const Operation& each) { return each.is_done; });
  if (launch.is_done) --comm.num_running;
  return launch.is_done;
}

// What is wrong with the communicator for a new call; expects the lock.
std::string why_not_ready(ncclComm& comm) {
  if (state().live.count(&comm) == 0) {
    return "the communicator was destroyed or aborted";
  }
  if (!is_complete(comm) || comm.pending || comm.child != nullptr) {
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

ncclComm_t make_comm(const std::string& id, int rank, int size, int device) {
  auto comm = std::make_unique<ncclComm>();
  comm->id = id;
  comm->rank = rank, comm->size = size;
  comm->device = device;
  state().live.insert(comm.get());
  state().comms.push_back(std::move(comm));
  return state().comms.back().get();
}

// Ends a rank's part; the last one of this process clears the board.
void leave(ncclComm_t comm) {
  state().live.erase(comm);
  const auto is_ours = [&](ncclComm_t each) { return each->id == comm->id; };
  if (std::none_of(state().live.begin(), state().live.end(), is_ours)) {
    forget(comm->id);
  }
}

// Other processes wake nobody here: threads that wait for them look again and
// again.
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

// Makes this rank's part of a split that all ranks have called.
void look_at_split(ncclComm& comm) {
  std::string id;
  int rank = -1, size = 0;
  if (comm.child == nullptr || !find_part(comm, id, rank, size)) return;
  ncclComm_t* const child = std::exchange(comm.child, nullptr);
  if (rank < 0) return;
  *child = make_comm(id, rank, size, comm.device);
  (*child)->is_complete = true;
  ++state().num_split;
}

}  // namespace

std::string Operation::text() const {
  static const char* const kNames[] = {
      "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
      "ncclReduce",    "ncclSend",          "ncclRecv"};
  static const char* const kOps[] = {"sum", "product", "max", "min"};
  std::ostringstream text;
  text << kNames[static_cast<int>(kind)] << " " << type_name(type) << "["
       << count << "]";
  if (kind == Kind::kAllReduce || kind == Kind::kReduceScatter ||
      kind == Kind::kReduce) {
    text << " (" << kOps[op] << ")";
  }
  if (kind == Kind::kBroadcast || kind == Kind::kReduce) {
    text << " (root " << peer << ")";
  }
  return text.str();
}

ncclResult_t call(const char* function, ncclComm_t comm, cudaStream_t stream,
                  Operation operation) {
  {
    const Lock lock(state().mutex);
    const ncclResult_t error = planted(function);
    if (error != ncclSuccess) return error;
    const bool has_peer = operation.kind == Kind::kBroadcast ||
                          operation.kind == Kind::kReduce ||
                          operation.is_message();
    if (has_peer && (operation.peer < 0 || operation.peer >= comm->size)) {
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

using stand_in::Kind;
using stand_in::Lock;
using stand_in::refuse;
using stand_in::state;

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
  *comm = stand_in::make_comm(id.internal, rank, size, device);
  ++state().num_joined;
  if (stand_in::are_processes()) stand_in::begin_to_look();
  stand_in::write_join(**comm);
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
  comm->child = child;
  stand_in::write_split(*comm, color, key);
  ++comm->num_splits;
  return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock(state().mutex);
  comm->is_finalized = true;
  stand_in::write_end(*comm);
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock(state().mutex);
  if (state().live.count(comm) == 0) {
    return refuse(ncclInvalidArgument, "the communicator is gone already");
  }
  stand_in::leave(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const Lock lock(state().mutex);
    if (state().live.count(comm) == 0) {
      return refuse(ncclInvalidArgument, "the communicator is gone already");
    }
    comm->is_aborted = true;
    ++state().num_aborted;
    stand_in::write_end(*comm);
    stand_in::leave(comm);
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
    if (!stand_in::is_complete(*comm) || comm->child) return ncclSuccess;
    if (comm->is_finalized && !stand_in::all_have_ended(*comm)) {
      return ncclSuccess;
    }
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
        [comm, launch] { return stand_in::poll(*comm, *launch); });
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
