#pragma once

// The thread that cells run on, what it prints, and the thread that watches it.
//
// All cells run on one thread of their own. The kernel's main thread meanwhile
// passes on what the cell prints and displays, and it alone talks to Jupyter.
// It also sees SIGINT, which asks it to interrupt the cell, and a crash of the
// cell, which stops that thread for good but not the kernel.

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace shardbook::notebook {

/// Standard output and error of this process, as pipes that the kernel reads.
/// This catches std::cout, printf, and the output of compiled libraries.
class OutputPipes {
 public:
  /// Takes the text of "stdout" or "stderr".
  using Receiver = std::function<void(const char*, const std::string&)>;

  /// Replaces files 1 and 2. Throws std::runtime_error on failure.
  OutputPipes();
  ~OutputPipes();

  int out() const { return ends_[0]; }
  int err() const { return ends_[1]; }

  /// Passes on all that has been printed so far; never waits. Characters of
  /// UTF-8 stay whole: the first bytes of one wait for the others, unless this
  /// is the `last` call of a cell.
  void drain(const Receiver& receive, bool last);

 private:
  int ends_[2] = {-1, -1};
  std::string begun_[2];  ///< the first bytes of a character
};

class GuardedBuffer;

/// Refuses text that a thread of a cell prints, such as a rank.
///
/// Ranks print in any order, and xeus-cling and xeus-cpp may lose such text,
/// since they send a cell's output from the thread that prints. The guard covers
/// std::cout, std::cerr, std::clog and printf. It leaves the file stderr alone,
/// to which compiled libraries write their warnings.
class PrintGuard {
 public:
  /// Takes the place of the streams' buffers and of stdout. The calling thread
  /// may print.
  PrintGuard();
  /// Gives the streams their own buffers back.
  ~PrintGuard();
  PrintGuard(const PrintGuard&) = delete;
  PrintGuard& operator=(const PrintGuard&) = delete;

  /// The calling thread may print, too.
  void allow_this_thread();

  /// True if the calling thread may print. Otherwise the guard keeps `text`,
  /// if it comes from the first such thread, for refused().
  bool allows(std::string_view text);

  /// The text that a forbidden thread tried to print since the last call: the
  /// beginning of the first line. Empty if there was none.
  std::string refused();

 private:
  std::mutex mutex_;
  std::vector<std::thread::id> allowed_;
  std::thread::id refused_thread_;  ///< the first one; none: no text so far
  std::string refused_;
  std::array<std::unique_ptr<GuardedBuffer>, 3> buffers_;
  std::FILE* own_stdout_ = nullptr;
  std::FILE* guarded_stdout_ = nullptr;
};

/// How many messages a cell may send.
///
/// A socket keeps a thousand messages for a front end that is busy, and drops
/// later ones, among them the end of the cell, for which the front end then
/// waits forever. After a burst, a cell that prints without end is slowed down.
class Pace {
 public:
  /// A message was sent.
  void count() {
    next_ = std::max(next_, Clock::now() - kBurst * kInterval) + kInterval;
  }

  /// Time until the next message may be sent; 0: now.
  int wait_ms() const {
    const auto wait =
        std::chrono::ceil<std::chrono::milliseconds>(next_ - Clock::now());
    return std::max(0, static_cast<int>(wait.count()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kBurst = 100;
  static constexpr std::chrono::milliseconds kInterval{20};

  /// A message may be sent from then on.
  Clock::time_point next_{};
};

class CellThread {
 public:
  /// Blocks SIGINT in the calling thread, and in all that start later.
  CellThread();
  ~CellThread();

  /// Runs `work` on the thread of cells, and returns when it has ended. True if
  /// it returned; false if it crashed: then crash() describes how, and the
  /// thread runs nothing more. `work` must not throw. What it prints goes to
  /// `print`, in the calling thread.
  bool run(const std::function<void()>& work,
           const OutputPipes::Receiver& print);

  const std::string& crash() const { return crash_; }

  /// Forgets what was printed while no cell ran.
  void drop_output();

  /// Text that other threads of the cell tried to print; may be empty.
  std::string refused_text() { return guard_.refused(); }

  /// For a cell: has the main thread call `send`, which shows something, and
  /// waits until it is done. Does nothing when no cell runs, and refuses other
  /// threads.
  void show(const std::function<void()>& send);

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kIdle, kRunning, kDone };

  void serve();
  void answer_show(const OutputPipes::Receiver& print);
  bool has_ended();
  void watch_interrupts(std::optional<Clock::time_point>& patient_until,
                        const OutputPipes::Receiver& print);

  OutputPipes pipes_;
  PrintGuard guard_;
  Pace pace_;
  int wake_ = -1;        ///< an eventfd: something happened on the cell's side
  int interrupts_ = -1;  ///< a signalfd of SIGINT
  std::string crash_;

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  bool stopping_ = false;
  std::function<void()> work_;
  const std::function<void()>* shown_ = nullptr;
  std::thread thread_;
};

}  // namespace shardbook::notebook
