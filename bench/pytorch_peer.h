#pragma once

// Shared declarations of pytorch_peer's sources.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "chapters/common/models/models.h"
#include "comm/process_group.h"
#include "core/optim.h"

namespace shardbook::bench {

/// The command line, as pytorch.py states it.
struct PeerOptions {
  std::string work;
  std::string model = "gpt-micro";
  std::string backend = "threads";
  std::int64_t size = 1024;
  std::int64_t batch = 8;  ///< of one rank
  std::int64_t seq = 128;
  std::int64_t bytes = std::int64_t{64} << 20;
  int world_size = 1;
  int threads = 1;  ///< of one rank
};

/// One iteration of a work, ready to run on this rank.
struct TimedWork {
  std::string variant;  ///< which of several ways, for the record
  std::function<void()> body;
};

/// A training step in f32 on one fixed batch of random token ids, which differ
/// from rank to rank: zero the gradients, forward, loss, backward, AdamW.
struct TrainingStep {
  TrainingStep(const PeerOptions& options, int rank);
  /// One step; `forward` runs `*model`, or what a strategy made of it.
  void run(const std::function<Tensor(const Tensor&)>& forward);

  std::unique_ptr<Module> model;
  std::unique_ptr<Optimizer> optimizer;  ///< made by the first step
  Tensor inputs, targets;                ///< i64 [batch, seq]
};

/// A training step of an image model with SGD: images of `size`, one batch.
TimedWork images_work(const PeerOptions& options, ProcessGroup& world);

/// The step under DistributedDataParallel.
TimedWork ddp_work(const PeerOptions& options, ProcessGroup& world);

}  // namespace shardbook::bench
