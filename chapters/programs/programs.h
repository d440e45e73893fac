#pragma once

// Every chapter's program, and the call that runs one in this process.
//
//   const Report report = run("05_gpipe --world-size 4 --recompute never");
//   return report.time.step_s;

#include <string>
#include <vector>

#include "chapters/common/run/program.h"

namespace shardbook {

struct NamedProgram {
  const char* name;  ///< the chapter's, "05_gpipe"
  MakeProgram program;
};

/// In reading order.
const std::vector<NamedProgram>& programs();

/// Trains as a chapter's program does with these options (run_line of program.h).
/// Throws Error for an unknown chapter, too.
Report run(const std::string& line);
/// The same. A line with --backend sim runs once in a process, because it has one
/// result: the second language of a figure is drawn from the runs of the first.
Report run_once(const std::string& line);

}  // namespace shardbook
