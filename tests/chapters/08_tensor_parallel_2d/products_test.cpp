// SUMMA's three products: blocks, bits, gradients, messages, buffers.

#include "chapters/08_tensor_parallel_2d/products.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/chapters/08_tensor_parallel_2d/summa_support.h"
#include "tests/support/errors.h"

namespace shardbook::summa_test {
namespace {

class SummaProducts : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sides, SummaProducts, testing::Values(1, 2, 3));

/// Sizes that divide by 2 and by 3, and are not equal.
constexpr std::int64_t kM = 12, kK = 18, kN = 24;

// [BIT] The loop over t adds in the same order as one product over all of k.
TEST_P(SummaProducts, AbHasTheBitsOfOneDevice) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    expect_all(on_grid({GetParam()}, [&](const Grid& grid, auto&) {
      const Tensor a = drawn({kM, kK}, dtype, 1), b = drawn({kK, kN}, dtype, 2);
      const Tensor bias = drawn({kN}, dtype, 3);
      const Tensor own_bias = take_part(bias, {{0, grid.j(), grid.q()}});
      const Tensor c =
          summa::multiply_ab(part_of(a, Lies::kMatrix, grid),
                             part_of(b, Lies::kMatrix, grid), grid, own_bias);
      return bitwise_equal(c, part_of(linear(a, b, bias), Lies::kMatrix, grid));
    }));
  }
}

/// The sum over blocks t of op(a_t) op(b_t), added in the order of ranks.
Tensor in_rank_order(const Tensor& a, std::int64_t a_dim, const Tensor& b,
                     std::int64_t b_dim, int q) {
  Tensor sum;
  for (int t = 0; t < q; ++t) {
    const Tensor part =
        matmul(take_part(a, {{a_dim, t, q}}), take_part(b, {{b_dim, t, q}}),
               a_dim == 0, b_dim == 1);
    sum = t == 0 ? part : add(sum, part);
  }
  return sum;
}

// [BIT] against the partial sums of the ranks, added in rank order.
TEST_P(SummaProducts, ReducedProductsAddInTheOrderOfRanks) {
  const int q = GetParam();
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    expect_all(on_grid({q}, [&](const Grid& grid, auto&) {
      const Tensor a = drawn({kM, kN}, dtype, 1), b = drawn({kK, kN}, dtype, 2);
      const Tensor c = drawn({kM, kK}, dtype, 3);
      const Tensor abt =
          summa::multiply_abt(part_of(a, Lies::kMatrix, grid),
                              part_of(b, Lies::kMatrix, grid), grid);
      const Tensor atb =
          summa::multiply_atb(part_of(c, Lies::kMatrix, grid),
                              part_of(a, Lies::kMatrix, grid), grid);
      return bitwise_equal(abt, part_of(in_rank_order(a, 1, b, 1, q),
                                        Lies::kMatrix, grid)) &&
             bitwise_equal(atb, part_of(in_rank_order(c, 0, a, 0, q),
                                        Lies::kMatrix, grid));
    }));
  }
}

TEST_P(SummaProducts, AreClosedUnderDifferentiation) {
  const Sizes sizes{GetParam()};
  const auto layer = [](const Shape& a, const Shape& b, bool ta, bool tb,
                        auto product) {
    return Layer{
        {{a, Lies::kMatrix}, {b, Lies::kMatrix}},
        Lies::kMatrix,
        [=](const Tensors& in) { return matmul(in[0], in[1], ta, tb); },
        [=](const Tensors& in, const Grid& grid) {
          return product(in[0], in[1], grid);
        }};
  };
  expect_one_device(layer({kM, kK}, {kK, kN}, false, false, summa::product_ab),
                    sizes);
  expect_one_device(layer({kM, kN}, {kK, kN}, false, true, summa::product_abt),
                    sizes);
  expect_one_device(layer({kM, kK}, {kM, kN}, true, false, summa::product_atb),
                    sizes);
}

// The root is a group rank: the second square of a world has other world ranks.
TEST(SummaProducts, EachSquareOfAWorldWorksByItself) {
  expect_all(on_ranks(8, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"dp", "col", "row"}, {2, 2, 2}));
    Grid grid;
    grid.row = &mesh.group("row");
    grid.col = grid.batch = &mesh.group("col");
    const auto stream = static_cast<std::uint64_t>(10 * mesh.coordinate("dp"));
    const Tensor a = drawn({kM, kK}, DType::kF64, stream + 1);
    const Tensor b = drawn({kK, kN}, DType::kF64, stream + 2);
    const Tensor c = summa::multiply_ab(part_of(a, Lies::kMatrix, grid),
                                        part_of(b, Lies::kMatrix, grid), grid);
    return bitwise_equal(c, part_of(matmul(a, b), Lies::kMatrix, grid));
  }));
}

