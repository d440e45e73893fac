// Random meshes, schedules and options: legal ones hold every claim, others are
// refused with a reason. SHARDBOOK_HYBRID_DRAWS sets how many legal ones run on
// threads; five times as many run on shapes.

#include <cstdlib>
#include <random>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

int num_draws() {
  const char* const given = std::getenv("SHARDBOOK_HYBRID_DRAWS");
  return given != nullptr ? std::atoi(given) : (kSanitized ? 2 : 10);
}

class Draws {
 public:
  explicit Draws(unsigned seed) : random_(seed) {}

  template <typename T>
  T one_of(std::vector<T> values) {
    return values[std::uniform_int_distribution<std::size_t>(
        0, values.size() - 1)(random_)];
  }

  HybridOptions next(int most_ranks) {
    HybridOptions setup;
    do {
      setup.dp = one_of<int>({1, 1, 2, 3, 4});
      setup.tp = one_of<int>({1, 1, 2, 2, 3, 4});
      setup.cp = one_of<int>({1, 1, 1, 2, 4});
      setup.pp = one_of<int>({1, 1, 2, 2, 3, 4, 6});
    } while (ranks_of(setup) > most_ranks);
    setup.order = one_of<std::string>(
        {"megatron", "megatron-pp-dp", "deepspeed", "colossal-ai",
         "pp-tp-dp-cp", "dp-pp-tp-cp", "tp-pp", "tp-tp-dp-pp"});
    setup.zero_stage = one_of<int>({0, 0, 1, 1, 1, 2, 3});
    setup.sequence_parallel = one_of<bool>({false, true});
    if (setup.cp > 1) {
      setup.cp_kind = one_of<std::string>({"ring", "ring", "rsa", "ulysses"});
      setup.cp_layout =
          one_of<std::string>({"contiguous", "zigzag", "striped"});
    }
    setup.schedule = one_of<std::string>(
        {"1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-auto",
         "dualpipe", "naive", "pipedream"});
    setup.micro_batches = one_of<std::int64_t>({1, 2, 3, 4, 6, 8});
    setup.chunks = one_of<int>({2, 3});
    setup.partition = one_of<std::string>({"uniform", "parameters"});
    setup.recompute = one_of<std::string>(
        {"never", "never", "always", "except_last", "blocks", "attention"});
    setup.bucket_bytes = one_of<std::int64_t>({1000, 20000, 1 << 25});
    setup.experts = one_of<std::int64_t>({1, 1, 4, 6, 8});
    if (setup.experts == 1 && one_of<int>({0, 0, 0, 1}) == 0) return setup;
    setup.ep = one_of<int>({1, 2, 2, 3, 4});
    setup.top_k = one_of<std::int64_t>({1, 1, 2, 3});
    setup.capacity_factor = one_of<double>({1, 1.3, 2});
    setup.expert_tp = one_of<bool>({false, false, true});
    setup.noise = one_of<std::string>(
        {"none", "none", "jitter", "rsample", "noisy-top-k"});
    return setup;
  }

 private:
  std::mt19937 random_;
};

/// Draws until `count` legal ones have been run.
void run_draws(unsigned seed, int count, int most_ranks,
               const std::function<void(const HybridOptions&)>& run) {
  Draws draws(seed);
  int refused = 0, over_ep = 0;
  for (int legal = 0; legal < count;) {
    const HybridOptions setup = draws.next(most_ranks);
    SCOPED_TRACE(name_of(setup));
    const std::string reason = refusal(nano_options(ranks_of(setup)), setup);
    if (!reason.empty()) {
      // Names an option, and gives a legal value
      EXPECT_EQ(reason.rfind("--", 0), 0u) << reason;
      expect_text(reason, {": "});
      ++refused;
      continue;
    }
    ++legal;
    over_ep += setup.ep > 1 ? 1 : 0;
    run(setup);
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(refused, 0);
  // Sanitizers run few draws, which may miss them
  if (num_draws() >= 10) {
    EXPECT_GT(over_ep, 0);
  }
}

TEST(HybridFuzz, RandomMeshesTrainAsOneDevice) {
  ReferenceRun one;
  run_draws(14, num_draws(), 16, [&](const HybridOptions& setup) {
    const Options options = nano_options(ranks_of(setup));
    expect_trained_as(
        options, setup,
        setup.has_experts() ? reference_with_experts(options, setup) : one);
  });
}

TEST(HybridFuzz, RandomMeshesRunOnShapes) {
  run_draws(41, 5 * num_draws(), 64, [&](const HybridOptions& setup) {
    Options options = nano_options(ranks_of(setup));
    options.backend = "sim";
    options.cluster = "dgx-a100";
    const Report report = train_on(options, setup);
    EXPECT_GT(report.time.step_s, 0);
    for (const RankReport& rank : report.ranks) {
      EXPECT_NEAR(rank.bytes.counted, rank.bytes.predicted,
                  1e-9 * rank.bytes.counted);
    }
  });
}

}  // namespace
}  // namespace shardbook::hybrid
