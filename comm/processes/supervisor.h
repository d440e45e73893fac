#pragma once

// The supervisor of processes that are ranks: it passes signals on, notices
// when a rank ends or is stopped, and collects all of them.

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/processes/coordinator.h"
#include "comm/processes/socket.h"

namespace shardbook::internal {

/// A process that is a rank.
struct Child {
  pid_t pid = -1;
  Descriptor pipe;     // its answer, in run_processes
  std::string answer;  // the bytes that came through the pipe
  bool ended = false;
  int status = 0;  // exit status, or kExitRunFailed
  std::optional<std::chrono::steady_clock::time_point> stopped_since;
};

/// Watches children until all have ended.
class Supervisor {
 public:
  /// Serves the coordinator on `listener`, where that is valid. A rank that is
  /// stopped for longer than `timeout` has failed.
  Supervisor(std::vector<Child> children, Descriptor listener,
             std::chrono::milliseconds timeout);
  ~Supervisor();

  /// Returns when all children have ended; passes signals on to them.
  void run();

  /// The first failure, or empty.
  std::string failure() const;
  int status() const { return status_; }
  const std::vector<Child>& children() const { return children_; }

 private:
  bool has_failure() const { return status_ != 0 || !failure().empty(); }
  void fail(const std::string& failure);
  std::string explain(int rank);
  void check_end(int rank);
  void check_stop(int rank);
  void read_answer(Child& child);
  void pass_on_signal();
  void send_signal(int signal);

  std::vector<Child> children_;
  std::unique_ptr<Coordinator> coordinator_;
  std::string failure_;  // of a rank that never reached the coordinator
  std::chrono::milliseconds timeout_;
  int status_ = 0;
  bool has_passed_on_ = false;
};

}  // namespace shardbook::internal
