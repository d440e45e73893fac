#pragma once

// The claims at the end of a run, each predicted by a formula, counted by the
// program, and compared: the numbers, the bytes on the wire, the memory held, and
// on the cluster `textbook` the time of a step.
//
// Peaks of memory and times on other clusters come from the same program run on
// shapes. The report prints them as simulated, and makes no claim.

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/parity.h"
#include "chapters/common/run/training.h"
#include "comm/process_group.h"
#include "core/device.h"
#include "sim/cluster.h"
#include "sim/timeline.h"

namespace shardbook {

/// In place of a prediction: none was made, and the claim is not judged.
constexpr double kNotPredicted = -1;
/// In place of a prediction: no claim is made, because the value depends on the
/// data (rows that experts are given).
constexpr double kNoClaim = -2;

/// A quantity that a formula predicts and the program counts.
struct Claim {
  double predicted = 0;
  double counted = 0;

  bool operator==(const Claim& other) const {
    return predicted == other.predicted && counted == other.counted;
  }
};

/// "failed" where one of the claims does not hold; else "not predicted" where
/// something was counted that nothing predicted; else "passed".
const char* verdict_of(const std::vector<Claim>& claims);

/// Kinds of memory that a formula predicts: parameters, gradients and optimizer
/// state as an update leaves them, before gradients are cleared, and activations
/// as a forward leaves them for its backward. They are the first of MemoryKind.
constexpr int kNumHeldKinds = 4;

/// The most bytes at one time.
struct Peak {
  double simulated = kNotPredicted;  ///< the peak of the run on shapes
  double counted = 0;                ///< by this run

  bool operator==(const Peak& other) const {
    return simulated == other.simulated && counted == other.counted;
  }
};

/// "parameters", "gradients", "optimizer state", "activations kept".
const char* held_name(MemoryKind kind);

/// One rank's bill.
struct RankReport {
  std::string device;                        ///< "cpu:0", "cuda:1", "meta:2"
  Claim bytes;                               ///< on the wire, sent by this rank
  std::array<Claim, kNumHeldKinds> held{};   ///< bytes, by MemoryKind
  std::array<Peak, kNumMemoryKinds> peak{};  ///< bytes, by MemoryKind
  /// All kinds together: at most the sum of `peak`, since kinds peak at
  /// different times.
  Peak peak_total;
  sim::TimeSummary time;  ///< of its device, where virtual time is kept
};

/// Virtual time of a step.
struct VirtualTime {
  std::string cluster;  ///< empty: none was kept
  sim::Trust trust = sim::Trust::kInterpolated;
  double step_s = 0;  ///< by this run's clock; 0: GPUs have none
  double simulated_step_s = kNotPredicted;  ///< by the run on shapes
  /// By the page's formula, on the cluster `textbook`; see Bill.
  double closed_form_s = kNotPredicted;
  /// A command whose step has a closed form.
  std::string closed_form_command;
  /// Means over the ranks, see sim::TimeSummary.
  double idle_share = 0;
  double exposed_comm_s = 0;
  double bubble_s = 0;
  std::vector<sim::LinkBytes> links;  ///< per step, over all ranks
  double capacity_bytes = 0;          ///< of the memory of one of its devices
};

/// "passed" or "failed" where a step has a closed form; else "no closed form", or
/// "not measured" without a cluster.
const char* time_verdict(const VirtualTime& time);

/// Predicted bytes held, by kind.
struct MemoryBill {
  MemoryBill() { bytes.fill(kNotPredicted); }
  double& operator[](MemoryKind kind) {
    return bytes.at(static_cast<std::size_t>(kind));
  }
  std::array<double, kNumHeldKinds> bytes;
};

/// The cost of options.steps steps for one device, by the formulas of the page.
struct Bill {
  double bytes = 0;   ///< that it sends, construction included
  MemoryBill memory;  ///< held
  /// Seconds of a step on the cluster `textbook`; not predicted where the
  /// conditions of the closed form do not hold.
  double step_s = kNotPredicted;
};

struct Report {
  std::string chapter;
  std::string tokens;  ///< tokens_text of data.h
  std::vector<double> losses;
  std::vector<double> grad_norms;
  Parity parity;
  std::vector<RankReport> ranks;
  double wall_step_s = 0;
  /// Cores that rank 0 computed with. The one device gets as many (in f64: all),
  /// to sum in the same order: batch norms of few images amplify rounding.
  int rank_threads = 0;
  VirtualTime time;
  /// The first ranks' timelines; empty where none were kept.
  std::vector<sim::RankTimeline> timelines;
  /// "the loss is nan in step 3, first on rank 1"; empty while all is finite.
  std::string not_finite;
  /// The chapter's own text, printed above the report and below it.
  std::string remarks, appendix;
  /// The chapter's further keys of the JSON object, and their JSON.
  std::vector<std::pair<std::string, std::string>> more;
};

/// This rank's counts, on its device, with the predictions.
RankReport rank_report(const Bill& predicted, double counted_bytes,
                       const Device& device);
/// Every rank's report, on rank 0; empty elsewhere. Collective.
std::vector<RankReport> gather_reports(ProcessGroup& world,
                                       const RankReport& mine);

/// Numbers that the optimizer keeps for each parameter.
double optimizer_states(const TrainingOptions& options);
/// Bytes held by one device that trains `config` on these pieces of a batch, one
/// after another. See kept.cpp for the derivation. With `tensor_ranks`, by one
/// of as many devices that share every block of a GPT by tensor parallelism.
MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              const std::vector<MicroBatch>& pieces,
                              bool recompute = false, int tensor_ranks = 1);
/// The same for pieces of `rows` samples.
MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              std::int64_t rows, bool recompute = false);

/// The most bytes that one device needs, and its capacity: --device-memory, or
/// that of the cluster's devices; 0 where neither is given.
struct Fit {
  double needed_bytes = 0;
  double capacity_bytes = 0;
  bool fits() const {
    return capacity_bytes == 0 || needed_bytes <= capacity_bytes;
  }
};
Fit fit_of(const Options& options, const Report& report);

/// Prints the report as --format says; returns the exit status: 0, or
/// kExitClaimFailed when a claim does not hold. A claim without a prediction is
/// marked as such, and does not fail.
int print_report(const Options& options, const CommandLine& line,
                 const Report& report);

}  // namespace shardbook
