#pragma once

// What all communicators of the stand-in share. One mutex guards everything; the
// emulator's own is taken before it (by whoever runs a stream), never after.

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/stand_in/communicator.h"
#include "tests/cuda/stand_in/processes.h"

namespace stand_in {

struct State {
  std::mutex mutex;
  std::int64_t num_ids = 0;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id
  std::vector<std::unique_ptr<ncclComm>> comms;            // ever made
  std::set<ncclComm_t> live;
  std::map<std::string, std::pair<int, ncclResult_t>> planted;
  std::map<int, std::string> lost;  // by device
  std::int64_t num_joined = 0, num_split = 0, num_aborted = 0;
};

State& state();

using Lock = std::unique_lock<std::mutex>;

inline bool are_processes() { return !meeting_folder().empty(); }

/// Whether all ranks are there. This and the next expect the lock.
bool is_complete(ncclComm& comm);
/// The communicators of this clique report an error from now on.
void break_all(Clique& clique, const std::string& text);

/// One look at a launch that is first on its stream; true when it is done.
bool poll(ncclComm& comm, Launch& launch);

}  // namespace stand_in
