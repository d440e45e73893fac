// How the calls of the stand-in's ranks meet on their streams.

#include <algorithm>
#include <cstring>
#include <sstream>

#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/stand_in/state.h"

namespace stand_in {
namespace {

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

// Compares a call with those of the ranks that are here.
std::string difference(const Meeting& meeting, int rank, const Operation& mine,
                       const std::vector<int>& ranks) {
  for (const auto& [other, theirs] : meeting.arrived) {
    const bool same = mine.is_message() ? mine.count == theirs->count &&
                                              mine.type == theirs->type
                                        : mine.text() == theirs->text();
    if (same) continue;
    std::ostringstream text;
    text << "rank " << ranks[static_cast<std::size_t>(other)] << " called "
         << theirs->text() << ", rank " << ranks[static_cast<std::size_t>(rank)]
         << " called " << mine.text();
    return text.str();
  }
  return "";
}

void arrive(ncclComm& comm, Operation& operation) {
  Clique& clique = *comm.clique;
  if (are_processes()) {
    const emulator::OpenDeviceMemory opened;
    const std::string wrong = look_at(clique, comm.rank, operation);
    if (!wrong.empty()) break_all(clique, "calls differ: " + wrong);
    return;
  }
  operation.has_arrived = true;
  const bool is_send = operation.kind == Kind::kSend;
  const std::pair<int, int> way = is_send
                                      ? std::pair(comm.rank, operation.peer)
                                      : std::pair(operation.peer, comm.rank);
  const bool is_message = operation.is_message();
  Meeting& meeting = is_message ? clique.messages[way][operation.number]
                                : clique.collectives[operation.number];
  const int seat = is_message ? (is_send ? 0 : 1) : comm.rank;
  std::vector<int> ranks = {way.first, way.second};
  if (!is_message) {
    ranks.clear();
    for (int r = 0; r < clique.size; ++r) ranks.push_back(r);
  }
  const std::string wrong = difference(meeting, seat, operation, ranks);
  // As with NCCL, the call never ends.
  if (!wrong.empty()) return break_all(clique, "calls differ: " + wrong);
  meeting.arrived[seat] = &operation;
  if (meeting.arrived.size() < ranks.size()) return;
  const emulator::OpenDeviceMemory opened;
  std::vector<Operation*> all;
  for (const auto& [index, each] : meeting.arrived) all.push_back(each);
  if (is_message) {
    std::memcpy(all[1]->output, all[0]->input,
                all[0]->count * size_of(all[0]->type));
    clique.messages[way].erase(operation.number);
  } else {
    run_collective(all);
    clique.collectives.erase(operation.number);
  }
  for (Operation* each : all) each->is_done = true;
}

}  // namespace

// Never destroyed: streams may be waited for while the process ends.
State& state() {
  static State& result = *new State;
  return result;
}

void break_all(Clique& clique, const std::string& text) {
  for (const auto& [rank, comm] : clique.members) {
    if (comm->error != ncclSuccess) continue;
    comm->error = ncclInvalidUsage;
    comm->error_text = text;
  }
}

bool is_complete(ncclComm& comm) {
  Clique& clique = *comm.clique;
  if (comm.is_complete) return true;
  std::string error;
  comm.is_complete =
      are_processes() ? all_have_joined(clique, error)
                      : static_cast<int>(clique.members.size()) == clique.size;
  if (!error.empty()) break_all(clique, error);
  return comm.is_complete;
}

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

bool poll(ncclComm& comm, Launch& launch) {
  const Lock lock(state().mutex);
  if (comm.is_aborted || launch.is_done) return true;
  // What an aborted rank brought may be gone: its peers wait until they are
  // aborted, too.
  for (const auto& [rank, member] : comm.clique->members) {
    if (member->is_aborted) return false;
  }
  // Messages of a group run together, collectives one after the other.
  for (Operation& operation : launch.operations) {
    const bool asks_again = are_processes() && !operation.is_done;
    if (!operation.has_arrived || asks_again) arrive(comm, operation);
    if (!operation.is_done && !operation.is_message()) return false;
  }
  launch.is_done =
      std::all_of(launch.operations.begin(), launch.operations.end(),
                  [](const Operation& each) { return each.is_done; });
  if (launch.is_done) --comm.num_running;
  return launch.is_done;
}

}  // namespace stand_in
