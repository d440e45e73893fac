#include "core/kernels/swiglu.h"

#include <cstdint>

#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"

namespace shardbook::kernels::cpu {

void swiglu(KernelContext&, DType dtype, std::int64_t rows, std::int64_t cols,
            const void* gate_up, void* y) {
  dispatch_floating("swiglu", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* const gate = static_cast<const T*>(gate_up) + r * 2 * cols;
      T* const out = static_cast<T*>(y) + r * cols;
      for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
        const V g = load_up_to(gate + i, size);
        const V silu = rounded<T>(g * sigmoid_vec(g));
        store_up_to(out + i, silu * load_up_to(gate + cols + i, size), size);
      });
    });
  });
}

void swiglu_backward(KernelContext&, DType dtype, std::int64_t rows,
                     std::int64_t cols, const void* gate_up, const void* dy,
                     void* dgate_up) {
  dispatch_floating("swiglu_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    const V one(Compute<T>(1));
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* const gate = static_cast<const T*>(gate_up) + r * 2 * cols;
      T* const dgate = static_cast<T*>(dgate_up) + r * 2 * cols;
      const T* const grads = static_cast<const T*>(dy) + r * cols;
      for_vectors<T>(cols, [&](std::int64_t i, std::int64_t size) {
        const V g = load_up_to(gate + i, size), s = sigmoid_vec(g);
        const V grad = load_up_to(grads + i, size);
        const V dsilu = rounded<T>(grad * load_up_to(gate + cols + i, size));
        const V slope = s * xsimd::fma(g, one - s, one);
        store_up_to(dgate + i, dsilu * slope, size);
        store_up_to(dgate + cols + i, grad * rounded<T>(g * s), size);
      });
    });
  });
}

}  // namespace shardbook::kernels::cpu
