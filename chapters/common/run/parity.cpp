#include "chapters/common/run/parity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "core/check.h"

namespace shardbook {
namespace {

/// Distance from 1 to the next number.
double unit_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-52;
    case DType::kF32:
      return 0x1p-23;
    case DType::kF16:
      return 0x1p-10;
    default:
      return 0x1p-7;
  }
}

/// Adds up how far Adam may carry the rounding of gradients: rule 2.
class Slack {
 public:
  Slack(const Options& options, Optimizer& optimizer)
      : optimizer_(optimizer),
        gradient_error_(kGradientRounding * unit_of(narrowest_of(options))) {
    const auto names = optimizer.state_names();
    is_adam_ = names.size() == 2;
    // "adam" adds the decay to the gradient, "adamw" to the weight
    if (options.optimizer == "adam") {
      decay_ = options.optimizer_options.weight_decay;
    }
    if (!is_adam_) return;
    for (const Tensor& each : optimizer.parameters()) {
      sums_.emplace_back(static_cast<std::size_t>(each.numel()), 0.0);
    }
  }

  void add_step() {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const OptimizerSlot& slot = optimizer_.slots()[i];
      const Shape& shape = optimizer_.parameters()[i].shape();
      const auto row =
          static_cast<std::size_t>(shape.empty() ? 1 : shape.back());
      if (slot.state.size() == 2) add(slot, row, sums_[i]);
    }
  }

  /// The slack of one parameter; empty where it is unknown.
  std::vector<double> of(const Tensor& parameter) const {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      if (optimizer_.parameters()[i].raw() == parameter.raw()) return sums_[i];
    }
    return {};
  }

 private:
  void add(const OptimizerSlot& slot, std::size_t row,
           std::vector<double>& sums) const {
    const OptimizerOptions& o = optimizer_.options();
    const double bias = 1 - std::pow(o.beta2, static_cast<double>(slot.step));
    std::vector<double> size = slot.state[1].to_vector<double>();
    double squares = 0;
    for (double& each : size) {
      squares += each / bias;
      each = std::sqrt(each / bias);
    }
    const double error =
        gradient_error_ * std::sqrt(squares / static_cast<double>(size.size()));
    const double two_steps =
        2 * std::max(1.0, (1 - o.beta1) / std::sqrt(1 - o.beta2));
    for (std::size_t begin = 0; begin < size.size(); begin += row) {
      // A row that was never used has no gradient, rounded or not
      const auto first = size.begin() + static_cast<std::ptrdiff_t>(begin);
      if (std::all_of(first, first + static_cast<std::ptrdiff_t>(row),
                      [](double each) { return each == 0; })) {
        continue;
      }
      for (std::size_t i = begin; i < begin + row; ++i) {
        const double element_error = error + decay_ * sums[i];
        sums[i] +=
            o.lr * std::min(two_steps, element_error / (size[i] + o.eps));
      }
    }
  }

  Optimizer& optimizer_;
  double gradient_error_;
  double decay_ = 0;  // gradient difference per weight difference
  bool is_adam_ = false;
  std::vector<std::vector<double>> sums_;
};

/// Sums of squares over a parameter.
struct Norms {
  double difference = 0, reference = 0;
  double relative() const {
    if (reference > 0) return std::sqrt(difference / reference);
    return difference > 0 ? 1 : 0;
  }
};

}  // namespace

DType narrowest_of(const Options& options) {
  // TF32 has as many bits as f16
  const DType own = options.tf32 && options.dtype == DType::kF32
                        ? DType::kF16
                        : options.dtype;
  return unit_of(options.narrowest) > unit_of(own) ? options.narrowest : own;
}

void narrow(Options& options, DType dtype) {
  if (unit_of(dtype) > unit_of(options.narrowest)) options.narrowest = dtype;
}

double parity_tolerance(DType dtype, std::int64_t steps) {
  switch (dtype) {
    case DType::kF64:
      return 1e-10 * static_cast<double>(std::max<std::int64_t>(steps, 1));
    case DType::kF32:
      return steps <= 1 ? 1e-5 : 1e-3;
    default:
      return 5e-2;
  }
}

