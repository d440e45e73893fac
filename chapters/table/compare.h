#pragma once

// The table of `./shardbook compare`: one training, split in several ways.
//
//                         devices  step  speed-up   peak  sent  idle
//                                    ms               GB    MB     %
//   one device                  1  1192      1.00  17.86     0   0.0
//   ddp                         4   327      3.64   6.08   871   1.9
//   zero --strategy fsdp        4   320      3.73   4.62  1002   0.6
//
// A column has one unit for all rows, so its numbers compare at a glance. The
// first run is the yardstick if it has one rank.

#include <string>
#include <vector>

#include "chapters/table/run.h"
#include "chapters/table/table.h"

namespace shardbook::table {

/// The title of the rows that `./shardbook compare` keeps.
extern const char* const kComparedTitle;
bool are_compared(const Runs& runs);

struct ComparedColumn {
  std::string name;
  std::string unit;                ///< may be empty
  std::string meaning;             ///< for the legend; empty: needs none
  std::vector<std::string> cells;  ///< one per run
};

struct ComparedTable {
  std::string setting;                  ///< of the first run
  std::vector<ComparedColumn> columns;  ///< those that have a value
  std::vector<std::string> remarks;     ///< on runs of another setting
};

ComparedTable compare_runs(const Runs& runs, const Marks& marks);

/// What the columns mean: "step: virtual time on dgx-a100.", "speed-up: ..."
std::vector<std::string> legend_of(const ComparedTable& table);

/// The table with its legend, at most 80 columns wide, and the claims.
std::string format_compared(const Runs& runs, const Marks& marks);

}  // namespace shardbook::table
