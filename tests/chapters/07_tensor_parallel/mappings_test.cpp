// The conjugate operators: what each sends, and which gradients arrive.

#include "chapters/07_tensor_parallel/mappings.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/support/errors.h"

namespace shardbook::tensor_parallel {
namespace {

/// 2 x 12 numbers, different on every rank.
Tensor numbers(int rank, const Shape& shape = {2, 12}) {
  Tensor x = Tensor::empty(shape, {DType::kF64, Device()});
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<double>()[i] = static_cast<double>((7 * i + 5 * rank * rank) % 23);
  }
  return x;
}

/// The sum over the ranks of a function of the rank.
Tensor sum_over(int ranks, const std::function<Tensor(int)>& of) {
  Tensor total = of(0);
  for (int r = 1; r < ranks; ++r) total = add(total, of(r));
  return total;
}

struct Result {
  Tensor y, dx;
  std::vector<CommRecord> log;
};

/// Applies `op` to x and sends `upstream(rank)` back.
Result apply(ProcessGroup& group, const Tensor& x,
             const std::function<Tensor(const Tensor&)>& op,
             const std::function<Tensor(const Tensor& y)>& upstream) {
  const Tensor leaf = x.clone().set_requires_grad();
  // reduce_from overwrites its input, which must therefore be no leaf
  const Tensor y = op(scale(leaf, 1));
  autograd::backward({y}, {upstream(y)});
  return {y.detach(), leaf.grad(), group.records()};
}

class Mappings : public ::testing::TestWithParam<int> {};

TEST_P(Mappings, CopyToAddsGradientsOnly) {
  const int p = GetParam();
  on_ranks(p, [&](ProcessGroup& group) {
    const Result result = apply(
        group, numbers(0), [&](const Tensor& x) { return copy_to(x, group); },
        [&](const Tensor&) { return numbers(group.rank() + 1); });
    EXPECT_TRUE(bitwise_equal(result.y, numbers(0)));
    EXPECT_TRUE(bitwise_equal(
        result.dx, sum_over(p, [](int r) { return numbers(r + 1); })));
    EXPECT_EQ(result.log.size(), p > 1 ? 1u : 0u);
  });
}

// The upstream gradient is whole on every rank: a sum over ranks would count it
// P times.
TEST_P(Mappings, ReduceFromPassesTheGradientOnAsItIs) {
  const int p = GetParam();
  on_ranks(p, [&](ProcessGroup& group) {
    const Result result = apply(
        group, numbers(group.rank()),
        [&](const Tensor& x) { return reduce_from(x, group); },
        [&](const Tensor&) { return numbers(9); });
    EXPECT_TRUE(
        bitwise_equal(result.y, sum_over(p, [](int r) { return numbers(r); })));
    EXPECT_TRUE(bitwise_equal(result.dx, numbers(9)));
    EXPECT_EQ(result.log.size(), p > 1 ? 1u : 0u);
  });
}

TEST_P(Mappings, ScatterAndGatherAreInverse) {
  const int p = GetParam();
  on_ranks(p, [&](ProcessGroup& group) {
    for (const std::int64_t dim : {-1, 0, 1}) {
      const Shape shape = dim == 0 ? Shape{12, 2} : Shape{2, 12};
      const Tensor whole = numbers(0, shape), grad = numbers(1, shape);
      const std::int64_t own = 12 / p, cut = dim == 0 ? 0 : 1;
      const auto part = [&](const Tensor& x) {
        return slice(x, cut, group.rank() * own, (group.rank() + 1) * own);
      };
      const Result scattered = apply(
          group, whole,
          [&](const Tensor& x) { return scatter_to(x, group, {dim}); },
          [&](const Tensor&) { return part(grad); });
      EXPECT_TRUE(bitwise_equal(scattered.y, part(whole)));
      EXPECT_TRUE(bitwise_equal(scattered.dx, grad));
      // All ranks compute the same afterwards: the gradient is cut, not added
      const Result gathered = apply(
          group, part(whole),
          [&](const Tensor& x) { return gather_from(x, group, {dim}); },
          [&](const Tensor&) { return grad; });
      EXPECT_TRUE(bitwise_equal(gathered.y, whole));
      EXPECT_TRUE(bitwise_equal(gathered.dx, part(grad)));
    }
  });
}

// Column and row layers: one message forward and one backward each.
TEST_P(Mappings, GatherToParallelAndReduceScatterAreConjugate) {
  const int p = GetParam();
  on_ranks(p, [&](ProcessGroup& group) {
    for (const std::int64_t dim : {1, 0}) {
      const Shape shape = dim == 0 ? Shape{12, 2} : Shape{2, 12};
      const std::int64_t own = 12 / p, r = group.rank();
      const auto part = [&](const Tensor& x) {
        return slice(x, dim, r * own, (r + 1) * own);
      };
      const auto mine = [&](const Tensor&) { return numbers(r, shape); };
      const auto whole = [&](const Tensor&) { return numbers(7, shape); };
      const auto part_of_whole = [&](const Tensor& y) {
        return part(whole(y));
      };
      const Tensor total =
          sum_over(p, [&](int rank) { return numbers(rank, shape); });
      group.clear_records();
      const auto expect_sent = [&](const Result& result, const Log& expected) {
        EXPECT_EQ(log_of(result.log), p == 1 ? Log{} : expected);
        group.clear_records();
      };
      const Result gathered = apply(
          group, part(numbers(7, shape)),
          [&](const Tensor& x) { return gather_to_parallel(x, group, {dim}); },
          mine);
      EXPECT_TRUE(bitwise_equal(gathered.y, numbers(7, shape)));
      EXPECT_TRUE(bitwise_equal(gathered.dx, part(total)));
      expect_sent(gathered, {"all_gather 24", "reduce_scatter 24"});
      const Result reduced = apply(
          group, numbers(group.rank(), shape),
          [&](const Tensor& x) { return reduce_scatter_to(x, group, {dim}); },
          part_of_whole);
      EXPECT_TRUE(bitwise_equal(reduced.y, part(total)));
      EXPECT_TRUE(bitwise_equal(reduced.dx, numbers(7, shape)));
      expect_sent(reduced, {"reduce_scatter 24", "all_gather 24"});
      // Replicated tensors are cut without a message, in either direction
      expect_sent(
          apply(
              group, numbers(7, shape),
              [&](const Tensor& x) { return scatter_to(x, group, {dim}); },
              part_of_whole),
          {"all_gather 24"});
      expect_sent(
          apply(
              group, part(numbers(7, shape)),
              [&](const Tensor& x) { return gather_from(x, group, {dim}); },
              whole),
          {"all_gather 24"});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Mappings, ::testing::Values(1, 2, 3, 4));

TEST(Mappings, SizesThatDoNotDivideNameThoseThatWould) {
  const std::string error = error_on_ranks(3, [](ProcessGroup& group) {
    scatter_to(numbers(0, {2, 10}), group);
  });
  expect_text(error, {"10 elements", "a multiple of 3 would do"});
}

}  // namespace
}  // namespace shardbook::tensor_parallel
