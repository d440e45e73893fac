// Element-wise kernels: bound by memory, so all of them move 16 bytes at once.

#include "core/kernels/elementwise.h"

#include <cmath>
#include <type_traits>

#include "core/kernels/cuda/convert.h"
#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/map.h"
#include "core/kernels/cuda/walk.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cuda {

namespace {

template <int N, typename T>
__global__ void fill_kernel(std::int64_t n, std::int64_t vectors, T* x,
                            double value) {
  const T filler = from_double<T>(value);
  AlignedVector<T, N> v;
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = filler;
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    store_vector(x + i * N, v);
  }
  for (std::int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    x[i] = filler;
  }
}

template <typename From, typename To>
struct Convert {
  __device__ To operator()(From x) const { return convert<From, To>(x); }
};

template <typename T>
struct Scale {
  Compute<T> factor;
  __device__ T operator()(T x) const { return narrow<T>(widen(x) * factor); }
};

template <typename T>
struct AddScalar {
  Compute<T> value;
  __device__ T operator()(T x) const { return narrow<T>(widen(x) + value); }
};

template <typename T>
struct Axpy {
  Compute<T> a;
  __device__ T operator()(T x, T y) const {
    if constexpr (std::is_integral_v<T>) {
      return y + x * a;
    } else {
      return narrow<T>(std::fma(a, widen(x), widen(y)));
    }
  }
};

// The operation is the same for all threads: choosing it costs no more than a
// branch that all take.
template <typename T>
struct Binary {
  BinaryOp op;
  DeviceError* error;  // For integer divisions
  __device__ T operator()(T a, T b) const {
    const auto x = widen(a), y = widen(b);
    switch (op) {
      case BinaryOp::kAdd:
        return narrow<T>(x + y);
      case BinaryOp::kSub:
        return narrow<T>(x - y);
      case BinaryOp::kMul:
        return narrow<T>(x * y);
      default:
        if constexpr (std::is_integral_v<T>) {
          if (y == 0) {
            report(error, DeviceError::kDivisionByZero, 0, 0, 0);
            return 0;
          }
        }
        return narrow<T>(x / y);
    }
  }
};

template <typename T>
Binary<T> make_binary(KernelContext& context, BinaryOp op) {
  const bool may_fail = std::is_integral_v<T> && op == BinaryOp::kDiv;
  return {op, may_fail ? cuda_state(context).error : nullptr};
}

// Thread i owns vector i of the output.
template <int N, typename Index, typename T>
__global__ void broadcast_kernel(Index vectors, Walk<Index> walk, Binary<T> op,
                                 const T* a, const T* b, T* out) {
  const bool a_moves = walk.a[0] != 0;
  const bool b_moves = walk.b[0] != 0;
  for (Index i = static_cast<Index>(first_index()); i < vectors;
       i += static_cast<Index>(index_step())) {
    Index a_at, b_at;
    walk.find(i, &a_at, &b_at);
    AlignedVector<T, N> x, y, result;
    if (a_moves) x = load_vector<N>(a + a_at);
    if (b_moves) y = load_vector<N>(b + b_at);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!a_moves) x[j] = a[a_at];
      if (!b_moves) y[j] = b[b_at];
      result[j] = op(x[j], y[j]);
    }
    store_vector(out + static_cast<std::int64_t>(i) * N, result);
  }
}

template <int N, typename Index, typename T>
void launch_broadcast(KernelContext& context, const Loops& loops,
                      std::int64_t n, BinaryOp op, const T* a, const T* b,
                      T* out) {
  launch(context, "binary", blocks_for(n / N), kBlock,
         broadcast_kernel<N, Index, T>, static_cast<Index>(n / N),
         Walk<Index>(loops, N), make_binary<T>(context, op), a, b, out);
}

template <typename T>
void broadcast(KernelContext& context, const Loops& loops, std::int64_t n,
               BinaryOp op, const T* a, const T* b, T* out) {
  constexpr int N = kLanes<T>;
  const std::size_t inner = loops.sizes.size() - 1;
  // An operand that moves along the innermost loop must do so in vectors.
  bool aligned = loops.sizes[inner] % N == 0 && is_aligned(kVectorBytes, out);
  const auto check = [&](const Dims& strides, const T* from) {
    if (strides[inner] == 0) return;
    aligned = aligned && is_aligned(kVectorBytes, from);
    for (std::size_t d = 0; d < inner; ++d) {
      aligned = aligned && strides[d] % N == 0;
    }
  };
  check(loops.a, a);
  check(loops.b, b);
  // Dividing 32 bits is several times as fast.
  const bool is_short = n < std::int64_t{1} << 31;
  if (aligned && is_short) {
    launch_broadcast<N, std::uint32_t>(context, loops, n, op, a, b, out);
  } else if (aligned) {
    launch_broadcast<N, std::uint64_t>(context, loops, n, op, a, b, out);
  } else if (is_short) {
    launch_broadcast<1, std::uint32_t>(context, loops, n, op, a, b, out);
  } else {
    launch_broadcast<1, std::uint64_t>(context, loops, n, op, a, b, out);
  }
}

