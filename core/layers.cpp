#include "core/layers.h"

#include <cmath>

#include "core/context.h"

namespace shardbook {

Linear::Linear(const std::string& name, std::int64_t in, std::int64_t out,
               const InitOptions& init, bool with_bias) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  weight = make_uniform_parameter(name + ".weight", {in, out}, bound, init);
  if (with_bias) {
    bias = make_uniform_parameter(name + ".bias", {out}, bound, init);
  }
}

void Linear::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

LayerNorm::LayerNorm(std::int64_t width, const InitOptions& init, double eps)
    : weight(make_constant_parameter({width}, 1, init)),
      bias(make_constant_parameter({width}, 0, init)),
      eps(eps) {}

void LayerNorm::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

Embedding::Embedding(const std::string& name, std::int64_t rows,
                     std::int64_t width, const InitOptions& init,
                     double stddev)
    : weight(make_parameter(name + ".weight", {rows, width}, stddev, init)) {}

void Embedding::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

BatchNorm::BatchNorm(std::int64_t channels, const InitOptions& init, double eps,
                     double momentum)
    : weight(make_constant_parameter({channels}, 1, init)),
      bias(make_constant_parameter({channels}, 0, init)),
      eps(eps),
      momentum(momentum) {
  running_mean = make_constant_parameter({channels}, 0, init);
  running_var = make_constant_parameter({channels}, 1, init);
  running_mean.set_requires_grad(false);
  running_var.set_requires_grad(false);
}

void BatchNorm::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
  visit.buffer("running_mean", running_mean);
  visit.buffer("running_var", running_var);
}

Tensor BatchNorm::forward(const Tensor& x) {
  if (!is_training()) {
    return batch_norm_eval(x, weight, bias, running_mean, running_var, eps);
  }
  const BatchNormResult result =
      batch_norm_train(x, weight, bias, eps, sum_over_ranks);
  // A second forward of the same batch must not count twice.
  if (!RankContext::current().is_recomputing) {
    NoGrad no_grad;
    auto update = [this](const Tensor& running, const Tensor& now,
                         double factor) {
      running.copy_from(add(scale(running, 1 - momentum),
                            to_dtype(scale(now, momentum * factor),
                                     running.dtype())));
    };
    const double unbiased =
        result.count > 1 ? result.count / (result.count - 1) : 1;
    update(running_mean, result.mean, 1);
    update(running_var, result.variance, unbiased);
  }
  return result.y;
}

Sequential::Sequential(const Sequential& other) : Module(other) {
  for (const auto& module : other.modules_) {
    modules_.push_back(module->clone());
  }
}

Sequential& Sequential::operator=(const Sequential& other) {
  Sequential copy(other);
  Module::operator=(other);
  modules_ = std::move(copy.modules_);
  return *this;
}

Tensor Sequential::forward(const Tensor& x) {
  Tensor y = x;
  for (const auto& module : modules_) y = (*module)(y);
  return y;
}

void Sequential::members(MemberVisitor& visit) {
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    visit.module(std::to_string(i), *modules_[i]);
  }
}

}  // namespace shardbook
