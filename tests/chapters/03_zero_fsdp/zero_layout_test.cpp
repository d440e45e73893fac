// Who owns which element, which gradients travel together, and the ledger.

#include <gtest/gtest.h>

#include <numeric>
#include <tuple>

#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

using zero::flat_layout;
using zero::GradientBucket;
using zero::OwnedPart;
using zero::plan_buckets;
using zero::ShardLayout;

using Counts = std::vector<std::int64_t>;
using Shapes = std::vector<Shape>;
using Places = std::vector<std::size_t>;

const Shapes k184 = {{32}, {4}, {64}, {16}, {64}, {4}};

/// Elements of a rank's shard in stage 3.
std::int64_t slices_of_184(int d) {
  return zero::row_layout(k184, d).shard_numel;
}

// --- Golden numbers ----------------------------------------------------------

TEST(ZeroLayout, TheNetOf184Parameters) {
  const ShardLayout three = flat_layout(k184, 3, 2);
  EXPECT_EQ(three.numel, 184);
  EXPECT_EQ(three.full_numel(), 186);
  EXPECT_EQ(three.shard_numel, 62);
  EXPECT_EQ(flat_layout(k184, 4, 2).shard_numel, 46);
  // In stage 3, each parameter alone: 11 + 2 + 22 + 6 + 22 + 2
  EXPECT_EQ(slices_of_184(3), 65);
  EXPECT_EQ(slices_of_184(4), 46);
}

// --- Layouts -----------------------------------------------------------------

/// Every element of every parameter has one owner and one place.
void expect_partition(const ShardLayout& layout) {
  std::vector<std::vector<int>> places(
      static_cast<std::size_t>(layout.ranks),
      std::vector<int>(static_cast<std::size_t>(layout.shard_numel)));
  for (std::size_t i = 0; i < layout.size(); ++i) {
    std::int64_t next = 0;
    for (const OwnedPart& part : layout.parts(i)) {
      EXPECT_EQ(part.begin, next);
      EXPECT_GT(part.numel, 0);
      next += part.numel;
      for (std::int64_t k = 0; k < part.numel; ++k) {
        places[static_cast<std::size_t>(part.owner)]
              [static_cast<std::size_t>(part.shard_begin + k)] += 1;
      }
    }
    EXPECT_EQ(next, layout.numel_of(i));
  }
  std::int64_t used = 0;
  for (const auto& owner : places) {
    for (const int count : owner) {
      EXPECT_LE(count, 1);
      used += count;
    }
  }
  EXPECT_EQ(used, layout.numel);
}

TEST(ZeroLayout, EveryElementHasOneOwner) {
  for (const Shapes& shapes : {k184, Shapes{{1}}, Shapes{{5}, {1}, {1}},
                               Shapes{{100}, {3}, {7}, {1}, {50}}}) {
    for (const int d : {1, 2, 3, 4, 8}) {
      for (const bool round_robin : {false, true}) {
        for (const std::int64_t alignment : {1, 2, 5}) {
          const ShardLayout flat =
              flat_layout(shapes, d, alignment, round_robin);
          EXPECT_EQ(flat.full_numel() % (alignment * d), 0);
          EXPECT_LT(flat.full_numel() - flat.numel, alignment * d);
          expect_partition(flat);
        }
      }
    }
  }
}

TEST(ZeroLayout, AParameterMayStraddleOwners) {
  const ShardLayout layout = flat_layout(k184, 3, 2);  // shards of 62
  // 64 elements at 36: 26 for rank 0, 38 for rank 1
  const std::vector<OwnedPart> parts = layout.parts(2);
  ASSERT_EQ(parts.size(), 2u);
  const auto fields = [](const OwnedPart& part) {
    return std::tuple(part.owner, part.begin, part.shard_begin, part.numel);
  };
  EXPECT_EQ(fields(parts[0]), std::tuple(0, 0, 36, 26));
  EXPECT_EQ(fields(parts[1]), std::tuple(1, 26, 0, 38));
}

TEST(ZeroLayout, RoundRobinPutsEveryDthParameterTogether) {
  const ShardLayout layout =
      flat_layout({{10}, {20}, {30}, {40}, {50}}, 2, 1, /*round_robin=*/true);
  EXPECT_EQ(layout.offsets, (Counts{0, 90, 10, 110, 40}));
}

// --- Buckets -----------------------------------------------------------------

std::int64_t total(const std::vector<GradientBucket>& buckets) {
  std::int64_t numel = 0;
  for (const GradientBucket& bucket : buckets) numel += bucket.numel;
  return numel;
}

