// Inputs are cut and outputs are joined: chunks, scatter, gather.

#include <gtest/gtest.h>

#include <memory>

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

TEST(DataParallelScatter, CutsTensorsAndSharesObjects) {
  World world(3);
  auto number = std::make_shared<int>(42);
  const Tensor x = random_tensor({7, 2}, 1);
  const Tensor y = random_tensor({7}, 2);
  const Value inputs(Value::List{
      Value(x),
      Value(Value::Dictionary{{"y", Value(y)}, {"n", Value::of(number)}})});
  const std::vector<Value> parts = scatter(inputs, world.devices);
  ASSERT_EQ(parts.size(), 3u);
  const std::vector<std::int64_t> rows = {3, 3, 1};
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const Tensor& part = parts[i][0].tensor();
    EXPECT_TRUE(part.device() == world.devices[i]);
    EXPECT_EQ(part.size(0), rows[i]);
    EXPECT_TRUE(bitwise_equal(part, x.rows_view(begin, begin + rows[i])));
    EXPECT_TRUE(bitwise_equal(parts[i][1]["y"].tensor(),
                              y.rows_view(begin, begin + rows[i])));
    EXPECT_EQ(parts[i][1]["n"].object_as<int>(), number);
    begin += rows[i];
  }
  // What is on its device already is not copied.
  EXPECT_TRUE(parts[0][0].tensor().shares_storage(x));
}

TEST(DataParallelScatter, ReachesAllDevicesWithoutTensors) {
  World world(3);
  auto number = std::make_shared<int>(1);
  EXPECT_EQ(scatter(Value::of(number), world.devices).size(), 3u);
}

TEST(DataParallelScatter, RefusesScalarsAndDifferentRows) {
  World world(4);
  expect_text(error_of([&] { scatter(Tensor::full({}, 1), world.devices); }),
              {"has no dim 0"});
  const Value uneven(Value::List{Value(random_tensor({8, 1}, 0)),
                                 Value(random_tensor({2, 1}, 1))});
  expect_text(error_of([&] { scatter(uneven, world.devices); }),
              {"4 and 2 chunks"});
}

TEST(DataParallelScatter, GathersTheGradient) {
  for (const std::int64_t dim : {0, 1, -1}) {
    World world(3);
    const Tensor x = random_tensor({5, 4}, 1);
    x.set_requires_grad();
    const std::vector<Device> devices = world.devices;
    const double error = autograd::check_gradients(
        [&](const Tensors& in) {
          Tensor total;
          // Each piece is weighted in its own way; the second not at all.
          const auto parts = scatter(in[0], devices, dim);
          for (std::size_t i = 0; i < parts.size(); ++i) {
            if (i == 1) continue;
            const Tensor part = to_device(
                sum(scale(square(parts[i].tensor()), 1.0 + i)), devices[0]);
            total = total.defined() ? add(total, part) : part;
          }
          return total;
        },
        {x});
    EXPECT_LT(error, 1e-6) << "dim " << dim;
  }
}

TEST(DataParallelGather, IsTheInverseOfScatter) {
  for (const std::int64_t dim : {0, 1, 2}) {
    World world(3);
    const Tensor x = random_tensor({5, 4, 7}, 1);
    const Value back =
        gather(scatter(x, world.devices, dim), world.devices[0], dim);
    EXPECT_TRUE(bitwise_equal(back.tensor(), x)) << "dim " << dim;
  }
}

TEST(DataParallelGather, ScattersTheGradient) {
  for (const std::int64_t dim : {0, 1}) {
    World world(3);
    Tensors parts;
    for (std::size_t i = 0; i < 3; ++i) {
      const Tensor part =
          to_device(random_tensor({2 + static_cast<int>(i) * (dim == 0), 2}, i),
                    world.devices[i]);
      parts.push_back(part.set_requires_grad());
    }
    const double error = autograd::check_gradients(
        [&](const Tensors& in) {
          const Tensor whole =
              gather({in.begin(), in.end()}, world.devices[2], dim).tensor();
          EXPECT_TRUE(whole.device() == world.devices[2]);
          return sum(mul(whole, square(whole)));
        },
        parts);
    EXPECT_LT(error, 1e-6) << "dim " << dim;
  }
}

TEST(DataParallelGather, MakesAVectorOfScalars) {
  World world(3);
  std::vector<Value> outputs;
  for (int i = 0; i < 3; ++i) {
    outputs.push_back(
        to_device(Tensor::full({}, i + 1, {DType::kF64}), world.devices[i]));
  }
  const Tensor all = gather(outputs, world.devices[0]).tensor();
  EXPECT_EQ(all.to_vector<double>(), (std::vector<double>{1, 2, 3}));
}

TEST(DataParallelGather, JoinsListsAndDictionariesByEntry) {
  World world(2);
  auto output = [&](int i) {
    return Value(Value::Dictionary{
        {"a", Value(to_device(Tensor::full({1, 2}, i), world.devices[i]))},
        {"b", Value(Value::List{Value(
                  to_device(Tensor::full({2, 1}, 10 + i), world.devices[i]))})},
        {"none", Value()}});
  };
  const Value all = gather({output(0), output(1)}, world.devices[0]);
  EXPECT_EQ(all["a"].tensor().to_vector<double>(),
            (std::vector<double>{0, 0, 1, 1}));
  EXPECT_EQ(all["b"][0].tensor().to_vector<double>(),
            (std::vector<double>{10, 10, 11, 11}));
  EXPECT_TRUE(all["none"].is_object());
}

TEST(DataParallelGather, RefusesWhatCannotBeJoined) {
  World world(2);
  const Value tensor(random_tensor({2, 3}, 0));
  expect_text(error_of([&] {
                gather({tensor, Value()}, world.devices[0]);
              }),
              {"a tensor"});
  auto object = Value::of(std::make_shared<int>(1));
  expect_text(error_of([&] {
                gather({object, object}, world.devices[0]);
              }),
              {"cannot be joined"});
  expect_text(
      error_of([&] {
        gather({tensor, Value(random_tensor({2, 4}, 0))}, world.devices[0]);
      }),
      {"shapes [2, 3] and [2, 4]"});
}

}  // namespace
}  // namespace shardbook::data_parallel
