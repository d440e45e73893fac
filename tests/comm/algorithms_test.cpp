// The algorithms against the backend's own collectives, and their cost cards
// against the messages actually sent.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "tests/support/files.h"
#include "tests/support/on_ranks.h"

namespace shardbook::algorithms {
namespace {

using Algorithm = std::function<void(ProcessGroup&, const Tensor&, ReduceOp)>;

Tensor numbers(int rank, std::int64_t n, DType dtype) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    values[static_cast<std::size_t>(i)] =
        static_cast<double>((i * 7 + rank * 13) % 17 - 8);
  }
  const Tensor result = Tensor::empty({n}, {dtype, Device()});
  result.copy_from(Tensor::from_values<double>(values, {n}));
  return result;
}

struct Case {
  std::string name;
  Algorithm run;
  std::function<CostCard(int, std::int64_t)> cost;
};

std::vector<Case> all_reduces() {
  return {{"Ring", ring_all_reduce, ring_all_reduce_cost},
          {"HalvingDoubling", halving_doubling_all_reduce,
           halving_doubling_all_reduce_cost},
          {"DoubleTree",
           [](ProcessGroup& group, const Tensor& tensor, ReduceOp op) {
             double_tree_all_reduce(group, tensor, op, 3);
           },
           [](int num_ranks, std::int64_t n) {
             return double_tree_all_reduce_cost(num_ranks, n, 3);
           }},
          {"Trees",
           [](ProcessGroup& group, const Tensor& tensor, ReduceOp op) {
             const int root = group.size() / 2;
             tree_reduce(group, tensor, root, op);
             tree_broadcast(group, tensor, root);
           },
           [](int num_ranks, std::int64_t n) {
             CostCard card = tree_reduce_cost(num_ranks, n, num_ranks / 2);
             const CostCard down =
                 tree_broadcast_cost(num_ranks, n, num_ranks / 2);
             for (std::size_t r = 0; r < card.elements_sent.size(); ++r) {
               card.elements_sent[r] += down.elements_sent[r];
             }
             return card;
           }}};
}

class AllReduces : public ::testing::TestWithParam<Case> {};

TEST_P(AllReduces, EqualTheBackend) {
  for (int num_ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const std::vector<int> wrong = on_ranks(num_ranks, [](ProcessGroup& world) {
      int num_wrong = 0;
      const auto compare = [&](std::int64_t n, DType dtype, ReduceOp op) {
        const Tensor mine = numbers(world.rank(), n, dtype);
        const Tensor theirs = mine.clone();
        GetParam().run(world, mine, op);
        world.all_reduce(theirs, op).wait();
        num_wrong += bitwise_equal(mine, theirs) ? 0 : 1;
      };
      for (DType dtype :
           {DType::kF64, DType::kF32, DType::kBF16, DType::kI64}) {
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
          for (std::int64_t n : {0, 1, 5, 24, 1009}) compare(n, dtype, op);
        }
      }
      // Large enough that messages do not leave their buffers at once.
      compare(300007, DType::kF32, ReduceOp::kSum);
      return num_wrong;
    });
    EXPECT_EQ(wrong, std::vector<int>(wrong.size(), 0)) << num_ranks;
  }
}

TEST_P(AllReduces, GiveEveryRankTheSameBits) {
  for (int num_ranks : {2, 3, 4, 7}) {
    const auto results = on_ranks(num_ranks, [](ProcessGroup& world) {
      std::vector<float> values(1000);
      for (std::size_t i = 0; i < values.size(); ++i) {
        // Sums of these values depend on their order.
        values[i] = 1.0f / static_cast<float>(1 + i + 37 * world.rank());
      }
      const Tensor x = Tensor::from_values<float>(values, {1000});
      GetParam().run(world, x, ReduceOp::kSum);
      return x.to_vector<double>();
    });
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
  }
}

TEST_P(AllReduces, SendWhatTheirCostCardSays) {
  for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) {
    const std::int64_t n = 24 * 35;
    const auto sent = on_ranks(num_ranks, [&](ProcessGroup& world) {
      GetParam().run(world, numbers(world.rank(), n, DType::kF32),
                     ReduceOp::kSum);
      double elements = 0;
      for (const auto& record : world.records()) {
        elements += wire_elements(record);
      }
      return elements;
    });
    EXPECT_EQ(sent, GetParam().cost(num_ranks, n).elements_sent) << num_ranks;
    // No all-reduce moves less than 2 (P-1) n in total.
    EXPECT_GE(std::accumulate(sent.begin(), sent.end(), 0.0),
              2.0 * (num_ranks - 1) * static_cast<double>(n));
  }
}

INSTANTIATE_TEST_SUITE_P(Algorithms, AllReduces,
                         ::testing::ValuesIn(all_reduces()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.name;
                         });

TEST(Ring, ReduceScatterAndAllGatherEqualTheBackend) {
  for (int num_ranks : {1, 2, 3, 4, 8}) {
    on_ranks(num_ranks, [](ProcessGroup& world) {
      for (std::int64_t n : {0, 1, 1009, 40000}) {
        const std::int64_t all = n * world.size();
        const Tensor input = numbers(world.rank(), all, DType::kF32);
        const Tensor before = input.clone();
        const Tensor a = Tensor::zeros({n}), b = Tensor::zeros({n});
        ring_reduce_scatter(world, a, input);
        world.reduce_scatter(b, input).wait();
        SB_CHECK(bitwise_equal(a, b) && bitwise_equal(input, before),
                 "reduce_scatter of ", n);
        const Tensor c = Tensor::zeros({all}), d = Tensor::zeros({all});
        ring_all_gather(world, c, a);
        world.all_gather(d, a).wait();
        SB_CHECK(bitwise_equal(c, d), "all_gather of ", n);
      }
      return 0;
    });
  }
}

