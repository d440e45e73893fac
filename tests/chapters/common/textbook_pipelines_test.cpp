// The time of a pipeline's step on the cluster `textbook`: the textbooks' forms
// for equal stages against the longest path in a schedule, and this path
// against the clock.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/schedule.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::pipelines {
namespace {

using pipeline::Recompute;
using pipeline::Schedule;

// --- Equal stages ------------------------------------------------------------

class TextbookPipelines : public ::testing::TestWithParam<int> {};

/// Equal stages: forward, the input's gradient, the weights', and a message.
struct Parts {
  double f = 3, i = 3, w = 3, c = 1;
};

double makespan(const Schedule& schedule, const Parts& t,
                Recompute recompute = Recompute::kNever, bool early = false) {
  std::vector<pipeline::Recomputed> dropped;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    dropped.emplace_back(schedule, rank, recompute);
  }
  pipeline::ReplayOptions setup;
  setup.recomputes = [&](int rank, const pipeline::Action& a) {
    return dropped[static_cast<std::size_t>(rank)].contains(a.micro_batch,
                                                            a.chunk);
  };
  setup.early_recompute = early;
  setup.messages = [&](int stage, int, bool is_forward) {
    std::vector<pipeline::Message> sent;
    const int to = is_forward ? stage + 1 : stage - 1;
    if (to >= 0 && to < schedule.num_stages) sent.push_back({to, t.c});
    return sent;
  };
  const pipeline::Costs costs{t.f, t.i + t.w, t.i, t.w};
  return replay(
             schedule, [&](int, int) { return costs; }, setup)
      .makespan;
}

// Fill, then one micro-batch at a time: (m + p - 1)(f + b), and a message from
// stage to stage, there and back.
TEST_P(TextbookPipelines, GpipeIsFillPlusOneMicroBatchAtATime) {
  const int p = GetParam();
  const auto [f, i, w, c] = Parts{};
  const double b = i + w;
  for (const int m : {1, 8}) {
    const Schedule gpipe = gpipe::schedule(p, m);
    SCOPED_TRACE(m);
    EXPECT_DOUBLE_EQ(makespan(gpipe, {}),
                     (m + p - 1) * (f + b) + 2 * (p - 1) * c);
    EXPECT_DOUBLE_EQ(makespan(gpipe, {}, Recompute::kAlways, false),
                     (m + p - 1) * (f + f + b) + 2 * (p - 1) * c);
    // While the first gradient travels, stages recompute their graphs
    EXPECT_DOUBLE_EQ(
        makespan(gpipe, {}, Recompute::kAlways, true),
        (m + p - 1) * f + m * (f + b) + (p - 1) * b + 2 * (p - 1) * c);
    // The last micro-batch is kept
    EXPECT_DOUBLE_EQ(
        makespan(gpipe, {}, Recompute::kExceptLast, true),
        (m + p - 1) * f + (m - 1) * (f + b) + p * b + 2 * (p - 1) * c);
  }
}

// A message between two ranks waits for the one before. If stages take no time,
// the last of m arrives after m + p - 2 messages, there and back.
TEST_P(TextbookPipelines, MessagesOfOneLineFollowEachOther) {
  const int p = GetParam();
  for (const int m : {1, 8}) {
    EXPECT_DOUBLE_EQ(makespan(gpipe::schedule(p, m), {0, 0, 0, 1}),
                     p == 1 ? 0 : 2 * (m + p - 2));
  }
}

// As GPipe, and in addition each micro-batch but one in p, after the first,
// waits for a message in each direction.
TEST_P(TextbookPipelines,
       OneForwardOneBackwardWaitsForMessagesInItsSteadyState) {
  const int p = GetParam();
  const auto [f, i, w, c] = Parts{};
  for (const int m : {1, 2, 8, 11}) {
    const int waits = (p - 1) + (m - 1) - (m - 1 + p - 1) / p;
    SCOPED_TRACE(m);
    EXPECT_DOUBLE_EQ(makespan(pipeline::schedules::one_f_one_b(p, m), {}),
                     (m + p - 1) * (f + i + w) + 2 * waits * c);
  }
}

// A message delays the start of each chunk, there and back; the steady state
// hides the others, for any number of micro-batches.
TEST_P(TextbookPipelines, InterleavingWaitsForAMessagePerChunkOfTheFill) {
  const int p = GetParam();
  const auto [f, i, w, one] = Parts{};
  const double c = p > 1 ? one : 0;
  for (const int v : {2, 3}) {
    for (const int m : {p, 2 * p, 3 * p}) {
      SCOPED_TRACE(std::to_string(v) + " chunks, " + std::to_string(m));
      EXPECT_DOUBLE_EQ(makespan(pipeline::schedules::interleaved(p, m, v), {}),
                       (v * m + p - 1) * (f + i + w) + 2 * (v * p - 1) * c);
    }
  }
}

