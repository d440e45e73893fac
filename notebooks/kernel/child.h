#pragma once

// Work that may crash, done in a copy of this process.

#include <functional>
#include <string>

namespace shardbook::notebook {

struct ChildResult {
  bool finished = false;     ///< the work returned
  bool interrupted = false;  ///< is_interrupted() ended it
  std::string text = {};     ///< the work's result, else how it ended
  std::string said = {};     ///< what the work told its parent
};

/// Forks, runs `work` in the child, and returns the text that `work` returned.
/// The child is ended when it has computed for `limit_s`, or when the cell is
/// interrupted. Only the calling thread exists in the child.
ChildResult in_child(const std::function<std::string()>& work,
                     int limit_s = 60);

/// For work in a child: says this at once, so it is known even after a crash.
void tell_parent(const std::string& text);

/// For work in a child: allows so many more seconds of computation.
void limit_rest_of_child(int seconds);

}  // namespace shardbook::notebook
