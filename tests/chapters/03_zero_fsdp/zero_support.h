#pragma once

// DDP as the oracle of ZeRO: the same data, the same ranks, the same bits.

#include <algorithm>
#include <map>
#include <optional>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "tests/chapters/02_ddp/ddp_support.h"
#include "tests/support/larger.h"

namespace shardbook::zero_test {

using namespace shardbook::ddp_test;  // NOLINT: the same small models
using zero::make_zero;
using zero::ZeroOptimizer;
using zero::ZeroOptions;

/// The result of a run: parameters and optimizer state by name.
using State = std::map<std::string, Values>;

struct Training {
  std::string optimizer = "adamw";
  OptimizerOptions optimizer_options = {};
  DType dtype = DType::kF32;
  int steps = 3;
  int micro_steps = 1;
  double clip = 0;
  std::uint64_t seed = 10;
};

/// SGD with momentum, Adam, AdamW.
inline std::vector<Training> optimizers(DType dtype, int micro_steps = 1) {
  std::vector<Training> all = {
      {"sgd", {.lr = 0.05, .weight_decay = 0.01, .momentum = 0.9}},
      {"adam", {.weight_decay = 0.01}},
      {"adamw", {.weight_decay = 0.1}}};
  for (Training& run : all) {
    run.dtype = dtype;
    run.micro_steps = micro_steps;
  }
  return all;
}

/// This rank's samples of micro-step `micro` of step `step`.
inline Samples samples_of(const Training& run, int step, int micro,
                          const ProcessGroup& world) {
  const int d = world.size(), g = run.micro_steps;
  return every(make_samples(24 * g, run.dtype,
                            run.seed + static_cast<std::uint64_t>(step)),
               world.rank() + d * micro, d * g);
}

/// The backward of one micro-step, scaled to its share of the step.
inline void backward_of(const Tensor& output, const Samples& mine,
                        int micro_steps, double loss_scale = 1) {
  const Tensor loss = mse_loss(output, mine.y);
  autograd::backward(
      {loss}, {Tensor::full({}, loss_scale / micro_steps, loss.options())});
}

inline State values_by_name(const std::vector<NamedTensor>& tensors) {
  State state;
  for (const auto& [name, tensor] : tensors) {
    state[name] = tensor.to_vector<double>();
  }
  return state;
}

inline State state_by_name(Module& model, Optimizer& optimizer) {
  State state;
  const std::vector<NamedTensor> parameters = model.named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    state[name] = tensor.to_vector<double>();
    const OptimizerSlot& slot = optimizer.slots()[i];
    if (slot.master.defined()) {
      state[name + ".master"] = slot.master.to_vector<double>();
    }
    for (std::size_t j = 0; j < slot.state.size(); ++j) {
      state[name + "." + optimizer.state_names()[j]] =
          slot.state[j].to_vector<double>();
    }
  }
  return state;
}

/// The first name that differs; "" when all are equal bit for bit.
inline std::string first_difference(const State& a, const State& b) {
  if (a.size() != b.size()) return "the number of tensors";
  for (const auto& [name, values] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second != values) return name;
  }
  return "";
}

inline double largest_difference(const State& a, const State& b) {
  double worst = a.size() == b.size() ? 0 : 1e300;
  for (const auto& [name, values] : a) {
    if (b.count(name) == 0) return 1e300;
    worst = larger(worst, ddp_test::largest_difference(values, b.at(name)));
  }
  return worst;
}

using MakeModel = std::function<Sequential(DType, std::uint64_t seed)>;

inline std::vector<State> train_ddp(int d, const Training& run,
                                    const MakeModel& make = make_mlp) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Sequential model = make(run.dtype, 1);
    ddp::DistributedDataParallel ddp(model, world);
    const auto optimizer = make_optimizer(run.optimizer, model.parameters(),
                                          run.optimizer_options);
    optimizer->keep_master_copies();
    for (int step = 0; step < run.steps; ++step) {
      for (int i = 0; i < run.micro_steps; ++i) {
        std::optional<ddp::NoSync> no_sync;
        if (i + 1 < run.micro_steps) no_sync.emplace(ddp);
        const Samples mine = samples_of(run, step, i, world);
        backward_of(ddp(mine.x), mine, run.micro_steps);
      }
      if (run.clip > 0) clip_grad_norm(model.parameters(), run.clip);
      optimizer->step();
      model.clear_grad();
    }
    return state_by_name(model, *optimizer);
  });
}

