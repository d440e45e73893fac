// Every operation: its gradient against differences in f64, the same shapes on
// meta, and values in f32, bf16 and f16 close to the f64 values.

#include <algorithm>
#include <array>
#include <ostream>

#include "core/rope.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

/// An operation, and operands where it is smooth.
struct Case {
  const char* name;
  std::vector<Shape> shapes;
  std::function<Tensor(const Tensors&)> op;
  double low = -1, high = 1;
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

Tensor indices(const Tensor& like, const std::vector<std::int64_t>& values,
               const Shape& shape) {
  return Tensor::from_values<std::int64_t>(values, shape, like.device());
}

/// Fixed draws: differences need the same function at every call.
struct SameDraws {
  SameDraws() : state(&RankContext::random, RandomState{5, 3, 0, {}}) {}
  ContextValue<RandomState> state;
};

using In = const Tensors&;

Case product(const char* name, const Shape& a, const Shape& b,
             bool trans_a = false, bool trans_b = false) {
  return {
      name, {a, b}, [=](In x) { return matmul(x[0], x[1], trans_a, trans_b); }};
}

// The last operand may be missing.
Tensor bias_of(In x) { return x.size() > 2 ? x[2] : Tensor(); }

Case layer(const char* name, const std::vector<Shape>& shapes) {
  return {name, shapes, [](In x) { return linear(x[0], x[1], bias_of(x)); }};
}

Case conv(const char* name, const std::vector<Shape>& shapes,
          std::int64_t stride, std::int64_t padding) {
  return {name, shapes, [=](In x) {
            return conv2d(x[0], x[1], bias_of(x), stride, padding);
          }};
}

Case attends(const char* name, const std::vector<Shape>& shapes,
             const AttentionOptions& options) {
  return {name, shapes, [=](In x) {
            const SameDraws draws;
            return x.size() == 1 ? attention(x[0], options)
                                 : attention(x[0], x[1], x[2], options);
          }};
}

/// Heads at positions that do not follow one another.
Case turns(const char* name, const Shape& shape, std::int64_t heads,
           std::int64_t head_dim) {
  return {name, {shape}, [=](In x) {
            const Tensor table =
                rope_table({5, 0, 2}, head_dim, 100, {}, x[0].options());
            return rope(x[0], table, heads, head_dim);
          }};
}

AttentionOptions grouped_attention(std::int64_t heads, std::int64_t kv_heads) {
  AttentionOptions options = attention_of(heads);
  options.kv_heads = kv_heads;
  return options;
}

Case normalized(const char* name, const std::vector<Shape>& shapes, bool relu) {
  return {name, shapes, [=](In x) {
            const Tensor addend = x.size() > 3 ? x[3] : Tensor();
            return batch_norm_train(x[0], x[1], x[2],
                                    {.relu = relu, .addend = addend})
                .y;
          }};
}

std::vector<Case> cases() {
  const std::vector<Shape> cross = {{2, 3, 8}, {2, 5, 8}, {2, 5, 8}};
  return {
      {"Add", {{3, 5}, {3, 5}}, [](In x) { return add(x[0], x[1]); }},
      {"AddRow", {{3, 5}, {5}}, [](In x) { return add(x[0], x[1]); }},
      {"AddColumn", {{3, 1}, {3, 5}}, [](In x) { return add(x[0], x[1]); }},
      {"AddOuter", {{3, 1}, {1, 5}}, [](In x) { return add(x[0], x[1]); }},
      {"AddScalarTensor", {{2, 3}, {}}, [](In x) { return add(x[0], x[1]); }},
      {"AddMiddle", {{2, 1, 3}, {4, 1}}, [](In x) { return add(x[0], x[1]); }},
      {"AddItself", {{3, 5}}, [](In x) { return add(x[0], x[0]); }},
      {"Sub", {{3, 5}, {3, 5}}, [](In x) { return sub(x[0], x[1]); }},
      {"SubFromRow", {{5}, {2, 3, 5}}, [](In x) { return sub(x[0], x[1]); }},
      {"SubItself", {{4}}, [](In x) { return sub(x[0], x[0]); }},
      {"Mul", {{3, 5}, {3, 5}}, [](In x) { return mul(x[0], x[1]); }},
      {"MulColumn", {{3, 5}, {3, 1}}, [](In x) { return mul(x[0], x[1]); }},
      {"MulItself", {{7}}, [](In x) { return mul(x[0], x[0]); }},
      {"Div", {{3, 5}, {3, 5}}, [](In x) { return div(x[0], x[1]); }, 0.5, 2},
      {"DivRow", {{3, 5}, {5}}, [](In x) { return div(x[0], x[1]); }, 0.5, 2},
      {"DivOfScalar",
       {{}, {3, 1}},
       [](In x) { return div(x[0], x[1]); },
       0.5,
       2},
      {"Scale", {{7}}, [](In x) { return scale(x[0], -2.5); }},
      {"AddScalar", {{7}}, [](In x) { return add_scalar(x[0], 3); }},
      {"Neg", {{7}}, [](In x) { return neg(x[0]); }},
      {"AbsOfPositive", {{9}}, [](In x) { return abs(x[0]); }, 0.1, 1},
      {"AbsOfNegative", {{9}}, [](In x) { return abs(x[0]); }, -1, -0.1},
      {"ReluOpen", {{9}}, [](In x) { return relu(x[0]); }, 0.1, 1},
      {"ReluShut", {{9}}, [](In x) { return relu(x[0]); }, -1, -0.1},
      {"Gelu", {{17}}, [](In x) { return gelu(x[0]); }, -4, 4},
      {"GeluErf",
       {{17}},
       [](In x) { return gelu(x[0], GeluForm::kErf); },
       -4,
       4},
      {"Tanh", {{17}}, [](In x) { return tanh(x[0]); }, -3, 3},
      {"Sigmoid", {{17}}, [](In x) { return sigmoid(x[0]); }, -4, 4},
      {"Square", {{7}}, [](In x) { return square(x[0]); }},
      {"Sqrt", {{7}}, [](In x) { return sqrt(x[0]); }, 0.5, 2},
      {"Exp", {{7}}, [](In x) { return exp(x[0]); }},
      {"Log", {{7}}, [](In x) { return log(x[0]); }, 0.5, 2},
      {"SumAll", {{3, 5}}, [](In x) { return sum(x[0]); }},
      {"MeanAll", {{3, 5}}, [](In x) { return mean(x[0]); }},
      {"SumFirst", {{3, 5}}, [](In x) { return sum(x[0], 0); }},
      {"SumMiddle", {{2, 3, 5}}, [](In x) { return sum(x[0], 1); }},
      {"SumLast", {{2, 3, 5}}, [](In x) { return sum(x[0], -1); }},
      {"MeanMiddle", {{2, 3, 5}}, [](In x) { return mean(x[0], -2); }},
      {"Reshape",
       {{4, 3}},
       [](In x) {
         return reshape(x[0], {2, -1});
       }},
      {"SliceRows", {{5, 3}}, [](In x) { return slice(x[0], 0, 1, 4); }},
      {"SliceColumns", {{5, 7}}, [](In x) { return slice(x[0], -1, 2, 5); }},
      {"SliceMiddle", {{2, 5, 3}}, [](In x) { return slice(x[0], 1, 4, 5); }},
      {"SliceNothing",
       {{4, 3}},
       [](In x) {
         return concat({slice(x[0], 0, 2, 2), x[0]}, 0);
       }},
      {"ConcatRows",
       {{2, 3}, {1, 3}},
       [](In x) {
         return concat({x[0], x[1], x[0]}, 0);
       }},
      {"ConcatColumns",
       {{3, 2}, {3, 5}},
       [](In x) {
         return concat({x[0], x[1]}, -1);
       }},
      {"Transpose", {{3, 5}}, [](In x) { return transpose(x[0], 0, 1); }},
      {"TransposeOuter",
       {{2, 3, 5}},
       [](In x) { return transpose(x[0], 0, -1); }},
      {"Permute",
       {{2, 3, 4, 5}},
       [](In x) {
         return permute(x[0], {2, 0, -1, 1});
       }},
      product("Matmul", {3, 5}, {5, 7}),
      product("MatmulTransA", {5, 3}, {5, 7}, true, false),
      product("MatmulTransB", {3, 5}, {7, 5}, false, true),
      product("MatmulTransBoth", {5, 3}, {7, 5}, true, true),
      product("MatmulBatched", {2, 3, 5}, {2, 5, 4}),
      product("MatmulBatchedTransBoth", {2, 5, 3}, {2, 4, 5}, true, true),
      product("MatmulVector", {1, 9}, {9, 1}),
      {"MatmulOfItself",
       {{3, 5}},
       [](In x) { return matmul(x[0], x[0], false, true); }},
      layer("Linear", {{4, 3}, {3, 5}, {5}}),
      layer("LinearManyDims", {{2, 3, 5}, {5, 2}, {2}}),
      layer("LinearWithoutBias", {{2, 3, 5}, {5, 2}}),
      layer("LinearOfVector", {{5}, {5, 3}, {3}}),
      {"Embedding",
       {{5, 70}},
       [](In x) {
         return embedding(x[0], indices(x[0], {1, 4, 1, 0, 1, 4}, {2, 3}));
       }},
      {"LayerNorm",
       {{140, 21}, {21}, {21}},
       [](In x) { return layer_norm(x[0], x[1], x[2]); }},
      {"LayerNormManyDims",
       {{2, 2, 5}, {5}, {5}},
       [](In x) { return layer_norm(x[0], x[1], x[2], 1e-3); }},
      {"RmsNorm",
       {{140, 21}, {21}},
       [](In x) { return rms_norm(x[0], x[1], 1e-5); }},
      {"RmsNormOfHeads",
       {{2, 3, 4, 16}, {16}},
       [](In x) { return rms_norm(x[0], x[1], 1e-2); }},
      {"Swiglu", {{3, 42}}, [](In x) { return swiglu(x[0]); }, -4, 4},
      {"SwigluManyDims", {{2, 3, 70}}, [](In x) { return swiglu(x[0]); }},
      turns("Rope", {2, 3, 20}, 2, 10),
      turns("RopeBeforeOtherColumns", {2, 3, 55}, 3, 16),
      {"Softmax", {{3, 70}}, [](In x) { return softmax(x[0]); }, -3, 3},
      {"LogSoftmax",
       {{2, 1, 35}},
       [](In x) { return log_softmax(x[0]); },
       -3,
       3},
      attends("AttentionCausal", {{2, 5, 18}}, attention_of(2)),
      attends("AttentionFull", {{2, 5, 18}}, attention_of(3, false)),
      attends("AttentionOfOneToken", {{3, 1, 6}}, attention_of(1)),
      attends("AttentionDropout", {{2, 5, 12}}, attention_of(2, true, 0.3)),
      attends("AttentionGrouped", {{2, 5, 24}}, grouped_attention(4, 2)),
      attends("AttentionGroupedWideHeads", {{1, 5, 80}},
              grouped_attention(3, 1)),
      attends("CrossAttention", cross, attention_of(2, false)),
      attends("CrossAttentionDropout", cross, attention_of(4, false, 0.2)),
      {"Dropout",
       {{6, 7}},
       [](In x) {
         SameDraws draws;
         return dropout(x[0], 0.4);
       }},
      {"CrossEntropy",
       {{4, 70}},
       [](In x) {
         return cross_entropy(x[0], indices(x[0], {1, 69, 0, 33}, {4}));
       },
       -3,
       3},
      {"CrossEntropyIgnored",
       {{2, 3, 5}},
       [](In x) {
         return cross_entropy(x[0],
                              indices(x[0], {1, -100, 0, -100, 4, 2}, {2, 3}));
       },
       -3,
       3},
      {"CrossEntropySum",
       {{4, 7}},
       [](In x) {
         return cross_entropy(x[0], indices(x[0], {1, -100, 0, 3}, {4}),
                              Reduction::kSum);
       },
       -3,
       3},
      {"MseLoss", {{3, 5}, {3, 5}}, [](In x) { return mse_loss(x[0], x[1]); }},
      normalized("BatchNormTrain", {{4, 5, 3}, {3}, {3}}, false),
      normalized("BatchNormTrainRelu", {{7, 3}, {3}, {3}}, true),
      normalized("BatchNormTrainAddRelu", {{7, 3}, {3}, {3}, {7, 3}}, true),
      normalized("BatchNormTrainAdd", {{7, 3}, {3}, {3}, {7, 3}}, false),
      conv("Conv1x1", {{2, 3, 4, 5}, {6, 5, 1, 1}}, 1, 0),
      conv("Conv1x1Strided", {{2, 5, 4, 3}, {4, 3, 1, 1}}, 2, 0),
      conv("Conv3x3Bias", {{2, 4, 5, 3}, {4, 3, 3, 3}, {4}}, 1, 1),
      conv("Conv3x3Strided", {{1, 6, 7, 2}, {3, 2, 3, 3}}, 2, 1),
      conv("Conv7x7Strided", {{1, 9, 8, 3}, {2, 3, 7, 7}}, 2, 3),
      conv("ConvUneven", {{2, 5, 6, 2}, {3, 2, 3, 2}}, 3, 1),
      {"MaxPool",
       {{2, 6, 5, 3}},
       [](In x) { return max_pool2d(x[0], 3, 2, 1); }},
      {"MaxPoolApart",
       {{1, 7, 7, 2}},
       [](In x) { return max_pool2d(x[0], 2, 3); }},
      {"GlobalAvgPool",
       {{2, 3, 4, 5}},
       [](In x) { return global_avg_pool2d(x[0]); }},
      {"BatchNormEval",
       {{2, 2, 2, 3}, {3}, {3}},
       [](In x) {
         const Tensor mean = noise({3}, 50, -1, 1, x[0].options());
         const Tensor variance = noise({3}, 51, 0.5, 1, x[0].options());
         return batch_norm_eval(x[0], x[1], x[2], mean, variance, 1e-5);
       }},
      {"Composed",
       {{4, 6}, {6, 6}, {6}},
       [](In x) {
         const Tensor h = gelu(linear(x[0], x[1], x[2]));
         return mul(softmax(matmul(h, x[1])), add(h, x[0]));
       }},
      {"GeluMlp",
       {{2, 3, 5}, {5, 8}, {8}, {8, 4}, {4}},
       [](In x) { return gelu_mlp(x[0], x[1], x[2], x[3], x[4]); }},
  };
}

class Operation : public testing::TestWithParam<Case> {
 protected:
  Tensors operands(const TensorOptions& options, bool need_grad = true) const {
    const Case& c = GetParam();
    Tensors x;
    for (std::size_t i = 0; i < c.shapes.size(); ++i) {
      x.push_back(noise(c.shapes[i], i + 1, c.low, c.high, options));
      x.back().set_requires_grad(need_grad);
    }
    return x;
  }
};

TEST_P(Operation, GradientEqualsDifferences) {
  for (const bool deterministic : {false, true}) {
    const Deterministic mode(deterministic);
    EXPECT_LT(
        autograd::check_gradients(
            [&](const Tensors& in) { return weighted_sum(GetParam().op(in)); },
            operands(kOfF64)),
        kGradientTolerance)
        << (deterministic ? "deterministic" : "fast");
  }
}

// Each operand alone: the others are constants and need no gradient.
TEST_P(Operation, AGradientDoesNotDependOnWhoElseNeedsOne) {
  const Tensors all = operands(kOfF64);
  weighted_sum(GetParam().op(all)).backward();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Tensors one = operands(kOfF64, /*need_grad=*/false);
    one[i].set_requires_grad();
    weighted_sum(GetParam().op(one)).backward();
    EXPECT_TRUE(bitwise_equal(one[i].grad(), all[i].grad())) << "operand " << i;
    for (std::size_t j = 0; j < one.size(); ++j) {
      if (j != i) {
        EXPECT_FALSE(one[j].grad().defined()) << "operand " << j;
      }
    }
  }
}

