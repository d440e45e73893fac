#include "core/layers.h"

#include <cmath>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/op_scope.h"
#include "core/kernels/batch_norm.h"

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

Conv2d::Conv2d(const std::string& name, std::int64_t in, std::int64_t out,
               std::int64_t size, std::int64_t stride, const InitOptions& init)
    : weight(make_parameter(
          name + ".weight", {out, in, size, size},
          std::sqrt(2.0 / static_cast<double>(out * size * size)), init)),
      stride(stride),
      padding(size / 2) {}

void Conv2d::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

LayerNorm::LayerNorm(std::int64_t width, const InitOptions& init, double eps)
    : weight(make_constant_parameter({width}, 1, init)),
      bias(make_constant_parameter({width}, 0, init)),
      eps(eps) {}

void LayerNorm::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

RmsNorm::RmsNorm(std::int64_t width, const InitOptions& init, double eps)
    : weight(make_constant_parameter({width}, 1, init)), eps(eps) {}

void RmsNorm::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

Embedding::Embedding(const std::string& name, std::int64_t rows,
                     std::int64_t width, const InitOptions& init, double stddev)
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

Tensors BatchNorm::forward_all(const Tensors& inputs) {
  SB_CHECK(inputs.size() == 1 || inputs.size() == 2,
           "BatchNorm: takes one tensor, and one to add; given ",
           inputs.size());
  return {normalize(inputs[0], inputs.size() == 2 ? inputs[1] : Tensor())};
}

Tensor BatchNorm::normalize(const Tensor& x, const Tensor& addend) {
  if (is_training()) {
    const BatchNormResult result =
        batch_norm_train(x, weight, bias, {eps, sum_over_ranks, relu, addend});
    // A second forward of the same batch must not count twice.
    if (!RankContext::current().is_recomputing) remember(result);
    return result.y;
  }
  Tensor y = batch_norm_eval(x, weight, bias, running_mean, running_var, eps);
  if (addend.defined()) y = add(y, addend);
  return relu ? shardbook::relu(y) : y;
}

void BatchNorm::remember(const BatchNormResult& result) {
  NoGrad no_grad;
  if (!deferred) {
    return update_running(result.mean, result.variance, result.count);
  }
  // The sums stay until the end of the mini-batch: not activations
  MemoryScope kind(MemoryKind::kWorkspace);
  const Tensor squares =
      scale(add(result.variance, square(result.mean)), result.count);
  const Tensor sum = scale(result.mean, result.count);
  const bool first = count_ == 0;
  sum_ = first ? sum : add(sum_, sum);
  sum_of_squares_ = first ? squares : add(sum_of_squares_, squares);
  count_ += result.count;
}

Tensors BatchNorm::pending() const {
  if (count_ == 0) return {};
  return {sum_, sum_of_squares_};
}

void BatchNorm::commit(int num_ranks) {
  if (count_ == 0) return;
  NoGrad no_grad;
  count_ *= num_ranks;
  const Tensor mean = scale(sum_, 1 / count_);
  update_running(mean, sub(scale(sum_of_squares_, 1 / count_), square(mean)),
                 count_);
  sum_ = sum_of_squares_ = Tensor();
  count_ = 0;
}

// One operation updates both: on a GPU it costs hardly more than its launch.
void BatchNorm::update_running(const Tensor& mean, const Tensor& variance,
                               double count) {
  internal::OpScope scope(
      "running_statistics", 6 * static_cast<double>(mean.numel()),
      internal::bytes_of({&mean, &variance, &running_mean, &running_mean,
                          &running_var, &running_var}),
      running_mean);
  if (!scope.runs()) return;
  const double unbiased = count > 1 ? count / (count - 1) : 1;
  const auto blend = [&](const Tensor& running, const Tensor& now,
                         double share) {
    kernels::channel_blend(scope.kernels(), running.dtype(), now.numel(),
                           1 - momentum, share, now.data<double>(),
                           running.raw());
  };
  blend(running_mean, mean, momentum);
  blend(running_var, variance, momentum * unbiased);
}

namespace {

template <typename Fn>
void for_batch_norms(Module& module, const Fn& fn) {
  for (const NamedModule& entry : module.named_modules()) {
    if (auto* norm = dynamic_cast<BatchNorm*>(entry.module)) fn(*norm);
  }
}

}  // namespace

void defer_batch_norms(Module& module, bool on) {
  for_batch_norms(module, [on](BatchNorm& norm) {
    norm.commit();
    norm.deferred = on;
  });
}

void commit_batch_norms(Module& module, int num_ranks) {
  for_batch_norms(module, [=](BatchNorm& norm) { norm.commit(num_ranks); });
}

Tensors pending_statistics(Module& module) {
  Tensors all;
  for_batch_norms(module, [&](BatchNorm& norm) {
    for (const Tensor& each : norm.pending()) all.push_back(each);
  });
  return all;
}

Sequential::Sequential(const Sequential& other) : Module(other) {
  for (const auto& module : other.modules_) modules_.push_back(module->clone());
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