inline void train_zero(ZeroOptimizer& zero, const Training& run, int first,
                       int last) {
  for (int step = first; step < last; ++step) {
    for (int i = 0; i < run.micro_steps; ++i) {
      zero.set_boundary(i + 1 == run.micro_steps);
      const Samples mine = samples_of(run, step, i, zero.group());
      backward_of(zero(mine.x), mine, run.micro_steps,
                  zero.options().loss_scale);
    }
    zero.step();
  }
}

/// Parameters and optimizer state, whole. Collective.
inline State state_of_zero(ZeroOptimizer& zero) {
  State state = values_by_name(zero.full_parameters());
  std::vector<std::string> fields = zero.optimizer().state_names();
  fields.push_back("master");
  const std::vector<StatePart> mine = zero.state().parts;
  for (const auto& [name, tensor] : zero.module().named_parameters()) {
    for (const std::string& field : fields) {
      // Each rank's elements, followed by their number
      const auto numel = static_cast<std::size_t>(tensor.numel());
      Values values(numel + 1);
      for (const StatePart& part : mine) {
        if (part.name != name) continue;
        for (const StateField& each : fields_of(part)) {
          if (each.name != field) continue;
          const Values own = each.values.to_vector<double>();
          std::copy(own.begin(), own.end(), values.begin() + part.begin);
          values[numel] += static_cast<double>(own.size());
        }
      }
      const Tensor sum = Tensor::from_values(values, {tensor.numel() + 1});
      zero.group().all_reduce(sum).wait();
      values = sum.to_vector<double>();
      if (values[numel] == 0) continue;
      values.resize(numel);
      state[name + "." + field] = values;
    }
  }
  return state;
}

inline std::vector<State> train_zero(int d, const Training& run,
                                     const ZeroOptions& options,
                                     const MakeModel& make = make_mlp) {
  return on_ranks(d, [&](ProcessGroup& world) {
    // Different weights on each rank: construction makes them rank 0's
    Sequential model =
        make(run.dtype, 1 + static_cast<std::uint64_t>(world.rank()));
    const auto zero =
        make_zero(model, world, options, run.optimizer, run.optimizer_options);
    train_zero(*zero, run, 0, run.steps);
    return state_of_zero(*zero);
  });
}

/// The state after `steps` steps of a backward, which the test gives, through
/// DDP (stage 0) or ZeRO.
using Backward = std::function<void(
    int step, const std::function<Tensor(const Tensor& x)>& forward)>;
inline State train_by(Module& model, ProcessGroup& world,
                      const ZeroOptions& options, const std::string& optimizer,
                      const OptimizerOptions& optimizer_options, int steps,
                      const Backward& backward) {
  if (options.stage > 0) {
    const auto zero =
        make_zero(model, world, options, optimizer, optimizer_options);
    for (int step = 0; step < steps; ++step) {
      backward(step, [&](const Tensor& x) { return (*zero)(x); });
      zero->step();
    }
    return state_of_zero(*zero);
  }
  ddp::DdpOptions finds_unused;
  finds_unused.find_unused_parameters = true;
  ddp::DistributedDataParallel ddp(model, world, finds_unused);
  const auto updates =
      make_optimizer(optimizer, model.parameters(), optimizer_options);
  updates->keep_master_copies();
  for (int step = 0; step < steps; ++step) {
    backward(step, [&](const Tensor& x) { return ddp(x); });
    updates->step();
    model.clear_grad();
  }
  return state_by_name(model, *updates);
}

inline ZeroOptions stage(int number) {
  ZeroOptions options;
  options.stage = number;
  options.persistence_threshold = 0;
  return options;
}

/// factor * x, not recorded.
inline Tensor scale_of(const Tensor& x, double factor) {
  NoGrad no_grad;
  return scale(x, factor);
}

/// 8 -> 4 -> 16 -> 4: 36 + 80 + 68 = 184 parameters.
inline Sequential make_184(DType dtype, std::uint64_t seed = 1) {
  const InitOptions init = init_of(dtype, seed);
  Sequential model;
  model.add(Linear("0", 8, 4, init));
  model.add(Relu());
  model.add(Linear("2", 4, 16, init));
  model.add(Relu());
  model.add(Linear("4", 16, 4, init));
  return model;
}

}  // namespace shardbook::zero_test
