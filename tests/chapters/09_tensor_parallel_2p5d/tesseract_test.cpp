// Squares with a depth: rows cut d times more, gradients summed over the depth.

#include "chapters/09_tensor_parallel_2p5d/tesseract.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <string>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/common/models/models.h"
#include "core/optim.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"
#include "tests/chapters/08_tensor_parallel_2d/layer_cases.h"

namespace shardbook::summa_test {
namespace {

class Tesseract : public testing::TestWithParam<Sizes> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Tesseract,
                         testing::Values(Sizes{1, 1}, Sizes{1, 2}, Sizes{1, 3},
                                         Sizes{2, 2}));

TEST_P(Tesseract, LayersEqualOneDevice) {
  for (const auto& [name, layer] : layer_cases()) {
    SCOPED_TRACE(name);
    expect_one_device(layer, GetParam());
  }
}

// The tests' grids are made by hand; the program's come from squares().
TEST(TesseractMesh, RanksRunAlongRowThenColumnThenDepth) {
  const int q = 2, depth = 3;
  const Topology mesh = tesseract::squares(q, depth);
  EXPECT_EQ(mesh.world_size(), depth * q * q);
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const int j = mesh.coordinate(rank, "row");
    const int i = mesh.coordinate(rank, "col");
    const int k = mesh.coordinate(rank, "dep");
    EXPECT_EQ(rank, j + q * (i + q * k));
    EXPECT_TRUE(j < q && i < q && k < depth) << rank;
  }
}

TEST_P(Tesseract, AGptTrainsAsOnOneDevice) {
  const auto [q, d] = GetParam();
  sharded_test::expect_claims(
      textbook::on_squares(textbook::odd_gpt(0.2), q, d), "squares");
}

TEST_P(Tesseract, ALlamaTrainsAsOnOneDevice) {
  const auto [q, d] = GetParam();
  for (const std::string family : {"llama", "qwen3"}) {
    sharded_test::expect_claims(
        textbook::on_squares(textbook::odd_llama(family), q, d), family);
  }
}

// [BIT] One square with a depth of 1 is the 2D chapter.
TEST(TesseractDepth, OfOneIsTheSquare) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const auto run = [dtype](const Grid& grid) {
      std::vector<double> values;
      for (const auto& [name, layer] : layer_cases()) {
        Tensors parts;
        for (const Input& input : layer.inputs) {
          const Tensor whole = drawn(input.shape, dtype, parts.size() + 1);
          parts.push_back(part_of(whole, input, grid).set_requires_grad());
        }
        const Tensor y = layer.split(parts, grid);
        autograd::backward({y}, {drawn(y.shape(), dtype, 9)});
        parts.push_back(y.detach());
        for (const Tensor& each : parts) {
          const Tensor& shown = each.grad().defined() ? each.grad() : each;
          for (const double v : shown.to_vector<double>()) values.push_back(v);
        }
      }
      return values;
    };
    const auto square = on_ranks(4, [&](ProcessGroup& world) {
      DeviceMesh mesh(world, summa::square(2));
      return run(summa::grid_of(mesh));
    });
    const auto depth_of_one = on_ranks(4, [&](ProcessGroup& world) {
      DeviceMesh mesh(world, tesseract::squares(2, 1));
      return run(summa::grid_of(mesh));
    });
    EXPECT_EQ(square, depth_of_one);
  }
}

TEST(TesseractDepth, LinearHasTheBitsOfOneDevice) {
  expect_linear_bits({2, 2});
}

