// Optimizers against their formulas, written out in f64; schedules; clipping.

#include "core/optim.h"

#include "core/tensor_storage.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

using Values = std::vector<double>;

constexpr int kSteps = 5;

/// The gradient of step t, for tests: different at every step and element.
Values gradient(int t, std::int64_t n) {
  return values(noise({n}, 100 + static_cast<std::uint64_t>(t)));
}

/// torch.optim.SGD, as its documentation writes it.
Values sgd_by_hand(Values w, const OptimizerOptions& o) {
  Values b(w.size());
  for (int t = 1; t <= kSteps; ++t) {
    const Values g0 = gradient(t, static_cast<std::int64_t>(w.size()));
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = g0[i] + o.weight_decay * w[i];
      if (o.momentum != 0) {
        b[i] = t == 1 ? g : o.momentum * b[i] + (1 - o.dampening) * g;
        g = o.nesterov ? g + o.momentum * b[i] : b[i];
      }
      w[i] -= o.lr * g;
    }
  }
  return w;
}

/// torch.optim.Adam and AdamW, as their documentation writes them.
Values adam_by_hand(Values w, const OptimizerOptions& o, bool decoupled) {
  Values m(w.size()), v(w.size());
  for (int t = 1; t <= kSteps; ++t) {
    const Values g0 = gradient(t, static_cast<std::int64_t>(w.size()));
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = g0[i];
      if (decoupled) {
        w[i] -= o.lr * o.weight_decay * w[i];
      } else {
        g += o.weight_decay * w[i];
      }
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(o.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(o.beta2, t));
      w[i] -= o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
    }
  }
  return w;
}

Tensor run(const std::string& name, const OptimizerOptions& options,
           std::int64_t n, DType dtype = DType::kF64) {
  const Tensor w = leaf({n}, 1, -1, 1, {dtype, Device()});
  const auto optimizer = make_optimizer(name, {w}, options);
  for (int t = 1; t <= kSteps; ++t) {
    const Tensor g = w.empty_like();
    g.copy_from(Tensor::from_values<double>(gradient(t, n), {n}));
    w.set_grad(g);
    optimizer->step();
  }
  return w.detach();
}

OptimizerOptions sgd(double momentum, double dampening, double decay,
                     bool nesterov) {
  OptimizerOptions o;
  o.lr = 0.1;
  o.momentum = momentum;
  o.dampening = dampening;
  o.weight_decay = decay;
  o.nesterov = nesterov;
  return o;
}

constexpr std::int64_t kSize = 1051;

/// Narrow dtypes differ from the formula by their roundings only.
void expect_follows(const std::string& name, const OptimizerOptions& o,
                    const Values& expected) {
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::kF64, 1e-13}, std::pair{DType::kF32, 1e-5},
        std::pair{DType::kF16, 1e-2}, std::pair{DType::kBF16, 5e-2}}) {
    SCOPED_TRACE(name + " in " + dtype_name(dtype));
    expect_close(values(run(name, o, kSize, dtype)), expected, tolerance);
  }
}

TEST(Sgd, FollowsPyTorchsFormulas) {
  for (const OptimizerOptions& o :
       {sgd(0, 0, 0, false), sgd(0, 0, 0.1, false), sgd(0.9, 0, 0, false),
        sgd(0.9, 0.3, 0, false), sgd(0.9, 0, 0.1, true),
        sgd(0.5, 0.1, 0.2, false)}) {
    expect_follows("sgd", o, sgd_by_hand(values(leaf({kSize})), o));
  }
}

TEST(Adam, FollowsPyTorchsFormulas) {
  const Values start = values(leaf({kSize}));
  for (double decay : {0.0, 0.3}) {
    for (double eps : {1e-8, 1e-2}) {
      OptimizerOptions o;
      o.lr = 0.05;
      o.weight_decay = decay;
      o.eps = eps;
      o.beta1 = 0.8;
      o.beta2 = 0.95;
      expect_follows("adam", o, adam_by_hand(start, o, false));
      expect_follows("adamw", o, adam_by_hand(start, o, true));
    }
  }
}

TEST(Adam, DecayIsTheDifferenceToAdamW) {
  OptimizerOptions o;
  o.lr = 0.05;
  EXPECT_TRUE(bitwise_equal(run("adam", o, 9), run("adamw", o, 9)));
  o.weight_decay = 0.3;
  EXPECT_GT(max_abs_difference(run("adam", o, 9), run("adamw", o, 9)), 1e-3);
}