/// A row of the page's table.
std::string predicted_row(int ranks, std::int64_t bytes, const char* size) {
  const auto us = [](const CostCard& card) {
    return fmt::format("{:.0f} µs", 1e6 * card.seconds(1e-5, 1e10, 4));
  };
  const std::int64_t n = bytes / 4;
  CostCard tree = tree_reduce_cost(ranks, n);
  const CostCard down = tree_broadcast_cost(ranks, n);
  tree.steps += down.steps;
  tree.chain_elements += down.chain_elements;
  return fmt::format("| {}, {} | {} | {} | {} | {} |\n", ranks, size,
                     us(ring_all_reduce_cost(ranks, n)),
                     us(halving_doubling_all_reduce_cost(ranks, n)),
                     us(double_tree_all_reduce_cost(ranks, n)), us(tree));
}

TEST(CostCards, AreThoseOfThePage) {
  const std::string page =
      read_bytes(SHARDBOOK_ROOT "/comm/algorithms/README.md");
  std::string rows;
  for (const int ranks : {6, 8, 64}) {
    rows += predicted_row(ranks, 1 << 10, "1 KiB");
    rows += predicted_row(ranks, 1 << 20, "1 MiB");
    rows += predicted_row(ranks, 64 << 20, "64 MiB");
  }
  EXPECT_NE(page.find("|---|---|---|---|---|\n" + rows + "\n"),
            std::string::npos)
      << "the page should have these rows:\n"
      << rows;
}

/// The formulas of the page.
TEST(CostCards, AreTheClosedFormulas) {
  const std::int64_t n = 3 * 5 * 7 * 64;  // divides into pieces and chunks
  const auto whole = static_cast<double>(n);
  for (const int p : {2, 3, 4, 5, 7, 8, 16}) {
    SCOPED_TRACE(p);
    const CostCard ring = ring_all_reduce_cost(p, n);
    EXPECT_DOUBLE_EQ(ring.seconds(1e-5, 1e10, 4),
                     ring.steps * (1e-5 + whole / p * 4 / 1e10));
    EXPECT_EQ(ring.steps, 2 * (p - 1));
    EXPECT_DOUBLE_EQ(ring.chain_elements, 2.0 * (p - 1) / p * whole);
    EXPECT_DOUBLE_EQ(ring.max_elements_sent(), 2.0 * (p - 1) / p * whole);

    const CostCard halving = halving_doubling_all_reduce_cost(p, n);
    const int k = log2_floor(p), active = 1 << k;
    const int folds = p > active ? 1 : 0;
    const double swapped = 2.0 * (active - 1) / active * whole;
    EXPECT_EQ(halving.steps, 2 * k + 2 * folds);
    EXPECT_DOUBLE_EQ(halving.chain_elements, swapped + 2 * folds * whole);
    EXPECT_DOUBLE_EQ(halving.max_elements_sent(), swapped + folds * whole);

    const CostCard trees = double_tree_all_reduce_cost(p, n, 4);
    const int depth =
        std::max(tree_depth(first_tree(p)), tree_depth(second_tree(p)));
    EXPECT_EQ(trees.steps, 2 * (depth + 3));
    EXPECT_DOUBLE_EQ(trees.chain_elements, (depth + 3) / 4.0 * whole);
    EXPECT_LE(trees.max_elements_sent(), 2 * whole);
    EXPECT_DOUBLE_EQ(tree_reduce_cost(p, n).chain_elements,
                     log2_ceil(p) * whole);
    EXPECT_DOUBLE_EQ(tree_broadcast_cost(p, n).max_elements_sent(),
                     log2_ceil(p) * whole);
  }
}

TEST(Trees, EveryRankHangsBelowOneParent) {
  for (int num_ranks = 1; num_ranks <= 33; ++num_ranks) {
    for (const auto& tree : {first_tree(num_ranks), second_tree(num_ranks)}) {
      int roots = 0;
      for (std::size_t r = 0; r < tree.size(); ++r) {
        const int parent = tree[r].parent;
        if (parent < 0) {
          ++roots;
        } else {
          const auto& children =
              tree[static_cast<std::size_t>(parent)].children;
          EXPECT_EQ(
              std::count(children.begin(), children.end(), static_cast<int>(r)),
              1);
        }
        EXPECT_LE(tree[r].children.size(), 2u);
      }
      EXPECT_EQ(roots, 1);
      EXPECT_LE(tree_depth(tree), log2_ceil(num_ranks + 1) + 1);
    }
  }
}

TEST(Trees, LeavesOfOneAreTheInnerRanksOfTheOther) {
  for (int num_ranks = 2; num_ranks <= 33; ++num_ranks) {
    const auto first = first_tree(num_ranks);
    const auto second = second_tree(num_ranks);
    for (std::size_t r = num_ranks % 2; r < first.size(); ++r) {
      EXPECT_TRUE(first[r].children.empty() || second[r].children.empty())
          << "rank " << r << " of " << num_ranks;
    }
  }
}

TEST(Pieces, CoverTheVectorWithoutGaps) {
  EXPECT_EQ(piece_begin(10, 4, 0), 0);
  EXPECT_EQ(piece_begin(10, 4, 1), 3);
  EXPECT_EQ(piece_begin(10, 4, 2), 6);
  EXPECT_EQ(piece_begin(10, 4, 3), 8);
  EXPECT_EQ(piece_begin(10, 4, 4), 10);
  EXPECT_EQ(piece_size(2, 4, 3), 0);
}

}  // namespace
}  // namespace shardbook::algorithms
