// Linear layers on a cube: indices, layouts, messages, memory.

#include "chapters/10_tensor_parallel_3d/cube.h"

#include <gtest/gtest.h>

#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/common/run/worlds.h"
#include "sim/world.h"
#include "tests/chapters/10_tensor_parallel_3d/cube_support.h"
#include "tests/support/errors.h"

namespace shardbook::cube_test {
namespace {

/// 0, 1, 2, ...: sums of their products are exact in f32.
Tensor integers(const Shape& shape, std::int64_t below) {
  const Tensor x = Tensor::empty(shape, {DType::kF32, Device()});
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<float>()[i] = static_cast<float>((i * 5 + i / 7) % below);
  }
  return x;
}

// The formulas for the parts, written out: rows and columns of X, W and Y.
TEST(CubeIndices, AreThoseOfThePage) {
  const std::int64_t m = 8, k = 16, n = 12;
  for (const int l : {1, 2}) {
    expect_all(on_cube(l, [=](const Cube& cube, ProcessGroup& world) {
      const auto [side, i, j, at_k] = cube.place;
      EXPECT_EQ(world.rank(), i + l * (j + l * at_k));
      const auto block = [](const Tensor& x, std::int64_t row,
                            std::int64_t rows, std::int64_t column,
                            std::int64_t columns) {
        return slice(slice(x, 0, row, row + rows), 1, column, column + columns);
      };
      const Tensor x = integers({m, k}, 11), w = integers({k, n}, 13);
      const Tensor own_x =
          block(x, (i * l + j) * m / (l * l), m / (l * l), at_k * k / l, k / l);
      const Tensor own_w =
          block(w, (at_k * l + i) * k / (l * l), k / (l * l), j * n / l, n / l);
      const Tensor own_y = block(matmul(x, w), (i * l + at_k) * m / (l * l),
                                 m / (l * l), j * n / l, n / l);
      const Tensor part = part_of(x, Lies::kBlock, cube, Layout::kStraight);
      const Tensor weight = part_of(w, Lies::kWeight, cube, Layout::kStraight);
      const Tensor y = cube::product(part, weight, cube);
      EXPECT_EQ(cube::layout_of(y), Layout::kSwapped);
      // [BIT]
      return bitwise_equal(part, own_x) && bitwise_equal(weight, own_w) &&
             bitwise_equal(y, own_y);
    }));
  }
}

/// Two linear layers: straight, swapped, straight again.
Layer mlp_case() {
  return {{{{8, 3, 16}},
           {{16, 24}, Lies::kWeight},
           {{24}, Lies::kColumns, Layout::kSwapped},
           {{24, 8}, Lies::kWeight, Layout::kSwapped},
           {{8}, Lies::kColumns}},
          {},
          [](const Tensors& in) {
            return linear(gelu(linear(in[0], in[1], in[2])), in[3], in[4]);
          },
          [](const Tensors& in, const Cube& cube) {
            const Tensor inner = gelu(cube::linear(in[0], in[1], in[2], cube));
            EXPECT_EQ(cube::layout_of(inner), Layout::kSwapped);
            const Tensor y = cube::linear(inner, in[3], in[4], cube);
            EXPECT_EQ(cube::layout_of(y), Layout::kStraight);
            return y;
          }};
}

TEST(CubeLinear, TwoLayersReturnToTheLayoutTheyBeganWith) {
  for (const bool keep : {true, false}) {
    EXPECT_LT(difference(mlp_case(), 1, DType::kF64, keep), 1e-12);
    EXPECT_LT(difference(mlp_case(), 2, DType::kF64, keep), 1e-12);
    EXPECT_LT(difference(mlp_case(), 2, DType::kF32, keep), 2e-4);
  }
}

// X [16, 256] and W [256, 1024] on 2 x 2 x 2 ranks.
TEST(CubeLedger, OfTheDocumentsLinear) {
  for (const bool keep : {true, false}) {
    const auto logs = on_cube(
        2,
        [&](const Cube& cube, ProcessGroup& world) {
          Tensor x = drawn({4, 128}, DType::kF32, 1).set_requires_grad();
          Tensor w = drawn({64, 512}, DType::kF32, 2).set_requires_grad();
          cube::with_layout(x, Layout::kStraight);
          const Tensor y = cube::product(x, w, cube);
          EXPECT_EQ(y.shape(), (Shape{4, 512}));
          EXPECT_EQ(elements_sent(world), 35328);
          autograd::backward({y}, {drawn(y.shape(), DType::kF32, 3)});
          const double again = (2.0 - 1) / 8 * (16 * 256 + 256 * 1024);
          EXPECT_EQ(elements_sent(world), 2 * 35328 + (keep ? 0 : again));
          return calls(world);
        },
        keep);
    for (const Calls& log : logs) {
      Calls expected = {"all_gather j 1024", "all_gather i 65536",
                        "reduce_scatter k 4096", "all_gather k 4096"};
      if (!keep) {
        expected.push_back("all_gather i 65536");
        expected.push_back("all_gather j 1024");
      }
      expected.push_back("reduce_scatter j 1024");
      expected.push_back("reduce_scatter i 65536");
      EXPECT_EQ(log, expected);
    }
  }
}

// --- Layouts -----------------------------------------------------------------

TEST(CubeLayouts, ASumOfTwoIsRefused) {
  expect_text(
      error_on_cube([](const Cube& cube) {
        const Tensor x =
            cube::with_layout(drawn({2, 8}, DType::kF64, 1), Layout::kStraight);
        // A residual branch with an odd number of linear layers. The shapes fit
        return add(x, cube::product(x, drawn({4, 8}, DType::kF64, 2), cube));
      }),
      {"add: operands are laid out in two ways"});
}

TEST(CubeLayouts, TravelThroughElementWiseOperations) {
  const Tensor x =
      cube::with_layout(drawn({2, 8}, DType::kF64, 1), Layout::kSwapped);
  const Tensor plain = drawn({8}, DType::kF64, 2);
  for (const Tensor& y :
       {gelu(x), scale(x, 2), reshape(x, {4, 4}), dropout(x, 0.5), x.detach(),
        add(x, plain), mul(plain, x), x.rows_view(0, 1)}) {
    EXPECT_EQ(cube::layout_of(y), Layout::kSwapped);
  }
  // Results of other operations have no layout
  EXPECT_THROW(cube::layout_of(sum(x, 0)), Error);
}

const BlockPart kSquare = {.in = 8, .out = 8, .bias = true, .stddev = 1};

TEST(CubeLayouts, ALayerRefusesWhatItsWeightDoesNotLieFor) {
  expect_text(
      error_on_cube([](const Cube& cube) {
        AnyModule fc1 = cube::layers(cube).linear("fc1", kSquare, {});
        return fc1(fc1(cube::with_layout(drawn({2, 4}, DType::kF32, 1),
                                         Layout::kStraight)));
      }),
      {"fc1: its weight lies for straight activations; this one is swapped: an "
       "odd number of linear layers lies before it"});
}

// The layout does not come from the last layer built: building more layers
// between the calls changes nothing.
TEST(CubeLayouts, DoNotDependOnTheOrderOfConstruction) {
  expect_all(on_cube(2, [](const Cube& cube, ProcessGroup&) {
    AnyModule fc1 = cube::layers(cube).linear("fc1", kSquare, {});
    const Tensor x =
        cube::with_layout(drawn({2, 4}, DType::kF32, 1), Layout::kStraight);
    const Tensor before = fc1(x);
    cube::layers(cube).linear("other", kSquare, {});
    return bitwise_equal(before, fc1(x));
  }));
}

TEST(CubeSizes, NameTheNumbersThatFormCubes) {
  EXPECT_EQ(cube::side_of(27, "--world-size"), 3);
  const std::string error = error_of([&] { cube::side_of(9, "--world-size"); });
  EXPECT_EQ(error, "--world-size 9: the ranks form a cube; give 8 or 27");
}

}  // namespace
}  // namespace shardbook::cube_test
