#pragma once

// The claims at the end of a run, each predicted by a formula, counted by the
// program, and compared.

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models.h"
#include "chapters/common/options.h"
#include "chapters/common/training.h"
#include "comm/process_group.h"
#include "core/device.h"
#include "sim/cluster.h"
#include "sim/timeline.h"

namespace shardbook {

/// A quantity that a formula predicts and the program counts.
struct Claim {
  double predicted = 0;
  double counted = 0;
};

/// One rank's bill.
struct RankReport {
  Claim bytes;  ///< on the wire, sent by this rank
  std::array<Claim, kNumMemoryKinds> peak{};  ///< bytes, by MemoryKind
  sim::TimeSummary time;  ///< of its device, where virtual time is kept
};

/// Virtual time of a step.
struct VirtualTime {
  std::string cluster;  ///< empty: none was kept
  sim::Trust trust = sim::Trust::kInterpolated;
  double predicted_step_s = -1;  ///< by the world `sim`; negative: not
  double step_s = 0;
  double idle_share = 0;      ///< mean over the ranks
  double exposed_comm_s = 0;  ///< of the slowest rank
  std::vector<sim::LinkBytes> links;  ///< per step, over all ranks
};

/// Predicted peaks by kind; negative: not predicted.
struct MemoryBill {
  MemoryBill() { bytes.fill(-1); }
  double& operator[](MemoryKind kind) {
    return bytes[static_cast<std::size_t>(kind)];
  }
  std::array<double, kNumMemoryKinds> bytes;
};

/// Equality with one device.
struct Parity {
  bool checked = false;
  double max_abs = 0;
  /// Of a loss, |a - b| / |b|; of a parameter, ||a - b|| / ||b|| (Euclidean:
  /// Adam makes whole steps of the rounding in a gradient that is nearly zero,
  /// so that single elements say little). In 16 bits, where all gradients are
  /// rounded that much, of all parameters together.
  double max_rel = 0;
  double tolerance = 0;
  bool passed = false;
};

struct Report {
  std::string chapter;
  std::vector<double> losses;
  Parity parity;
  std::vector<RankReport> ranks;
  double wall_step_s = 0;
  /// Cores that rank 0 computed with: one device that has as many sums in the
  /// same order, which matters where rounding is amplified (batch norms of few
  /// images).
  int rank_threads = 0;
  VirtualTime time;
  /// Of the first ranks; empty where none were kept.
  std::vector<sim::RankTimeline> timelines;
  /// More of the chapter's own: keys of the JSON object, and their JSON.
  std::vector<std::pair<std::string, std::string>> more;
};

/// Compares losses and parameters, by name, with the single-device run.
/// Tolerance: spec 0.5, relative: f64 1e-10 per step done, f32 1e-5 for one
/// step and 1e-3 beyond, 16-bit types 5e-2. The bias of attention's keys, which
/// has no gradient, is left out.
Parity compare_with_one_device(const Options& options,
                               const std::vector<double>& losses,
                               const std::vector<NamedTensor>& parameters,
                               const ReferenceRun& reference);
double parity_tolerance(DType dtype, std::int64_t steps);

/// What this rank counted, beside what was predicted.
RankReport rank_report(double predicted_bytes, double counted_bytes,
                       const MemoryBill& predicted, const MemoryStats& counted);
/// Every rank's report, on rank 0; empty elsewhere.
std::vector<RankReport> gather_reports(ProcessGroup& world,
                                       const RankReport& mine);

/// Peak bytes of parameters, gradients, optimizer state, activations and input
/// of one device that trains `config` on these pieces of a batch, one after
/// another. Workspace is not predicted, nor are a ResNet's activations. See
/// memory.cpp for the derivation.
MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              const std::vector<MicroBatch>& pieces,
                              bool recompute = false);
/// One piece of `rows` samples; with `accumulates`, several of them.
MemoryBill single_device_bill(const Options& options,
                              const ModelConfig& config, std::int64_t rows,
                              bool recompute = false, bool accumulates = false);

/// Prints the report as --format says; returns the exit status: 0, or
/// kExitClaimFailed when a claim does not hold.
int print_report(const Options& options, const CommandLine& line,
                 const Report& report);

}  // namespace shardbook
