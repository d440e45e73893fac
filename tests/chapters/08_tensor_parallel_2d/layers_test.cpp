// Layers in blocks against layers of one device.

#include "chapters/08_tensor_parallel_2d/layers.h"

#include <gtest/gtest.h>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/common/sharded/loss.h"
#include "tests/chapters/08_tensor_parallel_2d/layer_cases.h"

namespace shardbook::summa_test {
namespace {

using Calls = std::vector<std::string>;

class SummaLayers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sides, SummaLayers, testing::Values(1, 2, 3));

TEST_P(SummaLayers, EqualOneDevice) {
  for (const auto& [name, layer] : layer_cases()) {
    SCOPED_TRACE(name);
    expect_one_device(layer, {GetParam()});
  }
}

// [BIT] The forward of a linear adds in the order of one device.
TEST(SummaLayers, LinearHasTheBitsOfOneDevice) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const auto equal = on_grid({2}, [&](const Grid& grid, ProcessGroup&) {
      const Tensor x = drawn({4, 6, 8}, dtype, 1), w = drawn({8, 12}, dtype, 2);
      const Tensor b = drawn({12}, dtype, 3);
      const Tensor y = summa::linear(part_of(x, Lies::kBlock, grid),
                                     part_of(w, Lies::kMatrix, grid),
                                     part_of(b, Lies::kVector, grid), grid);
      return bitwise_equal(y, part_of(linear(x, w, b), Lies::kBlock, grid));
    });
    for (const bool each : equal) EXPECT_TRUE(each);
  }
}

// The mask is that of one device, in the rank's block of it.
TEST(SummaLayers, DropoutDrawsTheMaskOfOneDevice) {
  const auto equal = on_grid({2}, [&](const Grid& grid, ProcessGroup&) {
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
      return summa::dropout(part_of(x, Lies::kBlock, grid), 0.4, grid);
    });
    const Tensor heads = masked([&] { return attention(qkv, options); });
    const Tensor own_heads = masked([&] {
      return summa::attention(own_heads_of(qkv, grid), options, grid);
    });
    return bitwise_equal(own, part_of(whole, Lies::kBlock, grid)) &&
           max_abs_difference(own_heads, part_of(heads, Lies::kBlock, grid)) <
               kSameSumF64;
  });
  for (const bool each : equal) EXPECT_TRUE(each);
}

// [b, S, h/q] tokens of 2 numbers along ROW, pieces of h/q^2 along COL.
TEST(SummaLedger, OfTheLayersBesideTheProducts) {
  const std::int64_t batch = 4, s = 3, h = 8, v = 16;
  const auto logs = on_grid({2}, [&](const Grid& grid, ProcessGroup& world) {
    std::vector<Calls> logs;
    const auto run = [&](const Tensor& y) {
      logs.push_back(calls(world));
      world.clear_records();
      autograd::backward({y}, {Tensor::full(y.shape(), 1, y.options())});
      logs.push_back(calls(world));
      world.clear_records();
    };
    const auto leaf = [](const Shape& shape) {
      return drawn(shape, DType::kF64, 1).set_requires_grad();
    };
    const Tensor x = leaf({batch / 2, s, h / 2});
    run(summa::layer_norm(x, leaf({h / 4}), leaf({h / 4}), grid));
    run(summa::vocabulary_parallel_embedding(leaf({v / 2, h / 2}),
                                             drawn_ids({batch, s}, v), grid));
    run(summa::embedding(leaf({v, h / 4}), drawn_ids({batch, s}, v), grid));
    run(summa::classifier(x, leaf({v, h / 4}), leaf({v}), grid));
    run(summa::vocabulary_parallel_cross_entropy(
        leaf({batch / 2, s, v / 2}), drawn_ids({batch, s}, v), grid));
    run(summa::cross_entropy(leaf({batch / 2, s, v}), drawn_ids({batch, s}, v),
                             grid));
    return logs;
  });
  for (const std::vector<Calls>& log : logs) {
    EXPECT_EQ(log[0], (Calls{"all_gather col 4", "all_gather col 4",
                             "all_reduce row 12"}));
    EXPECT_EQ(log[1], (Calls{"all_reduce row 12", "reduce_scatter col 4",
                             "reduce_scatter col 4"}));
    EXPECT_EQ(log[2], Calls{"reduce_scatter col 48"});
    EXPECT_EQ(log[3], Calls{"all_gather col 48"});
    EXPECT_EQ(log[4], Calls{"all_gather col 64"});
    EXPECT_EQ(log[5], Calls{"reduce_scatter col 64"});
    EXPECT_EQ(log[6], (Calls{"all_gather col 64", "all_reduce row 96"}));
    EXPECT_EQ(log[7], (Calls{"all_reduce col 16", "reduce_scatter col 64"}));
    EXPECT_EQ(log[8], (Calls{"all_reduce row 6", "all_reduce row 6",
                             "all_reduce row 6", "all_reduce col 2"}));
    EXPECT_EQ(log[9], Calls{});
    EXPECT_EQ(log[10], Calls{"all_reduce col 2"});
    EXPECT_EQ(log[11], Calls{});
  }
}

