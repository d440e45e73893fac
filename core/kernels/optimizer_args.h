#pragma once

// Checks of the optimizers on every type of device.

#include "core/check.h"
#include "core/kernels/optimizer.h"

namespace shardbook::kernels {

/// Throws Error for options of SGD that do not go together.
inline void check_sgd(const SgdOptions& options, const void* momentum_buffer) {
  SB_CHECK(options.momentum == 0.0 || momentum_buffer != nullptr,
           "sgd: momentum ", options.momentum, " without a buffer");
  SB_CHECK(
      !options.nesterov || (options.momentum > 0.0 && options.dampening == 0.0),
      "sgd: nesterov needs momentum > 0 and dampening 0; they are ",
      options.momentum, " and ", options.dampening);
}

/// Calls run(S()) with the type that the slice's arithmetic and state have.
template <typename Run>
void with_state_type(const char* kernel, const ParameterSlice& slice,
                     const Run& run) {
  SB_CHECK(is_floating(slice.dtype) && is_floating(slice.grad_dtype), kernel,
           ": parameters of ", dtype_name(slice.dtype), " with gradients of ",
           dtype_name(slice.grad_dtype), "; both must be floating");
  if (slice.dtype == DType::kF64) {
    SB_CHECK(slice.master == nullptr, kernel,
             ": f64 parameters need no f32 master");
    run(double());
  } else {
    run(float());
  }
}

}  // namespace shardbook::kernels
