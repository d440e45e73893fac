#pragma once

// Small models and data for the tests of DistributedDataParallel.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/02_ddp/ddp.h"
#include "chapters/common/run/options.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/layers.h"
#include "core/optim.h"
#include "tests/support/errors.h"
#include "tests/support/larger.h"
#include "tests/support/on_ranks.h"

namespace shardbook::ddp_test {

/// One byte, in the options' unit MiB.
constexpr double kByte = 1.0 / (1 << 20);

using Values = std::vector<double>;

inline InitOptions init_of(DType dtype, std::uint64_t seed = 1) {
  InitOptions init;
  init.seed = seed;
  init.dtype = dtype;
  return init;
}

/// 5 -> 7 -> 6 -> 3 with ReLU: 42 + 48 + 21 = 111 parameters.
inline Sequential make_mlp(DType dtype, std::uint64_t seed = 1) {
  const InitOptions init = init_of(dtype, seed);
  Sequential model;
  model.add(Linear("0", 5, 7, init));
  model.add(Relu());
  model.add(Linear("2", 7, 6, init));
  model.add(Relu());
  model.add(Linear("4", 6, 3, init));
  return model;
}

/// The config of a small GPT.
inline constexpr char kTinyGpt[] =
    R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 16,)"
    R"("n_embd": 16, "n_layer": 3, "n_head": 2})";

/// Three steps of the program's strategy.
inline Options tiny_options(const std::string& model,
                            DType dtype = DType::kF32) {
  Options options;
  options.model = model;
  options.data = "random";
  options.cluster = "none";
  options.dtype = dtype;
  options.batch = 24;
  options.seq = 8;
  options.steps = 3;
  options.deterministic = true;
  return options;
}

struct Samples {
  Tensor x, y;
};

/// Rows of the same global data on every rank.
inline Samples make_samples(std::int64_t count, DType dtype,
                            std::uint64_t seed = 7) {
  Samples all{Tensor::empty({count, 5}, {dtype, Device()}),
              Tensor::empty({count, 3}, {dtype, Device()})};
  fill_normal(all.x, seed, 1, 0, 1);
  fill_normal(all.y, seed, 2, 0, 1);
  return all;
}

/// Rows first, first + stride, ... of `all`.
inline Tensor every(const Tensor& all, std::int64_t first,
                    std::int64_t stride) {
  Tensors rows;
  for (std::int64_t i = first; i < all.size(0); i += stride) {
    rows.push_back(slice(all, 0, i, i + 1));
  }
  NoGrad no_grad;
  return concat(rows, 0);
}

inline Samples every(const Samples& all, std::int64_t first,
                     std::int64_t stride) {
  return {every(all.x, first, stride), every(all.y, first, stride)};
}

/// Bits of all values, end to end, as doubles.
inline Values values_of(const Tensors& tensors) {
  Values values;
  for (const Tensor& tensor : tensors) {
    const Values part = tensor.to_vector<double>();
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

inline Values grads_of(Module& model) {
  Tensors grads;
  for (const Tensor& parameter : model.parameters()) {
    grads.push_back(parameter.grad().defined() ? parameter.grad()
                                               : parameter.zeros_like());
  }
  return values_of(grads);
}

/// The gradients of a new model on one device.
template <typename Model>
Values one_device_grads(std::int64_t rows, std::uint64_t seed = 7) {
  Model model;
  const DType dtype = model.parameters()[0].dtype();
  const Samples all = make_samples(rows, dtype, seed);
  mse_loss(model(all.x), all.y).backward();
  return grads_of(model);
}

/// Parameters, then the optimizer's state.
inline Values state_of(Module& model, Optimizer& optimizer) {
  Values values = values_of(model.parameters());
  for (const OptimizerSlot& slot : optimizer.slots()) {
    const Values part = values_of(slot.state);
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

inline double largest_difference(const Values& a, const Values& b) {
  if (a.size() != b.size()) return 1e300;
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst =
        larger(worst, std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i])));
  }
  return worst;
}

/// Sum over chunks r = 0..d-1 (rows r, r + d, ...) of gradient / d, computed
/// one after another in rank order: DDP must equal it bit for bit. Leaves the
/// result in the parameters' gradients.
inline void chunk_gradients(
    Module& model, const Samples& all, int d,
    const std::function<Tensor(Module&, const Samples&)>& loss) {
  Tensors sums(model.parameters().size());
  for (int r = 0; r < d; ++r) {
    model.clear_grad();
    loss(model, every(all, r, d)).backward();
    NoGrad no_grad;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const Tensor part = scale(model.parameters()[i].grad(), 1.0 / d);
      sums[i] = r == 0 ? part : add(sums[i], part);
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    model.parameters()[i].set_grad(sums[i]);
  }
}

inline Tensor mse(Module& model, const Samples& samples) {
  return mse_loss(model(samples.x), samples.y);
}

/// make_mlp of f64, and of f32.
struct Mlp : Sequential {
  Mlp() : Sequential(make_mlp(DType::kF64)) {}
};
struct Mlp32 : Sequential {
  Mlp32() : Sequential(make_mlp(DType::kF32)) {}
};

class CastTo : public ModuleOf<CastTo> {
 public:
  explicit CastTo(DType dtype) : dtype_(dtype) {}
  Tensor forward(const Tensor& x) override { return to_dtype(x, dtype_); }
  void members(MemberVisitor&) override {}

 private:
  DType dtype_;
};

/// A linear layer and a batch norm.
struct NormNet : Sequential {
  NormNet() {
    add(Linear("0", 5, 3, init_of(DType::kF64)));
    add(BatchNorm(3, init_of(DType::kF64)));
  }
};

/// A model under DDP on this rank, and this rank's rows of a global batch.
template <typename Model>
struct Replica {
  explicit Replica(ProcessGroup& group, const ddp::DdpOptions& options = {},
                   std::int64_t rows = 4, std::uint64_t seed = 7)
      : mine(every(make_samples(rows, model.parameters()[0].dtype(), seed),
                   group.rank(), group.size())),
        ddp(model, group, options) {}
  Tensor loss() { return mse_loss(ddp(mine.x), mine.y); }
  void backward() { loss().backward(); }

  Model model;
  Samples mine;
  ddp::DistributedDataParallel ddp;
};

/// The records of one operation.
inline std::vector<CommRecord> records_of(const ProcessGroup& group, CommOp op,
                                          const std::string& label = "") {
  std::vector<CommRecord> found;
  for (const CommRecord& record : group.records()) {
    if (record.op == op && record.label.compare(0, label.size(), label) == 0) {
      found.push_back(record);
    }
  }
  return found;
}

inline std::vector<std::int64_t> numels(const std::vector<CommRecord>& log) {
  std::vector<std::int64_t> counts;
  for (const CommRecord& record : log) counts.push_back(record.numel);
  return counts;
}

}  // namespace shardbook::ddp_test
