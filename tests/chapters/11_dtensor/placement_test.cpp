// Cuts, nested cuts, and the order of moves: arithmetic without ranks.

#include "chapters/11_dtensor/placement.h"

#include <gtest/gtest.h>

#include "chapters/11_dtensor/redistribute.h"

namespace shardbook::dtensor_test {
namespace {

using namespace dtensor;

std::vector<std::int64_t> sizes_of(std::int64_t n, std::int64_t parts) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < parts; ++i) {
    sizes.push_back(ceil_part(n, parts, i).size);
  }
  return sizes;
}

TEST(DTensorCut, FollowsTorchChunk) {
  EXPECT_EQ(sizes_of(8, 4), (std::vector<std::int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(sizes_of(5, 4), (std::vector<std::int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(sizes_of(7, 3), (std::vector<std::int64_t>{3, 3, 1}));
  EXPECT_EQ(sizes_of(1, 3), (std::vector<std::int64_t>{1, 0, 0}));
  EXPECT_EQ(sizes_of(0, 2), (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(ceil_part(5, 4, 3).offset, 5);
  EXPECT_EQ(ceil_part(5, 4, 3).full, 2);
}

// 7 rows: the first axis cuts 4 + 3, the second 2 + 2 and 2 + 1.
TEST(DTensorCut, NestsFromTheFirstAxisToTheLast) {
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t j = 0; j < 2; ++j) {
      const Block block =
          local_part({7, 3}, {shard(0), shard(0)}, {2, 2}, {i, j});
      rows.emplace_back(block.offset[0], block.shape[0]);
      EXPECT_EQ(block.shape[1], 3);
    }
  }
  EXPECT_EQ(rows, (std::vector<std::pair<std::int64_t, std::int64_t>>{
                      {0, 2}, {2, 2}, {4, 2}, {6, 1}}));
}

// Blocks of shards cover the tensor once, for any sizes.
TEST(DTensorCut, BlocksCoverTheTensorOnce) {
  for (std::int64_t n = 0; n < 12; ++n) {
    for (const Placements& placements :
         {Placements{shard(0), shard(0)}, Placements{shard(0), shard(1)},
          Placements{shard(1), shard(0)}}) {
      std::vector<int> owners(static_cast<std::size_t>(n * 5));
      for (std::int64_t i = 0; i < 2; ++i) {
        for (std::int64_t j = 0; j < 3; ++j) {
          const Block block = local_part({n, 5}, placements, {2, 3}, {i, j});
          for (std::int64_t r = 0; r < block.shape[0]; ++r) {
            for (std::int64_t c = 0; c < block.shape[1]; ++c) {
              ++owners[static_cast<std::size_t>((block.offset[0] + r) * 5 +
                                                block.offset[1] + c)];
            }
          }
        }
      }
      for (const int count : owners) EXPECT_EQ(count, 1);
    }
  }
}

std::string moves_text(const std::vector<Move>& moves) {
  std::string line;
  for (const Move& move : moves) {
    line += std::to_string(move.axis) + ":" + text(move.from) + ">" +
            text(move.to) + " ";
  }
  return line;
}

TEST(DTensorMoves, OpenNestedCutsFromTheInside) {
  const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
  EXPECT_EQ(moves_text(moves_between({s0, s0}, {r, s0})),
            "1:S(0)>R 0:S(0)>R 1:R>S(0) ");
  EXPECT_EQ(moves_text(moves_between({s0, s0}, {r, r})), "1:S(0)>R 0:S(0)>R ");
  EXPECT_EQ(moves_text(moves_between({r, s0}, {s0, s0})),
            "1:S(0)>R 0:R>S(0) 1:R>S(0) ");
  EXPECT_EQ(moves_text(moves_between({s0, s0}, {s0, s1})), "1:S(0)>S(1) ");
  EXPECT_EQ(moves_text(moves_between({p, s0}, {s0, s0})),
            "1:S(0)>R 0:P(sum)>S(0) 1:R>S(0) ");
  EXPECT_EQ(moves_text(moves_between({s0, s1}, {s0, s1})), "");
  EXPECT_EQ(moves_text(moves_between({p}, {partial(PartialOp::kMax)})),
            "0:P(sum)>R 0:R>P(max) ");
}

TEST(DTensorMoves, CountWhatTheyPad) {
  const Placement r = replicate();
  const auto numel = [](const Placements& from, const Placements& to,
                        const Shape& shape, std::int64_t parts) {
    const auto calls = calls_of(from, to, shape, {parts}, {0});
    return calls.empty() ? 0 : calls[0].numel;
  };
  EXPECT_EQ(numel({shard(0)}, {r}, {5, 3}, 4), 4 * 2 * 3);
  EXPECT_EQ(numel({partial()}, {shard(1)}, {5, 3}, 4), 5 * 4 * 1);
  EXPECT_EQ(numel({shard(0)}, {shard(1)}, {5, 3}, 4), 2 * 4 * 1);
  EXPECT_EQ(numel({partial()}, {r}, {5, 3}, 4), 15);
  EXPECT_EQ(numel({r}, {shard(0)}, {5, 3}, 4), 0);
  EXPECT_EQ(numel({r}, {partial()}, {5, 3}, 4), 0);
  EXPECT_EQ(numel({shard(0)}, {partial()}, {5, 3}, 4), 0);
  EXPECT_EQ(numel({shard(0)}, {r}, {5, 3}, 1), 0);
}

// 5 rows are 3 + 2 over the first axis, which the second cuts 2 + 1 and 1 + 1:
// its groups send different amounts.
TEST(DTensorMoves, CountNestedCutsByTheirGroup) {
  const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
  const auto log = [](const Placements& from, const Placements& to,
                      std::int64_t row) {
    std::string line;
    for (const Call& call : calls_of(from, to, {5, 3}, {2, 2}, {row, 1})) {
      line += std::string(comm_op_name(call.op)) + " " +
              std::to_string(call.axis) + " " + std::to_string(call.numel) +
              "; ";
    }
    return line;
  };
  EXPECT_EQ(log({s0, s0}, {r, r}, 0), "all_gather 1 12; all_gather 0 18; ");
  EXPECT_EQ(log({s0, s0}, {r, r}, 1), "all_gather 1 6; all_gather 0 18; ");
  EXPECT_EQ(log({s0, s0}, {s0, s1}, 0), "all_to_all 1 8; ");
  EXPECT_EQ(log({s0, s0}, {s0, s1}, 1), "all_to_all 1 4; ");
  EXPECT_EQ(log({s0, p}, {s0, r}, 0), "all_reduce 1 9; ");
  EXPECT_EQ(log({s0, p}, {s0, r}, 1), "all_reduce 1 6; ");
  EXPECT_EQ(log({s0, p}, {s0, s0}, 0), "reduce_scatter 1 12; ");
  EXPECT_EQ(log({s0, p}, {s0, s0}, 1), "reduce_scatter 1 6; ");
}

}  // namespace
}  // namespace shardbook::dtensor_test
