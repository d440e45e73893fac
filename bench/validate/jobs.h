#pragma once

// Training jobs as published tables describe them, run by the chapters in the
// `sim` world: on shapes alone, one rank for all that do the same.

#include <cstdint>
#include <string>

#include "chapters/common/models/models.h"
#include "core/dtype.h"
#include "sim/cluster.h"

namespace shardbook::validate {

enum class Strategy {
  kOneDevice,
  kDdp,
  kZero3,
  kFsdp,
  kGPipe,
  kTensor,    ///< Megatron-LM's matrices, cut over all ranks
  kMegatron,  ///< the same with Megatron-LM's sequence parallelism
  kUlysses,   ///< tokens cut over all ranks
  kRsa,    ///< ring self-attention as Colossal-AI's, which sums by all-reduce
  kHybrid  ///< tensor and pipeline parallelism, `tp` and `pp`; the rest is data
};

struct Job {
  std::string cluster;  ///< a preset
  Strategy strategy = Strategy::kOneDevice;
  ModelConfig model;
  std::int64_t seq = 0;         ///< of language models
  std::int64_t image_size = 0;  ///< of image models
  int ranks = 1;
  std::int64_t micro_batch = 1;  ///< sequences or images
  std::int64_t micro_batches = 1;
  /// Dtype of computation and messages. FSDP keeps shards in f32; the others
  /// have f32 master copies beside 16-bit parameters.
  DType dtype = DType::kBF16;
  double dropout = 0;
  bool recompute = false;
  int tp = 1, pp = 1;  ///< kHybrid
  /// kMegatron: selective recomputation, of attention alone.
  bool recompute_attention = false;
  /// ZeRO-3 as it was then: each module's parameters are fetched when it needs
  /// them, and neither fetches nor reductions overlap with computation. Since
  /// 2022 a block's are fetched together, on a stream of their own.
  bool is_deepspeed_of_2021 = false;
  /// GPipe: which micro-batches are computed again.
  std::string checkpoint = "always";
};

/// Groups of ranks that read different samples.
int replicas_of(const Job& job);

struct StepTime {
  double seconds = 0;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Virtual time of one optimizer step. Throws Error when the cluster has fewer
/// devices than the job has ranks.
StepTime step_time(const Job& job);

}  // namespace shardbook::validate
