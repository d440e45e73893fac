#include "core/kernels/combine.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace shardbook::kernels::cpu {
namespace {

// Elements handled at once: the running result stays in the first cache while
// the inputs stream past.
constexpr std::int64_t kStrip = 2048;

using Inputs = std::vector<const void*>;
using Outputs = std::vector<void*>;

struct BFloat16 {
  std::uint16_t bits;
};

// How an element type is stored, and in which type it is added. Integers add
// without sign, so that an overflow wraps as on every processor.
template <typename Stored, typename Added>
struct Plain {
  using StoredType = Stored;
  using AddedType = Added;
  static Added load(Stored value) { return static_cast<Added>(value); }
  static Stored store(Added value) { return static_cast<Stored>(value); }
};

struct Bf16Element {
  using StoredType = BFloat16;
  using AddedType = float;
  static float load(BFloat16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
  static BFloat16 store(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    // To nearest, ties to even; a NaN stays one.
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x40;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return {static_cast<std::uint16_t>(is_nan ? quiet : rounded)};
  }
};

using F16Element = Plain<_Float16, float>;

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return a + b;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a ? b : a;
  }
};

template <typename Element, typename Op>
void combine_strips(const Inputs& inputs, const Outputs& outputs,
                    std::int64_t count) {
  using Stored = typename Element::StoredType;
  using Added = typename Element::AddedType;
  const auto input = [&](std::size_t k) {
    return static_cast<const Stored*>(inputs[k]);
  };
  alignas(64) Added result[kStrip];
  for (std::int64_t begin = 0; begin < count; begin += kStrip) {
    const std::int64_t n = std::min(kStrip, count - begin);
    // The first two inputs make the running result, the others join it.
    const Stored* a = input(0) + begin;
    if (inputs.size() == 1) {
      for (std::int64_t i = 0; i < n; ++i) result[i] = Element::load(a[i]);
    } else {
      const Stored* b = input(1) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        result[i] = Op::apply(Element::load(a[i]), Element::load(b[i]));
      }
    }
    for (std::size_t k = 2; k < inputs.size(); ++k) {
      const Stored* b = input(k) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        result[i] = Op::apply(result[i], Element::load(b[i]));
      }
    }
    // Every input of the strip has been read: outputs may be inputs.
    for (void* const output : outputs) {
      Stored* out = static_cast<Stored*>(output) + begin;
      for (std::int64_t i = 0; i < n; ++i) out[i] = Element::store(result[i]);
    }
  }
}

template <typename Element>
void combine_typed(ReduceKind op, const Inputs& inputs, const Outputs& outputs,
                   std::int64_t count) {
  switch (op) {
    case ReduceKind::kSum:
      return combine_strips<Element, Sum>(inputs, outputs, count);
    case ReduceKind::kMax:
      return combine_strips<Element, Max>(inputs, outputs, count);
    default:
      return combine_strips<Element, Min>(inputs, outputs, count);
  }
}

// Signed integers: sums through the unsigned type, comparisons signed.
template <typename Signed, typename Unsigned>
void combine_integers(ReduceKind op, const Inputs& inputs,
                      const Outputs& outputs, std::int64_t count) {
  if (op == ReduceKind::kSum) {
    combine_strips<Plain<Unsigned, Unsigned>, Sum>(inputs, outputs, count);
  } else {
    combine_typed<Plain<Signed, Signed>>(op, inputs, outputs, count);
  }
}

}  // namespace

void combine(KernelContext&, DType dtype, ReduceKind op, std::int64_t n,
             const Inputs& inputs, const Outputs& outputs) {
  SB_CHECK(!inputs.empty(), "combine: no inputs; at least 1");
  switch (dtype) {
    case DType::kF64:
      return combine_typed<Plain<double, double>>(op, inputs, outputs, n);
    case DType::kF32:
      return combine_typed<Plain<float, float>>(op, inputs, outputs, n);
    case DType::kBF16:
      return combine_typed<Bf16Element>(op, inputs, outputs, n);
    case DType::kF16:
      return combine_typed<F16Element>(op, inputs, outputs, n);
    case DType::kI64:
      return combine_integers<std::int64_t, std::uint64_t>(op, inputs, outputs,
                                                           n);
    case DType::kI32:
      return combine_integers<std::int32_t, std::uint32_t>(op, inputs, outputs,
                                                           n);
  }
}

}  // namespace shardbook::kernels::cpu
