#pragma once

// The steps of every operation in core/ops_*.cpp around its kernel.

#include <cstddef>
#include <initializer_list>
#include <utility>

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/internal/tensor_impl.h"
#include "core/kernels/kernel_context.h"
#include "core/tensor.h"
#include "core/tensor_storage.h"
#include "core/weight_gradients.h"

namespace shardbook::internal {

/// Tells the observers that an operation runs, from construction to the end of
/// the scope. `run` calls its kernel, unless the operation is on meta.
/// Operations with several kernels check `runs()` and pass `kernels()` to each.
class OpScope {
 public:
  OpScope(const char* name, double flops, double bytes, const Tensor& on,
          const ProductShape& product = {}, const Device& source = Device())
      : context_(RankContext::current()),
        device_(on.device()),
        runs_(!on.is_meta()) {
    if (context_.observed()) {
      event_ = {name,           flops,           bytes,
                context_.phase, on.device(),     on.dtype(),
                product,        context_.stream, source};
      context_.notify_op_begin(event_);
    }
  }
  ~OpScope() {
    if (event_.device.defined()) context_.notify_op_end(event_);
  }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

  bool runs() const { return runs_; }
  KernelContext& kernels() { return context_.kernels(device_); }
  /// Calls the kernel, unless the device is meta.
  template <typename Kernel, typename... Args>
  void run(const Kernel& kernel, Args&&... args) {
    if (runs_) kernel(kernels(), std::forward<Args>(args)...);
  }

 private:
  RankContext& context_;
  const Device device_;
  OpEvent event_{};
  bool runs_;
};

/// Elements of a tensor, as a factor of flops and bytes.
inline double count(const Tensor& x) { return static_cast<double>(x.numel()); }

/// The address of an operand that may be undefined.
inline void* raw_or_null(const Tensor& x) {
  return x.defined() ? x.raw() : nullptr;
}

/// The address of element `i`; null on meta.
inline void* address_of(const Tensor& x, std::int64_t i) {
  auto* first = static_cast<std::byte*>(x.raw());
  if (first == nullptr) return nullptr;
  return first + i * static_cast<std::int64_t>(dtype_bytes(x.dtype()));
}

/// Bytes of the operands together, each once.
inline double bytes_of(std::initializer_list<const Tensor*> tensors) {
  double bytes = 0;
  for (const Tensor* tensor : tensors) {
    if (tensor->defined()) bytes += static_cast<double>(tensor->bytes());
  }
  return bytes;
}

/// Books what a backward computes for `input`: as a gradient when it is about
/// to become the leaf's own, or when `input` stands for a parameter; otherwise
/// as an activation.
class GradientOf : public MemoryScope {
 public:
  explicit GradientOf(const Tensor& input) : MemoryScope(kind_for(input)) {}

 private:
  static MemoryKind kind_for(const Tensor& input) {
    if (stands_for_parameter(input)) return MemoryKind::kGradient;
    if (!input.defined() || !input.is_leaf()) return MemoryKind::kActivation;
    const autograd::Meta& meta = input.impl()->grad_meta();
    const bool becomes_grad =
        !meta.grad.defined() && !meta.grad_buffer.defined();
    return becomes_grad ? meta.grad_kind : MemoryKind::kActivation;
  }
};

/// An uninitialised gradient of `input`.
inline Tensor gradient_like(const Tensor& input) {
  const GradientOf kind(input);
  return input.empty_like();
}

/// The gradient of `weight`. When a store is installed and `weight` is a
/// parameter, the store gets the computation and the result is undefined. (A
/// leaf that is booked as an activation is the input of a stage, and another
/// stage waits for its gradient.)
template <typename Compute>
Tensor weight_gradient(const Tensor& weight, Compute compute) {
  auto booked = [weight, compute = std::move(compute)] {
    const GradientOf kind(weight);
    return compute();
  };
  WeightGradients* store = RankContext::current().weight_gradients;
  if (store == nullptr || !weight.is_leaf() ||
      memory_kind_of(weight) != MemoryKind::kParameter) {
    return booked();
  }
  store->push(weight, std::move(booked));
  return Tensor();
}

inline void check_same_device(const char* op, const Tensor& a,
                              const Tensor& b) {
  SB_CHECK(a.device() == b.device(), op, ": devices ", a.device().name(),
           " and ", b.device().name(), " differ; copy one of them");
}

inline void check_same_kind(const char* op, const Tensor& a, const Tensor& b) {
  SB_CHECK(a.dtype() == b.dtype(), op, ": dtypes ", dtype_name(a.dtype()),
           " and ", dtype_name(b.dtype()), " differ; convert one of them");
  check_same_device(op, a, b);
}

/// Describes an input to a backward that does not need its values; keeps no
/// activation alive.
struct InputInfo {
  explicit InputInfo(const Tensor& input)
      : needs_grad(input.requires_grad()),
        shape(input.shape()),
        leaf(needs_grad && (input.is_leaf() || stands_for_parameter(input))
                 ? input
                 : Tensor()) {}
  bool needs_grad;
  Shape shape;
  Tensor leaf;
};

/// Statistics are kept in f64 for f64, otherwise in f32.
inline DType stat_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

}  // namespace shardbook::internal