TEST(ZeroBuckets, OneBucketForEverythingIsOneReduceScatter) {
  for (const int d : {1, 2, 3, 4, 8}) {
    const ShardLayout layout = flat_layout(k184, d, 2);
    const auto buckets = plan_buckets(layout, 500'000'000);
    ASSERT_EQ(buckets.size(), 1u);
    EXPECT_EQ(buckets[0].parameters, (Places{5, 4, 3, 2, 1, 0}));
    EXPECT_EQ(buckets[0].scatter_numel, layout.shard_numel);
    EXPECT_TRUE(buckets[0].rest.empty());
    EXPECT_EQ(buckets[0].numel, layout.full_numel());
    // A shard arrives in one run
    for (int owner = 0; owner < d; ++owner) {
      const auto runs = zero::runs_of(buckets[0], owner);
      ASSERT_EQ(runs.size(), 1u);
      EXPECT_EQ(runs[0].shard_begin, 0);
      EXPECT_EQ(runs[0].bucket_begin, owner * layout.shard_numel);
      EXPECT_EQ(runs[0].numel, layout.shard_numel);
    }
  }
}

TEST(ZeroBuckets, TheNextGradientThatDoesNotFitOpensAnother) {
  const auto buckets = plan_buckets(flat_layout(k184, 4, 2), 84);
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(buckets[0].parameters, (Places{5, 4, 3}));  // 84 fit
  EXPECT_EQ(buckets[1].parameters, (Places{2, 1}));
  EXPECT_EQ(buckets[2].parameters, (Places{0}));
}

TEST(ZeroBuckets, ALargeGradientTravelsAlone) {
  const auto buckets = plan_buckets(flat_layout(k184, 4, 2), 20);
  std::vector<bool> large;
  for (const GradientBucket& bucket : buckets) {
    large.push_back(bucket.is_large);
    if (bucket.is_large) {
      EXPECT_EQ(bucket.parameters.size(), 1u);
      EXPECT_EQ(bucket.scatter_numel, 0);
    }
  }
  EXPECT_EQ(large, (std::vector<bool>{false, true, false, true, false, true}));
}

TEST(ZeroBuckets, ReduceScatterAndReducesCoverEveryElementOnce) {
  for (const int d : {1, 2, 3, 4, 8}) {
    for (const bool round_robin : {false, true}) {
      const ShardLayout layout = flat_layout(k184, d, 2, round_robin);
      for (const std::int64_t size : {3, 20, 64, 84, 120, 150, 184, 10000}) {
        const auto buckets = plan_buckets(layout, size);
        std::vector<int> shards(static_cast<std::size_t>(layout.full_numel()));
        for (const GradientBucket& bucket : buckets) {
          std::vector<int> places(static_cast<std::size_t>(bucket.numel));
          for (const zero::BucketPiece& piece : bucket.pieces) {
            // The owner decides the place: in the block, or in the rest
            const std::int64_t common = bucket.scatter_numel * d;
            int owner = -1;
            if (piece.bucket_begin < common) {
              owner =
                  static_cast<int>(piece.bucket_begin / bucket.scatter_numel);
            }
            for (const zero::OwnedRange& range : bucket.rest) {
              if (piece.bucket_begin >= range.begin &&
                  piece.bucket_begin + piece.numel <=
                      range.begin + range.numel) {
                owner = range.owner;
              }
            }
            EXPECT_EQ(owner, piece.owner);
            for (std::int64_t k = 0; k < piece.numel; ++k) {
              places[static_cast<std::size_t>(piece.bucket_begin + k)] += 1;
              shards[static_cast<std::size_t>(piece.owner * layout.shard_numel +
                                              piece.shard_begin + k)] += 1;
            }
          }
          EXPECT_EQ(places, std::vector<int>(
                                static_cast<std::size_t>(bucket.numel), 1));
        }
        const bool last_is_large = buckets[0].is_large;
        EXPECT_EQ(total(buckets),
                  last_is_large ? layout.numel : layout.full_numel());
        EXPECT_EQ(std::accumulate(shards.begin(), shards.end(), 0),
                  total(buckets));
      }
    }
  }
}

TEST(ZeroBuckets, RoundRobinGivesEveryOwnerSomethingInEachBucket) {
  const Shapes equal(16, {10});
  auto scattered = [&](bool round_robin) {
    std::int64_t numel = 0;
    for (const GradientBucket& bucket :
         plan_buckets(flat_layout(equal, 4, 2, round_robin), 40)) {
      numel += 4 * bucket.scatter_numel;
    }
    return numel;
  };
  EXPECT_EQ(scattered(true), 160);  // all of it
  EXPECT_EQ(scattered(false), 0);   // each bucket has one owner
}

// --- The ledger --------------------------------------------------------------

struct Log {
  std::vector<std::string> lines;  ///< "reduce_scatter 186"
  double bytes = 0;
};

/// Construction, then `steps` steps; the lines come from the last step.
std::vector<Log> log_of(int d, const ZeroOptions& options, int steps,
                        int micro_steps) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Sequential model = make_184(DType::kF32);
    const auto zero = make_zero(model, world, options, "adam", {});
    Log log;
    for (int step = 0; step < steps; ++step) {
      const std::size_t before = world.records().size();
      log.lines.clear();
      for (int i = 0; i < micro_steps; ++i) {
        zero->set_boundary(i + 1 == micro_steps);
        Tensor x = Tensor::empty({4, 8});
        fill_normal(x, 3, static_cast<std::uint64_t>(world.rank()), 0, 1);
        sum((*zero)(x)).backward();
      }
      zero->step();
      for (std::size_t i = before; i < world.records().size(); ++i) {
        const CommRecord& record = world.records()[i];
        log.lines.push_back(std::string(comm_op_name(record.op)) + " " +
                            std::to_string(record.numel));
      }
    }
    log.bytes = wire_bytes(world.records());
    return log;
  });
}

