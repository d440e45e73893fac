#include "core/kernels/elementwise.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cpu {

namespace {

template <typename T>
constexpr bool kIsInteger = std::is_integral_v<T>;

template <typename T>
T from_double(double value) {
  if constexpr (kIsInteger<T>) {
    return static_cast<T>(value);
  } else {
    return narrow<T>(value);
  }
}

template <typename From, typename To>
To convert(From x) {
  if constexpr (kIsInteger<From> && kIsInteger<To>) {
    return static_cast<To>(x);
  } else if constexpr (kIsInteger<From>) {
    return narrow<To>(static_cast<double>(x));
  } else if constexpr (kIsInteger<To>) {
    return static_cast<To>(widen(x));
  } else {
    return narrow<To>(widen(x));
  }
}

template <typename From, typename To>
void cast_range(const From* from, To* to, std::int64_t n) {
  std::int64_t i = 0;
  if constexpr (!kIsInteger<From> && !kIsInteger<To>) {
    if constexpr (std::is_same_v<Compute<From>, float> &&
                  std::is_same_v<Compute<To>, float>) {
      for (; i + kLanes<float> <= n; i += kLanes<float>) {
        store(to + i, load(from + i));
      }
    }
  }
  for (; i < n; ++i) to[i] = convert<From, To>(from[i]);
}

// The four operations, on vectors of floats and on plain integers.
template <BinaryOp kOp, typename V>
V apply(const V& a, const V& b) {
  if constexpr (kOp == BinaryOp::kAdd) {
    return a + b;
  } else if constexpr (kOp == BinaryOp::kSub) {
    return a - b;
  } else if constexpr (kOp == BinaryOp::kMul) {
    return a * b;
  } else {
    if constexpr (std::is_integral_v<V>) {
      SB_CHECK(b != 0, "div: an integer divisor is zero");
    }
    return a / b;
  }
}

// One row: each operand runs along it or is one repeated element. Two loops
// call it; inlined, it would be compiled twice.
template <BinaryOp kOp, typename T>
[[gnu::noinline]] void binary_row(std::int64_t n, const T* a, bool a_moves,
                                  const T* b, bool b_moves, T* out) {
  if constexpr (kIsInteger<T>) {
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = apply<kOp, T>(a[a_moves ? i : 0], b[b_moves ? i : 0]);
    }
  } else {
    using V = VecOf<T>;
    const auto op = [](const V& x, const V& y) { return apply<kOp>(x, y); };
    if (a_moves && b_moves) {
      map_range(n, a, b, out, op);
    } else if (a_moves) {
      const V fixed(widen(*b));
      map_range(n, a, out, [&](const V& x) { return op(x, fixed); });
    } else if (b_moves) {
      const V fixed(widen(*a));
      map_range(n, b, out, [&](const V& y) { return op(fixed, y); });
    } else {
      std::fill(out, out + n, narrow<T>(op(V(widen(*a)), V(widen(*b))).get(0)));
    }
  }
}

// Calls fn with the operation as a compile-time constant.
template <typename Fn>
void with_op(BinaryOp op, const Fn& fn) {
  switch (op) {
    case BinaryOp::kAdd:
      return fn(std::integral_constant<BinaryOp, BinaryOp::kAdd>());
    case BinaryOp::kSub:
      return fn(std::integral_constant<BinaryOp, BinaryOp::kSub>());
    case BinaryOp::kMul:
      return fn(std::integral_constant<BinaryOp, BinaryOp::kMul>());
    case BinaryOp::kDiv:
      return fn(std::integral_constant<BinaryOp, BinaryOp::kDiv>());
  }
}

// y = fn(x, number), with `number` in x's type.
template <typename Fn>
void map_with(const char* kernel, DType dtype, std::int64_t n, double number,
              const void* x, void* y, const Fn& fn) {
  dispatch_any(kernel, dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if constexpr (kIsInteger<T>) {
      const T other = static_cast<T>(number);
      for (std::int64_t i = 0; i < n; ++i) out[i] = fn(in[i], other);
    } else {
      const VecOf<T> other(static_cast<Compute<T>>(number));
      map(n, in, out, [&](const auto& v) { return fn(v, other); });
    }
  });
}

