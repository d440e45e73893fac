#include "core/check.h"
#include "core/kernels/optimizer.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::AdamOptions;
using kernels::noise;
using kernels::ParameterSlice;
using kernels::SgdOptions;
using kernels::stat_dtype;

/// The same operations in the same order. They differ where one compiler joins
/// a product and a sum and the other does not: in the last bits of f32 (f64).
/// 16-bit parameters may then round to a neighbour.
double last_bits(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 1e-15;
    case DType::kF32:
      return 5e-7;
    case DType::kBF16:
      return 8e-3;
    default:
      return 1e-3;
  }
}

std::vector<double> positive(std::vector<double> values) {
  for (double& v : values) v = v * v;
  return values;
}

class OptimizerParity : public ParityTest {
 protected:
  ParameterSlice slice(std::int64_t n, void* param, DType grad_dtype,
                       const void* grad, void* master) const {
    ParameterSlice s;
    s.n = n;
    s.dtype = dtype, s.param = param;
    s.grad_dtype = grad_dtype, s.grad = grad;
    s.master = static_cast<float*>(master);
    return s;
  }
};

TEST_P(OptimizerParity, SgdEqualsTheCpu) {
  const SgdOptions options[] = {{0.1, 0, 0, 0, false},
                                {0.1, 0, 0, 0.01, false},
                                {0.1, 0.9, 0, 0.01, false},
                                {0.1, 0.9, 0.5, 0, false},
                                {0.1, 0.9, 0, 0.01, true}};
  for (const std::int64_t n : lengths()) {
    for (const SgdOptions& o : options) {
      for (const bool first_step : {true, false}) {
        SCOPED_TRACE(testing::Message() << n << " momentum " << o.momentum);
        const auto run = [&](KernelContext& context, void* param,
                             const void* grad, void* buffer) {
          ParameterSlice s = slice(n, param, dtype, grad, nullptr);
          s.grad_scale = first_step ? 0.5 : 1.0;
          kernels::sgd_step(context, s, o, buffer, first_step);
        };
        Comparison c;
        const Slot param = c.array(dtype, noise(n, 1));
        const Slot grad = c.array(dtype, noise(n, 2));
        const Slot buffer = o.momentum == 0
                                ? c.null()
                                : c.array(stat_dtype(dtype), noise(n + 1, 3));
        c.expect_equal(run, last_bits(dtype), param, grad, buffer);
      }
    }
  }
}

TEST_P(OptimizerParity, AdamEqualsTheCpu) {
  for (const std::int64_t n : lengths()) {
    for (const bool decoupled : {false, true}) {
      for (const double beta1 : {0.9, 0.3}) {
        SCOPED_TRACE(testing::Message() << n << " beta1 " << beta1);
        const AdamOptions o{0.01, beta1, 0.95, 1e-8, 0.1, decoupled};
        const auto run = [&](KernelContext& context, void* param,
                             const void* grad, void* first, void* second) {
          ParameterSlice s = slice(n, param, dtype, grad, nullptr);
          s.grad_scale = decoupled ? 0.5 : 1.0;
          kernels::adam_step(context, s, o, 3, first, second);
        };
        Comparison c;
        const Slot param = c.array(dtype, noise(n, 1));
        const Slot grad = c.array(dtype, noise(n, 2));
        const Slot first = c.array(stat_dtype(dtype), noise(n, 3));
        const Slot second = c.array(stat_dtype(dtype), positive(noise(n, 4)));
        c.expect_equal(run, last_bits(dtype), param, grad, first, second);
      }
    }
  }
}

// Gradients of every type, with and without a master copy.
TEST_P(OptimizerParity, MastersAndGradientsOfAllTypesEqualTheCpus) {
  const std::int64_t n = 1051;
  for (const DType grad_dtype : kernels::floating_dtypes()) {
    for (const bool has_master : {false, true}) {
      if (has_master && dtype == DType::kF64) continue;
      SCOPED_TRACE(testing::Message()
                   << dtype_name(grad_dtype) << " master " << has_master);
      const AdamOptions o{0.01, 0.9, 0.95, 1e-8, 0.1, true};
      const auto run = [&](KernelContext& context, void* param,
                           const void* grad, void* master, void* first,
                           void* second) {
        kernels::adam_step(context, slice(n, param, grad_dtype, grad, master),
                           o, 2, first, second);
      };
      Comparison c;
      const Slot param = c.array(dtype, noise(n, 1));
      const Slot grad = c.array(grad_dtype, noise(n, 2));
      const Slot master =
          has_master ? c.array(DType::kF32, noise(n, 5)) : c.null();
      const Slot first = c.array(stat_dtype(dtype), noise(n, 3));
      const Slot second = c.array(stat_dtype(dtype), positive(noise(n, 4)));
      c.expect_equal(run, last_bits(dtype), param, grad, master, first, second);
    }
  }
}

// A slice of a flat parameter, as ZeRO cuts it: all arrays begin at the same
// element, or the gradient at another.
TEST_P(OptimizerParity, SlicesMayBeginAnywhere) {
  const std::int64_t n = 999;
  const AdamOptions o{0.01, 0.9, 0.95, 1e-8, 0.1, true};
  for (const std::int64_t from : {0, 1, 3, 4}) {
    for (const std::int64_t grad_from : {from, from + 2}) {
      SCOPED_TRACE(testing::Message() << from << ", gradients " << grad_from);
      const auto run = [&](KernelContext& context, char* param,
                           const char* grad, char* first, char* second) {
        const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
        const auto state =
            static_cast<std::int64_t>(dtype_bytes(stat_dtype(dtype)));
        kernels::adam_step(context,
                           slice(n, param + from * bytes, dtype,
                                 grad + grad_from * bytes, nullptr),
                           o, 2, first + from * state, second + from * state);
      };
      Comparison c;
      const Slot param = c.array(dtype, noise(n + 8, 1));
      const Slot grad = c.array(dtype, noise(n + 8, 2));
      const Slot first = c.array(stat_dtype(dtype), noise(n + 8, 3));
      const Slot second = c.array(stat_dtype(dtype), positive(noise(n + 8, 4)));
      c.expect_equal(run, last_bits(dtype), param, grad, first, second);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(OptimizerParity);

TEST(OptimizerParityErrors, SayWhatIsMissing) {
  CudaContext context;
  ParameterSlice s;
  s.n = 1, s.dtype = s.grad_dtype = DType::kF64;
  SgdOptions o;
  o.momentum = 0.9;
  EXPECT_THROW(kernels::sgd_step(context.kernels(), s, o, nullptr, true),
               Error);
  EXPECT_THROW(kernels::adam_step(context.kernels(), s, AdamOptions{}, 0,
                                  nullptr, nullptr),
               Error);
  s.grad_dtype = DType::kI64;
  EXPECT_THROW(kernels::adam_step(context.kernels(), s, AdamOptions{}, 1,
                                  nullptr, nullptr),
               Error);
}

}  // namespace
}  // namespace shardbook::parity
