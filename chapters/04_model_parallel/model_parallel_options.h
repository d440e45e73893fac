#pragma once

// The chapter's own options.

#include <cstdint>
#include <string>

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/common/run/options.h"

namespace shardbook::model_parallel {

/// Options that do not concern the training itself.
struct Extras {
  bool toy = false;
  std::string sweep;  ///< split sizes; empty: none
  std::int64_t repeats = 5;
};

void add_options(CommandLine& line, Settings& settings, Extras& extras);
/// Fills in the values that depend on other options. Throws Error for options
/// that contradict each other.
void check_settings(const Options& options, Settings& settings);
/// Trains the toy and prints it; returns the exit status.
int show_toy(const Options& options, const Settings& settings);

}  // namespace shardbook::model_parallel
