#include <optional>

#include "core/kernels/optimizer.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::AdamOptions;
using kernels::ParameterSlice;
using kernels::SgdOptions;

/// The same operations in the same order. They differ where one compiler joins
/// a product and a sum and the other does not: in the last bits of f32 (f64).
/// 16-bit parameters may then round to a neighbour.
double last_bits(DType dtype) {
  return by_dtype(dtype, 1e-15, 5e-7, 8e-3, 1e-3);
}

/// A slice of n elements of a flat parameter, and its optimizer's state. With
/// `spare`, the arrays are longer: slices may begin at other elements.
struct SliceComparison : Comparison {
  SliceComparison(DType dtype, std::int64_t n, std::int64_t spare = 0,
                  std::optional<DType> of_grad = {})
      : Comparison(dtype),
        n(n),
        dtype(dtype),
        grad_dtype(of_grad.value_or(dtype)),
        stat(kernels::stat_dtype(dtype)),
        param(noise(n + spare, 1)),
        grad(noise(grad_dtype, n + spare, 2)),
        first(noise(stat, n + spare, 3)),
        second(empty(stat, 0)) {
    std::vector<double> squares = kernels::noise(n + spare, 4);
    for (double& x : squares) x *= x;
    second = array(stat, squares);
  }
  ParameterSlice slice(const Side& on, std::int64_t from = 0,
                       std::int64_t grad_from = 0) const {
    ParameterSlice s;
    s.n = n;
    s.dtype = dtype, s.param = on.from(param, from);
    s.grad_dtype = grad_dtype, s.grad = on.from(grad, grad_from);
    return s;
  }
  std::int64_t n;
  DType dtype, grad_dtype, stat;
  Slot param, grad, first, second;
};

class OptimizerParity : public ParityTest {};

TEST_P(OptimizerParity, SgdEqualsTheCpu) {
  const SgdOptions options[] = {{0.1, 0, 0, 0, false},
                                {0.1, 0, 0, 0.01, false},
                                {0.1, 0.9, 0, 0.01, false},
                                {0.1, 0.9, 0.5, 0, false},
                                {0.1, 0.9, 0, 0.01, true}};
  for (const std::int64_t n : lengths()) {
    for (const SgdOptions& o : options) {
      for (const bool first_step : {true, false}) {
        SliceComparison c(dtype, n);
        // Never empty: the buffer of no elements would be missing
        const Slot buffer =
            o.momentum == 0 ? c.null() : c.noise(c.stat, n + 1, 3);
        c.expect_equal_in(last_bits(dtype), [&](const auto& on) {
          ParameterSlice s = c.slice(on);
          s.grad_scale = first_step ? 0.5 : 1.0;
          kernels::sgd_step(on.context, s, o, on(buffer), first_step);
        });
      }
    }
  }
}

TEST_P(OptimizerParity, AdamEqualsTheCpu) {
  for (const std::int64_t n : lengths()) {
    for (const bool decoupled : {false, true}) {
      for (const double beta1 : {0.9, 0.3}) {
        const AdamOptions o{0.01, beta1, 0.95, 1e-8, 0.1, decoupled};
        SliceComparison c(dtype, n);
        c.expect_equal_in(last_bits(dtype), [&](const auto& on) {
          ParameterSlice s = c.slice(on);
          s.grad_scale = decoupled ? 0.5 : 1.0;
          kernels::adam_step(on.context, s, o, 3, on(c.first), on(c.second));
        });
      }
    }
  }
}

const AdamOptions kAdamW{0.01, 0.9, 0.95, 1e-8, 0.1, true};

// Gradients of every type, with and without a master copy.
TEST_P(OptimizerParity, MastersAndGradientsOfAllTypesEqualTheCpus) {
  for (const DType grad_dtype : kFloatingDTypes) {
    for (const bool has_master : {false, true}) {
      if (has_master && dtype == DType::kF64) continue;
      SliceComparison c(dtype, 1051, 0, grad_dtype);
      const Slot master = has_master ? c.noise(DType::kF32, c.n, 5) : c.null();
      c.expect_equal_in(last_bits(dtype), [&](const auto& on) {
        ParameterSlice s = c.slice(on);
        s.master = on(master);
        kernels::adam_step(on.context, s, kAdamW, 2, on(c.first), on(c.second));
      });
    }
  }
}

// A slice of a flat parameter, as ZeRO cuts it: all arrays begin at the same
// element, or the gradient at another.
TEST_P(OptimizerParity, SlicesMayBeginAnywhere) {
  for (const std::int64_t from : {0, 1, 3, 4}) {
    for (const std::int64_t grad_from : {from, from + 2}) {
      SliceComparison c(dtype, 999, /*spare=*/8);
      c.expect_equal_in(last_bits(dtype), [&](const auto& on) {
        kernels::adam_step(on.context, c.slice(on, from, grad_from), kAdamW, 2,
                           on.from(c.first, from), on.from(c.second, from));
      });
    }
  }
}

SB_OVER_FLOATING_DTYPES(OptimizerParity);

}  // namespace
}  // namespace shardbook::parity
