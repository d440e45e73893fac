#pragma once

// Runs that are kept: a folder that `./shardbook run` has filled.
//
//   build/runs/last/
//     rows.tsv      one line per run: file, title, label, command; a * before a
//                   label: the overview has this row; a line that begins with
//                   # is a remark on all of them
//     01.json       what the program wrote under --report
//     02.json

#include <map>
#include <string>
#include <vector>

#include "chapters/table/run.h"

namespace shardbook::table {

/// Its label, or "06_1f1b zb-h1"; with a * behind it for another training than
/// one device's.
std::string run_name(const ProgramRun& run);

/// "3.1e-07", "exact".
std::string format_difference(double value);

/// Whether the run fits in the memory of its devices.
bool fits(const ProgramRun& run);

/// Seconds of a step, virtual or else on the wall; negative: not measured.
double step_of(const ProgramRun& run);

/// Bytes that the busiest rank sends in a step, mean of the run; negative where
/// they were not measured.
double sent_per_step(const ProgramRun& run);

struct RunSet {
  Runs runs;
  std::string name = "";    ///< the folder's
  std::string remark = "";  ///< "Interrupted after 3 of 30 runs."; may be empty
};
/// The runs of a folder, or the one run of a JSON file. Throws Error that names
/// the file when one cannot be read.
RunSet read_run_set(const std::string& path);

/// Runs of the same title, one after the other.
struct RunGroup {
  std::string title;
  Chosen runs;
};
/// Runs on shapes alone, grouped by title and setting (setting_of).
std::vector<RunGroup> simulated_groups(const Runs& runs);
Chosen pointers_to(const Runs& runs);
/// The runs that trained.
Chosen trained_runs(const Runs& runs);

/// Runs with the same key; groups are in the order of their first runs.
template <typename KeyOf>
std::vector<Chosen> group_by(const Chosen& runs, KeyOf key_of) {
  std::vector<Chosen> groups;
  std::map<decltype(key_of(*runs[0])), std::size_t> places;
  for (const ProgramRun* run : runs) {
    const auto [place, is_new] =
        places.try_emplace(key_of(*run), groups.size());
    if (is_new) groups.emplace_back();
    groups[place->second].push_back(run);
  }
  return groups;
}

/// The group's run on one device; null without one.
const ProgramRun* yardstick(const RunGroup& group);

/// The same row in several sets, in the order of the sets: rows of the same title
/// and name. If each set has only one row, these are paired.
std::vector<Chosen> compare_sets(const Runs& runs);

/// "3.64": the speed-up over the yardstick, which may be null. In brackets if
/// one of the two does not fit in memory; empty where there is none.
std::string speed_up_text(const ProgramRun& run, const ProgramRun* one);

void add_once(std::vector<std::string>& texts, const std::string& text);

/// What the * behind names means: "*: other numbers than one device's
/// (PipeDream-2BW: weights one update old)."; empty where no run has one.
std::string other_trainings_text(const Chosen& runs);

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
