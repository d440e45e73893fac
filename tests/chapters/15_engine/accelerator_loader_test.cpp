// How batches are dealt out to processes, and how results come together again.

#include <numeric>

#include "tests/chapters/15_engine/accelerator_support.h"
#include "tests/support/errors.h"

namespace shardbook::accelerate {
namespace {

using Samples = std::vector<std::int64_t>;
using Batches = std::vector<Samples>;

Samples first(std::int64_t n) {
  Samples samples(static_cast<std::size_t>(n));
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

TEST(AcceleratorLoader, DealsOutSevenSamples) {
  struct Case {
    ShardOptions options;
    std::vector<Batches> by_rank;
  };
  for (const Case& each : std::vector<Case>{
           // Batch i, and every n-th after it
           {{.batch_size = 2}, {{{0, 1}, {4, 5}}, {{2, 3}, {6, 0}}}},
           {{.batch_size = 2, .split_batches = true},
            {{{0}, {2}, {4}, {6}}, {{1}, {3}, {5}, {0}}}},
           // The last round is short, or left out
           {{.batch_size = 2, .even_batches = false},
            {{{0, 1}, {6}}, {{2, 3}}, {{4, 5}}}},
           {{.batch_size = 2, .drop_last = true}, {{{0, 1}}, {{2, 3}}}},
           {{.batch_size = 4, .drop_last = true}, {{}, {}}},
           // One process reads what there is
           {{.batch_size = 4}, {{{0, 1, 2, 3}, {4, 5, 6}}}}}) {
    const int ranks = static_cast<int>(each.by_rank.size());
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(shard_batches(first(7), each.options, ranks, rank),
                each.by_rank[static_cast<std::size_t>(rank)]);
    }
  }
}

/// BatchSamplerShard._iter_with_no_split of Accelerate, for even_batches and
/// without drop_last: the samples begin again until the last round is full.
Batches as_accelerate(std::int64_t count, std::int64_t size, int n,
                      int process) {
  Batches batches;
  for (std::int64_t begin = 0; begin < count; begin += n * size) {
    batches.emplace_back();
    for (std::int64_t i = 0; i < size; ++i) {
      batches.back().push_back((begin + process * size + i) % count);
    }
  }
  return batches;
}

TEST(AcceleratorLoader, UnevenDataAreDealtOutAsAccelerateDoes) {
  for (const int n : {2, 3, 4, 8}) {
    for (const std::int64_t size : {1, 2, 3}) {
      for (std::int64_t count = 1; count <= 30; ++count) {
        for (int rank = 0; rank < n; ++rank) {
          EXPECT_EQ(shard_batches(first(count), {.batch_size = size}, n, rank),
                    as_accelerate(count, size, n, rank))
              << count << " samples, batches of " << size << ", rank " << rank
              << " of " << n;
        }
      }
    }
  }
}

TEST(AcceleratorLoader, SplitBatchesThatDoNotDivideAreAnError) {
  shardbook::expect_error(
      [&] {
        shard_batches(first(8), {.batch_size = 6, .split_batches = true}, 4, 0);
      },
      {"split_batches", "give 8"});
}

TEST(AcceleratorLoader, ShuffleIsOneOrderForAllProcessesAndNewInEachEpoch) {
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    Accelerator acc({}, world);
    Script script;
    const Options options = options_of(script);
    DataLoader data = loader_of(script, options, model_config(options));
    data.shuffle = true;
    data.batch_size = 2;
    PreparedLoader loader = acc.prepare(data);
    Samples seen;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const Samples& batch : loader.batches()) {
        seen.insert(seen.end(), batch.begin(), batch.end());
      }
      while (loader.next()) {
      }
    }
    return seen;
  });
  Samples epoch(ranks[0].begin(), ranks[0].begin() + 12);
  epoch.insert(epoch.end(), ranks[1].begin(), ranks[1].begin() + 12);
  EXPECT_NE(epoch, first(24));
  std::sort(epoch.begin(), epoch.end());
  EXPECT_EQ(epoch, first(24));
  EXPECT_NE(Samples(ranks[0].begin(), ranks[0].begin() + 12),
            Samples(ranks[0].begin() + 12, ranks[0].end()));
}

// --- Results of all processes ------------------------------------------------

TEST(AcceleratorGather, ForMetricsEverySampleComesOnce) {
  for (const int n : {1, 2, 3, 4}) {
    const auto ranks = on_ranks(n, [](ProcessGroup& world) {
      Accelerator acc({}, world);
      Script script;
      script.samples = 7;
      script.batch_size = 2;
      const Options options = options_of(script);
      PreparedLoader loader =
          acc.prepare(loader_of(script, options, model_config(options)));
      Samples metrics, all;
      for (std::size_t i = 0; loader.next(); ++i) {
        const Samples& mine = loader.batches()[i];
        const Tensor numbers =
            Tensor::from_values(mine, {static_cast<std::int64_t>(mine.size())});
        for (const auto each :
             acc.gather_for_metrics(numbers).to_vector<std::int64_t>()) {
          metrics.push_back(each);
        }
        for (const auto each : acc.gather(numbers).to_vector<std::int64_t>()) {
          all.push_back(each);
        }
      }
      // Gathering with repetitions counts some samples twice
      EXPECT_EQ(all.size() > 7, acc.num_processes() > 1);
      return metrics;
    });
    for (const Samples& seen : ranks) EXPECT_EQ(seen, first(7));
  }
}

TEST(AcceleratorGather, NumbersAndSumsOverRanks) {
  on_ranks(3, [](ProcessGroup& world) {
    Accelerator acc({}, world);
    const double mine = 1 + acc.process_index();
    const Tensor number = Tensor::full({}, mine, {DType::kF64, Device()});
    EXPECT_EQ(acc.gather(number).to_vector<double>(),
              (std::vector<double>{1, 2, 3}));
    EXPECT_EQ(acc.reduce(number).item(), 6);
    EXPECT_EQ(acc.reduce(number, "mean").item(), 2);
    EXPECT_EQ(number.item(), mine);
    EXPECT_EQ(acc.num_processes(), 3);
    EXPECT_EQ(acc.is_main_process(), acc.process_index() == 0);
    acc.wait_for_everyone();
    return 0;
  });
}

TEST(AcceleratorGather, WaitsForEveryoneAtABarrier) {
  on_ranks(2, [](ProcessGroup& world) {
    Accelerator acc({}, world);
    world.clear_records();
    acc.wait_for_everyone();
    EXPECT_EQ(world.records().size(), 1u);
    EXPECT_EQ(world.records()[0].op, CommOp::kBarrier);
    return 0;
  });
}

TEST(AcceleratorModel, UnwrappedIsTheScriptsOwn) {
  for (const Plugin& plugin : Plugins{Ddp{}, Fsdp{}, stage(0), stage(2)}) {
    on_prepared(plugin, [](Accelerator& acc, Prepared& all, Module& model) {
      EXPECT_EQ(&acc.unwrap_model(all.model), &model);
    });
  }
}

TEST(AcceleratorGather, OnlyTheMainProcessPrints) {
  testing::internal::CaptureStdout();
  on_ranks(3, [](ProcessGroup& world) {
    Accelerator({}, world).print("a line");
    return 0;
  });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "a line\n");
}

}  // namespace
}  // namespace shardbook::accelerate
