#pragma once

// How a cell that loops is stopped.
//
// Every loop that a cell compiles to reads a flag in each iteration and, when
// the flag is set, throws. The cell then ends as by any exception: the stack
// unwinds, and the results of earlier cells stay. Two things are lost: objects
// that live in the very function that loops are not destroyed, since that
// function has no clean-up for an exception that only this file knows of; and
// compiled code of a library, which has no such checks, stops only when it
// returns. Loops that a destructor or another noexcept function calls have no
// checks either: an exception would end the program there.

#include <functional>
#include <string>

namespace llvm {
class Module;
}

namespace shardbook::notebook {

/// Thrown in a cell. It derives from nothing, so that handlers for
/// std::exception in the cell do not catch it.
struct Interrupted {};

void set_interrupted(bool interrupted);
bool is_interrupted();

/// Adds the checks to the loops of a module that has been optimised.
void add_interruption_checks(llvm::Module& module);

// --- Work that may crash, done in a copy of this process ----------------------

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
