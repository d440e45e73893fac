#pragma once

// A request to the planner, and the plans that it predicts.
//
//   PlanRequest request;
//   request.model = "gpt-13b";
//   request.world_size = 64;
//   request.batch = 1024;
//   request.base.sizes.seq = 2048;
//   read_model(request, sim::Cluster::read("dgx-a100"));
//   PlanResult result = search(request);        // search.h
//   result.best[0].plan.layout_text();       // "tp 4 x pp 2 x dp 8, ZeRO-1"
//
// A plan is a way to train with the hybrid chapter. That chapter's rules say
// which plans are legal (refusal), and step.h how long a step takes and what a
// rank holds.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/planner/step.h"
#include "sim/cluster.h"

namespace shardbook::planner {

/// Models that the book counts and does not train are planned as a model that it
/// does: a Llama, or a Mixtral, with the same matrices. A plain MLP of width f is a
/// gated one of 2 f / 3: as many weights, operations and kept activations. Latent
/// attention, shared experts and dense blocks in front of those with experts are
/// rows of the block's table (DeepSeek-V3): they are planned as they are.
struct StandIn {
  /// What is planned; null: the model itself trains.
  std::shared_ptr<const ModelConfig> config;
  /// What the plan of it leaves out, in sentences.
  std::vector<std::string> remarks;
};

/// Samples have `seq` tokens; 0: as many as the model has positions. Throws Error
/// where parameters or operations per token would differ by more than 3 %, with
/// the part that differs most.
StandIn stand_in_of(const std::string& model, std::int64_t seq);

/// Choices that are fixed, or that a system lacks. 0 and empty: free.
struct Limits {
  int tp = 0, pp = 0, cp = 0, ep = 0;
  int zero_stage = -1;  ///< -1: free
  std::int64_t micro_batch = 0;
  int chunks = 0;              ///< of a rank; above 1 with "interleaved" only
  std::string schedule;        ///< "1f1b", "interleaved" or "zb-h1"
  std::string recompute;       ///< "never", "attention" or "blocks"
  int sequence_parallel = -1;  ///< 0 never, 1 wherever tp is above 1; -1: free
  bool has_zero_bubble = true, offloads = true;
  int max_tp = 1 << 20, max_chunks = 1 << 20;
  std::int64_t max_micro_batch = 64;
};

struct PlanRequest {
  std::string model = "gpt-13b";
  StandIn stand_in;  ///< planned in its place; set by read_model
  /// The caller sets the sequence, the dtype and dropout; read_model the
  /// cluster, the model's other sizes, and the behaviour of the system that
  /// trains it. Degrees and micro-batches are the plan's.
  HybridJob base;
  /// Commands and --confirm read the cluster from here; empty: its name.
  std::string cluster;
  int world_size = 0;
  std::int64_t batch = 0;
  /// Memory of a device; 0: the cluster's.
  double memory_bytes = 0;
  Limits limits;

  /// False for a model that the book only plans: no command trains it.
  bool trains() const { return stand_in.config == nullptr; }

  PlanRequest() { base.layout.dtype = DType::kBF16; }
  std::int64_t seq() const { return base.sizes.seq; }
  DType dtype() const { return base.layout.dtype; }
  double capacity() const;
  const std::string& cluster_source() const {
    return cluster.empty() ? base.cluster.name : cluster;
  }
};

/// Sets `base`: the sizes of `model`, or of its stand-in, trained by this book's
/// chapters.
void read_model(PlanRequest& request, const sim::Cluster& cluster);

/// The part of a device's memory that a plan may fill. The rest is left to the
/// driver, NCCL's buffers and fragmentation.
constexpr double kUsableMemory = 0.95;

struct Plan {
  hybrid::HybridOptions setup;
  std::int64_t micro_batch = 1;
  /// Recomputed in backward: "never", "attention" (selective), "blocks" (full).
  std::string recompute = "never";
  /// The ZeRO chapter's --cpu-offload; only without tp, pp and cp.
  bool offloads = false;

  /// "tp 4 x pp 2 x dp 8, ZeRO-1".
  std::string layout_text() const;
  /// "16 x 2 samples, 1f1b, recompute attention".
  std::string work_text() const;
};

/// The shared options that the hybrid chapter is started with.
Options options_of(const PlanRequest& request);
/// Its own options: the plan's degrees and cuts, and its recomputation.
hybrid::HybridOptions chapter_options(const PlanRequest& request,
                                      const Plan& plan);
/// The job that step.h predicts.
HybridJob job_of(const PlanRequest& request, const Plan& plan);

struct Prediction {
  Plan plan;
  HybridStep step;
  StepMemory memory;
  /// From the hybrid chapter itself, on shapes: seconds of a step, and the most
  /// bytes of a device at one time. 0: it was not run.
  double confirmed_s = 0, confirmed_bytes = 0;
};

/// Seconds that no plan of these degrees can beat: products at the device's
/// best rate, bytes over the fastest link, and the pipeline's fill and drain.
double least_seconds(const PlanRequest& request, const Plan& plan);
/// Bytes that the plan needs at least: its part of parameters, gradients and
/// optimizer state.
double least_bytes(const PlanRequest& request, const Plan& plan);
/// The prediction, exact except for the omissions of step.h.
Prediction predict_plan(const PlanRequest& request, const Plan& plan);

/// Runs the plan in the hybrid chapter, on shapes, and adds its results.
void confirm(const PlanRequest& request, Prediction& prediction);
/// Whether confirm is affordable: few different ranks, and a plan that the
/// chapter itself runs.
bool can_confirm(const PlanRequest& request, const Plan& plan);

/// FLOPs per second of a device. Throws Error where it does not know the dtype.
double peak_flops(const PlanRequest& request);
/// Model FLOPs over the devices' peak FLOPs in the time of a step.
double mfu(const PlanRequest& request, const Prediction& prediction);
double tokens_per_s(const PlanRequest& request, const Prediction& prediction);

}  // namespace shardbook::planner
