#pragma once

// Data parallelism, plain and sharded, in the words of this chapter.
//
// A forward borrows each parameter whole, and each rank's gradient is a term of
// a sum:
//
//   layout   forward       backward           the chapter that does it by hand
//   R        -             all-reduce         DDP
//   S(0)     all-gather    reduce-scatter     FSDP
//
// Those chapters add optimizations: buckets, overlap, prefetch, and parameters
// that are freed and gathered again.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/11_dtensor/dtensor.h"
#include "core/module.h"

namespace shardbook::dtensor {

/// A parameter as a forward borrows it: of shape `whole`; the gradient of the
/// result is a term of a sum over the ranks of `dp`. On one rank it is the
/// parameter itself.
Tensor borrowed(const Tensor& parameter, const Mesh& dp,
                const Placement& placement, const Shape& whole);

/// Lends the module's parameters to each of its forwards; of shards, `whole` are
/// the shapes. Hooks that `inside` adds run while they are lent.
void lend_parameters(
    Module& module, const Mesh& dp, const Placement& placement,
    const std::vector<Shape>& whole = {},
    const std::function<void(Module&)>& inside = [](Module&) {});

/// DDP: lends every layer its parameters as replicas. Gradients are sums over
/// the ranks: start backward from global_mean.
void replicate_parameters(Module& model, const Mesh& dp);

/// FSDP: all parameters of a module in one flat parameter, of which each rank
/// has a shard by rule CEIL.
class FlatUnit {
 public:
  /// The module must outlive it; all ranks have equal parameters.
  FlatUnit(Module& module, const Mesh& dp);
  /// [F] in shards: what the optimizer trains.
  const Parameter& flat() const { return flat_; }
  /// The module's result: one all-gather, and one reduce-scatter in backward.
  Tensor operator()(const Tensor& x);

 private:
  Module& module_;
  std::vector<Shape> shapes_;
  Parameter flat_;
};

/// The mean of the ranks' means over equally many samples, on every rank.
Tensor global_mean(const Tensor& local_mean, const Mesh& dp);

}  // namespace shardbook::dtensor
