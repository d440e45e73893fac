#pragma once

// The tables that `./shardbook run` ends with.
//
//   PROOF                 world       loss         numbers    sent     ...
//   DataParallel          threads ×4  5.53 → 3.44  ✓ 5.6e-05  ✓ 3.8 MiB ...
//
//   WHAT IT BUYS          devices  step    speed-up  memory    sent    idle
//   gpt2, 32 x 512 tokens on dgx-a100 (80 GB per device)
//   One device            1        1.19 s  1.00      18 GB     -       0 %
//   DistributedDataP...   4        327 ms  3.64      6.8 GB    ...     2 %
//
// Runs that trained are proofs: their claims are shown. Runs on shapes alone
// (--backend sim) show what a strategy buys: each group of rows has one model
// on one cluster, and the group's run on one device is the yardstick.

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// How marks and arrows are written.
enum class Charset { kUtf8, kAscii };

/// Both tables, at most 100 columns wide, with their legends, and a sentence
/// for each claim that failed.
std::string format_table(const std::vector<ProgramRun>& runs, Charset charset);

/// How many claims hold, and a sentence for each that failed.
std::string format_claims(const std::vector<ProgramRun>& runs, Charset charset);

/// Sets of runs side by side: rows of the same title and label (or, where each
/// set has one row, these rows) share lines, and ratios are to the first set.
std::string format_comparison(const std::vector<ProgramRun>& runs);

/// The claims of all runs that were measured, and how many of them failed.
struct ClaimCount {
  int failed = 0;
  int measured = 0;
};
ClaimCount count_claims(const ProgramRun& run);
ClaimCount count_claims(const std::vector<ProgramRun>& runs);

}  // namespace shardbook::table