// ZeRO needs this: updating a slice gives the bits of the whole update.
TEST(Sharding, SlicesUpdateBitwiseAsTheWhole) {
  for (DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const std::string name : {"sgd", "adam", "adamw"}) {
      OptimizerOptions o = sgd(0.9, 0, 0.1, name == "sgd");
      const Tensor whole = run(name, o, kSize, dtype);
      for (const std::vector<std::int64_t>& cuts :
           {std::vector<std::int64_t>{0, kSize},
            {0, 1, kSize},
            {0, 334, 668, kSize},
            {0, 7, 7, 24, 63, 64, 65, 999, kSize}}) {
        const Tensor w = leaf({kSize}, 1, -1, 1, {dtype, Device()});
        Tensors slices;
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
          slices.push_back(w.rows_view(cuts[i], cuts[i + 1]));
        }
        const auto optimizer = make_optimizer(name, slices, o);
        for (int t = 1; t <= kSteps; ++t) {
          const Tensor g = w.empty_like();
          g.copy_from(Tensor::from_values<double>(gradient(t, kSize), {kSize}));
          for (std::size_t i = 0; i < slices.size(); ++i) {
            optimizer->step_one(i, g.rows_view(cuts[i], cuts[i + 1]));
          }
        }
        EXPECT_TRUE(bitwise_equal(w.detach(), whole))
            << name << " " << dtype_name(dtype) << ", " << cuts.size() - 1
            << " slices";
      }
    }
  }
}

TEST(Optimizer, LeavesParametersWithoutGradientAlone) {
  const Tensor a = leaf({3}), b = leaf({3});
  const Values before = values(b);
  OptimizerOptions o;
  o.weight_decay = 0.5;
  const auto optimizer = make_optimizer("adam", {a, b}, o);
  a.set_grad(Tensor::full({3}, 1, a.options()));
  optimizer->step();
  EXPECT_EQ(values(b), before);
  EXPECT_EQ(optimizer->slots()[0].step, 1);
  EXPECT_EQ(optimizer->slots()[1].step, 0);
  EXPECT_TRUE(optimizer->slots()[1].state.empty());
}

