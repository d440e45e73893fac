#include "core/kernels/optimizer.h"

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

// PyTorch's single-tensor SGD, line by line.
void torch_sgd(const SgdOptions& o, bool first, double& p, double g,
               double& buffer) {
  if (o.weight_decay != 0) g += o.weight_decay * p;
  if (o.momentum != 0) {
    buffer = first ? g : o.momentum * buffer + (1 - o.dampening) * g;
    g = o.nesterov ? g + o.momentum * buffer : buffer;
  }
  p -= o.lr * g;
}

// PyTorch's single-tensor Adam and AdamW, line by line.
void torch_adam(const AdamOptions& o, int step, double& p, double g, double& m,
                double& v) {
  if (o.weight_decay != 0) {
    if (o.decoupled) {
      p *= 1 - o.lr * o.weight_decay;
    } else {
      g += o.weight_decay * p;
    }
  }
  m += (1 - o.beta1) * (g - m);
  v = o.beta2 * v + (1 - o.beta2) * g * g;
  const double correction1 = 1 - std::pow(o.beta1, step);
  const double correction2 = 1 - std::pow(o.beta2, step);
  const double denominator = std::sqrt(v) / std::sqrt(correction2) + o.eps;
  p -= o.lr / correction1 * m / denominator;
}

class Optimizer : public KernelTest {
 protected:
  ParameterSlice slice(Array& param, const Array& grad) const {
    ParameterSlice s;
    s.n = param.size();
    s.dtype = dtype, s.param = param.data();
    s.grad_dtype = dtype, s.grad = grad.data();
    return s;
  }
};

TEST_P(Optimizer, SgdFollowsPyTorch) {
  const SgdOptions options[] = {{0.1, 0, 0, 0, false},
                                {0.1, 0, 0, 0.01, false},
                                {0.1, 0.9, 0, 0.01, false},
                                {0.1, 0.9, 0.5, 0, false},
                                {0.1, 0.9, 0, 0.01, true}};
  for (const SgdOptions& o : options) {
    const std::int64_t n = 1051;
    Array param = array(noise(n, 1));
    Array buffer(stat_dtype(dtype), n);
    std::vector<double> momentum(n, 0.0);
    for (int step = 1; step <= 3; ++step) {
      const Array grad = array(noise(n, 10 + step));
      auto expected = param.values();
      const auto g = grad.values();
      for (std::int64_t i = 0; i < n; ++i) {
        torch_sgd(o, step == 1, expected[i], 0.5 * g[i], momentum[i]);
      }
      ParameterSlice s = slice(param, grad);
      s.grad_scale = 0.5;
      sgd_step(context, s, o, o.momentum == 0 ? nullptr : buffer.data(),
               step == 1);
      expect_close(param.values(), expected, tolerance(dtype));
      // What is stored rounds; go on from there.
      momentum = o.momentum == 0 ? momentum : buffer.values();
    }
  }
}

TEST_P(Optimizer, AdamFollowsPyTorch) {
  for (const bool decoupled : {false, true}) {
    for (const double decay : {0.0, 0.1}) {
      for (const double beta1 : {0.9, 0.3}) {
        const AdamOptions o{0.01, beta1, 0.95, 1e-8, decay, decoupled};
        const std::int64_t n = 1051;
        Array param = array(noise(n, 1));
        Array first(stat_dtype(dtype), n), second(stat_dtype(dtype), n);
        for (int step = 1; step <= 3; ++step) {
          const Array grad = array(noise(n, 10 + step));
          auto expected = param.values(), m = first.values(),
               v = second.values();
          const auto g = grad.values();
          for (std::int64_t i = 0; i < n; ++i) {
            torch_adam(o, step, expected[i], g[i], m[i], v[i]);
          }
          adam_step(context, slice(param, grad), o, step, first.data(),
                    second.data());
          expect_close(param.values(), expected, tolerance(dtype));
          expect_close(first.values(), m, tolerance(stat_dtype(dtype)));
          expect_close(second.values(), v, tolerance(stat_dtype(dtype)));
        }
      }
    }
  }
}

// A slice of the parameters updates as it would inside the whole.
TEST_P(Optimizer, SlicesUpdateLikeTheWhole) {
  const std::int64_t n = 40001, cut = 12345;
  const AdamOptions o{0.01, 0.9, 0.999, 1e-8, 0.1, true};
  Array whole = array(noise(n, 1)), parts = whole;
  const Array grad = array(noise(n, 2));
  Array m(stat_dtype(dtype), n), v(stat_dtype(dtype), n), m2 = m, v2 = v;
  adam_step(context, slice(whole, grad), o, 1, m.data(), v.data());
  const auto at = [](auto* data, DType type, std::int64_t i) {
    return static_cast<char*>(
               const_cast<void*>(static_cast<const void*>(data))) +
           i * dtype_bytes(type);
  };
  for (const auto& [from, to] :
       {std::pair<std::int64_t, std::int64_t>{0, cut}, {cut, n}}) {
    ParameterSlice s = slice(parts, grad);
    s.n = to - from;
    s.param = at(parts.data(), dtype, from);
    s.grad = at(grad.data(), dtype, from);
    adam_step(context, s, o, 1, at(m2.data(), stat_dtype(dtype), from),
              at(v2.data(), stat_dtype(dtype), from));
  }
  EXPECT_TRUE(parts == whole);
  EXPECT_TRUE(m2 == m && v2 == v);
}

SB_OVER_FLOATING_DTYPES(Optimizer);

// Steps too small for bf16 add up in the master copy.
TEST(OptimizerMaster, KeepsWhatRoundingLoses) {
  KernelContext context;
  const std::int64_t n = 2000;
  for (const DType grad_dtype : {DType::kBF16, DType::kF32}) {
    Array param(DType::kBF16, std::vector<double>(n, 1.0));
    Array alone = param;
    const Array grad(grad_dtype, std::vector<double>(n, 1.0));
    std::vector<float> master(n, 1.0f);
    ParameterSlice s;
    s.n = n, s.dtype = DType::kBF16, s.param = param.data();
    s.grad_dtype = grad_dtype, s.grad = grad.data(), s.master = master.data();
    ParameterSlice without = s;
    without.param = alone.data(), without.master = nullptr;
    SgdOptions o;
    o.lr = 1e-3;
    for (int step = 0; step < 10; ++step) {
      sgd_step(context, s, o, nullptr, false);
      sgd_step(context, without, o, nullptr, false);
    }
    for (const double v : param.values()) ASSERT_EQ(v, 0.98828125);
    for (const double v : alone.values()) ASSERT_EQ(v, 1.0);
    for (const float v : master) ASSERT_NEAR(v, 0.99f, 1e-6f);
  }
}

TEST(OptimizerErrors, SayWhatIsMissing) {
  KernelContext context;
  double x[1] = {}, state[1] = {};
  ParameterSlice s;
  s.n = 1, s.dtype = s.grad_dtype = DType::kF64, s.param = x, s.grad = x;
  SgdOptions o;
  o.momentum = 0.9;
  EXPECT_THROW(sgd_step(context, s, o, nullptr, true), Error);
  o.nesterov = true, o.dampening = 0.1;
  EXPECT_THROW(sgd_step(context, s, o, state, true), Error);
  EXPECT_THROW(adam_step(context, s, {}, 0, state, state), Error);
  s.grad_dtype = DType::kI64;
  EXPECT_THROW(adam_step(context, s, {}, 1, state, state), Error);
}

}  // namespace
}  // namespace shardbook::kernels
