#pragma once

// The claims at the end of a run, each predicted by a formula, counted by the
// program, and compared.

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
/// In place of a prediction: no claim is made. The scratch memory of kernels
/// depends on the machine; how long a pipeline's message waits for its receiver
/// depends on which of them is late.
constexpr double kNoClaim = -2;

/// A quantity that a formula predicts and the program counts.
struct Claim {
  double predicted = 0;
  double counted = 0;
};

/// "failed" where one of the claims does not hold; else "not predicted" where
/// something was counted that nothing predicted; else "passed".
const char* verdict_of(const std::vector<Claim>& claims);

/// One rank's bill.
struct RankReport {
  std::string device;  ///< "cpu:0", "cuda:1", "meta:2"
  Claim bytes;         ///< on the wire, sent by this rank
  std::array<Claim, kNumMemoryKinds> peak{};  ///< bytes, by MemoryKind
  /// The most bytes of all kinds at one time: less than the sum of `peak`,
  /// whose kinds have their peaks at different times.
  double peak_total = 0;
  sim::TimeSummary time;  ///< of its device, where virtual time is kept
};

/// Virtual time of a step.
struct VirtualTime {
  std::string cluster;  ///< empty: none was kept
  sim::Trust trust = sim::Trust::kInterpolated;
  double predicted_step_s = kNotPredicted;  ///< by the `sim` world
  double step_s = 0;  ///< 0: predicted only, for devices that are real
  /// Means over the ranks, see sim::TimeSummary.
  double idle_share = 0;
  double exposed_comm_s = 0;
  double bubble_s = 0;
  std::vector<sim::LinkBytes> links;  ///< per step, over all ranks
  double capacity_bytes = 0;          ///< of the memory of one of its devices
};

/// Predicted peaks by kind.
struct MemoryBill {
  MemoryBill() {
    bytes.fill(kNotPredicted);
    (*this)[MemoryKind::kWorkspace] = kNoClaim;
  }
  double& operator[](MemoryKind kind) {
    return bytes[static_cast<std::size_t>(kind)];
  }
  std::array<double, kNumMemoryKinds> bytes;
};

struct Report {
  std::string chapter;
  std::vector<double> losses;
  std::vector<double> grad_norms;
  Parity parity;
  std::vector<RankReport> ranks;
  double wall_step_s = 0;
  /// Cores that rank 0 computed with. The one device gets as many (in f64: all),
  /// to sum in the same order: batch norms of few images amplify rounding.
  int rank_threads = 0;
  VirtualTime time;
  /// Of the first ranks; empty where none were kept.
  std::vector<sim::RankTimeline> timelines;
  /// "the loss is nan in step 3, first on rank 1"; empty while all is finite.
  std::string not_finite;
  /// The chapter's own text, printed above the report and below it.
  std::string remarks, appendix;
  /// More of the chapter's own: keys of the JSON object, and their JSON.
  std::vector<std::pair<std::string, std::string>> more;
};

/// This rank's counts, on its device, beside the predictions.
RankReport rank_report(double predicted_bytes, double counted_bytes,
                       const MemoryBill& predicted, const Device& device);
/// Every rank's report, on rank 0; empty elsewhere. Collective.
std::vector<RankReport> gather_reports(ProcessGroup& world,
                                       const RankReport& mine);

/// Numbers that the optimizer keeps for each parameter.
double optimizer_states(const Options& options);
/// Peak bytes of parameters, gradients, optimizer state, activations and input
/// of one device that trains `config` on these pieces of a batch, one after
/// another. Workspace is not predicted, nor are a ResNet's activations. See
/// memory.cpp for the derivation. With `tensor_ranks`, one of as many devices
/// that share every block of a GPT by tensor parallelism.
MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              const std::vector<MicroBatch>& pieces,
                              bool recompute = false, int tensor_ranks = 1);
/// One piece of `rows` samples; with `accumulates`, several of them.
MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              std::int64_t rows, bool recompute = false,
                              bool accumulates = false);

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
