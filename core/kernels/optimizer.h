#pragma once

// Optimizer updates on flat slices, with PyTorch's formulas in PyTorch's order.
// State belongs to the caller, so that it can be sharded in any way.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// n consecutive parameters and their gradients.
///
/// With `master` (f32 [n]) the update works on the master copy and the
/// parameters become its rounding. State arrays are f64 for f64 parameters,
/// otherwise f32. The gradient is multiplied by `grad_scale` on the way in
/// (clipping, loss scaling); it is not written.
struct ParameterSlice {
  std::int64_t n = 0;
  DType dtype = DType::kF32;
  void* param = nullptr;
  DType grad_dtype = DType::kF32;
  const void* grad = nullptr;
  float* master = nullptr;
  double grad_scale = 1.0;
};

struct SgdOptions {
  double lr = 0.0;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};

/// torch.optim.SGD. `momentum_buffer` is state [n], null when momentum is 0; in
/// the first step (`first_step`) it becomes the gradient, undampened.
SHARDBOOK_KERNEL(sgd_step,
                 void(KernelContext& context, const ParameterSlice& slice,
                      const SgdOptions& options, void* momentum_buffer,
                      bool first_step));

struct AdamOptions {
  double lr = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  /// false: decay joins the gradient (Adam); true: it shrinks the parameter
  /// first (AdamW).
  bool decoupled = false;
};

/// torch.optim.Adam and AdamW. `step` counts from 1; exp_avg and exp_avg_sq are
/// state [n], zeros before the first step. One pass over all arrays.
SHARDBOOK_KERNEL(adam_step,
                 void(KernelContext& context, const ParameterSlice& slice,
                      const AdamOptions& options, std::int64_t step,
                      void* exp_avg, void* exp_avg_sq));

}  // namespace shardbook::kernels
