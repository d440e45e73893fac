#pragma once

// What the threads of a cell print, and what becomes of it.

#include <array>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
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

/// Writes what the buffers of std::cout, std::cerr and stdio hold.
void flush_output();

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
  bool allows(const char* text, std::size_t size);

  /// The text that a forbidden thread tried to print since the last call: the
  /// beginning of the first line. Empty if there was none.
  std::string refused();

 private:
  static ssize_t write_stdout(void* guard, const char* text, std::size_t size);

  std::mutex mutex_;
  std::vector<std::thread::id> allowed_;
  std::thread::id refused_thread_;  ///< the first one; none: no text so far
  std::string refused_;
  std::array<std::unique_ptr<GuardedBuffer>, 3> buffers_;
  std::FILE* own_stdout_ = nullptr;
  std::FILE* guarded_stdout_ = nullptr;
};

}  // namespace shardbook::notebook
