#pragma once

// A rank's line to the coordinator.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/gloo/socket.h"

namespace shardbook::internal {

/// Safe to use from several threads.
class ControlLine {
 public:
  struct Options {
    /// Where the coordinator is, once that is known.
    std::function<std::optional<HostPort>()> locate;
    /// For messages: "rank 0", "the launcher".
    std::string coordinator_name = "rank 0";
    int rank = 0;
    int world_size = 1;
    std::uint64_t generation = 0;
    std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  };

  /// Connects; throws Error when nobody answers before the timeout.
  explicit ControlLine(Options options);
  ~ControlLine();
  ControlLine(const ControlLine&) = delete;
  ControlLine& operator=(const ControlLine&) = delete;

  /// The address of this host that reaches the coordinator.
  const std::string& host() const { return host_; }

  /// Called once, by the reader's thread, when the world fails; at once when
  /// it has failed already.
  void set_failure_callback(std::function<void()> callback);
  /// The first thing that went wrong in the world; empty while nothing did.
  std::string failure() const;
  /// The same; gives a failure that must be on its way some time to arrive.
  std::string wait_for_failure(std::chrono::milliseconds patience);

  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key, std::chrono::milliseconds timeout);
  /// Tells what this rank calls. Returns at once.
  void report_call(const std::string& key, const std::string& members,
                   const std::string& signature, const std::string& text,
                   std::chrono::milliseconds timeout);
  /// Every member's text, by position among `members`.
  std::vector<std::string> exchange(const std::string& key,
                                    const std::string& members,
                                    const std::string& name,
                                    const std::string& text,
                                    std::chrono::milliseconds timeout);
  /// Tells all ranks that this one failed, and returns when they are told.
  void fail(const std::string& reason);
  /// Ends this rank's part; returns when all ranks have, or the world failed.
  void leave(std::chrono::milliseconds timeout);

 private:
  void connect();
  bool shake_hands();
  void read();
  void handle(Frame frame);
  void set_failure(const std::string& message);
  void send(const Frame& frame);
  /// Waits for `ready`; throws on failure and when the time is over.
  void wait_until(std::unique_lock<std::mutex>& lock,
                  std::chrono::milliseconds timeout, const std::string& what,
                  const std::function<bool()>& ready);

  Options options_;
  Descriptor socket_;
  std::string host_;
  std::string input_;

  std::mutex write_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> answers_;
  std::string failure_;
  std::function<void()> failure_callback_;
  bool all_left_ = false;
  bool ending_ = false;
  std::thread reader_;
};

}  // namespace shardbook::internal
