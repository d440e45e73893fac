// Layers in blocks against layers of one device.

#include "chapters/08_tensor_parallel_2d/summa_layers.h"

#include <gtest/gtest.h>
#include <cmath>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "tests/chapters/08_tensor_parallel_2d/layer_cases.h"
#include "tests/support/errors.h"

namespace shardbook::summa_test {
namespace {

class SummaLayers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sides, SummaLayers, testing::Values(1, 2, 3));

TEST_P(SummaLayers, EqualOneDevice) {
  for (const auto& [name, layer] : layer_cases()) {
    SCOPED_TRACE(name);
    expect_one_device(layer, {GetParam()});
  }
}

// Comparisons must see NaN: a maximum that loses it would pass every test.
TEST(SummaTraps, ADifferenceOfNanIsSeen) {
  Layer broken = norm_case();
  broken.split = [](const Tensors& in, const Grid& grid) {
    return scale(summa::layer_norm(in[0], in[1], in[2], grid), NAN);
  };
  EXPECT_TRUE(std::isnan(difference(broken, Sizes{2}, DType::kF64)));
}

TEST(SummaLayers, LinearHasTheBitsOfOneDevice) { expect_linear_bits({2}); }

// Norms use the model's epsilon, not a default of the layer.
TEST(SummaLayers, NormsTakeTheEpsilonOfTheModel) {
  const auto differences = on_grid({2}, [](const Grid& grid, ProcessGroup&) {
    InitOptions init;
    init.dtype = DType::kF64;
    AnyModule norm =
        summa::layers(grid).norm("ln_1", {.out = kWidth}, 0.25, init);
    const Tensor x = drawn({kBatch, kSeq, kWidth}, DType::kF64, 1);
    const Tensor ones = Tensor::full({kWidth}, 1, x.options());
    const Tensor zeros = Tensor::zeros({kWidth}, x.options());
    const Tensor y = norm(part_of(x, Lies::kBlock, grid));
    return max_abs_difference(
        y.detach(),
        part_of(layer_norm(x, ones, zeros, 0.25), Lies::kBlock, grid));
  });
  for (const double each : differences) EXPECT_LT(each, kSameSumF64);
}

// Sums of 16-bit rows are in f32. In 16 bits, the error of E[x^2] - E[x]^2 for
// numbers around 20 would exceed the variance.
TEST(SummaLayers, NormsOfSixteenBitsSumInF32) {
  const auto bf16 = [](const Tensor& x) { return to_dtype(x, DType::kBF16); };
  const auto differences = on_grid({2}, [&](const Grid& grid, ProcessGroup&) {
    const Shape shape = {kBatch, kSeq, kWidth};
    const Tensor x = bf16(add_scalar(drawn(shape, DType::kF32, 1), 20));
    const Tensor gamma = bf16(drawn({kWidth}, DType::kF32, 2));
    const Tensor beta = bf16(drawn({kWidth}, DType::kF32, 3));
    const Tensor dy = bf16(drawn(shape, DType::kF32, 4));
    const Tensor own = part_of(x, Lies::kBlock, grid).set_requires_grad();
    const Tensor whole = x.clone().set_requires_grad();
    const Tensor g = part_of(gamma, Lies::kVector, grid).set_requires_grad();
    const Tensor b = part_of(beta, Lies::kVector, grid).set_requires_grad();
    const Tensor y = summa::layer_norm(own, g, b, grid);
    const Tensor expected = layer_norm(whole, gamma, beta);
    autograd::backward({y}, {part_of(dy, Lies::kBlock, grid)});
    autograd::backward({expected}, {dy});
    return std::pair(
        max_abs_difference(y.detach(),
                           part_of(expected.detach(), Lies::kBlock, grid)),
        max_abs_difference(own.grad(),
                           part_of(whole.grad(), Lies::kBlock, grid)));
  });
  // Results below 16 may round to a neighbour, 1/16 away
  for (const auto& [output, gradient] : differences) {
    EXPECT_LT(output, 0.1);
    EXPECT_LT(gradient, 0.1);
  }
}

// The maximum over all ranks is subtracted, not the sum of their maxima.
TEST_P(SummaLayers, TheLossOfLargeLogitsIsThatOfOneDevice) {
  const Layer usual = vocabulary_loss_case();
  const auto large = [](const Tensor& x) {
    return add_scalar(scale(x, 300), 5000);
  };
  Layer layer = usual;
  layer.whole = [=](const Tensors& in) { return usual.whole({large(in[0])}); };
  layer.split = [=](const Tensors& in, const Grid& grid) {
    return usual.split({large(in[0])}, grid);
  };
  EXPECT_LT(difference(layer, {GetParam()}, DType::kF64), 1e-9);
}

// The mask equals the rank's block of one device's mask.
TEST(SummaLayers, DropoutDrawsTheMaskOfOneDevice) {
  expect_all(on_grid({2}, [&](const Grid& grid, ProcessGroup&) {
    const auto masked = [](const std::function<Tensor()>& drop) {
      const ContextValue<RandomState> state(&RankContext::random,
                                            RandomState{7, 2, 0, {0, 1}});
      return drop();
    };
    const Tensor x = drawn({4, 3, 8}, DType::kF64, 1);
    const Tensor qkv = drawn({4, 6, 24}, DType::kF64, 2);
    AttentionOptions options;
    options.heads = 4;
    options.dropout = 0.3;
    const Tensor whole = masked([&] { return dropout(x, 0.4); });
    const Tensor own = masked([&] {
      return summa::block_dropout(part_of(x, Lies::kBlock, grid), 0.4,
                                  grid.block());
    });
    const Tensor heads = masked([&] { return attention(qkv, options); });
    AttentionOptions own_options = options;
    own_options.heads /= grid.q();
    const Tensor own_heads = masked([&] {
      return summa::layers(grid).attention(own_heads_of(qkv, grid),
                                           own_options);
    });
    return bitwise_equal(own, part_of(whole, Lies::kBlock, grid)) &&
           max_abs_difference(own_heads, part_of(heads, Lies::kBlock, grid)) <
               kSameSumF64;
  }));
}

// [b, S, h/q] tokens of 2 numbers along ROW, pieces of h/q^2 along COL.
TEST(SummaLedger, OfTheLayersBesideTheProducts) {
  const std::int64_t batch = 4, s = 3, h = 8, v = 16;
  const auto ids = [=] { return drawn_ids({batch, s}, v); };
  on_grid({2}, [&](const Grid& grid, ProcessGroup& world) {
    const Tensor x = leaf({batch / 2, s, h / 2});
    expect_calls(
        world, summa::layer_norm(x, leaf({h / 4}), leaf({h / 4}), grid),
        {"all_gather col 4", "all_gather col 4", "all_reduce row 12"},
        {"all_reduce row 12", "reduce_scatter col 4", "reduce_scatter col 4"});
    expect_calls(world, summa::rms_norm(x, leaf({h / 4}), grid, 1e-5),
                 {"all_gather col 4", "all_reduce row 6"},
                 {"all_reduce row 6", "reduce_scatter col 4"});
    expect_calls(
        world,
        summa::vocabulary_parallel_embedding(leaf({v / 2, h / 2}), ids(), grid),
        {"reduce_scatter col 48"}, {"all_gather col 48"});
    expect_calls(world, summa::embedding(leaf({v, h / 4}), ids(), grid),
                 {"all_gather col 64"}, {"reduce_scatter col 64"});
    expect_calls(world, summa::classifier(x, leaf({v, h / 4}), leaf({v}), grid),
                 {"all_gather col 64", "all_reduce row 96"},
                 {"all_reduce col 16", "reduce_scatter col 64"});
    expect_calls(world,
                 summa::vocabulary_parallel_cross_entropy(
                     leaf({batch / 2, s, v / 2}), ids(), grid),
                 {"all_reduce row 6", "all_reduce row 6", "all_reduce row 6",
                  "all_reduce col 2"},
                 {});
    expect_calls(world,
                 summa::cross_entropy(leaf({batch / 2, s, v}), ids(), grid),
                 {"all_reduce col 2"}, {});
  });
}

// Pieces of N/q^2 are gathered over COL; their gradient is scattered over it.
TEST(SummaLedger, OfABias) {
  on_grid({2}, [](const Grid& grid, ProcessGroup& world) {
    const Tensor x = drawn({2, 3, 4}, DType::kF64, 1);
    const Tensor w = drawn({4, 6}, DType::kF64, 2);
    const Tensor y = summa::linear(x, w, leaf({3}), grid);
    // Neither x nor w needs a gradient
    expect_calls(world, y,
                 {"all_gather col 6", "broadcast row 24", "broadcast col 24",
                  "broadcast row 24", "broadcast col 24"},
                 {"reduce_scatter col 6"});
  });
}

TEST(SummaLayers, RefuseWhatDoesNotDivide) {
  expect_error(
      [&] {
        on_grid({2}, [](const Grid& grid, ProcessGroup&) {
          return summa::vocabulary_parallel_embedding(
              drawn({4, 4}, DType::kF64, 1), drawn_ids({5, 3}, 8), grid);
        });
      },
      {"a batch of 5 does not divide over 2 parts; give 6"});
  expect_error(
      [&] {
        on_grid({2}, [](const Grid& grid, ProcessGroup&) {
          const ModelConfig config{"gpt2", 50, 8, 12, 2, 3};
          return GptAttention("attn", config, {}, summa::layers(grid)).heads;
        });
      },
      {"attention: 3 heads do not divide over 2 ranks; give 4"});
}

}  // namespace
}  // namespace shardbook::summa_test
