#pragma once

// Runs that are kept: a folder that `./shardbook run` has filled.
//
//   build/runs/last/
//     rows.tsv      one line per run: file, title, label, command; a * before a
//                   label: the overview has this row; a line that begins with
//                   # is a remark on all of them
//     01.json       what the program wrote under --report
//     02.json

#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// The runs of a folder, or the one run of a JSON file. Throws Error that names
/// the file when one cannot be read.
std::vector<ProgramRun> read_run_set(const std::string& path);

/// The remark on the runs of a folder, such as "Interrupted after 3 of 30 runs.";
/// empty without one.
std::string read_remark(const std::string& path);

/// Runs of the same title, one after the other.
struct RunGroup {
  std::string title;
  std::vector<const ProgramRun*> runs;
};
/// Runs on shapes alone, grouped by title and setting (setting_of).
std::vector<RunGroup> simulated_groups(const std::vector<ProgramRun>& runs);
std::vector<const ProgramRun*> pointers_to(const std::vector<ProgramRun>& runs);
/// The runs that trained.
std::vector<const ProgramRun*> trained_runs(
    const std::vector<ProgramRun>& runs);

/// The group's run on one device; null without one.
const ProgramRun* yardstick(const RunGroup& group);

/// The same row in several sets.
struct ComparedRuns {
  std::vector<const ProgramRun*> runs;  ///< in the order of the sets
};
/// Pairs rows of the same title and name. If each set has only one row, these
/// are paired.
std::vector<ComparedRuns> compare_sets(const std::vector<ProgramRun>& runs);

/// Step, peak memory, bytes sent per step and idle share, with the ratio to the
/// run of the first set in brackets; empty where they were not measured.
std::vector<std::string> compared_cells(const ProgramRun& run,
                                        const ProgramRun& first);

/// "3.64": the speed-up over the yardstick, which may be null. In brackets if
/// one of the two does not fit in memory; empty where there is none.
std::string speed_up_text(const ProgramRun& run, const ProgramRun* one);

/// What the * behind names means: "*: other numbers than one device's
/// (PipeDream-2BW: weights one update old)."; empty where no run has one.
std::string other_trainings_text(const std::vector<const ProgramRun*>& runs);
std::string other_trainings_text(const std::vector<ProgramRun>& runs);

/// "threads ×4", "1 rank".
std::string world_name(const ProgramRun& run,
                       const std::string& times = " \u00d7");

/// "gpt2, f32, adamw, 32 x 512 tokens on dgx-a100 (80 GB per device)".
std::string setting_of(const ProgramRun& run);

/// "gpt2, 32 x 512 tokens on dgx-a100 (80 GB)"; a config that is given as text
/// would be too long.
std::string short_setting_of(const ProgramRun& run);

/// "80", "17.2", "0.61": decimal gigabytes with three digits.
std::string format_gigabytes(double bytes);

}  // namespace shardbook::table
