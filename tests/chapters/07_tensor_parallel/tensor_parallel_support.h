#pragma once

// Values, logs, and GPTs that the tests of this chapter train.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/07_tensor_parallel/rng.h"
#include "chapters/common/run/training.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "tests/support/on_ranks.h"

namespace shardbook::tensor_parallel {

inline InitOptions init_f64() {
  InitOptions init;
  init.seed = 11;
  init.dtype = DType::kF64;
  return init;
}

/// Standard normal values, the same on every rank.
inline Tensor drawn(const Shape& shape, std::uint64_t stream) {
  Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  fill_normal(x, 3, stream, 0, 1);
  return x;
}

inline void expect_near(const Tensor& found, const Tensor& expected,
                        double tolerance = 1e-12) {
  EXPECT_LT(max_abs_difference(found, expected), tolerance);
}

/// "all_reduce 192", ...
using Log = std::vector<std::string>;
inline Log log_of(const std::vector<CommRecord>& records) {
  Log log;
  for (const CommRecord& record : records) {
    log.push_back(comm_op_name(record.op) +
                  (" " + std::to_string(record.numel)));
  }
  return log;
}

/// A GPT whose layers `change` may corrupt.
class ChangedGpt : public ShardedStrategy {
 public:
  using Change = std::function<void(LayerFactory& layers, ProcessGroup& tp)>;
  /// With `rng`, ranks draw from Megatron's streams.
  ChangedGpt(const Options& options, ProcessGroup& tp, const Change& change,
             RngTracker* rng = nullptr, bool recompute = false)
      : ShardedStrategy(options, sharded(options, tp, change, rng), tp,
                        {1, recompute}) {}
  std::vector<Bill> bills() override { return {}; }

 private:
  static ShardedModel sharded(const Options& options, ProcessGroup& tp,
                              const Change& change, RngTracker* rng) {
    RngPlace place;
    place.tp = tp.rank();
    if (rng != nullptr) {
      rng->add(kTensorStream, megatron_seeds(options.seed, place).tensor);
    }
    ShardedModel model;
    model.layers = layers(model_config(options), tp, rng);
    if (change) change(model.layers, tp);
    model.layout = [t = tp.size()](const std::string& name, int rank) {
      return layout(name, rank, t);
    };
    return model;
  }
};

/// By rank: all parameters after training by `make(tp, rng)`, or only the
/// replicated ones.
template <typename Make>
std::vector<std::vector<double>> trained(const Options& options,
                                         bool replicas_only, const Make& make) {
  return on_ranks(options.world_size, [&](ProcessGroup& tp) {
    RngTracker rng;
    auto strategy = make(tp, rng);
    train(options, strategy.optimizer(), false,
          [&](std::int64_t k) { return strategy.step(k); });
    std::vector<double> values;
    for (const NamedTensor& each : strategy.model().named_parameters()) {
      if (replicas_only && !layout(each.name, 0, tp.size()).empty()) continue;
      const auto mine = each.tensor.to_vector<double>();
      values.insert(values.end(), mine.begin(), mine.end());
    }
    return values;
  });
}

}  // namespace shardbook::tensor_parallel
