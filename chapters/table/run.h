#pragma once

// One program run: the JSON object that a chapter prints under
// `--format json`, read for the table and for report.html.
//
// Runs that are kept: a folder that `./shardbook run` has filled.
//
//   build/runs/last/
//     rows.tsv      one line per run: file, title, label, command; a * before a
//                   label: the overview has this row; a line that begins with
//                   # is a remark on all of them
//     01.json       what the program wrote under --report
//     02.json

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/units.h"
#include "sim/timeline_step.h"

namespace shardbook::table {

using pictures::format_bytes;
using pictures::format_decimal_bytes;

enum class Verdict { kPassed, kFailed, kNotMeasured };

/// One claim of one run: the measured value and, when it failed, how.
struct Claim {
  Verdict verdict = Verdict::kNotMeasured;
  std::string value;    ///< "3.1e-07", "3.2 MiB"; empty when not measured
  std::string failure;  ///< one sentence without a full stop
};

/// A quantity that a formula (for a peak: the run on shapes) predicts and the
/// program counts.
struct Figure {
  double predicted = -1;  ///< negative: not predicted
  double counted = 0;
};

/// Bytes that one rank sent, and its memory by kind: held, and at its peak.
struct RankBill {
  Figure sent;
  std::vector<std::pair<std::string, Figure>> held;
  std::vector<std::pair<std::string, Figure>> peak;
};

/// The run in virtual time, on a cluster.
struct VirtualRun {
  std::string cluster;    ///< "dgx-a100"
  std::string trust;      ///< "interpolated"
  Figure step_s;          ///< predicted: by the closed form on "textbook"
  double idle_share = 0;  ///< means over the ranks, see sim::TimeSummary
  double exposed_comm_s = 0;
  double bubble_s = 0;
  std::vector<sim::LinkBytes> links;  ///< per step
  std::optional<sim::StepView> timeline;
};

/// Seconds of one training step; negative where it was not measured.
struct SweepTime {
  std::int64_t split_size = 0;  ///< 0: not in splits
  double wall_s = -1;           ///< mean
  double wall_sd_s = 0;
  double virtual_s = -1;
};

/// A sweep over split sizes, by the chapter on model parallelism.
struct Sweep {
  std::int64_t repeats = 0;
  std::string cluster;
  SweepTime single, naive;
  std::vector<SweepTime> pipelined;
};

struct LayerLoad {
  std::string layer;  ///< "h.3"
  /// For each expert: how often tokens chose it, relative to an even load.
  std::vector<double> shares;
};

/// One program run, ready to be shown.
struct ProgramRun {
  std::string chapter;
  std::string variant;  ///< the chosen one: "zb-h1"; may be empty
  /// Where the run comes from (see RunSet); all may be empty.
  std::string label;    ///< "ZeRO-2"
  std::string title;    ///< of its group of rows
  std::string command;  ///< "./shardbook run ddp -- --world-size 4"
  std::string set;      ///< the name of the set of runs
  bool is_in_overview = false;
  std::string backend;
  std::string device;  ///< "cpu", "cuda"; may be empty
  int world_size = 1;
  std::int64_t steps = 0;         ///< of training; 0: not stated
  std::string setting;            ///< "gpt-nano, f32, sgd"; may be empty
  std::string samples;            ///< "32 x 512 tokens"; may be empty
  std::vector<std::string> loss;  ///< first and last step; empty: not measured
  Claim numbers, bytes, memory, time;
  double difference = -1;     ///< from one device, relative; negative: none
  std::string tolerance;      ///< of the numbers: "1.0e-05"; may be empty
  double wall_step_s = -1;    ///< negative: not measured
  double peak_bytes = -1;     ///< of the fullest rank; negative: not measured
  double held_bytes = -1;     ///< by the fullest rank; negative: not measured
  double sent_bytes = -1;     ///< by the busiest rank; negative: not measured
  double capacity_bytes = 0;  ///< of one device's memory; 0: no limit
  /// What it does that one device would not: "weights one update old"; empty for
  /// most runs, whose numbers are those of one device.
  std::string other_training;
  std::vector<RankBill> ranks;
  std::optional<VirtualRun> virtual_run;
  std::optional<Sweep> sweep;
  std::vector<LayerLoad> expert_loads;  ///< empty: no experts
};

using Runs = std::vector<ProgramRun>;
/// Some of the runs, in their order.
using Chosen = std::vector<const ProgramRun*>;

/// Reads the JSON object of one run; `source` names it in messages. Values
/// that a chapter does not measure may be missing. The claim on time holds
/// when the closed form of a step and its virtual time are equal to 1e-9,
/// relative.
///
/// Throws shardbook::Error when the text is no JSON object, when the chapter,
/// its world or its claims are missing, or when a value has the wrong type.
ProgramRun read_run(const std::string& text, const std::string& source);

// --- Sets of runs -------------------------------------------------------------

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
