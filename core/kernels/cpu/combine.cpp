#include "core/kernels/combine.h"

#include <algorithm>

#include "core/check.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/elementwise.h"

namespace shardbook::kernels::cpu {
namespace {

// Elements handled at once: the running result stays in the first cache while
// the inputs stream past.
constexpr std::int64_t kStrip = 2048;

// One operation, on elements or on vectors of them.
template <ReduceKind kKind, typename V>
V apply(const V& a, const V& b) {
  if constexpr (kKind == ReduceKind::kSum) {
    return a + b;
  } else {
    const auto b_wins = kKind == ReduceKind::kMax ? a < b : b < a;
    if constexpr (std::is_arithmetic_v<V>) {
      return b_wins ? b : a;
    } else {
      return xsimd::select(b_wins, b, a);
    }
  }
}

// result[i] = a[i] op b[i]; `a` may be the result.
template <ReduceKind kKind, typename A, typename B>
void join(std::int64_t n, const A* a, const B* b, Compute<B>* result) {
  std::int64_t i = 0;
  if constexpr (!std::is_integral_v<B>) {
    for (; i + kLanes<B> <= n; i += kLanes<B>) {
      store(result + i, apply<kKind>(load(a + i), load(b + i)));
    }
  }
  for (; i < n; ++i) result[i] = apply<kKind>(widen(a[i]), widen(b[i]));
}

template <ReduceKind kKind, typename T>
void combine_strips(std::int64_t count, const std::vector<const void*>& inputs,
                    const std::vector<void*>& outputs) {
  using S = Compute<T>;
  const auto input = [&](std::size_t k, std::int64_t at) {
    return static_cast<const T*>(inputs[k]) + at;
  };
  alignas(64) S result[kStrip];
  for (std::int64_t begin = 0; begin < count; begin += kStrip) {
    const std::int64_t n = std::min(kStrip, count - begin);
    join<kKind>(n, input(0, begin), input(1, begin), result);
    for (std::size_t k = 2; k < inputs.size(); ++k) {
      join<kKind>(n, result, input(k, begin), result);
    }
    // Every input of the strip has been read: outputs may be inputs.
    for (void* const output : outputs) {
      T* const out = static_cast<T*>(output) + begin;
      std::int64_t i = 0;
      if constexpr (std::is_same_v<T, S>) {
        std::copy_n(result, n, out);
      } else {
        for (; i + kLanes<T> <= n; i += kLanes<T>) {
          store(out + i, load(result + i));
        }
        for (; i < n; ++i) out[i] = narrow<T>(result[i]);
      }
    }
  }
}

}  // namespace

void combine(KernelContext& context, DType dtype, ReduceKind op, std::int64_t n,
             const std::vector<const void*>& inputs,
             const std::vector<void*>& outputs) {
  SB_CHECK(!inputs.empty(), "combine: no inputs; at least 1");
  if (inputs.size() == 1) {
    for (void* output : outputs) {
      if (output != inputs[0])
        cast(context, dtype, inputs[0], dtype, output, n);
    }
    return;
  }
  dispatch_any("combine", dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (op) {
      case ReduceKind::kSum:
        // Unsigned, because an overflow must wrap
        if constexpr (std::is_integral_v<T>) {
          return combine_strips<ReduceKind::kSum, std::make_unsigned_t<T>>(
              n, inputs, outputs);
        } else {
          return combine_strips<ReduceKind::kSum, T>(n, inputs, outputs);
        }
      case ReduceKind::kMax:
        return combine_strips<ReduceKind::kMax, T>(n, inputs, outputs);
      case ReduceKind::kMin:
        return combine_strips<ReduceKind::kMin, T>(n, inputs, outputs);
    }
  });
}

}  // namespace shardbook::kernels::cpu
