#pragma once

// The board, on which ranks of the stand-in meet: a map for threads of this
// process; for processes a folder, which SHARDBOOK_STAND_IN_FOLDER names. A rank
// writes what it brings to a call, and a call is complete when the parts of all
// its ranks are there. Each rank then computes its own result, from all parts.
// Nothing is removed from a folder, so a test can read afterwards who called
// what:
//
//   COMMUNICATOR.join.RANK                   "DEVICE of SIZE"
//   COMMUNICATOR.call.NUMBER.RANK            a collective: its text, its input
//   COMMUNICATOR.message.FROM.TO.NUMBER      a message, and with .taken its end
//   COMMUNICATOR.split.NUMBER.RANK           "COLOR KEY"
//   COMMUNICATOR.end.RANK
//
// All functions expect the lock of State.

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/stand_in/communicator.h"

namespace stand_in {

/// What all communicators share. One mutex guards everything; the emulator's own
/// is taken before it (by the thread that runs a stream), never after.
struct State {
  std::mutex mutex;
  std::int64_t num_ids = 0;
  std::vector<std::unique_ptr<ncclComm>> comms;  // ever made
  std::set<ncclComm_t> live;
  std::map<std::string, std::pair<int, ncclResult_t>> planted;
  std::map<int, std::string> lost;  // by device
  std::int64_t num_joined = 0, num_split = 0, num_aborted = 0;
};
State& state();
using Lock = std::unique_lock<std::mutex>;

bool are_processes();

void write_join(const ncclComm& comm);
void write_end(const ncclComm& comm);
void write_split(const ncclComm& comm, int color, int key);
/// Whether all ranks have written it. Two ranks on one device are an error of
/// the communicator.
bool all_have_joined(ncclComm& comm);
bool all_have_ended(const ncclComm& comm);
/// Whether all ranks have called the last split. Then `id`, `rank` and `size`
/// are those of this rank's part; the rank is -1 where it has none.
bool find_part(const ncclComm& comm, std::string& id, int& rank, int& size);

/// One look at an operation that is first on its stream: brings this rank's
/// part, and computes the result when all parts are there. Returns what differs
/// between ranks, or nothing.
std::string look_at(const ncclComm& comm, Operation& operation);

/// Forgets what the ranks of a communicator that has ended wrote for each other.
void forget(const std::string& id);

}  // namespace stand_in
