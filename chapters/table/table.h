#pragma once

// The table that `./shardbook run` ends with: one row per program run, side
// by side, with the claims of each.
//
//   chapter           world       loss         numbers    bytes sent  ...
//   00_single_device  1 rank      5.55 → 2.91  ✓ exact    ✓ 0 B       ...
//   02_ddp            threads ×2  5.55 → 2.91  ✓ 3.1e-07  ✓ 3.2 MiB   ...

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// How marks and arrows are written.
enum class Charset { kUtf8, kAscii };

/// Lays out the table, at most 100 columns wide, a legend, and a sentence for
/// each claim that failed.
std::string format_table(const std::vector<ProgramRun>& runs, Charset charset);

/// The claims of all runs that were measured, and how many of them failed.
struct ClaimCount {
  int failed = 0;
  int measured = 0;
};
ClaimCount count_claims(const std::vector<ProgramRun>& runs);

}  // namespace shardbook::table
