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

}  // namespace shardbook::notebook
