// Experts on a mesh: the groups of the book's example, the page's bill worked
// out by hand, and mistakes that coarse tests would miss.

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

HybridOptions two_replicas() {
  return {.dp = 2,
          .micro_batches = 2,
          .experts = 4,
          .ep = 2,
          .aux_coefficient = 0.3};
}

// --- Groups ------------------------------------------------------------------

// The lists of sixteen ranks are those of chapter 13.
TEST(HybridExpertGroups, AreThoseOfChapter13) {
  for (const auto& [tp, ep] : {std::pair{1, 2}, {2, 4}}) {
    const Topology grid = topology_of({.dp = 16 / tp, .tp = tp, .ep = ep});
    const Topology expected =
        moe::expert_topology({.world = 16, .tp = tp, .ep = ep});
    for (const char* axis : {"ep", "edp"}) {
      EXPECT_EQ(grid.groups({axis}), expected.groups({axis})) << axis;
    }
  }
}

// Expert groups stay within a stage, a tensor-parallel index, and a part of the
// sequence.
TEST(HybridExpertGroups, CrossReplicasAlone) {
  HybridOptions setup;
  setup.dp = 4, setup.ep = 2, setup.tp = 2, setup.cp = 2, setup.pp = 2;
  for (const char* order : {"megatron", "colossal-ai", "pp-dp-cp-tp"}) {
    setup.order = order;
    const Topology grid = topology_of(setup);
    for (const std::vector<int>& group : grid.groups({"ep"})) {
      ASSERT_EQ(group.size(), 2u);
      for (const char* axis : {"edp", "tp", "cp", "pp"}) {
        EXPECT_EQ(grid.coordinate(group[0], axis),
                  grid.coordinate(group[1], axis));
      }
      // Adjacent replicas, with different samples
      EXPECT_EQ(replica_of(grid, group[0]) + 1, replica_of(grid, group[1]));
    }
  }
}

// --- The page's bill, by hand ------------------------------------------------

double bytes_of_all_reduce(double k, double bytes) {
  return 2 * (k - 1) / k * bytes;
}

/// Bytes that each rank of one stage without context parallelism sends.
double bytes_of_the_page(const Options& options, const HybridOptions& setup) {
  const ModelConfig config = model_config(options);
  const auto h = static_cast<double>(config.n_embd);
  const auto l = static_cast<double>(config.n_layer);
  const auto v = static_cast<double>(config.vocab_size);
  const auto m = static_cast<double>(setup.micro_batches);
  const double t = setup.tp, ep = setup.ep, d = setup.dp;
  const auto e_count = static_cast<double>(setup.experts);
  const double n = static_cast<double>(options.batch) / d / m *
                   static_cast<double>(options.seq);
  const double e = 8, z = 8;  // f64
  const double slots = std::max(4.0, std::ceil(n / e_count));
  // Layers
  double step = bytes_of_all_reduce(t, (2 * l * m + 2 * m) * n * h * e);
  step += bytes_of_all_reduce(t, 3 * n * z * m);
  const double all = e_count * slots * h;
  step += l * m * (4 * (ep - 1) / ep * all / t + 2 * (t - 1) / t * all) * e;
  step += bytes_of_all_reduce(setup.dp * setup.tp, 16);
  // Gradients and parameters
  const auto positions = static_cast<double>(config.n_positions);
  const double dense = v * h / t + positions * h + 2 * h +
                       l * ((4 * h * h + 3 * h) / t + 5 * h + h * e_count);
  const double experts = l * e_count / ep * (8 * h * h + 5 * h);
  const double r = d / ep * t;
  const double sums =
      bytes_of_all_reduce(d, dense * e) + bytes_of_all_reduce(r, experts * e);
  const auto steps = static_cast<double>(options.steps);
  if (setup.zero_stage < 2) return steps * (step + sums);
  return steps * (step + (m + 1) / 2 * sums) + sums / 2;
}

TEST(HybridExpertBill, IsThatOfThePage) {
  for (const int zero : {0, 1, 2}) {
    for (const int tp : {1, 2}) {
      HybridOptions setup = two_replicas();
      setup.tp = tp, setup.zero_stage = zero;
      setup.dp = tp == 1 && !kSanitized ? 4 : 2;
      SCOPED_TRACE(name_of(setup));
      Options options = nano_options(ranks_of(setup));
      options.check = false;
      const double bytes = bytes_of_the_page(options, setup);
      for (const RankReport& rank : train_on(options, setup).ranks) {
        EXPECT_NEAR(rank.bytes.counted, bytes, 1e-12 * bytes);
      }
    }
  }
}

/// Bytes of the states of a model with experts, in the page's symbols.
TEST(HybridExpertBill, StatesAreThoseOfThePage) {
  for (const int zero : {0, 1, 2}) {
    HybridOptions setup = two_replicas();
    setup.zero_stage = zero;
    Options options = nano_options(2);
    options.check = false;
    const double h = 64, l = 4, v = 256, positions = 256;
    const double dense =
        v * h + positions * h + 2 * h + l * (4 * h * h + 3 * h + 5 * h + 4 * h);
    const double experts = l * 2 * (8 * h * h + 5 * h);
    for (const RankReport& rank : train_on(options, setup).ranks) {
      const auto& held = rank.held;
      EXPECT_EQ(held[static_cast<std::size_t>(MemoryKind::kParameter)].counted,
                8 * (dense + experts));
      // Experts have one copy, so ZeRO cuts none of Adam's two moments
      const double kept = zero == 0 ? dense : dense / 2;
      EXPECT_EQ(
          held[static_cast<std::size_t>(MemoryKind::kOptimizerState)].counted,
          16 * (kept + experts));
      if (zero < 2) continue;
      const auto gradient = static_cast<std::size_t>(MemoryKind::kGradient);
      EXPECT_EQ(held[gradient].counted, 8 * (dense / 2 + experts));
      // At the peak, two temporary tables besides the shard: the largest
      // gradient is c_fc of two experts, 2 x 4 h^2
      const double passing = v * h + std::max(v * h, 2 * 4 * h * h);
      EXPECT_EQ(rank.peak[gradient].counted,
                8 * (dense / 2 + experts + passing));
    }
  }
}

// --- Traps -------------------------------------------------------------------

// By SGD, which shows the scale of gradients, and clipped by a norm that counts
// experts once: updates do not depend on ep. Divided by the size of the
// expert-data group, they would be ep times too large.
TEST(HybridExpertTraps, UpdatesDoNotDependOnEp) {
  HybridOptions setup = two_replicas();
  setup.dp = 4, setup.micro_batches = 1;
  for (const double clip : {0.0, 0.2}) {
    Options options = nano_options(4);
    options.batch = 8, options.steps = 2;
    options.optimizer = "sgd";
    options.optimizer_options.lr = 0.3;
    options.clip = clip;
    ReferenceRun one = reference_run(options, setup);
    for (const int zero : sized<int>({0, 1, 2}, {1, 2})) {
      for (const int ep : sized<int>({1, 2, 4}, {2})) {
        setup.zero_stage = zero, setup.ep = ep;
        expect_trained_as(options, setup, one);
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::hybrid