/// All and half of the weights trained; with and without recomputation, which
/// makes I longer.
const std::vector<std::pair<Parts, Recompute>> kSplits = {
    {{3, 3, 3, 1}, Recompute::kNever},
    {{3, 3, 1.5, 1}, Recompute::kNever},
    {{3, 3, 3, 1}, Recompute::kAlways},
    {{3, 3, 1.5, 1}, Recompute::kAlways}};

// W hides a message there and back in the steady state, where it is as long.
TEST_P(TextbookPipelines, ZbH1HidesMessagesBehindWeights) {
  const int p = GetParam();
  for (const int m : {p + 1, 2 * p, 3 * p + 2}) {
    for (const auto& [t, recompute] : kSplits) {
      const double i = t.i + (recompute == Recompute::kAlways ? t.f : 0);
      const bool hides = 2 * t.c <= t.w;
      const int waits = m - p - (m - 1 + p - 1) / p;
      EXPECT_DOUBLE_EQ(makespan(pipeline::schedules::zb_h1(p, m), t, recompute),
                       (m + p - 1) * (t.f + i) + (m - p + 1) * t.w +
                           4 * (p - 1) * t.c +
                           (hides ? 0 : waits * (2 * t.c - t.w)))
          << m;
    }
  }
}

// Messages to the last stage always count; on the way back, only the part of I
// and a message that two W do not cover.
TEST_P(TextbookPipelines, ZbH2WaitsWhereTwoWeightsAreShorterThanAnInput) {
  const int p = GetParam();
  for (const int m : {2 * p - 1, 2 * p, 3 * p + 2}) {
    for (const auto& [t, recompute] : kSplits) {
      const double i = t.i + (recompute == Recompute::kAlways ? t.f : 0);
      const bool covers = i + t.c <= 2 * t.w;
      EXPECT_DOUBLE_EQ(makespan(pipeline::schedules::zb_h2(p, m), t, recompute),
                       m * (t.f + i + t.w) + (p - 1) * (t.f + t.c) +
                           (covers ? 0 : (p - 1) * (i + t.c - 2 * t.w)))
          << m;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookPipelines,
                         ::testing::Values(1, 2, 4, 8));

// --- The bill and the clock --------------------------------------------------

/// Blocks whose messages are relatively long, or short; unequal heads.
const std::pair<std::string, int> kModels[] = {
    {R"({"n_embd": 16, "n_layer": 10, "n_head": 2, "vocab_size": 31,
         "n_positions": 16})",
     16},
    {R"({"n_embd": 512, "n_layer": 10, "n_head": 8, "vocab_size": 30000,
         "n_positions": 512})",
     512}};

Options gpt_options(const std::pair<std::string, int>& model, int ranks,
                    std::int64_t batch) {
  Options options = mlp_options(ranks, batch);
  std::tie(options.model, options.seq) = model;
  return options;
}

/// Stages differ, so every rank runs.
Report run_ranks(const Options& options,
                 const std::function<std::unique_ptr<Strategy>(
                     const Options&, ProcessGroup&)>& make) {
  ChapterRun chapter;
  chapter.fold_class = each_rank;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    run.train(options, *make(options, world));
  };
  return run_and_compare(options, chapter);
}

Report run_gpipe(const Options& options, const gpipe::StrategyOptions& setup) {
  return run_ranks(options, [&](const Options& options, ProcessGroup& world) {
    return std::make_unique<gpipe::GpipeStrategy>(options, setup, world);
  });
}

Report run_schedule(Options options, const pipeline::StrategyOptions& setup) {
  const pipeline::Plan plan =
      pipeline::make_plan(options, setup).on_shapes(&options);
  return run_ranks(options, [&](const Options& options, ProcessGroup& world) {
    return std::make_unique<pipeline::PipelineStrategy>(options, setup, plan,
                                                        world);
  });
}

/// The last micro-batch of 17 samples in 6 is short.
TEST(TextbookPipelineBills, GpipesLongestPathIsTheClocks) {
  for (const auto& model : kModels) {
    for (const int p : {1, 2, 4}) {
      for (const int m : {1, 6}) {
        for (const char* recompute : {"never", "always", "except_last"}) {
          for (const bool early : {false, true}) {
            const Options options = gpt_options(model, p, 17);
            gpipe::StrategyOptions setup;
            setup.micro_batches = m;
            setup.recompute = recompute;
            setup.early_recompute = early;
            SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(m) +
                         recompute + (early ? " early" : " late"));
            expect_closed_form(run_gpipe(options, setup));
          }
        }
      }
    }
  }
}

// Skips travel in parallel to the chain of stages; several to one stage wait
// for each other.
TEST(TextbookPipelineBills, GpipesSkipsDelayNoStageUnnoticed) {
  for (const auto& model : kModels) {
    for (const char* partition : {"4,4,4", "1,5,4,2", "5,1,1,5"}) {
      gpipe::StrategyOptions setup;
      setup.long_skips = true;
      setup.partition = partition;
      const int p = partition[5] == '\0' ? 3 : 4;
      SCOPED_TRACE(partition);
      expect_closed_form(run_gpipe(gpt_options(model, p, 8), setup));
    }
  }
}