Parity compare_runs(const Options& options, const ReferenceRun& run,
                    const ReferenceRun& one_device) {
  const DType narrowest = narrowest_of(options);
  Parity parity;
  parity.checked = true;
  parity.tolerance = parity_tolerance(narrowest, options.steps);
  SB_CHECK(run.losses.size() == one_device.losses.size(),
           "compare: ", run.losses.size(), " losses here, ",
           one_device.losses.size(), " on one device");
  std::map<std::string, Tensor> trained;
  for (const NamedTensor& each : run.parameters) {
    trained.emplace(each.name, each.tensor);
  }
  const auto difference_of = [&](double mine, double theirs) {
    const double difference = std::abs(mine - theirs);
    parity.one_device_finite =
        parity.one_device_finite && std::isfinite(theirs);
    if (std::isfinite(difference)) return difference;
    // NaN compares as false with everything: it would pass for small
    parity.finite = false;
    return std::numeric_limits<double>::infinity();
  };
  const auto add = [&](double mine, double theirs) {
    const double difference = difference_of(mine, theirs);
    if (theirs != 0) {
      parity.max_rel = std::max(parity.max_rel, difference / std::abs(theirs));
    }
    return difference;
  };
  for (std::size_t i = 0; i < run.losses.size(); ++i) {
    const double difference = add(run.losses[i], one_device.losses[i]);
    parity.max_abs = std::max(parity.max_abs, difference);
  }
  if (!run.grad_norms.empty() && !one_device.grad_norms.empty()) {
    // Not every chapter needs the norm: 0 or NaN where it was not computed
    const double mine = run.grad_norms[0], theirs = one_device.grad_norms[0];
    if (mine > 0 && theirs > 0 && std::isfinite(theirs)) add(mine, theirs);
  }

  Norms all;
  for (std::size_t i = 0; i < one_device.parameters.size(); ++i) {
    const std::string& name = one_device.parameters[i].name;
    SB_CHECK(trained.count(name) == 1, "compare: one device has a parameter '",
             name, "', the other run has none");
    const std::vector<double> mine = trained.at(name).to_vector<double>();
    const std::vector<double> theirs =
        one_device.parameters[i].tensor.to_vector<double>();
    SB_CHECK(mine.size() == theirs.size(), "compare: '", name,
             "' has another size than on one device");
    std::vector<double> slack;
    if (!one_device.slack.empty()) slack = one_device.slack[i];
    slack.resize(mine.size(), 0);
    Norms norms;
    for (std::size_t j = 0; j < mine.size(); ++j) {
      const double difference = difference_of(mine[j], theirs[j]);
      if (!std::isfinite(mine[j]) && parity.not_finite.empty()) {
        parity.not_finite = name;
      }
      parity.max_abs = std::max(parity.max_abs, difference);
      const double beyond = std::max(0.0, difference - slack[j]);
      norms.difference += beyond * beyond;
      norms.reference += theirs[j] * theirs[j];
    }
    all.difference += norms.difference;
    all.reference += norms.reference;
    if (dtype_bytes(narrowest) > 2) {
      parity.max_rel = std::max(parity.max_rel, norms.relative());
    }
  }
  if (dtype_bytes(narrowest) == 2) {
    parity.max_rel = std::max(parity.max_rel, all.relative());
  }
  parity.passed = parity.finite && parity.max_rel <= parity.tolerance;
  return parity;
}

Parity compare_with_one_device(
    const Options& options, const ReferenceRun& run,
    const std::function<ReferenceRun(const Options& options)>& train_one) {
  const ReferenceRun one_device = train_one(options);
  Parity parity = compare_runs(options, run, one_device);
  if (parity.passed || !parity.finite || parity.max_rel > kMostAllowed) {
    return parity;
  }

  // Does a change of the last bit grow as much?
  Options nudged = options;
  nudged.nudged = true;
  parity.last_bit =
      compare_runs(options, train_one(nudged), one_device).max_rel;
  parity.tolerance =
      std::max(parity.tolerance,
               std::min(kMostAllowed, kLastBitFactor * parity.last_bit));
  parity.passed = parity.max_rel <= parity.tolerance;
  return parity;
}

ReferenceRun train_yardstick(
    const Options& options, Optimizer& optimizer,
    const std::vector<NamedTensor>& parameters,
    const std::function<StepResult(std::int64_t)>& step) {
  nudge(options, optimizer.parameters());
  Slack slack(options, optimizer);
  const TrainingLog log =
      train(options, optimizer, /*is_main=*/false, [&](std::int64_t k) {
        const StepResult result = step(k);
        slack.add_step();
        return result;
      });
  ReferenceRun run{log.losses, log.grad_norms, parameters};
  for (const NamedTensor& each : parameters) {
    run.slack.push_back(slack.of(each.tensor));
  }
  return run;
}

void nudge(const Options& options, const Tensors& parameters) {
  if (!options.nudged) return;
  const double unit = unit_of(narrowest_of(options));
  std::uint32_t bits = 1;
  for (const Tensor& parameter : parameters) {
    std::vector<double> values = parameter.to_vector<double>();
    for (double& each : values) {
      // Up or down by the highest bit of a linear congruential generator
      bits = bits * 1664525u + 1013904223u;
      each *= bits >> 31 != 0 ? 1 + unit : 1 - unit;
    }
    parameter.copy_from(
        Tensor::from_values(values, parameter.shape(), parameter.device()));
  }
}

}  // namespace shardbook
