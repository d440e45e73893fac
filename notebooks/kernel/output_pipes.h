#pragma once

// Standard output and error of this process, as pipes that the kernel reads.
// This catches std::cout, printf, and the output of compiled libraries.

#include <functional>
#include <string>

namespace shardbook::notebook {

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

}  // namespace shardbook::notebook