using Lines = std::vector<std::string>;

/// Three ranks log these lines in the last of two steps.
void expect_lines(const ZeroOptions& options, int micro_steps,
                  const Lines& lines) {
  for (const Log& log : log_of(3, options, 2, micro_steps)) {
    EXPECT_EQ(log.lines, lines) << "stage " << options.stage;
  }
}

TEST(ZeroLedger, Stages1And2ReduceBucketsAndGatherOnce) {
  const Lines once = {"reduce_scatter 186", "all_reduce 1", "all_gather 186"};
  expect_lines(stage(1), 1, once);
  expect_lines(stage(1), 3, once);
  expect_lines(stage(2), 3,
               {"reduce_scatter 186", "reduce_scatter 186",
                "reduce_scatter 186", "all_reduce 1", "all_gather 186"});
  // DeepSpeed's way, at three units of traffic
  ZeroOptions options = stage(2);
  options.reduce_scatter = false;
  expect_lines(options, 1,
               {"all_reduce 186", "all_reduce 1", "all_gather 186"});
}

TEST(ZeroLedger, SmallBucketsSendTheSameBytes) {
  ZeroOptions options = stage(2);
  options.reduce_bucket_size = 84;
  options.allgather_bucket_size = 100;  // 33 columns of 3 ranks at a time
  // [124, 124 + 60 + 2), [100, 124) and [36, 124) by owner
  expect_lines(options, 1,
               {"reduce 24", "reduce 62", "reduce 30", "reduce 38", "reduce 32",
                "all_reduce 1", "all_gather 99", "all_gather 87"});
  EXPECT_DOUBLE_EQ(log_of(3, options, 1, 1)[0].bytes,
                   log_of(3, stage(2), 1, 1)[0].bytes);
}

// Units 36, 80 and 68: padded for three ranks 39, 84 and 72.
TEST(ZeroLedger, Stage3GathersTwicePerMicroStepAndReducesOnce) {
  ZeroOptions options = stage(3);
  options.prefetch_bucket_size = 0;
  Lines lines = {"all_gather 39",     "all_gather 84",     "all_gather 72",
                 "all_gather 72",     "reduce_scatter 72", "all_gather 84",
                 "reduce_scatter 84", "all_gather 39",     "reduce_scatter 39"};
  Lines twice = lines;
  twice.insert(twice.end(), lines.begin(), lines.end());
  lines.push_back("all_reduce 1");
  twice.push_back("all_reduce 1");
  expect_lines(options, 1, lines);
  expect_lines(options, 2, twice);
  // Prefetching changes the order and not the count
  expect_lines(
      stage(3), 1,
      {"all_gather 39", "all_gather 84", "all_gather 72", "all_gather 72",
       "all_gather 84", "all_gather 39", "reduce_scatter 72",
       "reduce_scatter 84", "reduce_scatter 39", "all_reduce 1"});
  // The three biases, 4, 16 and 4, stay whole and are gathered once per step
  options.persistence_threshold = 16;
  expect_lines(
      options, 1,
      {"all_gather 33", "all_gather 66", "all_gather 66", "all_gather 66",
       "reduce_scatter 72", "all_gather 66", "reduce_scatter 84",
       "all_gather 33", "reduce_scatter 39", "all_reduce 1", "all_gather 30"});
}

// Table 3.2 in units of (d-1)/d * padded elements; the norm is 2 * 8 bytes.
TEST(ZeroLedger, TrafficIsThatOfThePaper) {
  for (const int d : {2, 3, 4, 8}) {
    for (const int g : {1, 3}) {
      auto units = [&](const ZeroOptions& options, std::int64_t padded) {
        const double twice = log_of(d, options, 2, g)[0].bytes;
        const double once = log_of(d, options, 1, g)[0].bytes;
        const double norm = 16.0 * (d - 1) / d;
        return (twice - once - norm) /
               (4.0 * static_cast<double>(padded) * (d - 1) / d);
      };
      const std::int64_t flat = flat_layout(k184, d, 2).full_numel();
      const std::int64_t slices = slices_of_184(d) * d;
      EXPECT_NEAR(units(stage(1), flat), 2, 1e-12);
      EXPECT_NEAR(units(stage(2), flat), g + 1, 1e-12);
      EXPECT_NEAR(units(stage(3), slices), 3 * g, 1e-12);
      ZeroOptions all_reduced = stage(1);
      all_reduced.reduce_scatter = false;
      EXPECT_NEAR(units(all_reduced, flat), 3, 1e-12);
    }
  }
}

}  // namespace
}  // namespace shardbook::zero_test
