// The parts of DDP that need no ranks: buckets, coalescing, sampling.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "chapters/02_ddp/bucket.h"
#include "chapters/02_ddp/sampler.h"
#include "chapters/common/models/data.h"
#include "comm/coalesce.h"
#include "core/check.h"

namespace shardbook::ddp {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr BucketLimits kLimits{1 * kMiB, 25 * kMiB};

std::vector<BucketItem> items_of_mib(const std::vector<double>& sizes) {
  std::vector<BucketItem> items;
  for (const double size : sizes) {
    BucketItem item;
    item.bytes = static_cast<std::int64_t>(size * kMiB);
    items.push_back(item);
  }
  return items;
}

std::vector<int> counting(int n) {
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

using Buckets = std::vector<BucketMembers>;

TEST(DdpBuckets, GoldenLists) {
  const auto items = items_of_mib({4, .5, 10, .5, 20, .2, 30, .1});
  EXPECT_EQ(assign_buckets(items, counting(8), kLimits),
            (Buckets{{0}, {1, 2, 3, 4}, {5, 6}, {7}}));
  // The first iteration has the reversed list of the order of definition
  EXPECT_EQ(initial_buckets(items, kLimits),
            (Buckets{{7}, {5, 6}, {1, 2, 3, 4}, {0}}));
  // Rebuilt from the order of arrival, the small bucket comes first
  EXPECT_EQ(assign_buckets(items, {7, 6, 5, 4, 3, 2, 1, 0}, kLimits),
            (Buckets{{7, 6}, {5, 4, 3, 2}, {1, 0}}));
  // 24 MiB do not close a bucket, 24 + 100 do; the next bucket is new
  EXPECT_EQ(assign_buckets(items_of_mib({1, 24, 100, 1}), counting(4), kLimits),
            (Buckets{{0}, {1, 2}, {3}}));
  // A huge parameter that opens a bucket is a bucket by itself
  EXPECT_EQ(assign_buckets(items_of_mib({300, 1, 300}), counting(3), kLimits),
            (Buckets{{0}, {1, 2}}));
  EXPECT_EQ(assign_buckets(items_of_mib({2, 300, 1}), counting(3), kLimits),
            (Buckets{{0}, {1}, {2}}));
}

TEST(DdpBuckets, DtypesNeverMixAndEachHasItsOwnFirstLimit) {
  auto items = items_of_mib({.6, .6, .6, .6, .6, .6});
  for (const std::size_t i : {1u, 3u, 5u}) items[i].dtype = DType::kBF16;
  const BucketLimits limits{kMiB, 2 * kMiB};
  EXPECT_EQ(assign_buckets(items, counting(6), limits),
            (Buckets{{0, 2}, {1, 3}, {4}, {5}}));
  for (const BucketMembers& bucket : initial_buckets(items, limits)) {
    for (const int i : bucket) {
      EXPECT_EQ(items[static_cast<std::size_t>(i)].dtype,
                items[static_cast<std::size_t>(bucket[0])].dtype);
    }
  }
}

TEST(DdpBuckets, DevicesNeverMix) {
  auto items = items_of_mib({.1, .1, .1, .1});
  const Device one = Device::cpu(0), two = Device::cpu(1);
  items[0].device = items[3].device = one;
  items[1].device = items[2].device = two;
  EXPECT_EQ(assign_buckets(items, counting(4), kLimits),
            (Buckets{{1, 2}, {0, 3}}));
}

TEST(DdpBuckets, EveryParameterIsInExactlyOneBucket) {
  std::vector<double> sizes;
  for (int i = 0; i < 100; ++i) sizes.push_back((i * 37 % 11) * 0.3);
  for (const double cap : {0.001, 1.0, 3.0, 1000.0}) {
    const BucketLimits limits{static_cast<std::int64_t>(cap * kMiB / 2) + 1,
                              static_cast<std::int64_t>(cap * kMiB)};
    std::vector<int> all;
    for (const BucketMembers& bucket :
         initial_buckets(items_of_mib(sizes), limits)) {
      all.insert(all.end(), bucket.begin(), bucket.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, counting(100)) << "cap " << cap;
  }
}

TEST(DdpBuckets, AnOrderThatIsNoPermutationIsRefused) {
  const auto items = items_of_mib({1, 1, 1});
  EXPECT_THROW(assign_buckets(items, {0, 1}, kLimits), Error);
  EXPECT_THROW(assign_buckets(items, {0, 1, 1}, kLimits), Error);
  EXPECT_THROW(assign_buckets(items, {0, 1, 3}, kLimits), Error);
  EXPECT_THROW(assign_buckets(items, {0, -1, 2}, kLimits), Error);
}

TEST(DdpCoalesce, PiecesKeepOrderAndStayBelowTheLimit) {
  Tensors tensors;
  for (const std::int64_t n : {10, 20, 30, 100, 5, 5}) {
    tensors.push_back(Tensor::zeros({n}));
  }
  tensors.push_back(Tensor::zeros({5}, {DType::kF64, Device()}));
  // Bytes: 40 80 120 | 400 | 20 20 | 40 in f64.
  const auto pieces = coalesce(tensors, 250);
  ASSERT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].size(), 3u);
  EXPECT_EQ(pieces[1].size(), 1u);
  EXPECT_EQ(pieces[2].size(), 2u);
  EXPECT_EQ(pieces[3].size(), 1u);
}

std::vector<std::int64_t> indices_of(std::int64_t n, int d, int r,
                                     SamplerOptions options,
                                     std::int64_t epoch = 0) {
  DistributedSampler sampler(n, d, r, options);
  sampler.set_epoch(epoch);
  EXPECT_EQ(static_cast<std::int64_t>(sampler.indices().size()),
            sampler.size());
  return sampler.indices();
}

using Indices = std::vector<std::int64_t>;

// Every d-th sample from r on; samples are repeated from the beginning where
// their number does not divide.
TEST(DdpSampler, WithoutShufflingRankRTakesEveryDthFromR) {
  const SamplerOptions options{.shuffle = false};
  EXPECT_EQ(indices_of(8, 2, 0, options), (Indices{0, 2, 4, 6}));
  EXPECT_EQ(indices_of(8, 2, 1, options), (Indices{1, 3, 5, 7}));
  EXPECT_EQ(indices_of(10, 4, 1, options), (Indices{1, 5, 9}));
  EXPECT_EQ(indices_of(10, 4, 2, options), (Indices{2, 6, 0}));
  EXPECT_EQ(indices_of(10, 4, 3, options), (Indices{3, 7, 1}));
  // Fewer samples than ranks: the samples repeat more than once.
  EXPECT_EQ(indices_of(2, 5, 4, options), (Indices{0}));
  EXPECT_EQ(indices_of(2, 5, 3, options), (Indices{1}));
}

TEST(DdpSampler, DropLastLeavesOutTheRest) {
  const SamplerOptions options{.shuffle = false, .drop_last = true};
  EXPECT_EQ(indices_of(10, 4, 1, options), (Indices{1, 5}));
  EXPECT_EQ(indices_of(10, 4, 3, options), (Indices{3, 7}));
  EXPECT_EQ(indices_of(3, 4, 0, options), Indices{});
}

TEST(DdpSampler, ShuffledRanksShareOnePermutation) {
  for (const int d : {1, 2, 3, 4, 8}) {
    std::multiset<std::int64_t> all;
    for (int r = 0; r < d; ++r) {
      for (const std::int64_t i : indices_of(24, d, r, {})) all.insert(i);
    }
    const std::vector<int> expected = counting(24);
    EXPECT_EQ(all,
              std::multiset<std::int64_t>(expected.begin(), expected.end()))
        << d << " ranks";
  }
}

TEST(DdpSampler, EpochAndSeedChooseThePermutation) {
  SamplerOptions options;
  const Indices first = indices_of(50, 2, 0, options, 0);
  EXPECT_EQ(indices_of(50, 2, 0, options, 0), first);
  EXPECT_NE(indices_of(50, 2, 0, options, 1), first);
  options.seed = 1;
  EXPECT_NE(indices_of(50, 2, 0, options, 0), first);
  // Seed and epoch are added.
  EXPECT_EQ(indices_of(50, 2, 0, options, 0), indices_of(50, 2, 0, {}, 1));
}

TEST(DdpSampler, DealsAGlobalBatchOutAsTheDatasetDoes) {
  const Dataset data = Dataset::open("random", 4, 256, 3);
  const SamplerOptions options{.shuffle = false};
  for (int r = 0; r < 3; ++r) {
    const Indices mine = indices_of(12, 3, r, options);
    for (std::int64_t step = 0; step < 2; ++step) {
      // Two of this rank's samples are its part of a global batch of 6.
      const Batch batch = data.batch(step, 6, BatchSlice{r, 3}, 2);
      for (std::int64_t i = 0; i < 2; ++i) {
        const Batch one = data.batch(
            0, 1, BatchSlice{mine[static_cast<std::size_t>(2 * step + i)], 1},
            1);
        EXPECT_TRUE(bitwise_equal(one.inputs, batch.inputs.rows_view(i, i + 1)))
            << "rank " << r << ", step " << step << ", sample " << i;
      }
    }
  }
}

TEST(DdpSampler, ImpossibleArgumentsAreRefused) {
  EXPECT_THROW(DistributedSampler(0, 2, 0), Error);
  EXPECT_THROW(DistributedSampler(4, 2, 2), Error);
  EXPECT_THROW(DistributedSampler(4, 2, -1), Error);
}

}  // namespace
}  // namespace shardbook::ddp
