#pragma once

// A rank's line to the coordinator.
//
// The line also tracks this rank's waits. A thread registers each wait; the
// line's reader reports a wait that exceeds its timeout to the coordinator, and
// answers the coordinator's questions about this rank's waits. The coordinator
// asks all ranks when something takes too long: a rank that does not answer is
// stopped or cut off; otherwise the waits lead from the rank that complains to
// the culprit. A rank whose coordinator does not answer gives up by itself.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/socket.h"

namespace shardbook::internal {

/// Where a coordinator may be reached.
struct ServingPlace {
  /// One of these; empty as long as it is not known.
  std::vector<HostPort> addresses;
  /// Coordinator::Options::serial, which an address of an earlier coordinator
  /// does not have; empty where a place does not tell.
  std::string serial;
  bool operator==(const ServingPlace&) const = default;
};

/// Safe to use from several threads.
class ControlLine {
 public:
  struct Options {
    /// Where the coordinator is. It is asked again and again, because what it
    /// says may be left from an earlier run.
    std::function<ServingPlace()> locate;
    /// For messages: "rank 0", "the launcher".
    std::string coordinator_name = "rank 0";
    int rank = 0;
    int world_size = 1;
    /// RankEnvironment::job
    std::string job;
    std::uint64_t generation = 0;
    std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  };

  /// A wait of the calling thread, from construction to destruction.
  class Wait {
   public:
    /// The thread waits in `text` for a message of world rank `peer`.
    Wait(ControlLine& line, const std::string& text, int peer,
         std::chrono::milliseconds timeout);
    /// The thread waits in `text` for the ranks that are missing in the
    /// coordinator's meeting `key`, or for any rank where `key` is empty.
    Wait(ControlLine& line, const std::string& text, std::string key,
         std::chrono::milliseconds timeout);
    /// The thread waits for another thread of this rank.
    explicit Wait(ControlLine& line);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class ControlLine;
    void begin();
    /// Id, text, peers, key: the message to the coordinator.
    std::vector<std::string> fields() const;

    ControlLine& line_;
    std::uint64_t id_ = 0;
    const std::string* text_ = nullptr;  // null: another thread's wait counts
    std::string peer_;
    std::string key_;
    std::chrono::milliseconds timeout_{0};
    std::chrono::steady_clock::time_point began_;
    std::thread::id thread_;
    // When the coordinator learned that the wait is too long.
    std::optional<std::chrono::steady_clock::time_point> reported_;
    std::list<Wait*>::iterator place_;
  };

  /// Connects; throws RunError when nobody answers before the timeout. The
  /// calling thread is the rank's own: while it waits, the rank waits.
  explicit ControlLine(Options options);
  ~ControlLine();
  ControlLine(const ControlLine&) = delete;
  ControlLine& operator=(const ControlLine&) = delete;

  /// The address at which the other ranks reach this host: the one that reaches
  /// the coordinator, unless that is this host's loopback and others are not on
  /// it. Call it when all ranks have come.
  std::string host();

  /// Called once, by the reader's thread, when the world fails; at once when
  /// it has failed already.
  void set_failure_callback(std::function<void()> callback);
  /// The first thing that went wrong in the world; empty while nothing did.
  std::string failure() const;
  /// The same, after waiting for a failure that must be on its way. If the
  /// coordinator does not answer, that is the failure.
  std::string wait_for_failure(std::chrono::milliseconds patience);

  /// Sends a text to another rank, through the coordinator. Returns at once.
  void mail(int to, const std::string& key, const std::string& text);
  /// The text mailed to this rank under `key`, once; empty until it arrives.
  std::optional<std::string> take_mail(const std::string& key);
  /// The same, after waiting for it in `what`.
  std::string wait_for_mail(const std::string& key, const std::string& what,
                            std::chrono::milliseconds timeout);
  /// Called by the reader's thread whenever mail has come.
  void set_mail_callback(std::function<void()> callback);
  /// Reports a call of this rank to the coordinator. Returns at once.
  void report_call(const std::string& key, const std::string& members,
                   const std::string& signature, const std::string& text);
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
  /// What is wrong; empty when the coordinator has welcomed this rank.
  std::string join(const HostPort& address, const ServingPlace& place,
                   std::chrono::steady_clock::time_point give_up);
  std::string shake_hands(const ServingPlace& place,
                          std::chrono::steady_clock::time_point give_up);
  bool receive(int timeout_ms);
  void read();
  void handle(Frame frame);
  void set_failure(const std::string& message);
  void send(const Frame& frame);
  void check_waits();
  std::string silence() const;
  Frame describe_waits(const std::string& question) const;
  /// Waits for `ready`; throws RunError on failure and when the time is over.
  void wait_until(const std::string& key, std::chrono::milliseconds timeout,
                  const std::string& what, const std::function<bool()>& ready);
  std::vector<std::string> wait_for_answer(const std::string& key,
                                           const std::string& meeting,
                                           std::chrono::milliseconds timeout,
                                           const std::string& what);

  Options options_;
  Descriptor socket_;
  std::string host_;
  std::string input_;
  std::chrono::steady_clock::time_point last_heard_;  // by the reader

  std::mutex write_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> answers_;
  std::string failure_;
  std::function<void()> failure_callback_, mail_callback_;
  std::list<Wait*> waits_;
  std::uint64_t num_waits_ = 0;
  const std::thread::id owner_ = std::this_thread::get_id();
  bool all_left_ = false;
  int num_pongs_ = 0;
  bool ending_ = false;
  std::thread reader_;
};

}  // namespace shardbook::internal
