#pragma once

// The simplest ZeRO-3, to read first and for tests to compare with: no hooks,
// no buckets, no overlap.
//
//   const auto layers = layers_of(config);
//   NaiveZero3 zero(*layers, init, dp, "adamw", {});
//   double loss = zero.step(inputs, targets);    // of this rank's samples
//
// Each of d ranks holds 1/d of every parameter, gradient and optimizer state.
// Whole parameters exist one layer at a time. Only the input of each layer is
// kept for backward.

#include <map>
#include <memory>
#include <string>

#include "chapters/common/pipeline/stages.h"
#include "comm/process_group.h"
#include "core/optim.h"

namespace shardbook::zero_fsdp {

class NaiveZero3 {
 public:
  /// `layers` and `dp` outlive this object.
  NaiveZero3(const LayerList& layers, const InitOptions& init, ProcessGroup& dp,
             const std::string& optimizer, const OptimizerOptions& options);

  /// Forward, backward and update; every rank has equally many samples.
  /// Returns this rank's mean loss.
  ///
  /// Communication, for parameters of P bytes in all layers: two all-gathers
  /// and a reduce-scatter of P, 3 P (d - 1) / d bytes sent by each rank. The
  /// last layer is gathered once: its backward follows at once.
  double step(const Tensor& inputs, const Tensor& targets);

  /// Whole parameters by name. Collective.
  std::vector<NamedTensor> full_parameters();

 private:
  struct Shard {
    Tensor part;  ///< [ceil(numel / d)], the last rank's padded with zeros
    Shape whole;
  };
  std::unique_ptr<Module> gather(int layer);
  Tensor gather(const Shard& shard);
  void reduce(Module& layer);

  const LayerList& layers_;
  InitOptions init_;
  ProcessGroup& dp_;
  std::map<std::string, Shard> shards_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace shardbook::zero_fsdp
