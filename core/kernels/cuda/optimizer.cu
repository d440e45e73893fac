// Optimizer updates on flat slices: one pass over all arrays, in the order of
// the CPU's arithmetic.

#include "core/kernels/optimizer.h"

#include <cmath>

#include "core/check.h"
#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/optimizer_args.h"

namespace shardbook::kernels::cuda {

namespace {

/// Elements that a thread updates at once.
constexpr int kStep = 4;

/// Parameters of P with gradients of G.
template <typename P, typename G>
struct Slice {
  using S = Compute<P>;
  std::int64_t n;
  /// Elements before the first vector: all, where the arrays' vectors do not
  /// begin at the same elements.
  std::int64_t head;
  P* param;
  const G* grad;
  float* master;

  template <int kWidth, typename Rule>
  __device__ void update(const Rule& rule, std::int64_t at) const {
    const auto up = load_vector<kWidth>(grad + at);
    AlignedVector<S, kWidth> p, g;
    bool has_master = false;
    if constexpr (std::is_same_v<S, float>) {
      has_master = master != nullptr;
      if (has_master) p = load_vector<kWidth>(master + at);
    }
    if (!has_master) {
      const auto stored = load_vector<kWidth>(param + at);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) p[j] = widen(stored[j]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = static_cast<S>(widen(up[j]));
    rule.update(at, p, g);
    if constexpr (std::is_same_v<S, float>) {
      if (has_master) store_vector(master + at, p);
    }
    AlignedVector<P, kWidth> rounded;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) rounded[j] = narrow<P>(p[j]);
    store_vector(param + at, rounded);
  }
};

template <typename P, typename G, typename Rule>
__global__ void update_slice(Slice<P, G> slice, Rule rule) {
  const std::int64_t vectors = (slice.n - slice.head) / kStep;
  const std::int64_t tail = slice.head + vectors * kStep;
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    slice.template update<kStep>(rule, slice.head + i * kStep);
  }
  const std::int64_t single = slice.n - vectors * kStep;
  for (std::int64_t i = first_index(); i < single; i += index_step()) {
    slice.template update<1>(rule, i < slice.head ? i : tail + i - slice.head);
  }
}

template <typename S>
struct SgdRule {
  S grad_scale, decay, momentum, undamped, minus_lr;
  bool scales, decays, nesterov, first_step;
  S* buffer;  ///< null without momentum

  template <int kWidth>
  __device__ void update(std::int64_t at, AlignedVector<S, kWidth>& p,
                         const AlignedVector<S, kWidth>& grad) const {
    AlignedVector<S, kWidth> b;
    if (buffer != nullptr && !first_step) b = load_vector<kWidth>(buffer + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      S g = grad[j];
      if (scales) g = g * grad_scale;
      if (decays) g = std::fma(p[j], decay, g);
      if (buffer != nullptr) {
        b[j] = first_step ? g : std::fma(g, undamped, b[j] * momentum);
        g = nesterov ? std::fma(b[j], momentum, g) : b[j];
      }
      p[j] = std::fma(g, minus_lr, p[j]);
    }
    if (buffer != nullptr) store_vector(buffer + at, b);
  }
};

template <typename S>
struct AdamRule {
  S grad_scale, decay, shrink, weight1, keep1, keep2, weight2, root2, eps,
      minus_lr;
  bool scales, decays, shrinks;
  bool near_start;  ///< as torch.lerp: from the nearer end
  S* first;
  S* second;

