#include "comm/internal/reduce.h"

#include <algorithm>
#include <cstring>

namespace shardbook::internal {
namespace {

// Elements handled at once: the running result stays in the first cache while
// the inputs stream past.
constexpr std::int64_t kStrip = 2048;

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

struct Bf16 {
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

using F16 = Plain<_Float16, float>;

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
void reduce_strips(const void* const* inputs, int num_inputs,
                   void* const* outputs, int num_outputs, std::int64_t count) {
  using Stored = typename Element::StoredType;
  using Added = typename Element::AddedType;
  const auto input = [&](int k) {
    return static_cast<const Stored*>(inputs[k]);
  };
  alignas(64) Added result[kStrip];
  for (std::int64_t begin = 0; begin < count; begin += kStrip) {
    const std::int64_t n = std::min(kStrip, count - begin);
    // The first two inputs make the running result, the others join it.
    const Stored* a = input(0) + begin;
    if (num_inputs == 1) {
      for (std::int64_t i = 0; i < n; ++i) result[i] = Element::load(a[i]);
    } else {
      const Stored* b = input(1) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        result[i] = Op::apply(Element::load(a[i]), Element::load(b[i]));
      }
    }
    for (int k = 2; k < num_inputs; ++k) {
      const Stored* b = input(k) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        result[i] = Op::apply(result[i], Element::load(b[i]));
      }
    }
    // Every input of the strip has been read: outputs may be inputs.
    for (int j = 0; j < num_outputs; ++j) {
      Stored* out = static_cast<Stored*>(outputs[j]) + begin;
      for (std::int64_t i = 0; i < n; ++i) out[i] = Element::store(result[i]);
    }
  }
}

template <typename Element>
void reduce_typed(ReduceOp op, const void* const* inputs, int num_inputs,
                  void* const* outputs, int num_outputs, std::int64_t count) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_strips<Element, Sum>(inputs, num_inputs, outputs,
                                         num_outputs, count);
    case ReduceOp::kMax:
      return reduce_strips<Element, Max>(inputs, num_inputs, outputs,
                                         num_outputs, count);
    default:
      return reduce_strips<Element, Min>(inputs, num_inputs, outputs,
                                         num_outputs, count);
  }
}

// Signed integers: sums through the unsigned type, comparisons signed.
template <typename Signed, typename Unsigned>
void reduce_integers(ReduceOp op, const void* const* inputs, int num_inputs,
                     void* const* outputs, int num_outputs,
                     std::int64_t count) {
  if (op == ReduceOp::kSum) {
    reduce_strips<Plain<Unsigned, Unsigned>, Sum>(inputs, num_inputs, outputs,
                                                  num_outputs, count);
  } else {
    reduce_typed<Plain<Signed, Signed>>(op, inputs, num_inputs, outputs,
                                        num_outputs, count);
  }
}

}  // namespace

void reduce_buffers(DType dtype, ReduceOp op, const void* const* inputs,
                    int num_inputs, void* const* outputs, int num_outputs,
                    std::int64_t count) {
  switch (dtype) {
    case DType::kF64:
      return reduce_typed<Plain<double, double>>(op, inputs, num_inputs,
                                                 outputs, num_outputs, count);
    case DType::kF32:
      return reduce_typed<Plain<float, float>>(op, inputs, num_inputs, outputs,
                                               num_outputs, count);
    case DType::kBF16:
      return reduce_typed<Bf16>(op, inputs, num_inputs, outputs, num_outputs,
                                count);
    case DType::kF16:
      return reduce_typed<F16>(op, inputs, num_inputs, outputs, num_outputs,
                               count);
    case DType::kI64:
      return reduce_integers<std::int64_t, std::uint64_t>(
          op, inputs, num_inputs, outputs, num_outputs, count);
    case DType::kI32:
      return reduce_integers<std::int32_t, std::uint32_t>(
          op, inputs, num_inputs, outputs, num_outputs, count);
  }
}

void accumulate(DType dtype, ReduceOp op, void* target, const void* source,
                std::int64_t count) {
  const void* const inputs[] = {target, source};
  void* const outputs[] = {target};
  reduce_buffers(dtype, op, inputs, 2, outputs, 1, count);
}

}  // namespace shardbook::internal
