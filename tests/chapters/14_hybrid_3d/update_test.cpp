// The sums at the end of a step: their groups, their order, and each element of
// the norm once.

#include "chapters/14_hybrid_3d/update.h"

#include <set>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"

namespace shardbook::hybrid {
namespace {

HybridOptions cube(int zero, bool sequence_parallel) {
  HybridOptions setup;
  setup.dp = setup.tp = setup.pp = 2;
  setup.zero_stage = zero;
  setup.sequence_parallel = sequence_parallel;
  setup.micro_batches = 2;
  return setup;
}

/// The results of `read` on each rank after `steps` steps.
template <typename Read>
auto after_steps(const HybridOptions& setup, std::int64_t steps, Read read) {
  Options options = nano_options(ranks_of(setup));
  options.steps = steps;
  return on_mesh(
      options, setup,
      [&](ProcessGroup& world, DeviceMesh& mesh, HybridStrategy& strategy) {
        world.clear_records();
        for (std::int64_t k = 0; k < steps; ++k) strategy.step(k);
        return read(world, mesh, strategy);
      });
}

/// Labels of the collectives of the update, in order; repeated ones once.
std::vector<std::string> sums_of(ProcessGroup& world) {
  const std::set<std::string> known = {"gradients", "sequence_parallel",
                                       "tied gradient", "loss and norm",
                                       "parameters"};
  std::vector<std::string> labels;
  for (const CommRecord& record : world.records()) {
    if (known.count(record.label) == 0) continue;
    const std::string each = record.group + ": " + record.label;
    if (labels.empty() || labels.back() != each) labels.push_back(each);
  }
  return labels;
}

using Lines = std::vector<std::string>;

TEST(HybridSums, ComeInTheOrderOfMegatron) {
  const auto expect_sums = [](const HybridOptions& setup, const Lines& lines) {
    for (const Lines& labels : after_steps(
             setup, 1, [](ProcessGroup&world, DeviceMesh&, HybridStrategy&) {
               return sums_of(world);
             })) {
      EXPECT_EQ(labels, lines);
    }
  };
  expect_sums(cube(0, true), {"dp-cp: gradients", "tp: sequence_parallel",
                              "tied 0: tied gradient", "world: loss and norm"});
  expect_sums(cube(1, false), {"dp-cp: gradients", "tied 0: tied gradient",
                               "world: loss and norm", "dp-cp: parameters"});
}

// A middle stage holds no embedding; without cut tokens nothing is partial.
TEST(HybridSums, AreLeftOutWhereNobodySharesAParameter) {
  HybridOptions setup = cube(0, false);
  setup.pp = 3, setup.dp = 1;
  const auto all = after_steps(
      setup, 1, [](ProcessGroup& world, DeviceMesh& mesh, HybridStrategy&) {
        Lines labels = sums_of(world);
        labels.insert(labels.begin(), std::to_string(mesh.coordinate("pp")));
        return labels;
      });
  for (const Lines& labels : all) {
    const Lines expected =
        labels[0] == "1"
            ? Lines{"1", "world: loss and norm"}
            : Lines{labels[0], "tied 0: tied gradient", "world: loss and norm"};
    EXPECT_EQ(labels, expected);
  }
}

// The elements that the ranks add to the norm sum to the model's.
TEST(HybridNorm, CountsEachElementOnce) {
  const std::int64_t whole =
      make_model(model_config(nano_options(1)), InitOptions{})
          ->num_parameters();
  for (const int zero : {0, 1}) {
    for (const bool sequence_parallel : {false, true}) {
      for (const char* schedule : {"1f1b", "dualpipe"}) {
        HybridOptions setup = cube(zero, sequence_parallel);
        setup.schedule = schedule;
        setup.micro_batches = 4;
        SCOPED_TRACE(name_of(setup));
        EXPECT_EQ(counted_in_norm(setup), whole);
      }
    }
  }
}

// Without one of the sums, copies drift apart while the loss still falls.
TEST(HybridReplicas, StayEqualBitForBit) {
  for (const int zero : {0, 1}) {
    for (const bool sequence_parallel : {false, true}) {
      expect_equal_copies(cube(zero, sequence_parallel));
    }
  }
}

// With shards, both stages must cut a tied parameter's first sum alike.
TEST(HybridBuckets, TiedWeightsHaveTheirOwn) {
  const auto all = after_steps(
      cube(1, false), 0,
      [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
        Lines tied;
        for (const UpdateBucket& bucket : strategy.update().buckets()) {
          if (bucket.tied == nullptr) continue;
          for (const NamedTensor& each : bucket.parameters) {
            tied.push_back(each.name + " " +
                           std::to_string(bucket.own.numel()));
          }
        }
        return tied;
      });
  for (const Lines& tied : all) {
    // 256 x 64 elements over tp and dp
    EXPECT_EQ(tied, Lines{"transformer.wte.weight 4096"});
  }
}

TEST(HybridFolding, TakesTheTimeOfAllRanks) {
  for (const int zero : {0, 1, 2}) {
    for (const char* kind : {"none", "ring", "ulysses"}) {
      HybridOptions setup = cube(zero, true);
      if (zero == 2) setup.pp = 1;
      if (kind != std::string("none")) setup.cp = 2, setup.cp_kind = kind;
      expect_folded_as_all(nano_options(ranks_of(setup)), setup);
    }
  }
}

TEST(HybridFolding, AnEvenRingKeepsThePaceOfItsLastRank) {
  HybridOptions setup = cube(1, true);
  setup.cp = 4, setup.cp_layout = "zigzag";
  Options options = nano_options(ranks_of(setup));
  options.model = "llama-3.2-1b";
  options.seq = 8192;
  options.backend = "sim";
  options.cluster = "dgx-a100";
  expect_folded_as_all(options, setup, 1e-4);
  const FoldClass even = fold_class(options, setup);
  EXPECT_EQ(even(0), even(setup.tp));
  // Contiguous tokens give unequal work, and the hops of a ring over two nodes
  // go over unlike links
  for (const int cp : {4, 8}) {
    setup.cp = cp;
    setup.cp_layout = cp == 4 ? "contiguous" : "zigzag";
    const FoldClass uneven = fold_class(options, setup);
    EXPECT_NE(uneven(0), uneven(setup.tp)) << cp;
  }
}

}  // namespace
}  // namespace shardbook::hybrid
