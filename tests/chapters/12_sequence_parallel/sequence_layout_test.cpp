// Layouts: the tokens of each rank, and the pairs that each step computes.

#include "chapters/12_sequence_parallel/sequence_layout.h"

#include <map>
#include <numeric>
#include <set>

#include "tests/chapters/12_sequence_parallel/sequence_support.h"

namespace shardbook::sequence_parallel {
namespace {

TEST(SequenceLayout, GivesTheDocumentedTokens) {
  using Positions = std::vector<std::int64_t>;
  EXPECT_EQ(positions(Layout::kContiguous, 1, 2, 8), Positions({4, 5, 6, 7}));
  EXPECT_EQ(positions(Layout::kZigzag, 0, 2, 8), Positions({0, 1, 6, 7}));
  EXPECT_EQ(positions(Layout::kZigzag, 1, 2, 8), Positions({2, 3, 4, 5}));
  EXPECT_EQ(positions(Layout::kZigzag, 2, 3, 12), Positions({4, 5, 6, 7}));
  EXPECT_EQ(positions(Layout::kStriped, 1, 3, 9), Positions({1, 4, 7}));
}

TEST(SequenceLayout, HoldsEveryTokenOnce) {
  for (Layout layout : all_layouts()) {
    for (int c : {1, 2, 3, 4, 8}) {
      std::set<std::int64_t> all;
      for (int rank = 0; rank < c; ++rank) {
        for (std::int64_t p : positions(layout, rank, c, 48)) all.insert(p);
      }
      EXPECT_EQ(all.size(), 48u);
      EXPECT_EQ(*all.rbegin(), 47);
    }
  }
}

TEST(SequenceLayout, CutsAndJoinsEveryDim) {
  const Tensor whole = noise({2, 24, 3});
  for (Layout layout : all_layouts()) {
    for (int c : {1, 2, 3, 4}) {
      for (std::int64_t dim : {0, 1}) {
        const Tensor x = dim == 0 ? reshape(whole, {24, 6}) : whole;
        Tensors parts;
        for (int rank = 0; rank < c; ++rank) {
          parts.push_back(cut_sequence(x, dim, layout, rank, c));
        }
        EXPECT_TRUE(bitwise_equal(join_sequence(parts, dim, layout), x));
        // Row i of a part is the row of its position
        const auto held = positions(layout, c - 1, c, 24);
        for (std::size_t i = 0; i < held.size(); ++i) {
          const auto at = static_cast<std::int64_t>(i);
          EXPECT_TRUE(
              bitwise_equal(slice(parts.back(), dim, at, at + 1).clone(),
                            slice(x, dim, held[i], held[i] + 1).clone()));
        }
      }
    }
  }
}

TEST(SequenceLayout, RefusesLengthsThatDoNotDivide) {
  expect_error([] { check_sequence(Layout::kContiguous, 4, 10); },
               {"--seq 10: 4 ranks", "multiple of 4", "12"});
  expect_error([] { check_sequence(Layout::kZigzag, 4, 12); },
               {"zigzag", "multiple of 8", "16"});
  expect_error([] { layout_of("spiral"); }, {"spiral", "zigzag"});
}

/// How often each (query, key) pair, by global position, is computed by all
/// ranks in all steps.
std::map<std::pair<std::int64_t, std::int64_t>, int> pairs_of(
    Layout layout, int c, std::int64_t s, bool causal, bool runs_apart) {
  std::map<std::pair<std::int64_t, std::int64_t>, int> pairs;
  for (int rank = 0; rank < c; ++rank) {
    const auto queries = positions(layout, rank, c, s);
    for (int source = 0; source < c; ++source) {
      const auto keys = positions(layout, source, c, s);
      double counted = 0, promised = 0;
      for (const AttentionBlock& block :
           visible_blocks(layout, rank, source, c, s / c, causal, runs_apart)) {
        promised += visible_pairs(block);
        for (std::int64_t i = 0; i < block.queries.size(); ++i) {
          for (std::int64_t j = 0; j < block.keys.size(); ++j) {
            if (block.causal && i + block.shift < j) continue;
            ++counted;
            ++pairs[{queries[static_cast<std::size_t>(block.queries.begin + i)],
                     keys[static_cast<std::size_t>(block.keys.begin + j)]}];
          }
        }
      }
      EXPECT_EQ(counted, promised);
    }
  }
  return pairs;
}

TEST(VisibleBlocks, ComputeEveryPairOnce) {
  for (Layout layout : all_layouts()) {
    for (int c : {1, 2, 3, 4}) {
      for (bool causal : {false, true}) {
        for (bool runs_apart : {false, true}) {
          const std::int64_t s = 24;
          const auto pairs = pairs_of(layout, c, s, causal, runs_apart);
          EXPECT_EQ(static_cast<std::int64_t>(pairs.size()),
                    causal ? s * (s + 1) / 2 : s * s);
          for (const auto& [pair, times] : pairs) {
            EXPECT_EQ(times, 1);
            if (causal) {
              EXPECT_GE(pair.first, pair.second);
            }
          }
        }
      }
    }
  }
}

double pairs_at(Layout layout, int rank, int source, int c, std::int64_t n) {
  double pairs = 0;
  for (const AttentionBlock& block :
       visible_blocks(layout, rank, source, c, n, true)) {
    pairs += visible_pairs(block);
  }
  return pairs;
}

// Four ranks of n = 12 tokens each, on the step with this source. Zigzag steps
// have equally many pairs, except for the diagonal. Striped steps differ by one
// diagonal. Contiguous ranks see all sources before them.
TEST(VisibleBlocks, HaveThePairsOfTheirLayout) {
  for (int rank = 0; rank < 4; ++rank) {
    for (int source = 0; source < 4; ++source) {
      const auto pairs = [&](Layout layout) {
        return pairs_at(layout, rank, source, 4, 12);
      };
      EXPECT_EQ(pairs(Layout::kZigzag), source == rank ? 78 : 72);
      EXPECT_EQ(pairs(Layout::kStriped), source <= rank ? 78 : 66);
      EXPECT_EQ(pairs(Layout::kContiguous), source == rank  ? 78
                                            : source < rank ? 144
                                                            : 0);
    }
  }
}

TEST(VisibleBlocks, KnowTheirPlaceForDropout) {
  const int c = 3;
  const std::int64_t s = 24;
  for (Layout layout : all_layouts()) {
    for (int rank = 0; rank < c; ++rank) {
      for (int source = 0; source < c; ++source) {
        for (const AttentionBlock& block : visible_blocks(
                 layout, rank, source, c, s / c, true, /*runs_apart=*/true)) {
          const ShardView view =
              shard_of(block, layout, rank, source, c, 2, 4, s);
          const auto queries = positions(layout, rank, c, s);
          const auto keys = positions(layout, source, c, s);
          for (std::int64_t i = 0; i < block.queries.size(); ++i) {
            EXPECT_EQ(
                view.offset[2] + i * view.step[2],
                queries[static_cast<std::size_t>(block.queries.begin + i)]);
          }
          for (std::int64_t j = 0; j < block.keys.size(); ++j) {
            EXPECT_EQ(view.offset[3] + j * view.step[3],
                      keys[static_cast<std::size_t>(block.keys.begin + j)]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::sequence_parallel