template <typename V>
V gelu_slope2(const V& x, V* twice_u) {
  // 2u = 2 sqrt(2/pi) (x + 0.044715 x^3); the slope of 2u is returned.
  using T = typename V::value_type;
  constexpr T kTwoRoot = T(1.5957691216057307117597842397375);
  constexpr T kCubic = T(0.044715);
  const V square = x * x;
  *twice_u = x * xsimd::fma(square, V(kTwoRoot * kCubic), V(kTwoRoot));
  return xsimd::fma(square, V(T(3) * kTwoRoot * kCubic), V(kTwoRoot));
}

/// The share of the standard normal distribution below x.
template <typename V>
V normal_below(const V& x) {
  using T = typename V::value_type;
  constexpr T kRootOfHalf = T(0.70710678118654752440084436210485);
  return V(T(0.5)) * erfc_vec(-x * V(kRootOfHalf));
}

}  // namespace

void fill(KernelContext&, DType dtype, std::int64_t n, void* x, double value) {
  dispatch_any("fill", dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = static_cast<T*>(x);
    const T filler = from_double<T>(value);
    parallel_for(0, n, kGrain, [&](std::int64_t from, std::int64_t to) {
      if (value == 0.0 && !std::signbit(value)) {
        std::memset(out + from, 0, (to - from) * sizeof(T));
      } else {
        std::fill(out + from, out + to, filler);
      }
    });
  });
}

void repeat(KernelContext& context, DType dtype, std::int64_t n, double factor,
            const void* value, void* x) {
  double wide = 0;
  cpu::cast(context, dtype, value, DType::kF64, &wide, 1);
  cpu::fill(context, dtype, n, x, wide * factor);
}

void cast(KernelContext&, DType from_dtype, const void* from, DType to_dtype,
          void* to, std::int64_t n) {
  if (n == 0) return;
  const std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(to_dtype));
  parallel_for(0, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
    if (from_dtype == to_dtype) {
      std::memcpy(static_cast<char*>(to) + begin * bytes,
                  static_cast<const char*>(from) + begin * bytes,
                  (end - begin) * bytes);
      return;
    }
    dispatch_any("cast", from_dtype, [&](auto from_zero) {
      using From = decltype(from_zero);
      dispatch_any("cast", to_dtype, [&](auto to_zero) {
        using To = decltype(to_zero);
        cast_range(static_cast<const From*>(from) + begin,
                   static_cast<To*>(to) + begin, end - begin);
      });
    });
  });
}

void binary(KernelContext&, BinaryOp op, DType dtype, const Dims& a_shape,
            const void* a, const Dims& b_shape, const void* b, void* out) {
  if (a_shape == b_shape) {
    std::int64_t n = 1;
    for (const std::int64_t size : a_shape) n *= size;
    return dispatch_any("binary", dtype, [&](auto zero) {
      using T = decltype(zero);
      with_op(op, [&](auto kOp) {
        parallel_for(0, n, kGrain, [&](std::int64_t from, std::int64_t to) {
          binary_row<kOp.value>(to - from, static_cast<const T*>(a) + from,
                                true, static_cast<const T*>(b) + from, true,
                                static_cast<T*>(out) + from);
        });
      });
    });
  }
  const Dims shape = broadcast_shape(a_shape, b_shape);
  for (const std::int64_t size : shape) {
    if (size == 0) return;
  }
  const Loops loops = plan_broadcast(shape, a_shape, b_shape);
  const std::int64_t cols = loops.sizes.back();
  const bool a_moves = loops.a.back() != 0, b_moves = loops.b.back() != 0;
  dispatch_any("binary", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_op(op, [&](auto kOp) {
      for_outer(
          loops, [&](std::int64_t row, std::int64_t a_at, std::int64_t b_at) {
            binary_row<kOp.value>(cols, static_cast<const T*>(a) + a_at,
                                  a_moves, static_cast<const T*>(b) + b_at,
                                  b_moves, static_cast<T*>(out) + row * cols);
          });
    });
  });
}

void scale(KernelContext&, DType dtype, std::int64_t n, double factor,
           const void* x, void* y) {
  map_with("scale", dtype, n, factor, x, y,
           [](const auto& v, const auto& by) { return v * by; });
}

void add_scalar(KernelContext&, DType dtype, std::int64_t n, double value,
                const void* x, void* y) {
  map_with("add_scalar", dtype, n, value, x, y,
           [](const auto& v, const auto& by) { return v + by; });
}

