// Ranks with uneven numbers of batches.

#include <gtest/gtest.h>

#include "tests/chapters/02_ddp/ddp_reducer_support.h"

namespace shardbook::ddp_test {
namespace {

using ddp::DdpOptions;
using ddp::DistributedDataParallel;

struct Joined {
  Values parameters;
  int num_steps = 0;
};

/// Rank r trains on counts[r] batches.
std::vector<Joined> train_uneven(const std::vector<int>& counts,
                                 bool by_initial, const DdpOptions& options) {
  return on_ranks(static_cast<int>(counts.size()), [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world, options);
    const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
    Joined result;
    ddp.join(
        [&] {
          const int count = counts[static_cast<std::size_t>(world.rank())];
          for (int step = 0; step < count; ++step) {
            const Samples mine =
                every(make_samples(2 * world.size(), DType::kF64,
                                   30 + static_cast<std::uint64_t>(step)),
                      world.rank(), world.size());
            mse_loss(ddp(mine.x), mine.y).backward();
            optimizer->step();
            model.clear_grad();
            result.num_steps += 1;
          }
        },
        by_initial);
    result.parameters = values_of(model.parameters());
    return result;
  });
}

/// The same on one device, one rank's batches after another's.
Values train_uneven_reference(const std::vector<int>& counts, bool by_initial) {
  Sequential model = make_mlp(DType::kF64);
  const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
  const int d = static_cast<int>(counts.size());
  for (int step = 0;; ++step) {
    int active = 0;
    for (const int count : counts) active += step < count;
    if (active == 0) return values_of(model.parameters());
    for (int r = 0; r < d; ++r) {
      if (step >= counts[static_cast<std::size_t>(r)]) continue;
      const Samples mine =
          every(make_samples(2 * d, DType::kF64,
                             30 + static_cast<std::uint64_t>(step)),
                r, d);
      scale(mse(model, mine), 1.0 / (by_initial ? d : active)).backward();
    }
    optimizer->step();
    model.clear_grad();
  }
}

// Ranks that left the first join at different steps agree on the rank with the
// final weights.
TEST(DdpJoin, AJoinWithoutBatchesMayFollowAnUnevenOne) {
  const auto parameters = on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp> r(world);
    r.ddp.join([&] {
      for (int step = 0; step <= world.rank(); ++step) {
        r.backward();
      }
    });
    r.ddp.join([] {});
    return values_of(r.model.parameters());
  });
  EXPECT_EQ(parameters[0], parameters[1]);
}

TEST(DdpJoin, EarlyFinishersAnswerForTheRanksThatHaveMore) {
  DdpOptions views = tiny_buckets(100);
  views.gradient_as_bucket_view = true;
  DdpOptions unused = tiny_buckets(100);
  unused.find_unused_parameters = true;
  DdpOptions static_graph = tiny_buckets(100);
  static_graph.static_graph = true;
  for (const std::vector<int>& counts :
       {std::vector<int>{1, 4, 2}, {0, 3}, {3, 0}, {2, 2}, {3}, {0, 0}}) {
    for (const bool by_initial : {true, false}) {
      const Values expected = train_uneven_reference(counts, by_initial);
      for (const DdpOptions& options :
           {DdpOptions{}, views, unused, static_graph}) {
        const auto ranks = train_uneven(counts, by_initial, options);
        for (std::size_t r = 0; r < ranks.size(); ++r) {
          EXPECT_EQ(ranks[r].num_steps, counts[r]);
          EXPECT_LT(largest_difference(ranks[r].parameters, expected), 1e-12)
              << "rank " << r << " of " << ranks.size() << ", by initial "
              << by_initial;
        }
      }
    }
  }
}

TEST(DdpJoin, AccumulationAndBuffersWorkInside) {
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    Replica<NormNet> r(world, {}, 8);
    const auto optimizer = make_optimizer("sgd", r.model.parameters(), {0.1});
    r.ddp.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
        {
          auto no_sync = r.ddp.no_sync();
          r.backward();
        }
        r.backward();
        optimizer->step();
        r.model.clear_grad();
      }
    });
    return std::pair(values_of(r.model.parameters()),
                     values_of(r.model.buffers()));
  });
  EXPECT_EQ(ranks[0], ranks[1]);
}

TEST(DdpTrap, UnevenInputsWithoutJoinFailAndNameTheRankThatLeft) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp> r(world);
    for (int step = 0; step < 1 + world.rank(); ++step) r.backward();
  });
  expect_text(error, {"rank 0"});
}

}  // namespace
}  // namespace shardbook::ddp_test
