#pragma once

// One program run: the JSON object that a chapter prints under
// `--format json`, read for the table and for report.html.

#include <cstdint>
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
  /// Where the run comes from (see run_set.h); all may be empty.
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

/// Reads the JSON object of one run; `source` names it in messages. Values
/// that a chapter does not measure may be missing. The claim on time holds
/// when the closed form of a step and its virtual time are equal to 1e-9,
/// relative.
///
/// Throws shardbook::Error when the text is no JSON object, when the chapter,
/// its world or its claims are missing, or when a value has the wrong type.
ProgramRun read_run(const std::string& text, const std::string& source);

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

}  // namespace shardbook::table
