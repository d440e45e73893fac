#include "notebooks/live_ranks.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <string>

#include "tests/support/errors.h"

namespace shardbook::notebook {
namespace {

double sum_of_ranks(ProcessGroup& world) {
  const Tensor x = Tensor::full({1}, world.rank());
  world.all_reduce(x).wait();
  return x.item();
}

int rank_plus(ProcessGroup& world, int more) { return world.rank() + more; }

std::ptrdiff_t num_threads_of_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

class LiveRanks : public testing::TestWithParam<int> {};

TEST_P(LiveRanks, ResultsComeInTheOrderOfTheRanks) {
  const int n = GetParam();
  const std::vector<int> results = on_ranks(n, rank_plus, 10);
  ASSERT_EQ(results.size(), static_cast<std::size_t>(n));
  for (int rank = 0; rank < n; ++rank) {
    EXPECT_EQ(results[static_cast<std::size_t>(rank)], 10 + rank);
  }
}

TEST_P(LiveRanks, RanksMeetInCollectives) {
  const int n = GetParam();
  const std::vector<double> sums = on_ranks(n, sum_of_ranks);
  EXPECT_EQ(sums, std::vector<double>(static_cast<std::size_t>(n),
                                      n * (n - 1) / 2.0));
}

TEST_P(LiveRanks, NoThreadOutlivesTheCall) {
  on_ranks(GetParam(), sum_of_ranks);  // kernels may start threads of their own
  const std::ptrdiff_t before = num_threads_of_process();
  on_ranks(GetParam(), sum_of_ranks);
  EXPECT_LE(num_threads_of_process(), before);
}

TEST_P(LiveRanks, AnErrorNamesItsRank) {
  const int n = GetParam();
  const std::string message = error_of([n] {
    run_on_ranks(n, [n](ProcessGroup& world) {
      SB_CHECK(world.rank() != n - 1, "a broken line");
      sum_of_ranks(world);  // the others wait for the rank that threw
    });
  });
  EXPECT_EQ(message.rfind("rank " + std::to_string(n - 1) + ": ", 0), 0u)
      << message;
  expect_text(message, {"a broken line"});
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, LiveRanks, testing::Values(1, 2, 3, 4, 8));

TEST(LiveRanksCall, TensorsOfRanksStayReadable) {
  const auto make = [](ProcessGroup& world) {
    return Tensor::full({2}, world.rank());
  };
  const std::vector<Tensor> tensors = on_ranks(2, make);
  EXPECT_EQ(tensors[1].to_vector<double>(), (std::vector<double>{1, 1}));
  EXPECT_EQ(tensors[1].device().name(), "cpu:1");
}

TEST(LiveRanksCall, BodiesMayReturnNothing) {
  std::vector<int> seen(3, 0);
  on_ranks(3, [&](ProcessGroup& world) {
    seen[static_cast<std::size_t>(world.rank())] = 1;
  });
  EXPECT_EQ(seen, std::vector<int>(3, 1));
}

TEST(LiveRanksCall, AWorldHasAtLeastOneRank) {
  EXPECT_EQ(error_of([] { run_on_ranks(0, [](ProcessGroup&) {}); }),
            "on_ranks: world_size is 0; it has to be at least 1");
}

}  // namespace
}  // namespace shardbook::notebook
