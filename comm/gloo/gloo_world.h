#pragma once

// One rank's connections: Gloo's transport to every other rank, the line to
// the coordinator, and the calls that wait.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/launch.h"
#include "comm/processes.h"
#include "comm/processes/control_line.h"
#include "comm/processes/rendezvous.h"

namespace gloo::transport {
class Context;
class UnboundBuffer;
}  // namespace gloo::transport

namespace shardbook::internal {

class CallQueue;

/// The name of a call in error messages, and its timeout.
struct CallInfo {
  std::string text;  ///< "all_reduce f32[10] over 'world'"
  std::chrono::milliseconds timeout{0};
};

class GlooWorld {
 public:
  /// Meets the other ranks and connects to all of them.
  GlooWorld(const RankEnvironment& environment, std::uint64_t generation,
            const LaunchOptions& options);
  ~GlooWorld();
  GlooWorld(const GlooWorld&) = delete;
  GlooWorld& operator=(const GlooWorld&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  ControlLine& line() { return *line_; }
  /// Gloo's connections to all ranks.
  ::gloo::transport::Context& mesh() { return *mesh_; }

  /// Throws Error when something has failed anywhere in the world.
  void check(const CallInfo& info) const;
  /// Tells all ranks that this one failed; their calls throw.
  void fail(const std::string& reason);
  /// Waits for calls that are in flight, and ends this rank's part. Throws
  /// Error when the world has failed.
  void leave();

  /// Queues outlive their groups until they are empty.
  void add_queue(std::shared_ptr<CallQueue> queue);
  void release_queue(const std::shared_ptr<CallQueue>& queue);

 private:
  friend class Message;

  void abort_waits();
  RunError failure_in(const std::string& failure, const CallInfo& info) const;
  [[noreturn]] void throw_failure(const CallInfo& info, int peer,
                                  const std::string& cause);

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  Rendezvous rendezvous_;
  std::unique_ptr<ControlLine> line_;
  std::shared_ptr<::gloo::transport::Context> mesh_;

  std::vector<std::shared_ptr<CallQueue>> queues_;  // of the rank's thread

  mutable std::mutex mutex_;
  bool failed_ = false;
  std::set<::gloo::transport::UnboundBuffer*> waiting_;
};

/// One message between two ranks: in flight from its construction until wait().
/// The memory must stay where it is until then; destroying a message before
/// its end cancels what has not been moved.
class Message {
 public:
  enum class Way { kSend, kRecv };
  /// `slot` identifies the message: it pairs with the other rank's message of
  /// the same slot. `peer` is a world rank. A send does not change the memory.
  Message(GlooWorld& world, CallInfo info, Way way, int peer,
          std::uint64_t slot, const void* data, std::size_t bytes);
  Message(Message&&) noexcept;
  Message& operator=(Message&&) noexcept;
  ~Message();

  /// Throws Error that names the failed rank.
  void wait();

 private:
  GlooWorld* world_;
  CallInfo info_;
  Way way_;
  int peer_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
};

}  // namespace shardbook::internal
