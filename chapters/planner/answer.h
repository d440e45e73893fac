#pragma once

// The planner as a function: a line in, a text out.
//
//   CommandLine line({"plan", "--nodes", "8", "--batch", "1024"});
//   std::fputs(planner::answer(line, planner::confirm).text.c_str(), stdout);

#include <functional>
#include <string>

#include "chapters/common/run/command_line.h"
#include "chapters/planner/search.h"

namespace shardbook::planner {

struct Answer {
  std::string text;  ///< a table, or a JSON object (--format json)
  int status = 0;    ///< of the program: kExitClaimFailed where no plan fits
};

/// Answers --confirm: plan.h's runs the hybrid chapter.
using Confirm = std::function<void(const PlanRequest&, Prediction&)>;

/// Adds the planner's options to the line, reads them, and searches. Throws
/// Error, a sentence, for a request that makes no sense. Writes a file under
/// --write-config alone.
Answer answer(CommandLine& line, const Confirm& confirm,
              const Progress& progress = {});

}  // namespace shardbook::planner
