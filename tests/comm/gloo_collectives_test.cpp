// Sizes large enough for Gloo's rings; the conformance suite has the rest.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/processes.h"
#include "core/tensor.h"

namespace shardbook {
namespace {

// More than 8 MiB, and not a multiple of the ranks.
std::int64_t large(DType dtype) {
  return (std::int64_t{8} << 20) /
             static_cast<std::int64_t>(dtype_bytes(dtype)) +
         3;
}

void run(int world_size,
         const std::function<std::string(ProcessGroup&)>& body) {
  for (const std::string& wrong : run_processes(world_size, body)) {
    EXPECT_EQ(wrong, "");
  }
}

TEST(GlooCollectives, RingSumsWithinRoundingOfF64) {
  run(3, [](ProcessGroup& world) -> std::string {
    const auto value = [](int rank, std::int64_t i) {
      return 1.0 / static_cast<double>(i % 1009 + rank + 1);
    };
    const std::int64_t n = large(DType::kF64);
    const Tensor x = Tensor::empty({n}, {DType::kF64, Device()});
    double* data = x.data<double>();
    for (std::int64_t i = 0; i < n; ++i) data[i] = value(world.rank(), i);
    world.all_reduce(x).wait();
    for (std::int64_t i = 0; i < n; ++i) {
      const double sum = value(0, i) + value(1, i) + value(2, i);
      if (std::abs(data[i] - sum) > 1e-12 * sum) return "a sum differs";
    }
    return "";
  });
}

TEST(GlooCollectives, RingReducesEveryTypeAndOperation) {
  run(3, [](ProcessGroup& world) -> std::string {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const auto& [op, expected] :
           {std::pair(ReduceOp::kSum, 4.5), std::pair(ReduceOp::kMax, 3.0),
            std::pair(ReduceOp::kMin, -0.5)}) {
        const TensorOptions options{dtype, Device()};
        const double values[] = {2, 3, -0.5};
        const Tensor x =
            Tensor::full({large(dtype)}, values[world.rank()], options);
        world.all_reduce(x, op).wait();
        if (!bitwise_equal(x,
                           Tensor::full({large(dtype)}, expected, options))) {
          return std::string(dtype_name(dtype)) + " differs";
        }
      }
    }
    return "";
  });
}

TEST(GlooCollectives, RingGathersInPlaceAndApart) {
  run(3, [](ProcessGroup& world) -> std::string {
    const std::int64_t n = large(DType::kF32) / 2;
    const Tensor in_place = Tensor::zeros({3 * n}),
                 apart = Tensor::zeros({3 * n});
    const Tensor expected = Tensor::zeros({3 * n});
    for (int r = 0; r < 3; ++r) expected.flat_view(r * n, {n}).fill(r + 1);
    const Tensor piece = in_place.flat_view(world.rank() * n, {n});
    piece.fill(world.rank() + 1);
    world.all_gather(apart, piece).wait();
    world.all_gather(in_place, piece).wait();
    return bitwise_equal(apart, expected) && bitwise_equal(in_place, expected)
               ? ""
               : "differs";
  });
}

// Gloo has calls in flight on two groups of the same ranks and connections.
TEST(GlooCollectives, RingsOfSeveralGroupsRunAtOnce) {
  run(2, [](ProcessGroup& world) -> std::string {
    const auto other = world.split(0, world.rank(), "other");
    const std::int64_t n = large(DType::kF32);
    const Tensor x = Tensor::full({n}, 1), y = Tensor::full({n}, 2);
    std::vector<Work> works = {world.all_reduce(x), other->all_reduce(y)};
    if (world.rank() == 1) std::swap(works[0], works[1]);
    for (Work& work : works) work.wait();
    return bitwise_equal(x, Tensor::full({n}, 2)) &&
                   bitwise_equal(y, Tensor::full({n}, 4))
               ? ""
               : "a sum differs";
  });
}

}  // namespace
}  // namespace shardbook
