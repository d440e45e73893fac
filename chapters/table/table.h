#pragma once

// The tables that `./shardbook run` ends with.
//
//   WHAT IT BUYS           step    speed-up  memory   sent            idle
//
//   Split the batch
//   gpt2, f32, adamw, 32 x 512 tokens on dgx-a100 (80 GB per device)
//      1  One device       1.19 s  1.00      17.9 GB  -               0.0 %
//      4  DDP              327 ms  3.64      6.1 GB   3.0 GB nvlink   1.9 %
//
//   PROOF                  world       numbers    sent        held        time
//   DataParallel           threads x4  ok 5.6e-05  ok 3.8 MiB ...
//
// Runs on shapes alone (--backend sim) show what a strategy buys: each group of
// rows has one model on one cluster, and the group's run on one device is the
// yardstick. Runs that trained are proofs: their claims are shown.
//
// The overview has some rows of each group, and a line per chapter that trained.

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// The signs of a terminal. With colours, they are green or red.
struct Marks {
  std::string passed, failed;
  std::string too_large;  ///< behind memory that does not fit
  std::string times;      ///< between the backend and its ranks
};
Marks marks_of(bool is_utf8, bool has_colours = false);

/// Both tables, at most 80 columns wide, with their legends, and a sentence for
/// each claim that failed.
std::string format_table(const Runs& runs, const Marks& marks);

/// The same on one screen: the rows of the overview, and proofs by chapter.
std::string format_overview(const Runs& runs, const Marks& marks);

/// How many claims hold, and a sentence for each that failed.
std::string format_claims(const Runs& runs, const Marks& marks);

/// Lines of a legend that say what the * behind names means; empty where there is
/// none.
std::string other_trainings_lines(const Chosen& runs);

/// Sets of runs side by side: rows of the same title and label (or, where each
/// set has one row, these rows) share lines, and ratios are to the first set.
std::string format_comparison(const Runs& runs);

/// The claims of all runs that were measured, and how many of them failed.
struct ClaimCount {
  int failed = 0;
  int measured = 0;
};
ClaimCount count_claims(const ProgramRun& run);
ClaimCount count_claims(const Chosen& runs);
ClaimCount count_claims(const Runs& runs);
/// "all 292 claims hold", "1 of 11 claims failed", "no claim was measured".
std::string verdict_text(const ClaimCount& count);

// --- ./shardbook compare -------------------------------------------------------

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

// report.html: several program runs in one file that needs no network. The
// first screen says how the claims stand, and shows step time against memory of
// one group and a few timelines on one axis. Tables of all runs follow: what
// they buy, and the proof. Each run has a section with its claims and the
// predicted and counted values per rank. A run with virtual time also has the
// timeline of its last step, memory over time, and bytes by link.
//
// Tables and bars need no script. Timelines are compressed data: a script draws
// those of a run when the run is opened, zooms into them, and describes the item
// under the pointer or the arrow keys.

/// Folders, as links of the page name them.
struct ReportLinks {
  std::string book = "";      ///< a clone of the book; empty: no links into it
  std::string explorer = "";  ///< the explorer's; empty: it has not been built
};

/// The whole page, with remarks on the runs at its top. The same runs give the
/// same bytes.
std::string report_html(const Runs& runs, const std::string& remarks = "",
                        const ReportLinks& links = {});

}  // namespace shardbook::table