TEST_P(Operation, RecordsNothingWithoutNeed) {
  EXPECT_FALSE(GetParam().op(operands(kOfF64, false)).requires_grad());
  NoGrad no_grad;
  EXPECT_FALSE(GetParam().op(operands(kOfF64)).requires_grad());
}

TEST_P(Operation, OnMetaHasTheSameShapesAndBytes) {
  struct Bill {
    Shape shape;
    std::vector<Shape> grads;
    std::array<std::int64_t, kNumMemoryKinds> peak;
    std::int64_t kept;
  };
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    auto bill_on = [&](const Device& device) {
      RankContext context(device);
      RankContext::Scope scope(context);
      const Tensors x = operands({dtype, device});
      Bill bill;
      Tensor y = GetParam().op(x);
      bill.shape = y.shape();
      bill.kept = device.memory().current_total;
      y = weighted_sum(y);
      y.backward();
      for (const Tensor& operand : x) {
        bill.grads.push_back(operand.grad().shape());
      }
      bill.peak = device.memory().peak_by_kind;
      // Scratch of kernels depends on the machine; meta runs no kernel.
      bill.peak[static_cast<std::size_t>(MemoryKind::kWorkspace)] = 0;
      return bill;
    };
    const Bill real = bill_on(Device::cpu()), meta = bill_on(Device::meta());
    EXPECT_EQ(real.shape, meta.shape);
    EXPECT_EQ(real.grads, meta.grads);
    EXPECT_EQ(real.kept, meta.kept);
    EXPECT_EQ(real.peak, meta.peak);
  }
}

