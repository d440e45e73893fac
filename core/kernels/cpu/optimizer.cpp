#include "core/kernels/optimizer.h"

#include <cmath>

#include "core/check.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/optimizer_args.h"

namespace shardbook::kernels::cpu {

namespace {

// Calls fn(i, count) for vectors that cover [0, n): `count` elements from i.
template <typename S, typename Fn>
void for_read_write(std::int64_t n, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<S> <= n; i += kLanes<S>) {
    fn(
        i, [](const S* x) { return load(x); },
        [](S* x, const Vec<S>& v) { store(x, v); });
  }
  const std::int64_t left = n - i;
  if (left > 0) {
    fn(
        i, [left](const S* x) { return load_part(x, left); },
        [left](S* x, const Vec<S>& v) { store_part(x, v, left); });
  }
}

// Runs update(n, i, param, grad) on pieces of the slice, where param and grad
// are arrays of S: the slice's own where they have that type, else copies of a
// piece that fits into L1.
template <typename S, typename Update>
void for_pieces(KernelContext& context, const ParameterSlice& slice,
                const Update& update) {
  constexpr DType kWide = std::is_same_v<S, double> ? DType::kF64 : DType::kF32;
  const bool own_grad = slice.grad_dtype == kWide;
  const bool own_param = slice.master != nullptr || slice.dtype == kWide;
  parallel_for(0, slice.n, kGrain, [&](std::int64_t from, std::int64_t to) {
    constexpr std::int64_t kPiece = 1024;
    alignas(64) S param_copy[kPiece], grad_copy[kPiece];
    const std::int64_t piece = own_grad && own_param ? to - from : kPiece;
    for (std::int64_t i = from; i < to; i += piece) {
      const std::int64_t n = std::min(piece, to - i);
      const S* grad = static_cast<const S*>(slice.grad) + i;
      if (!own_grad) {
        dispatch_floating("optimizer", slice.grad_dtype, [&](auto zero) {
          using G = decltype(zero);
          const G* in = static_cast<const G*>(slice.grad) + i;
          for (std::int64_t j = 0; j < n; ++j) {
            grad_copy[j] = static_cast<S>(widen(in[j]));
          }
        });
        grad = grad_copy;
      }
      dispatch_floating("optimizer", slice.dtype, [&](auto zero) {
        using P = decltype(zero);
        P* const stored = static_cast<P*>(slice.param) + i;
        S* param = param_copy;
        if constexpr (std::is_same_v<S, float>) {
          if (slice.master != nullptr) param = slice.master + i;
        }
        if constexpr (std::is_same_v<P, S>) {
          if (slice.master == nullptr) param = stored;
        }
        if (param == param_copy) {
          for (std::int64_t j = 0; j < n; ++j) {
            param[j] = static_cast<S>(widen(stored[j]));
          }
        }
        update(n, i, param, grad);
        if (static_cast<const void*>(param) != stored) {
          for (std::int64_t j = 0; j < n; ++j) stored[j] = narrow<P>(param[j]);
        }
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
    using V = Vec<S>;
    const V grad_scale(static_cast<S>(slice.grad_scale));
    const V decay(static_cast<S>(options.weight_decay));
    const V momentum(static_cast<S>(options.momentum));
    const V undamped(static_cast<S>(1.0 - options.dampening));
    const V minus_lr(static_cast<S>(-options.lr));
    const bool scales = slice.grad_scale != 1.0;
    const bool decays = options.weight_decay != 0.0;
    const bool has_momentum = options.momentum != 0.0;
    for_pieces<S>(
        context, slice,
        [&](std::int64_t n, std::int64_t at, S* param, const S* grad) {
          S* const buffer =
              has_momentum ? static_cast<S*>(momentum_buffer) + at : nullptr;
          for_read_write<S>(n, [&](std::int64_t i, auto read, auto write) {
            V p = read(param + i), g = read(grad + i);
            if (scales) g = g * grad_scale;
            if (decays) g = xsimd::fma(p, decay, g);
            if (has_momentum) {
              const V b = first_step ? g
                                     : xsimd::fma(g, undamped,
                                                  read(buffer + i) * momentum);
              write(buffer + i, b);
              g = options.nesterov ? xsimd::fma(b, momentum, g) : b;
            }
            write(param + i, xsimd::fma(g, minus_lr, p));
          });
        });
  });
}

void adam_step(KernelContext& context, const ParameterSlice& slice,
               const AdamOptions& options, std::int64_t step, void* exp_avg,
               void* exp_avg_sq) {
  SB_CHECK(step >= 1, "adam: step ", step, "; steps count from 1");
  with_state_type("adam", slice, [&](auto zero) {
    using S = decltype(zero);
    using V = Vec<S>;
    const double correction1 = 1.0 - std::pow(options.beta1, step);
    const double correction2 = 1.0 - std::pow(options.beta2, step);
    const V grad_scale(static_cast<S>(slice.grad_scale));
    const V decay(static_cast<S>(options.weight_decay));
    const V shrink(static_cast<S>(1.0 - options.lr * options.weight_decay));
    const V weight1(static_cast<S>(1.0 - options.beta1));
    const V keep1(static_cast<S>(options.beta1));
    const V keep2(static_cast<S>(options.beta2));
    const V weight2(static_cast<S>(1.0 - options.beta2));
    const V root2(static_cast<S>(std::sqrt(correction2)));
    const V eps(static_cast<S>(options.eps));
    const V minus_lr(static_cast<S>(-(options.lr / correction1)));
    const bool scales = slice.grad_scale != 1.0;
    const bool decays = options.weight_decay != 0.0 && !options.decoupled;
    const bool shrinks = options.weight_decay != 0.0 && options.decoupled;
    // As torch.lerp: from the nearer end.
    const bool near_start = 1.0 - options.beta1 < 0.5;
    for_pieces<S>(
        context, slice,
        [&](std::int64_t n, std::int64_t at, S* param, const S* grad) {
          S* const first = static_cast<S*>(exp_avg) + at;
          S* const second = static_cast<S*>(exp_avg_sq) + at;
          for_read_write<S>(n, [&](std::int64_t i, auto read, auto write) {
            V p = read(param + i), g = read(grad + i);
            if (scales) g = g * grad_scale;
            if (shrinks) p = p * shrink;
            if (decays) g = xsimd::fma(p, decay, g);
            V m = read(first + i);
            m = near_start ? xsimd::fma(weight1, g - m, m)
                           : g - (g - m) * keep1;
            const V v = xsimd::fma(g * g, weight2, read(second + i) * keep2);
            write(first + i, m);
            write(second + i, v);
            const V denominator = xsimd::sqrt(v) / root2 + eps;
            write(param + i, p + minus_lr * m / denominator);
          });
        });
  });
}

}  // namespace shardbook::kernels::cpu