// X [16, 256] and W [256, 1024] on 2 x 2 ranks.
TEST(SummaLedger, OfTheDocumentsLinear) {
  const auto logs = on_grid({2}, [&](const Grid& grid, ProcessGroup& world) {
    Tensor x = drawn({8, 128}, DType::kF32, 1).set_requires_grad();
    Tensor w = drawn({128, 512}, DType::kF32, 2).set_requires_grad();
    const Tensor y = summa::linear(x, w, Tensor(), grid);
    const Calls forward = calls(world);
    const double sent = elements_sent(world);
    autograd::backward({y}, {drawn(y.shape(), DType::kF32, 3)});
    Calls backward = calls(world);
    backward.erase(
        backward.begin(),
        backward.begin() + static_cast<std::ptrdiff_t>(forward.size()));
    EXPECT_EQ(sent, 66560);
    EXPECT_EQ(elements_sent(world), 199680);
    return std::pair(forward, backward);
  });
  for (const auto& [forward, backward] : logs) {
    EXPECT_EQ(forward, (Calls{"broadcast row 1024", "broadcast col 65536",
                              "broadcast row 1024", "broadcast col 65536"}));
    // dX, then dW: the second broadcast is on its way before the first sum
    EXPECT_EQ(backward, (Calls{"broadcast col 65536", "broadcast col 65536",
                               "reduce row 1024", "reduce row 1024",
                               "broadcast row 1024", "broadcast row 1024",
                               "reduce col 65536", "reduce col 65536"}));
  }
}

TEST(SummaLedger, AnInputWithoutGradientCausesNoMessages) {
  const auto logs = on_grid({2}, [&](const Grid& grid, ProcessGroup& world) {
    const Tensor x = drawn({4, 4}, DType::kF64, 1);
    Tensor w = drawn({4, 6}, DType::kF64, 2).set_requires_grad();
    const Tensor y = summa::linear(x, w, Tensor(), grid);
    world.clear_records();
    autograd::backward({y}, {drawn(y.shape(), DType::kF64, 3)});
    return calls(world);
  });
  for (const Calls& log : logs) {
    EXPECT_EQ(log, (Calls{"broadcast row 16", "broadcast row 16",
                          "reduce col 24", "reduce col 24"}));
  }
}

// Two buffers for each operand that is received, fewer for fewer operands: no
// rank ever holds all rows or all columns.
TEST(SummaMemory, TwoBuffersForEachOperandInFlight) {
  const std::int64_t m = 5, k = 7, n = 11;
  for (const int q : {2, 3, 4}) {
    on_grid({q}, [&](const Grid& grid, ProcessGroup&) {
      const Tensor a = drawn({m, k}, DType::kF64, 1);
      const Tensor b = drawn({k, n}, DType::kF64, 2);
      const Tensor c = drawn({m, n}, DType::kF64, 3);
      Device device = RankContext::current().device;
      const auto expect_peak = [&](auto multiply, const Tensor& x,
                                   const Tensor& y, std::int64_t moved) {
        device.reset_peak_memory();
        multiply(x, y, grid);
        EXPECT_EQ(device.memory().peak(MemoryKind::kCommunication),
                  8 * std::min(2, q - 1) * moved)
            << q;
      };
      const auto ab = [](const Tensor& x, const Tensor& y, const Grid& grid) {
        return summa::multiply_ab(x, y, grid);
      };
      expect_peak(ab, a, b, m * k + k * n);
      expect_peak(summa::multiply_abt, c, b, k * n + m * k);
      expect_peak(summa::multiply_atb, a, c, m * k + k * n);
    });
  }
}

TEST(SummaGrid, NamesTheNumbersThatFormSquares) {
  EXPECT_EQ(summa::side_of(1, 1, "--world-size"), 1);
  EXPECT_EQ(summa::side_of(9, 1, "--world-size"), 3);
  EXPECT_EQ(summa::side_of(8, 2, "--world-size"), 2);
  const std::string error =
      error_of([&] { summa::side_of(6, 1, "--world-size"); });
  EXPECT_EQ(error, "--world-size 6: the ranks form a square; give 4 or 9");
  EXPECT_THROW(summa::side_of(8, 3, "--world-size"), Error);
}

// rank = q i + j, and a vector's piece begins at j N/q + i N/q^2.
TEST(SummaGrid, RanksRunAlongRowThenColumn) {
  const int q = 3;
  const Topology mesh = summa::square(q);
  EXPECT_EQ(mesh.world_size(), q * q);
  for (int rank = 0; rank < q * q; ++rank) {
    const summa::Place place = summa::place_of(rank, q);
    EXPECT_EQ(mesh.coordinate(rank, "col"), place.i);
    EXPECT_EQ(mesh.coordinate(rank, "row"), place.j);
    EXPECT_EQ(rank, q * place.i + place.j);
    const auto runs = runs_of(summa::vector_part(place), {36}, 0);
    ASSERT_EQ(runs.size(), 1u);
    EXPECT_EQ(runs[0].begin, 12 * place.j + 4 * place.i);
    EXPECT_EQ(runs[0].count, 4);
  }
  // The rank in a COL group is the row, in a ROW group the column
  const auto seen = on_grid({q}, [](const Grid& grid, ProcessGroup& world) {
    return std::vector<int>{world.rank(), grid.col->rank(), grid.row->rank()};
  });
  for (const std::vector<int>& each : seen) {
    EXPECT_EQ(each[0], q * each[1] + each[2]);
  }
}

}  // namespace
}  // namespace shardbook::summa_test