// [BIT] Different data at each depth, one update for all.
TEST(TesseractDepth, WeightsStayEqual) {
  const auto trained = on_grid({2, 2}, [](const Grid& grid, ProcessGroup&) {
    InitOptions init;
    init.seed = 3;
    const ModelConfig config{"gpt2", 50, 8, 36, 2, 6};
    Gpt model(config, init, summa::layers(grid));
    const auto optimizer = make_optimizer("adamw", model.parameters(), {});
    for (int step = 0; step < 5; ++step) {
      summa::layers(grid)
          .loss(model(drawn_ids({12, 4 + step % 3}, 50)),
                drawn_ids({12, 4 + step % 3}, 43))
          .backward();
      optimizer->step();
      model.clear_grad();
    }
    std::vector<double> values;
    for (const Tensor& each : model.parameters()) {
      for (const double v : each.to_vector<double>()) values.push_back(v);
    }
    return values;
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(trained[rank], trained[rank + 4]) << rank;
  }
  EXPECT_NE(trained[0], trained[1]);
}

// X [16, 256] and W [256, 1024] on 2 x 2 x 2 ranks.
TEST(TesseractLedger, OfTheDocumentsLinear) {
  const auto logs = on_grid({2, 2}, [&](const Grid& grid, ProcessGroup& world) {
    Tensor x = drawn({4, 128}, DType::kF32, 1).set_requires_grad();
    Tensor w = drawn({128, 512}, DType::kF32, 2).set_requires_grad();
    const Tensor y = summa::linear(x, w, Tensor(), grid);
    EXPECT_EQ(elements_sent(world), 66048);
    const std::size_t forward = world.records().size();
    autograd::backward({y}, {drawn(y.shape(), DType::kF32, 3)});
    EXPECT_EQ(elements_sent(world), 3 * 66048 + 65536);
    const Calls all = calls(world);
    return std::pair(
        Calls(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(forward)),
        all.back());
  });
  for (const auto& [forward, last] : logs) {
    EXPECT_EQ(forward, (Calls{"broadcast row 512", "broadcast col 65536",
                              "broadcast row 512", "broadcast col 65536"}));
    // After the layer's backward
    EXPECT_EQ(last, "all_reduce dep 65536");
  }
}

// b/(d q) sequences: 2D's messages for the rows of one depth, and the depth sum
// of every parameter's gradient. The loss is summed over all of XZ.
TEST(TesseractLedger, OfTheLayersBesideTheProducts) {
  const std::int64_t batch = 8, s = 3, h = 8, v = 16;
  const auto ids = [=] { return drawn_ids({batch, s}, v); };
  on_grid({2, 2}, [&](const Grid& grid, ProcessGroup& world) {
    expect_calls(world,
                 summa::layer_norm(leaf({batch / 4, s, h / 2}), leaf({h / 4}),
                                   leaf({h / 4}), grid),
                 {"all_gather col 4", "all_gather col 4", "all_reduce row 12"},
                 {"all_reduce dep 2", "all_reduce dep 2", "all_reduce row 12",
                  "reduce_scatter col 4", "reduce_scatter col 4"});
    expect_calls(
        world,
        summa::vocabulary_parallel_embedding(leaf({v / 2, h / 2}), ids(), grid),
        {"reduce_scatter col 48"}, {"all_gather col 48", "all_reduce dep 32"});
    expect_calls(world, summa::embedding(leaf({v, h / 4}), ids(), grid),
                 {"all_gather col 64"},
                 {"all_reduce dep 32", "reduce_scatter col 64"});
    expect_calls(world,
                 summa::vocabulary_parallel_cross_entropy(
                     leaf({batch / 4, s, v / 2}), ids(), grid),
                 {"all_reduce row 6", "all_reduce row 6", "all_reduce row 6",
                  "all_reduce dep-col 2"},
                 {});
  });
}

TEST(TesseractMlp, HasTheShapesOfTheDocuments) {
  // The documents' partition: by ranks of DEP, of COL, of ROW
  expect_all(on_grid({2, 2}, [](const Grid& grid, ProcessGroup&) {
    const Tensor x = drawn({16, 256}, DType::kF32, 1);
    const Tensor expected =
        chunk(chunk(chunk(x, 0, *grid.depth), 0, *grid.col), 1, *grid.row);
    return expected.shape() == Shape{4, 128} &&
           bitwise_equal(expected, summa::own_block(x, grid));
  }));
}

/// dW of a linear without the depth in its backward, against one device.
double without_the_depth(bool equal_rows) {
  return largest_of(on_grid({2, 2}, [=](const Grid& grid, ProcessGroup&) {
    const Tensor half = drawn({4, 8}, DType::kF64, 1);
    const Tensor rows = equal_rows ? half : drawn({4, 8}, DType::kF64, 11);
    const Tensor x = concat({half, rows}, 0);
    Tensor w = drawn({8, 4}, DType::kF64, 2).set_requires_grad();
    mean(square(matmul(x, w))).backward();
    Tensor own = part_of(w.detach(), Lies::kMatrix, grid);
    own.set_requires_grad();
    Grid no_depth = grid;
    no_depth.depth = nullptr;
    // The mean of this depth's half, as if it were the whole batch
    const Tensor y =
        summa::linear(part_of(x, Lies::kBlock, grid), own, Tensor(), no_depth);
    autograd::backward({y}, {scale(y.detach(), 2.0 / (4 * 4))});
    return max_abs_difference(own.grad(),
                              part_of(w.grad(), Lies::kMatrix, grid));
  }));
}

// With equal data at all depths the mistake would not show.
TEST(TesseractTraps, WithoutTheDepthReduceEachDepthTrainsItsOwnModel) {
  EXPECT_LT(without_the_depth(/*equal_rows=*/true), 1e-12);
  EXPECT_GT(without_the_depth(/*equal_rows=*/false), 1e-3);
}

}  // namespace
}  // namespace shardbook::summa_test