TEST(TextbookPipelineBills, SchedulesLongestPathIsTheClocks) {
  for (const auto& model : kModels) {
    for (const int p : {2, 4}) {
      for (const char* schedule : {"naive", "gpipe", "1f1b", "interleaved",
                                   "zb-h1", "zb-h2", "zb-auto"}) {
        for (const char* recompute : {"never", "always"}) {
          pipeline::StrategyOptions setup;
          setup.schedule = schedule;
          setup.micro_batches = 8;
          setup.recompute =
              setup.schedule == "naive" ? "never" : std::string(recompute);
          SCOPED_TRACE(std::to_string(p) + " ranks, " + schedule + ", " +
                       recompute);
          expect_closed_form(run_schedule(gpt_options(model, p, 8), setup));
        }
      }
    }
  }
}

// Stages of unequal work, one of which waits for another.
TEST(TextbookPipelineBills, UnequalStagesWait) {
  for (const char* partition : {"1,5,4,2", "6,1,1,4", "3,3,3,3"}) {
    for (const char* schedule : {"1f1b", "zb-h1"}) {
      pipeline::StrategyOptions setup;
      setup.schedule = schedule;
      setup.partition = partition;
      SCOPED_TRACE(std::string(partition) + schedule);
      expect_closed_form(run_schedule(gpt_options(kModels[1], 4, 8), setup));
    }
  }
}

// The last step with a forward: while the pipeline fills, in its steady state,
// and in a run whose middle is not listed.
TEST(TextbookPipelineBills, StepsWithoutAFlushLastUntilTheNextUpdate) {
  const auto expect = [](const char* schedule, int p, int steps, int model) {
    Options options = gpt_options(kModels[model], p, 8);
    options.steps = steps;
    pipeline::StrategyOptions setup;
    setup.schedule = schedule;
    SCOPED_TRACE(std::to_string(p) + " ranks, " + schedule + ", " +
                 std::to_string(steps) + " steps");
    expect_closed_form(run_schedule(options, setup));
  };
  for (const char* schedule : {"pipedream", "pipedream-2bw"}) {
    for (const int model : {0, 1}) {
      for (const int p : {1, 4}) {
        for (const int steps : {1, 3, 12}) expect(schedule, p, steps, model);
      }
    }
  }
  expect("pipedream", 3, 70, 0);
}

// On the last rank, for 4 * 16 tokens each: a block keeps 16 h numbers and 6
// statistics, the last norm 2 h and 2, the softmax 1, and logits. GPipe has
// both micro-batches when backward begins, 1F1B one. The gradients of the loss
// and of the logits are added.
TEST(PipelinePeaks, AreWhatTheScheduleKeepsAndTheLogitsGradient) {
  Options options = gpt_options(
      {R"({"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 1024,
           "n_positions": 16})",
       16},
      2, 8);
  const double set = 64 * (18 * 8 + 9 + 1024);
  const auto peak = [](const Report& report) {
    return report.ranks[1]
        .peak[static_cast<std::size_t>(MemoryKind::kActivation)]
        .counted;
  };
  gpipe::StrategyOptions gpipe;
  gpipe.micro_batches = 2;
  gpipe.recompute = "never";
  EXPECT_EQ(peak(run_gpipe(options, gpipe)), 4 * (2 * set + 64 * 1024 + 1));
  pipeline::StrategyOptions one;
  one.schedule = "1f1b";
  one.micro_batches = 2;
  EXPECT_EQ(peak(run_schedule(options, one)), 4 * (set + 64 * 1024 + 1));
}

// No form is given where none holds.
TEST(TextbookPipelineBills, NoFormIsGivenWhereItDoesNotHold) {
  const auto form = [](const char* schedule, int p, auto change) {
    Options options = gpt_options(kModels[0], p, 8);
    pipeline::StrategyOptions setup;
    setup.schedule = schedule;
    change(options, setup);
    return run_schedule(options, setup).time.closed_form_s;
  };
  const auto as_it_is = [](Options&, pipeline::StrategyOptions&) {};
  EXPECT_LT(form("pipedream", 2, as_it_is), 0);
  EXPECT_LT(form("dualpipe", 2, as_it_is), 0);
  EXPECT_LT(
      form("pipedream", 4, [](auto&, auto& setup) { setup.stash = false; }), 0);
  EXPECT_LT(
      form("1f1b", 2, [](auto&, auto& setup) { setup.post_validation = true; }),
      0);
  EXPECT_LT(form("1f1b", 2,
                 [](auto& options, auto&) { options.cluster = "dgx-a100"; }),
            0);
}

}  // namespace
}  // namespace shardbook::textbook::pipelines