void axpy(KernelContext&, DType dtype, std::int64_t n, double a, const void* x,
          void* y) {
  dispatch_any("axpy", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if constexpr (kIsInteger<T>) {
      const T by = static_cast<T>(a);
      for (std::int64_t i = 0; i < n; ++i) out[i] += in[i] * by;
    } else {
      const VecOf<T> by(static_cast<Compute<T>>(a));
      map(n, in, out, out,
          [&](const auto& v, const auto& w) { return xsimd::fma(by, v, w); });
    }
  });
}

void unary(KernelContext&, UnaryOp op, DType dtype, std::int64_t n,
           const void* x, void* y) {
  dispatch_floating("unary", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    using S = Compute<T>;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const auto map_each = [&](const auto& fn) { map(n, in, out, fn); };
    switch (op) {
      case UnaryOp::kNeg:
        return map_each([](const V& v) { return -v; });
      case UnaryOp::kAbs:
        return map_each([](const V& v) { return xsimd::abs(v); });
      case UnaryOp::kRelu:
        // A comparison keeps NaN
        return map_each(
            [](const V& v) { return xsimd::select(v < V(S(0)), V(S(0)), v); });
      case UnaryOp::kGeluTanh:
        // 0.5 x (1 + tanh u) = x sigmoid(2u)
        return map_each([](const V& v) {
          V twice_u;
          gelu_slope2(v, &twice_u);
          return v * sigmoid_vec(twice_u);
        });
      case UnaryOp::kGeluErf:
        return map_each([](const V& v) { return v * normal_below(v); });
      case UnaryOp::kTanh:
        return map_each([](const V& v) { return tanh_vec(v); });
      case UnaryOp::kSigmoid:
        return map_each([](const V& v) { return sigmoid_vec(v); });
      case UnaryOp::kSquare:
        return map_each([](const V& v) { return v * v; });
      case UnaryOp::kSqrt:
        return map_each([](const V& v) { return xsimd::sqrt(v); });
      case UnaryOp::kExp:
        return map_each([](const V& v) { return exp_vec(v); });
      case UnaryOp::kLog:
        return map_each([](const V& v) { return log_vec(v); });
    }
  });
}

void unary_backward(KernelContext&, UnaryOp op, DType dtype, std::int64_t n,
                    const void* saved, const void* dy, void* dx) {
  dispatch_floating("unary_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    using S = Compute<T>;
    const T* in = static_cast<const T*>(saved);
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const V none(S(0)), one(S(1));
    const auto map_each = [&](const auto& fn) { map(n, in, grad, out, fn); };
    switch (op) {
      case UnaryOp::kNeg:
        return map(n, grad, out, [](const V& g) { return -g; });
      case UnaryOp::kAbs:
        return map_each([&](const V& x, const V& g) {
          return xsimd::select(x > none, g, xsimd::select(x < none, -g, none));
        });
      case UnaryOp::kRelu:
        return map_each([&](const V& x, const V& g) {
          return xsimd::select(x > none, g, none);
        });
      case UnaryOp::kGeluTanh:
        return map_each([&](const V& x, const V& g) {
          V twice_u;
          const V slope = gelu_slope2(x, &twice_u);
          const V s = sigmoid_vec(twice_u);
          return g * s * xsimd::fma(x * slope, one - s, one);
        });
      case UnaryOp::kGeluErf:
        return map_each([](const V& x, const V& g) {
          const V density = V(S(0.39894228040143267793994605993438)) *
                            exp_vec(V(S(-0.5)) * x * x);
          return g * xsimd::fma(x, density, normal_below(x));
        });
      case UnaryOp::kTanh:
        return map_each(
            [&](const V& y, const V& g) { return g * (one - y * y); });
      case UnaryOp::kSigmoid:
        return map_each(
            [&](const V& y, const V& g) { return g * y * (one - y); });
      case UnaryOp::kSquare:
        return map_each([](const V& x, const V& g) { return (g + g) * x; });
      case UnaryOp::kSqrt:
        return map_each([](const V& y, const V& g) { return g / (y + y); });
      case UnaryOp::kExp:
        return map_each([](const V& y, const V& g) { return g * y; });
      case UnaryOp::kLog:
        return map_each([](const V& x, const V& g) { return g / x; });
    }
  });
}

}  // namespace shardbook::kernels::cpu
