#pragma once

// Work that may crash, done in a copy of this process.

#include <functional>
#include <string>

namespace shardbook::notebook {

struct ChildResult {
  bool finished = false;     ///< the work returned
  bool interrupted = false;  ///< is_interrupted() ended it
  std::string text = {};     ///< the work's result, else how it ended
  std::string remarks = {};  ///< of work that did not finish
};

/// Forks, runs `work` in the child, and returns the text that `work` returned.
/// The child is ended when it has computed for `limit_s`, or when the cell is
/// interrupted. Only the calling thread exists in the child. Work that crashes,
/// or that a limit ends, leaves `remarks` as they are at that time.
ChildResult in_child(const std::function<std::string()>& work,
                     const std::string& remarks, int limit_s = 60);

/// For work in a child: allows so many more seconds of computation.
void limit_rest_of_child(int seconds);

}  // namespace shardbook::notebook