template <UnaryOp kOp>
using Op = std::integral_constant<UnaryOp, kOp>;

template <UnaryOp... kOps, typename Fn>
void with_one_of(UnaryOp op, const Fn& fn) {
  ((op == kOps ? fn(Op<kOps>()) : void()), ...);
}

// Calls fn with the operation as a compile-time constant.
template <typename Fn>
void with_op(UnaryOp op, const Fn& fn) {
  with_one_of<UnaryOp::kNeg, UnaryOp::kAbs, UnaryOp::kRelu, UnaryOp::kGeluTanh,
              UnaryOp::kGeluErf, UnaryOp::kTanh, UnaryOp::kSigmoid,
              UnaryOp::kSquare, UnaryOp::kSqrt, UnaryOp::kExp, UnaryOp::kLog>(
      op, fn);
}

template <typename S>
__device__ S sigmoid(S x) {
  return S(1) / (S(1) + std::exp(-x));
}

// 2u = 2 sqrt(2/pi) (x + 0.044715 x^3); the slope of 2u is returned.
template <typename S>
__device__ S gelu_slope2(S x, S* twice_u) {
  constexpr S kTwoRoot = S(1.5957691216057307117597842397375);
  constexpr S kCubic = S(0.044715);
  const S square = x * x;
  *twice_u = x * std::fma(square, kTwoRoot * kCubic, kTwoRoot);
  return std::fma(square, S(3) * kTwoRoot * kCubic, kTwoRoot);
}

// The share of the standard normal distribution below x; erfc keeps the digits
// of a small one.
template <typename S>
__device__ S normal_below(S x) {
  constexpr S kRootOfHalf = S(0.70710678118654752440084436210485);
  return S(0.5) * std::erfc(-x * kRootOfHalf);
}

template <typename T, UnaryOp kOp>
struct Unary {
  __device__ T operator()(T element) const {
    return narrow<T>(apply(widen(element)));
  }
  template <typename S>
  static __device__ S apply(S x) {
    if constexpr (kOp == UnaryOp::kNeg) {
      return -x;
    } else if constexpr (kOp == UnaryOp::kAbs) {
      return std::fabs(x);
    } else if constexpr (kOp == UnaryOp::kRelu) {
      return x < S(0) ? S(0) : x;  // A comparison keeps NaN
    } else if constexpr (kOp == UnaryOp::kGeluTanh) {
      // 0.5 x (1 + tanh u) = x sigmoid(2u)
      S twice_u;
      gelu_slope2(x, &twice_u);
      return x * sigmoid(twice_u);
    } else if constexpr (kOp == UnaryOp::kGeluErf) {
      return x * normal_below(x);
    } else if constexpr (kOp == UnaryOp::kTanh) {
      return std::tanh(x);
    } else if constexpr (kOp == UnaryOp::kSigmoid) {
      return sigmoid(x);
    } else if constexpr (kOp == UnaryOp::kSquare) {
      return x * x;
    } else if constexpr (kOp == UnaryOp::kSqrt) {
      return std::sqrt(x);
    } else if constexpr (kOp == UnaryOp::kExp) {
      return std::exp(x);
    } else {
      return std::log(x);
    }
  }
};

// `x` is the saved array: the output y where backward_uses_output.
template <typename T, UnaryOp kOp>
struct UnaryBackward {
  __device__ T operator()(T saved, T grad) const {
    return narrow<T>(apply(widen(saved), widen(grad)));
  }
  template <typename S>
  static __device__ S apply(S x, S g) {
    if constexpr (kOp == UnaryOp::kNeg) {
      return -g;
    } else if constexpr (kOp == UnaryOp::kAbs) {
      return x > S(0) ? g : x < S(0) ? -g : S(0);
    } else if constexpr (kOp == UnaryOp::kRelu) {
      return x > S(0) ? g : S(0);
    } else if constexpr (kOp == UnaryOp::kGeluTanh) {
      S twice_u;
      const S slope = gelu_slope2(x, &twice_u);
      const S s = sigmoid(twice_u);
      return g * s * std::fma(x * slope, S(1) - s, S(1));
    } else if constexpr (kOp == UnaryOp::kGeluErf) {
      const S density =
          S(0.39894228040143267793994605993438) * std::exp(S(-0.5) * x * x);
      return g * std::fma(x, density, normal_below(x));
    } else if constexpr (kOp == UnaryOp::kTanh) {
      return g * (S(1) - x * x);
    } else if constexpr (kOp == UnaryOp::kSigmoid) {
      return g * x * (S(1) - x);
    } else if constexpr (kOp == UnaryOp::kSquare) {
      return (g + g) * x;
    } else if constexpr (kOp == UnaryOp::kSqrt) {
      return g / (x + x);
    } else if constexpr (kOp == UnaryOp::kExp) {
      return g * x;
    } else {
      return g / x;
    }
  }
};

}  // namespace