TEST_P(Operation, OtherDtypesComeNearF64) {
  auto run = [&](DType dtype) {
    // The operands of the narrow run, so that only the operation rounds.
    Tensors x;
    for (const Tensor& operand : operands(kOfBF16, false)) {
      x.push_back(to_dtype(operand, dtype).set_requires_grad());
    }
    Tensors result = {GetParam().op(x)};
    sum(to_dtype(result[0], DType::kF64)).backward();
    for (const Tensor& operand : x) result.push_back(operand.grad());
    return result;
  };
  const Tensors exact = run(DType::kF64);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // A few roundings of 2^-24, 2^-9 and 2^-12, in forward and backward.
    const double tolerance = dtype == DType::kF32    ? 1e-5
                             : dtype == DType::kBF16 ? 6e-2
                                                     : 8e-3;
    const Tensors near = run(dtype);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (i > 0) {
        EXPECT_EQ(near[i].dtype(), dtype);
      }
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " +
                   (i == 0 ? "result" : "gradient " + std::to_string(i - 1)));
      expect_close(near[i], exact[i], tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Operation, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.name);
                         });

// A check that cannot fail proves nothing.
TEST(CheckGradients, FindsAWrongGradient) {
  auto wrong_square = [](const Tensor& x) {
    return autograd::custom_function(
        "wrong_square", {x},
        [](const Tensors& in) { return Tensors{square(in[0])}; },
        [x](const Tensors& grads) {
          return Tensors{mul(scale(x, 2.001), grads[0])};
        })[0];
  };
  EXPECT_GT(autograd::check_gradients(
                [&](const Tensors& in) { return sum(wrong_square(in[0])); },
                {leaf({5}, 1, 0.5, 1)}),
            1e-4);
}

TEST(CheckGradients, WantsF64) {
  const Tensor x = leaf({2}, 1, -1, 1, kOfF32);
  expect_error(
      [&] {
        autograd::check_gradients([](const Tensors& in) { return sum(in[0]); },
                                  {x});
      },
      {"f64", "f32"});
}

}  // namespace
}  // namespace shardbook