// A variance from the rank's own columns alone is another one.
TEST(SummaTraps, ANormOfOwnColumnsIsNotThatOfTheRow) {
  Layer wrong = norm_case();
  wrong.split = [](const Tensors& in, const Grid& grid) {
    return layer_norm(in[0], summa::gather_columns(in[1], *grid.col),
                      summa::gather_columns(in[2], *grid.col));
  };
  EXPECT_GT(difference(wrong, Sizes{2}, DType::kF64), 1e-2);
}

// The vocabulary's offset is j V/q: with i in its place targets are missed.
TEST(SummaTraps, TheOffsetOfTheClassesIsThatOfTheColumn) {
  Layer wrong = vocabulary_loss_case();
  wrong.split = [](const Tensors& in, const Grid& grid) {
    const Tensor targets =
        summa::own_rows(drawn_ids({kBatch, kSeq}, kVocabulary), grid);
    return mean_loss_over_ranks(
        [&](Reduction reduction) {
          return summa::split_cross_entropy(in[0], targets,
                                            grid.i() * in[0].size(-1),
                                            *grid.row, 0, reduction);
        },
        targets, {grid.batch});
  };
  EXPECT_GT(difference(wrong, Sizes{2}, DType::kF64), 1e-2);
}

// The backward of sum_over is the identity: a sum once more counts the logits'
// gradient q times.
TEST(SummaTraps, TheGradientOfASumIsNotSummed) {
  Layer wrong = classifier_case();
  wrong.split = [](const Tensors& in, const Grid& grid) {
    const Tensor w = summa::gather_columns(in[1], *grid.col);
    Tensor partial = matmul(summa::as_matrix(in[0]), w, false, true);
    partial.add_grad_hook([&grid](const Tensor& grad) {
      const Tensor sum = grad.clone();
      grid.row->all_reduce(sum).wait();
      return sum;
    });
    const Tensor logits = summa::sum_over(partial, *grid.row);
    return reshape(add(logits, summa::replicated(in[2], grid.batch)),
                   {in[0].size(0), kSeq, kVocabulary});
  };
  EXPECT_GT(difference(wrong, Sizes{2}, DType::kF64), 1e-2);
}

TEST(SummaLayers, RefuseWhatDoesNotDivide) {
  const std::string text = error_on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh mesh(world, summa::square(2));
    const Grid grid = summa::grid_of(mesh);
    summa::vocabulary_parallel_embedding(drawn({4, 4}, DType::kF64, 1),
                                         drawn_ids({5, 3}, 8), grid);
  });
  EXPECT_NE(text.find("a batch of 5 does not divide over 2 parts; give 6"),
            std::string::npos)
      << text;
  EXPECT_THROW(on_grid({2},
                       [](const Grid& grid, ProcessGroup&) {
                         AttentionOptions options;
                         options.heads = 3;
                         return summa::attention(
                             drawn({2, 2, 12}, DType::kF64, 1), options, grid);
                       }),
               Error);
}

}  // namespace
}  // namespace shardbook::summa_test