  template <int kWidth>
  __device__ void update(std::int64_t at, AlignedVector<S, kWidth>& p,
                         const AlignedVector<S, kWidth>& grad) const {
    auto m = load_vector<kWidth>(first + at);
    auto v = load_vector<kWidth>(second + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      S g = grad[j];
      if (scales) g = g * grad_scale;
      if (shrinks) p[j] = p[j] * shrink;
      if (decays) g = std::fma(p[j], decay, g);
      m[j] = near_start ? std::fma(weight1, g - m[j], m[j])
                        : g - (g - m[j]) * keep1;
      v[j] = std::fma(g * g, weight2, v[j] * keep2);
      const S denominator = std::sqrt(v[j]) / root2 + eps;
      p[j] = p[j] + minus_lr * m[j] / denominator;
    }
    store_vector(first + at, m);
    store_vector(second + at, v);
  }
};

/// Elements before the first address that a vector may have.
template <typename T>
std::int64_t elements_before_vector(const T* x) {
  const auto index = reinterpret_cast<std::uintptr_t>(x) / sizeof(T);
  return static_cast<std::int64_t>((kStep - index % kStep) % kStep);
}

/// Elements before the first vector of all arrays; n where there is none.
template <typename T, typename... Arrays>
std::int64_t common_head(std::int64_t n, const T* x, const Arrays*... others) {
  const std::int64_t head = elements_before_vector(x);
  const bool agree =
      ((others == nullptr || elements_before_vector(others) == head) && ...);
  return agree ? std::min(n, head) : n;
}

template <typename S, typename Rule>
void run(KernelContext& context, const char* name, const ParameterSlice& slice,
         const Rule& rule, const S* state, const S* more_state) {
  with_floating("optimizer", slice.dtype, [&](auto zero) {
    using P = decltype(zero);
    if constexpr (std::is_same_v<Compute<P>, S>) {
      with_floating("optimizer", slice.grad_dtype, [&](auto other) {
        using G = decltype(other);
        auto* const param = static_cast<P*>(slice.param);
        const auto* const grad = static_cast<const G*>(slice.grad);
        const Slice<P, G> typed{
            slice.n,
            common_head(slice.n, param, grad, slice.master, state, more_state),
            param, grad, slice.master};
        const std::int64_t threads = slice.n / kStep + kStep;
        launch(context, name, slice.n == 0 ? dim3(0) : blocks_for(threads),
               kBlock, update_slice<P, G, Rule>, typed, rule);
      });
    }
  });
}

}  // namespace

void sgd_step(KernelContext& context, const ParameterSlice& slice,
              const SgdOptions& options, void* momentum_buffer,
              bool first_step) {
  check_sgd(options, momentum_buffer);
  with_state_type("sgd", slice, [&](auto zero) {
    using S = decltype(zero);
    SgdRule<S> rule;
    rule.grad_scale = static_cast<S>(slice.grad_scale);
    rule.decay = static_cast<S>(options.weight_decay);
    rule.momentum = static_cast<S>(options.momentum);
    rule.undamped = static_cast<S>(1.0 - options.dampening);
    rule.minus_lr = static_cast<S>(-options.lr);
    rule.scales = slice.grad_scale != 1.0;
    rule.decays = options.weight_decay != 0.0;
    rule.nesterov = options.nesterov;
    rule.first_step = first_step;
    rule.buffer =
        options.momentum != 0.0 ? static_cast<S*>(momentum_buffer) : nullptr;
    run<S>(context, "sgd_step", slice, rule, rule.buffer, nullptr);
  });
}

void adam_step(KernelContext& context, const ParameterSlice& slice,
               const AdamOptions& options, std::int64_t step, void* exp_avg,
               void* exp_avg_sq) {
  SB_CHECK(step >= 1, "adam: step ", step, "; steps count from 1");
  with_state_type("adam", slice, [&](auto zero) {
    using S = decltype(zero);
    const double correction1 = 1.0 - std::pow(options.beta1, step);
    const double correction2 = 1.0 - std::pow(options.beta2, step);
    AdamRule<S> rule;
    rule.grad_scale = static_cast<S>(slice.grad_scale);
    rule.decay = static_cast<S>(options.weight_decay);
    rule.shrink = static_cast<S>(1.0 - options.lr * options.weight_decay);
    rule.weight1 = static_cast<S>(1.0 - options.beta1);
    rule.keep1 = static_cast<S>(options.beta1);
    rule.keep2 = static_cast<S>(options.beta2);
    rule.weight2 = static_cast<S>(1.0 - options.beta2);
    rule.root2 = static_cast<S>(std::sqrt(correction2));
    rule.eps = static_cast<S>(options.eps);
    rule.minus_lr = static_cast<S>(-(options.lr / correction1));
    rule.scales = slice.grad_scale != 1.0;
    rule.decays = options.weight_decay != 0.0 && !options.decoupled;
    rule.shrinks = options.weight_decay != 0.0 && options.decoupled;
    rule.near_start = 1.0 - options.beta1 < 0.5;
    rule.first = static_cast<S*>(exp_avg);
    rule.second = static_cast<S*>(exp_avg_sq);
    run<S>(context, "adam_step", slice, rule, rule.first, rule.second);
  });
}

SHARDBOOK_CUDA_KERNEL(sgd_step);
SHARDBOOK_CUDA_KERNEL(adam_step);

}  // namespace shardbook::kernels::cuda
