// Inputs are cut and outputs are joined: chunks, scatter, gather.

#include <gtest/gtest.h>

#include "core/autograd.h"
#include "tests/chapters/01_data_parallel/data_parallel_support.h"
#include "tests/support/errors.h"

namespace shardbook::data_parallel {
namespace {

using namespace test;

// --- Splitting --------------------------------------------------------------

TEST(DataParallelChunks, FollowTheCeilRule) {
  using Ranges = std::vector<RowRange>;
  EXPECT_EQ(ceil_chunks(5, 4), (Ranges{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(ceil_chunks(8, 4), (Ranges{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
  EXPECT_EQ(ceil_chunks(2, 4), (Ranges{{0, 1}, {1, 2}}));
  EXPECT_EQ(ceil_chunks(7, 3), (Ranges{{0, 3}, {3, 6}, {6, 7}}));
  EXPECT_EQ(ceil_chunks(0, 3), (Ranges{{0, 0}}));
  EXPECT_THROW(ceil_chunks(-1, 3), Error);
  EXPECT_THROW(ceil_chunks(3, 0), Error);
}

TEST(DataParallelChunks, CoalesceClosesAChunkWhenItIsFull) {
  World world(1);
  // 80, 80, 8, 240, 8 bytes of f64, and one f32 tensor in between.
  const Tensors tensors = {random_tensor({10}, 0),
                           random_tensor({10}, 1),
                           random_tensor({3}, 2, DType::kF32),
                           random_tensor({1}, 3),
                           random_tensor({30}, 4),
                           random_tensor({1}, 5)};
  using Chunks = std::vector<std::vector<std::size_t>>;
  EXPECT_EQ(coalesce(tensors, 160), (Chunks{{0, 1}, {3, 4}, {5}, {2}}));
  EXPECT_EQ(coalesce(tensors, 1), (Chunks{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_EQ(coalesce(tensors).size(), 2u);
  EXPECT_TRUE(coalesce({}).empty());
}

// --- Scatter and gather -----------------------------------------------------

TEST(DataParallelScatter, CutsRows) {
  World world(3);
  const Tensor x = random_tensor({7, 2}, 1);
  const Tensors parts = scatter(x, world.devices);
  ASSERT_EQ(parts.size(), 3u);
  const std::int64_t ends[] = {0, 3, 6, 7};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(parts[i].device() == world.devices[i]);
    EXPECT_TRUE(bitwise_equal(parts[i], x.rows_view(ends[i], ends[i + 1])));
  }
  // A tensor that is on its device already is not copied.
  EXPECT_TRUE(parts[0].shares_storage(x));
  EXPECT_TRUE(bitwise_equal(gather(parts, world.devices[0]), x));
}

TEST(DataParallelScatter, GathersTheGradient) {
  World world(3);
  const Tensor x = random_tensor({5, 4}, 1);
  x.set_requires_grad();
  const double error = autograd::check_gradients(
      [&](const Tensors& in) {
        // Pieces 0 and 2 are weighted 1 and 3; piece 1 is not used.
        const Tensors parts = scatter(in[0], world.devices);
        const auto of_piece = [&](std::size_t i, double weight) {
          return to_device(sum(scale(square(parts[i]), weight)),
                           world.devices[0]);
        };
        return add(of_piece(0, 1), of_piece(2, 3));
      },
      {x});
  EXPECT_LT(error, 1e-6);
}

TEST(DataParallelGather, ScattersTheGradient) {
  World world(3);
  Tensors parts;
  for (int i = 0; i < 3; ++i) {
    const auto at = static_cast<std::size_t>(i);
    parts.push_back(to_device(random_tensor({2 + i, 2}, at), world.devices[at])
                        .set_requires_grad());
  }
  const double error = autograd::check_gradients(
      [&](const Tensors& in) {
        const Tensor whole = gather(in, world.devices[2]);
        EXPECT_TRUE(whole.device() == world.devices[2]);
        return sum(mul(whole, square(whole)));
      },
      parts);
  EXPECT_LT(error, 1e-6);
}

TEST(DataParallelGather, MakesAVectorOfScalars) {
  World world(3);
  Tensors outputs;
  for (int i = 0; i < 3; ++i) {
    outputs.push_back(
        to_device(Tensor::full({}, i + 1, {DType::kF64}), world.devices[i]));
  }
  EXPECT_EQ(gather(outputs, world.devices[0]).to_vector<double>(),
            (std::vector<double>{1, 2, 3}));
}

TEST(DataParallelGather, RefusesWhatCannotBeJoined) {
  World world(2);
  expect_text(error_of([&] {
                gather({random_tensor({2, 3}, 0), random_tensor({2, 4}, 0)},
                       world.devices[0]);
              }),
              {"f64[2, 3] and f64[2, 4]", "cannot be joined"});
}

}  // namespace
}  // namespace shardbook::data_parallel
