#pragma once

// The coordinator of ranks that are processes: one thread, in rank 0 or in the
// launcher, with one control line to every rank. No data passes through it. It
//
//   - passes texts from rank to rank, such as the addresses by which they find
//     each other,
//   - sees the description of every call of every rank, compares them, and so
//     notices calls that differ and ranks that never come,
//   - finds the rank that delays the others: when a rank complains about a
//     wait, it asks every rank what it waits for. A rank that does not answer
//     is to blame; otherwise the one at the end of the chain of waits, which
//     waits for nobody,
//   - notices the end of a rank by the end of its line,
//   - and tells all ranks the first thing that went wrong.
//
// Every world (a call of run_ranks) of a job has a number, its generation.
//
// Ranks say which job they belong to. A rank of another job, or one that looks
// for an earlier coordinator, is turned away, and no rank here learns of it. A
// coordinator of one world stops listening when all ranks of it have come.

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/socket.h"

namespace shardbook::internal {

class Coordinator {
 public:
  struct Options {
    Descriptor listener = listen_on({"127.0.0.1", 0});
    int world_size = 1;
    /// The job of all ranks (RankEnvironment::job).
    std::string job = {};
    /// Differs from that of every other coordinator, where the ranks know it.
    std::string serial = {};
    /// Serves only this world; empty: all that come, one after another.
    std::optional<std::uint64_t> generation = {};
    /// Why a rank's line ended ("killed by signal 9"), if the owner knows.
    std::function<std::string(int rank)> explain_end = {};
  };

  explicit Coordinator(Options options);
  /// Closes all lines.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Where this process reaches it.
  const HostPort& address() const { return address_; }
  /// Tells every rank, now and later, that the job failed.
  void fail(const std::string& message);
  /// This rank's process ended normally; a world that still needs it fails.
  void rank_ended(int rank);
  /// The first failure of any world; empty while there is none.
  std::string failure() const;

 private:
  using Clock = std::chrono::steady_clock;

  // Calls that belong together: one per member.
  struct Meeting {
    std::vector<int> members;
    std::string signature;              // of the first that came
    std::map<int, std::string> texts;   // by rank: what it calls
    std::map<int, std::string> values;  // exchanges only
  };

  // One wait, as the rank describes it.
  struct Wait {
    std::string id;  // among the waits of its rank
    std::string text;
    std::vector<int> peers;
  };
  struct Answer {
    bool is_waiting = false;  // the rank's own thread
    std::vector<Wait> waits;
  };
  // `wait` of `rank` is too long, so every rank is asked for its waits.
  struct Inquiry {
    std::uint64_t number = 0;
    int rank = 0;
    Wait wait;
    std::int64_t timeout_ms = 0;
    Clock::time_point deadline;
    std::set<int> asked;
    std::map<int, Answer> answers;
  };

  struct World {
    std::map<std::string, Meeting> meetings;
    std::set<int> seen;  // ranks that have joined
    std::set<int> left;
    std::optional<Inquiry> inquiry;
    std::string failure;
  };

  struct Line {
    Descriptor socket;
    std::string input;
    std::string output;
    int rank = -1;  // -1 until kHello
    std::uint64_t generation = 0;
    bool closing = false;
  };

  void serve();
  bool awaits_late_ranks() const;
  void accept_line();
  void read_line(Line& line);
  void flush(Line& line);
  void end_line(Line& line, const std::string& cause);
  void handle(Line& line, const Frame& frame);
  void handle_hello(Line& line, const Frame& frame);
  void turn_away(Line& line, const Frame& frame);
  void note_all_came(std::uint64_t generation);
  void handle_call(Line& line, const Frame& frame);
  void handle_leave(Line& line);
  void handle_overdue(Line& line, const Frame& frame);
  void handle_waits(Line& line, const Frame& frame);
  // The ranks that a wait is for, by the peers or the key that it names.
  std::vector<int> awaited(const World& world, int rank,
                           const std::string& peers,
                           const std::string& key) const;
  // Four fields of a frame: id, text, peers, key.
  Wait read_wait(const World& world, int rank, const Frame& frame,
                 std::size_t at) const;
  void conclude(std::uint64_t generation);
  static std::string verdict(const Inquiry& inquiry);
  static bool misses(const World& world, int rank);
  void drain();
  void fail_world(std::uint64_t generation, const std::string& message);
  void send(std::uint64_t generation, int rank, const Frame& frame);
  static void queue(Line& line, const Frame& frame);

  Options options_;
  Descriptor listener_;
  Descriptor wake_;
  HostPort address_;

  mutable std::mutex mutex_;
  bool stopping_ = false;
  Clock::time_point stopped_;
  std::string first_failure_;
  std::string job_failure_;
  std::set<int> ended_;
  std::list<Line> lines_;
  std::map<std::uint64_t, World> worlds_;
  std::uint64_t num_inquiries_ = 0;
  std::thread thread_;
};

}  // namespace shardbook::internal