void fill(KernelContext& context, DType dtype, std::int64_t n, void* x,
          double value) {
  with_any("fill", dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kLanes<T>;
    const std::int64_t vectors = is_aligned(kVectorBytes, x) ? n / N : 0;
    launch(context, "fill", blocks_for(std::max(vectors, n - vectors * N)),
           kBlock, fill_kernel<N, T>, n, vectors, static_cast<T*>(x), value);
  });
}

void cast(KernelContext& context, DType from_dtype, const void* from,
          DType to_dtype, void* to, std::int64_t n) {
  if (n == 0) return;
  if (from_dtype == to_dtype) {
    const std::size_t bytes = n * dtype_bytes(to_dtype);
    SHARDBOOK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice,
                                   stream_of(context.stream)),
                   bytes, " bytes");
    return;
  }
  with_any("cast", from_dtype, [&](auto from_zero) {
    with_any("cast", to_dtype, [&](auto to_zero) {
      using From = decltype(from_zero);
      using To = decltype(to_zero);
      map<From, To>(context, "cast", n, Convert<From, To>(), to, from);
    });
  });
}

void binary(KernelContext& context, BinaryOp op, DType dtype,
            const Dims& a_shape, const void* a, const Dims& b_shape,
            const void* b, void* out) {
  const Dims shape =
      a_shape == b_shape ? a_shape : broadcast_shape(a_shape, b_shape);
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  if (n == 0) return;
  if (a_shape == b_shape) {
    return with_any("binary", dtype, [&](auto zero) {
      using T = decltype(zero);
      map<T>(context, "binary", n, make_binary<T>(context, op), out, a, b);
    });
  }
  const Loops loops = plan_broadcast(shape, a_shape, b_shape);
  with_any("binary", dtype, [&](auto zero) {
    using T = decltype(zero);
    broadcast(context, loops, n, op, static_cast<const T*>(a),
              static_cast<const T*>(b), static_cast<T*>(out));
  });
}

void scale(KernelContext& context, DType dtype, std::int64_t n, double factor,
           const void* x, void* y) {
  with_any("scale", dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T>(context, "scale", n, Scale<T>{static_cast<Compute<T>>(factor)}, y,
           x);
  });
}

void add_scalar(KernelContext& context, DType dtype, std::int64_t n,
                double value, const void* x, void* y) {
  with_any("add_scalar", dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T>(context, "add_scalar", n,
           AddScalar<T>{static_cast<Compute<T>>(value)}, y, x);
  });
}

void axpy(KernelContext& context, DType dtype, std::int64_t n, double a,
          const void* x, void* y) {
  with_any("axpy", dtype, [&](auto zero) {
    using T = decltype(zero);
    map<T>(context, "axpy", n, Axpy<T>{static_cast<Compute<T>>(a)}, y, x, y);
  });
}

void unary(KernelContext& context, UnaryOp op, DType dtype, std::int64_t n,
           const void* x, void* y) {
  with_floating("unary", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_op(op, [&](auto kOp) {
      map<T>(context, "unary", n, Unary<T, kOp.value>(), y, x);
    });
  });
}

void unary_backward(KernelContext& context, UnaryOp op, DType dtype,
                    std::int64_t n, const void* saved, const void* dy,
                    void* dx) {
  with_floating("unary_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_op(op, [&](auto kOp) {
      map<T>(context, "unary_backward", n, UnaryBackward<T, kOp.value>(), dx,
             saved, dy);
    });
  });
}

SHARDBOOK_CUDA_KERNEL(fill);
SHARDBOOK_CUDA_KERNEL(cast);
SHARDBOOK_CUDA_KERNEL(binary);
SHARDBOOK_CUDA_KERNEL(scale);
SHARDBOOK_CUDA_KERNEL(add_scalar);
SHARDBOOK_CUDA_KERNEL(axpy);
SHARDBOOK_CUDA_KERNEL(unary);
SHARDBOOK_CUDA_KERNEL(unary_backward);

}  // namespace shardbook::kernels::cuda