TEST(Optimizer, StateIsF32FlatAndBooked) {
  const Device device = Device::cpu();
  const Tensor w = leaf({4, 5}, 1, -1, 1, {DType::kBF16, device});
  w.set_grad(Tensor::full({4, 5}, 1, w.options()));
  const auto adam = make_optimizer("adam", {w}, {});
  adam->step();
  EXPECT_EQ(adam->state_names(),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  ASSERT_EQ(adam->slots()[0].state.size(), 2u);
  EXPECT_EQ(adam->slots()[0].state[0].dtype(), DType::kF32);
  EXPECT_EQ(adam->slots()[0].state[0].shape(), Shape{20});
  EXPECT_EQ(device.memory().current(MemoryKind::kOptimizerState), 2 * 80);
  EXPECT_TRUE(make_optimizer("sgd", {w}, {})->state_names().empty());
  EXPECT_EQ(make_optimizer("sgd", {w}, sgd(0.9, 0, 0, false))->state_names(),
            std::vector<std::string>{"momentum_buffer"});
}

TEST(Optimizer, GradScaleIsAFactorOfTheGradient) {
  for (const std::string name : {"sgd", "adamw"}) {
    const Tensor a = leaf({9}), b = leaf({9});
    const Tensor g = noise({9}, 5);
    make_optimizer(name, {a}, {})->step_one(0, g, 0.25);
    make_optimizer(name, {b}, {})->step_one(0, scale(g, 0.25));
    EXPECT_TRUE(bitwise_equal(a.detach(), b.detach()));
    expect_close(g, noise({9}, 5), 0);
  }
}

// Steps too small for bf16 add up in the master copy.
TEST(MasterCopies, KeepWhatSixteenBitsLose) {
  auto after = [&](bool master) {
    const Tensor w = Tensor::full({4}, 1, kOfBF16).set_requires_grad();
    OptimizerOptions o;
    o.lr = 1.0 / 1024;
    const auto optimizer = make_optimizer("sgd", {w}, o);
    if (master) optimizer->keep_master_copies();
    for (int i = 0; i < 32; ++i) {
      optimizer->step_one(0, Tensor::full({4}, 1, kOfBF16));
    }
    if (master) {
      EXPECT_EQ(values(optimizer->slots()[0].master),
                Values(4, 1 - 32.0 / 1024));
      EXPECT_EQ(memory_kind_of(optimizer->slots()[0].master),
                MemoryKind::kOptimizerState);
    }
    return values(w)[0];
  };
  EXPECT_EQ(after(false), 1);
  EXPECT_EQ(after(true), 1 - 32.0 / 1024);
}

TEST(MasterCopies, AreForSixteenBitsOnly) {
  const Tensor w = leaf({4});
  const auto optimizer = make_optimizer("sgd", {w}, {});
  optimizer->keep_master_copies();
  EXPECT_FALSE(optimizer->slots()[0].master.defined());
}

TEST(Optimizer, RunsOnMeta) {
  const Device meta = Device::meta();
  const Tensor w = Tensor::zeros({10}, {DType::kF32, meta});
  const auto adam = make_optimizer("adamw", {w}, {});
  w.set_grad(w.empty_like());
  adam->step();
  EXPECT_EQ(meta.memory().current(MemoryKind::kOptimizerState), 80);
  EXPECT_EQ(clip_grad_norm({w}, 1.0), 0);
}

TEST(Optimizer, SaysWhatIsWrong) {
  expect_error([] { make_optimizer("lion", {}, {}); }, {"'lion'", "adamw"});
  const Tensor w = leaf({4});
  const auto optimizer = make_optimizer("sgd", {w}, {});
  expect_error([&] { optimizer->step_one(0, Tensor::zeros({3})); },
               {"3 elements", "of 4"});
  const auto damped = make_optimizer("sgd", {w}, sgd(0.9, 0.1, 0, true));
  expect_error([&] { damped->step_one(0, ones_like(w)); }, {"nesterov"});
}

TEST(Schedules, RiseAndFall) {
  const LrSchedule linear = make_schedule("linear", 4, 12, 0.1);
  EXPECT_DOUBLE_EQ(linear(0), 0.25);
  EXPECT_DOUBLE_EQ(linear(3), 1);
  EXPECT_DOUBLE_EQ(linear(4), 1);
  EXPECT_DOUBLE_EQ(linear(8), 0.1 + 0.9 * 0.5);
  EXPECT_DOUBLE_EQ(linear(12), 0.1);
  EXPECT_DOUBLE_EQ(linear(1000), 0.1);
  const LrSchedule cosine = make_schedule("cosine", 4, 12);
  EXPECT_DOUBLE_EQ(cosine(1), 0.5);
  EXPECT_DOUBLE_EQ(cosine(4), 1);
  EXPECT_DOUBLE_EQ(cosine(6), 0.5 * (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(cosine(8), 0.5);
  EXPECT_NEAR(cosine(12), 0, 1e-16);
  EXPECT_NEAR(cosine(13), 0, 1e-16);
}

TEST(Schedules, HaveNames) {
  EXPECT_EQ(make_schedule("constant", 0, 10)(0), 1);
  EXPECT_EQ(make_schedule("constant", 2, 10)(0), 0.5);
  EXPECT_EQ(make_schedule("constant", 2, 10)(9), 1);
  EXPECT_EQ(make_schedule("linear", 0, 10)(5), 0.5);
  EXPECT_DOUBLE_EQ(make_schedule("cosine", 0, 10)(5), 0.5);
  // Warm-up only: no steps remain for the decay.
  EXPECT_EQ(make_schedule("linear", 10, 10)(10), 0);
  EXPECT_EQ(make_schedule("linear", 10, 10)(9), 1);
  expect_error([] { make_schedule("step", 0, 1); }, {"'step'", "cosine"});
}

TEST(Clipping, ScalesDownToTheLargestNorm) {
  const Tensor a = leaf({2}), b = leaf({1}), none = leaf({5});
  auto set = [&] {
    a.set_grad(Tensor::from_values<double>({1, 2}, {2}));
    b.set_grad(Tensor::from_values<double>({2}, {1}));
  };
  set();
  EXPECT_EQ(grad_norm({a, b, none}), 3);
  EXPECT_EQ(clip_grad_norm({a, b, none}, 1.5), 3);
  const double factor = 1.5 / (3 + 1e-6);
  expect_close(values(a.grad()), {factor, 2 * factor}, 1e-15);
  expect_close(values(b.grad()), {2 * factor}, 1e-15);
  set();
  EXPECT_EQ(clip_grad_norm({a, b, none}, 3.1), 3);
  EXPECT_EQ(values(a.grad()), (Values{1, 2}));
  EXPECT_EQ(grad_norm({none}), 0);
}

TEST(Clipping, AddsInF64) {
  // 2^24 ones: a sum in f32 would stop there.
  const std::int64_t n = (1 << 24) + 1024;
  const Tensor w = Tensor::empty({n}).set_requires_grad();
  w.set_grad(Tensor::full({n}, 1));
  EXPECT_EQ(grad_norm({w}), std::sqrt(static_cast<double>(n)));
}

TEST(Clipping, WritesIntoTheBucketWhereTheGradientLies) {
  const Tensor w = leaf({2});
  const Tensor bucket = Tensor::from_values<double>({0, 3, 4}, {3});
  w.set_grad(bucket.rows_view(1, 3));
  clip_grad_norm({w}, 0.5);
  EXPECT_NEAR(values(bucket)[2], 0.4, 1e-6);
}

}  // namespace
}  // namespace shardbook
