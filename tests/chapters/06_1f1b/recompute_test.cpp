// Recomputation under every schedule: the same numbers, and fewer activations.

#include <gmock/gmock.h>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "core/check.h"
#include "tests/chapters/06_1f1b/worlds_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Recompute;
using pipeline::Recomputed;
using pipeline::Schedule;
namespace schedules = pipeline::schedules;
using testing::ElementsAre;
using testing::HasSubstr;

/// The micro-batches that a rank runs forward twice.
std::vector<int> twice(const Schedule& schedule, int rank, Recompute mode) {
  const Recomputed recomputed(schedule, rank, mode);
  std::vector<int> result;
  for (int b = 0; b < schedule.num_micro_batches; ++b) {
    if (recomputed.contains(b, 0)) result.push_back(b);
  }
  return result;
}

TEST(Recomputed, AreNotThoseWhoseBackwardIsNext) {
  const Schedule gpipe = gpipe::schedule(2, 4);
  EXPECT_THAT(twice(gpipe, 0, Recompute::kExceptLast), ElementsAre(0, 1, 2));
  EXPECT_THAT(twice(gpipe, 1, Recompute::kExceptLast), ElementsAre(0, 1, 2));
  EXPECT_THAT(twice(gpipe, 1, Recompute::kAlways), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(twice(gpipe, 1, Recompute::kNever), ElementsAre());
  // The last stage of 1F1B runs each backward directly after its forward, also
  // if the backward is in two parts
  for (const Schedule& each :
       {schedules::one_f_one_b(2, 4), schedules::zb_h1(2, 4)}) {
    EXPECT_THAT(twice(each, 0, Recompute::kExceptLast),
                ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(twice(each, 1, Recompute::kExceptLast), ElementsAre());
  }
}

/// Under a sanitizer, one schedule for each way to recompute.
std::vector<Variant> few_recomputing_variants() {
  std::vector<Variant> few = {variant("gpipe", 3), variant("zb-h1", 3),
                              variant("dualpipe", 2), variant("pipedream", 3)};
  few[3].setup.replicas = "2,1";
  return few;
}

std::vector<Variant> recomputing_variants() {
  if (kSanitized) return few_recomputing_variants();
  std::vector<Variant> all = {
      variant("gpipe", 3),       variant("1f1b", 3),
      variant("interleaved", 2), variant("zb-h1", 3),
      variant("zb-h2", 3),       variant("zb-auto", 3),
      variant("dualpipe", 2),    variant("pipedream", 3),
      variant("pipedream", 3),   variant("pipedream-2bw", 3)};
  all[8].setup.replicas = "2,1";
  all.push_back(variant("zb-h2", 3));
  all.back().setup.post_validation = true;
  return all;
}

double activations(const WorldRun& run, std::size_t rank) {
  return sharded_test::activation_peak(run.report.ranks[rank]);
}

void expect_same_numbers(const WorldRun& a, const WorldRun& b) {
  EXPECT_EQ(a.report.losses, b.report.losses);
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(a.parameters[i].tensor, b.parameters[i].tensor))
        << a.parameters[i].name;
  }
}

// Recomputation with dropout: bytes and memory as predicted, time as on shapes,
// the same bits as without recomputation, and less memory on the first rank.
TEST(RecomputeWorlds, EveryScheduleKeepsItsClaimsAndLessActivations) {
  for (Variant each : recomputing_variants()) {
    Options options = worlds_options(each.world_size);
    options.dropout = 0.1;
    each.setup.recompute = "never";
    const WorldRun kept = run_strategy(options, each.setup);
    for (const bool is_early : {true, false}) {
      SCOPED_TRACE(each.name + (is_early ? " early" : " late"));
      each.setup.recompute = is_early ? "always" : "except_last";
      each.setup.early_recompute = is_early;
      options.backend = "threads";
      const WorldRun threads = run_strategy(options, each.setup);
      expect_bill(threads.report);
      EXPECT_NEAR(threads.report.time.simulated_step_s,
                  threads.report.time.step_s,
                  1e-9 * threads.report.time.step_s);
      expect_same_numbers(threads, kept);
      EXPECT_LT(activations(threads, 0), activations(kept, 0));
      options.backend = "sim";
      const WorldRun shapes = run_strategy(options, each.setup);
      expect_bill(shapes.report);
      for (std::size_t r = 0; r < shapes.report.ranks.size(); ++r) {
        EXPECT_EQ(activations(shapes, r), activations(threads, r)) << r;
        EXPECT_EQ(shapes.report.ranks[r].bytes.counted,
                  threads.report.ranks[r].bytes.counted);
      }
    }
  }
}

TEST(RecomputeWorlds, TrainsAsOneDevice) {
  for (const char* schedule :
       sized<const char*>({"1f1b", "zb-h1", "pipedream"}, {"zb-h1"})) {
    SCOPED_TRACE(schedule);
    Variant each = variant(schedule, 3);
    each.setup.recompute = "always";
    expect_trained_as_one_device(worlds_options(3), each.setup);
  }
}

TEST(RecomputeWorlds, ModesWithoutAMeaningAreOneSentence) {
  const auto error = [](const std::string& schedule, bool stash) {
    Variant each = variant(schedule, 2);
    each.setup.recompute = "always";
    each.setup.stash = stash;
    return error_of(
        [&] { pipeline::make_plan(worlds_options(2), each.setup); });
  };
  EXPECT_EQ(error("1f1b", true), "");
  EXPECT_THAT(error("naive", true),
              HasSubstr("--recompute always: --schedule naive has one "
                        "micro-batch in flight at a time"));
  EXPECT_THAT(error("pipedream", false),
              HasSubstr("--recompute always: with --no-stash the forward would "
                        "run again with other weights"));
}

}  // namespace
}  // namespace shardbook::pipeline_test
