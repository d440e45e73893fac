// Ranks that execute a schedule equal one device that runs the same
// micro-batches in the same order.

#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/05_gpipe/gpipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <utility>

#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "core/check.h"
#include "tests/chapters/common/pipeline/pipeline_engine_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Schedule;
namespace schedules = pipeline::schedules;

std::shared_ptr<const LayerList> pair_layers(int size = kLayers) {
  return std::make_shared<PairLayers>(size);
}

/// Bit for bit: losses of micro-batches, and gradients.
void expect_one_device(const Schedule& schedule, const Options& options,
                       const std::vector<int>& order) {
  SCOPED_TRACE(schedule.name + ", " + std::to_string(schedule.num_ranks) +
               " ranks, " + std::to_string(schedule.num_micro_batches) +
               " micro-batches");
  const auto layers = pair_layers(std::max(kLayers, schedule.num_stages + 1));
  const auto pieces =
      ceil_micro_batches(options.batch, schedule.num_micro_batches);
  const Outcome one = on_one_device(*layers, options, pieces, order);
  const auto ranks = on_ranks(schedule, layers,
                              cut_uniform(layers->size(), schedule.num_stages),
                              options, pieces);
  const Outcome all = together(ranks);
  EXPECT_EQ(all.losses, one.losses);
  EXPECT_EQ(all.grads, one.grads);
  for (const Outcome& each : ranks) {
    EXPECT_EQ(each.predicted, each.counted);
    EXPECT_EQ(each.evaluated, each.loss);
    EXPECT_EQ(each.gradients_evaluating, 0);
  }
}

class EngineRanks : public ::testing::TestWithParam<int> {};

TEST_P(EngineRanks, OneFOneBEqualsAccumulationOnOneDevice) {
  const int p = GetParam();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    // Fewer micro-batches than stages, and a last one that is short
    for (const int m : {1, 2, 5, 8}) {
      const Options options = small_options(m == 5 ? 13 : 2 * m, dtype);
      expect_one_device(schedules::one_f_one_b(p, m), options, ascending(m));
    }
  }
}

TEST_P(EngineRanks, GpipeSumsInReverse) {
  const int p = GetParam(), m = 4;
  std::vector<int> order = ascending(m);
  std::reverse(order.begin(), order.end());
  expect_one_device(gpipe::schedule(p, m), small_options(8), order);
  expect_one_device(schedules::naive(p, m), small_options(8), ascending(m));
}

TEST_P(EngineRanks, LiveSetsAreThoseOfTheFormula) {
  const int p = GetParam(), m = 5;
  const Options options = small_options(10);
  const auto pieces = ceil_micro_batches(10, m);
  const auto cuts = cut_uniform(kLayers, p);
  const auto one = on_ranks(schedules::one_f_one_b(p, m), pair_layers(), cuts,
                            options, pieces);
  const auto gpipe =
      on_ranks(gpipe::schedule(p, m), pair_layers(), cuts, options, pieces);
  for (int s = 0; s < p; ++s) {
    const auto at = static_cast<std::size_t>(s);
    EXPECT_EQ(one[at].live, std::min(p - s, m));
    EXPECT_EQ(gpipe[at].live, m);
  }
}

TEST_P(EngineRanks, InterleavedSchedulesEqualOneDevice) {
  const int p = GetParam();
  // As many micro-batches as ranks, and more; a last one that is short
  for (const int m : {p, 2 * p}) {
    expect_one_device(schedules::interleaved(p, m, 2), small_options(2 * m - 1),
                      ascending(m));
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, EngineRanks,
                         ::testing::ValuesIn(world_sizes()));

TEST(EngineTest, ChunksThatAreAlive) {
  const auto ranks = on_ranks(schedules::interleaved(4, 8, 2), pair_layers(),
                              cut_uniform(kLayers, 8), small_options(8),
                              ceil_micro_batches(8, 8));
  const std::vector<int> live = {11, 9, 7, 5};
  for (std::size_t r = 0; r < 4; ++r) EXPECT_EQ(ranks[r].live, live[r]);
}

TEST(EngineTest, MessagesAreThoseOfTheList) {
  // Two samples of three tokens: 36 activations, and the tokens themselves,
  // which have no gradient
  const auto ranks = on_ranks(schedules::one_f_one_b(3, 2), pair_layers(),
                              cut_uniform(kLayers, 3), small_options(4),
                              ceil_micro_batches(4, 2));
  const auto expect = [&](std::size_t rank, const std::string& expected) {
    std::string found;
    for (const std::string& each : ranks[rank].messages) found += each + "\n";
    EXPECT_EQ("\n" + found, expected);
  };
  expect(0, R"(
send 36 to 1: activations micro-batch 0 stage 1
send 6 to 1: activations micro-batch 0 stage 1
send 36 to 1: activations micro-batch 1 stage 1
send 6 to 1: activations micro-batch 1 stage 1
recv 36 from 1: gradients micro-batch 0 stage 1
recv 36 from 1: gradients micro-batch 1 stage 1
)");
  expect(1, R"(
recv 36 from 0: activations micro-batch 0 stage 1
recv 6 from 0: activations micro-batch 0 stage 1
send 36 to 2: activations micro-batch 0 stage 2
send 6 to 2: activations micro-batch 0 stage 2
recv 36 from 0: activations micro-batch 1 stage 1
recv 6 from 0: activations micro-batch 1 stage 1
send 36 to 2: activations micro-batch 1 stage 2
send 6 to 2: activations micro-batch 1 stage 2
recv 36 from 2: gradients micro-batch 0 stage 2
send 36 to 0: gradients micro-batch 0 stage 1
recv 36 from 2: gradients micro-batch 1 stage 2
send 36 to 0: gradients micro-batch 1 stage 1
)");
  expect(2, R"(
recv 36 from 1: activations micro-batch 0 stage 2
recv 6 from 1: activations micro-batch 0 stage 2
send 36 to 1: gradients micro-batch 0 stage 2
recv 36 from 1: activations micro-batch 1 stage 2
recv 6 from 1: activations micro-batch 1 stage 2
send 36 to 1: gradients micro-batch 1 stage 2
)");
}

/// Counts the calls of inputs and loss.
class CountingFeed : public pipeline::LanguageFeed {
 public:
  using LanguageFeed::LanguageFeed;
  Tensors inputs(int micro_batch) override {
    ++num_inputs;
    return LanguageFeed::inputs(micro_batch);
  }
  Tensor loss(int micro_batch, const Tensors& outputs) override {
    ++num_losses;
    return LanguageFeed::loss(micro_batch, outputs);
  }
  int num_inputs = 0, num_losses = 0;
};

// A trap: rank 0 has chunks that are not the first stage, and rank p-1 has
// chunks that are not the last. An engine that looks at the rank instead of the
// stage would ask for tokens and losses twice.
TEST(EngineTest, FirstAndLastAreVirtualStages) {
  const int p = 4, m = 4;
  const Schedule schedule = schedules::interleaved(p, m, 2);
  const Options options = small_options(m);
  const auto pieces = ceil_micro_batches(m, m);
  std::vector<int> inputs(p), losses(p);
  run_ranks(p, [&](ProcessGroup& world) {
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    CountingFeed feed(options, data, pieces);
    PipelineModel model(
        options, pair_layers(),
        pipeline::layout_of(schedule, cut_uniform(kLayers, 2 * p)), world);
    pipeline::Engine(schedule, model, world, feed).run();
    const auto r = static_cast<std::size_t>(world.rank());
    inputs[r] = feed.num_inputs;
    losses[r] = feed.num_losses;
  });
  EXPECT_EQ(inputs, (std::vector<int>{m, 0, 0, 0}));
  EXPECT_EQ(losses, (std::vector<int>{0, 0, 0, m}));
}

/// Throws once, at the loss of micro-batch 1.
class FusedFeed : public pipeline::LanguageFeed {
 public:
  using LanguageFeed::LanguageFeed;
  Tensor loss(int micro_batch, const Tensors& outputs) override {
    if (micro_batch == 1 && std::exchange(throws_, false)) SB_FAIL("blown");
    return LanguageFeed::loss(micro_batch, outputs);
  }

 private:
  bool throws_ = true;
};

// A second run would count the gradients of micro-batch 0 twice.
TEST(EngineTest, ARunAfterOneThatFailedIsRefused) {
  const Schedule schedule = schedules::one_f_one_b(1, 2);
  const Options options = small_options(2);
  run_ranks(1, [&](ProcessGroup& world) {
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    FusedFeed feed(options, data, ceil_micro_batches(2, 2));
    PipelineModel model(options, pair_layers(),
                        pipeline::layout_of(schedule, {0, kLayers}), world);
    pipeline::Engine engine(schedule, model, world, feed);
    using ::testing::HasSubstr;
    EXPECT_THAT(error_of([&] { engine.run(); }), HasSubstr("blown"));
    const auto refused = HasSubstr("after a run that failed");
    EXPECT_THAT(error_of([&] { engine.run(); }), refused);
    EXPECT_THAT(error_of([&] { engine.run_to_update(); }), refused);
  });
}

// The same lists with stages numbered rank by rank: rank 0 begins with stage 1,
// which has no inputs before stage 0 has finished its micro-batches.
TEST(EngineTest, ChunksOfARankAreNotNeighbours) {
  Schedule wrong = schedules::interleaved(4, 4, 2);
  for (int stage = 0; stage < 8; ++stage) {
    wrong.routes[0][static_cast<std::size_t>(stage)] = {stage / 2, stage % 2};
  }
  const std::string error = error_of([&] {
    on_ranks(wrong, pair_layers(), cut_uniform(kLayers, 8), small_options(4),
             ceil_micro_batches(4, 4));
  });
  EXPECT_THAT(error, ::testing::HasSubstr("deadlock"));
}

/// 1F1B on two ranks. `blocks`: every send is waited for at once; `buffers`:
/// small messages do not wait for their receivers.
void exchange_along_1f1b(bool blocks, bool buffers) {
  const Schedule schedule = schedules::one_f_one_b(2, 3);
  LayerInput spec;
  spec.values = {{{8}, DType::kF32, /*needs_grad=*/true}};
  LaunchOptions launch;
  launch.rendezvous_sends = !buffers;
  run_ranks(
      2,
      [&](ProcessGroup& world) {
        Mailbox mailbox(world, 2);
        const bool is_first = world.rank() == 0;
        const Tensors values = {Tensor::full({8}, 1)};
        for (const pipeline::Action& each :
             schedule.actions[static_cast<std::size_t>(world.rank())]) {
          const int b = each.micro_batch;
          if (each.kind == pipeline::ActionKind::kForward) {
            if (is_first) mailbox.send_forward(values, b, 1, 1);
            if (!is_first) mailbox.receive_forward(spec, b, 1, 0);
          } else {
            if (is_first) mailbox.receive_backward(spec, b, 1, 1);
            if (!is_first) mailbox.send_backward(values, spec, b, 1, 0);
          }
          if (blocks) mailbox.flush();
        }
        mailbox.flush();
      },
      launch);
}

// A trap: rank 0 sends F1 while rank 1 sends the gradient of F0, and neither
// receives. Megatron-LM fuses the two calls; here a send never waits. Buffers
// hide the mistake, as long as messages are small.
TEST(EngineTest, SendsThatBlockWaitForEachOtherForEver) {
  for (const bool buffers : {false, true}) {
    EXPECT_NO_THROW(exchange_along_1f1b(/*blocks=*/false, buffers));
  }
  EXPECT_NO_THROW(exchange_along_1f1b(/*blocks=*/true, /*buffers=*/true));
  const std::string error =
      error_of([] { exchange_along_1f1b(/*blocks=*/true, /*buffers=*/false); });
  for (const char* words :
       {"deadlock: ",
        "rank 0 waits for rank 1 in send f32[8] to rank 1 (tag 6) "
        "'activations micro-batch 1 stage 1' over 'world', which rank 1 does "
        "not receive yet",
        "rank 1 waits for rank 0 in send f32[8] to rank 0 "}) {
    EXPECT_THAT(error, ::testing::HasSubstr(words));
  }
}

// A whole backward between an I and its W: the weights' gradients are summed in
// an order that differs from the biases' and from one device's.
TEST(EngineTest, BackwardsBetweenInputAndWeightsSumInAnotherOrder) {
  Schedule schedule = schedules::one_f_one_b(1, 3);
  using pipeline::ActionKind;
  schedule.actions[0] = {
      {ActionKind::kForward, 0},       {ActionKind::kForward, 1},
      {ActionKind::kForward, 2},       {ActionKind::kBackwardInput, 0},
      {ActionKind::kBackward, 1},      {ActionKind::kBackward, 2},
      {ActionKind::kBackwardWeight, 0}};
  const auto pieces = ceil_micro_batches(6, 3);
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Options options = small_options(6, dtype);
    const Outcome all = together(
        on_ranks(schedule, pair_layers(), {0, kLayers}, options, pieces));
    const Outcome one =
        on_one_device(*pair_layers(), options, pieces, ascending(3));
    const Outcome weights =
        on_one_device(*pair_layers(), options, pieces, {1, 2, 0});
    EXPECT_EQ(all.losses, one.losses);
    EXPECT_NE(all.grads, one.grads);
    EXPECT_LT(largest_difference(all.grads, one.grads),
              dtype == DType::kF64 ? 1e-14 : 1e-6);
    for (const auto& [name, values] : all.grads) {
      const bool is_bias = name.find("bias") != std::string::npos;
      EXPECT_EQ(values, (is_bias ? one : weights).grads.at(name)) << name;
    }
  }
}

// Random neighbours in the lists are swapped. If `check` still accepts them,
// they run to their end and give one device's sums.
TEST(EngineTest, WhatIsAcceptedRunsToItsEnd) {
  const int p = 3, m = 4;
  const Options options = small_options(m, DType::kF64);
  const auto pieces = ceil_micro_batches(m, m);
  const Outcome one =
      on_one_device(*pair_layers(), options, pieces, ascending(m));
  const auto is_accepted = [](const Schedule& schedule) {
    try {
      pipeline::check(schedule);
    } catch (const Error&) {
      return false;
    }
    return true;
  };
  std::mt19937 random(1);
  int num_accepted = 0;
  for (int i = 0; i < 400 && num_accepted < 25; ++i) {
    Schedule schedule =
        i % 2 == 0 ? schedules::one_f_one_b(p, m) : schedules::zb_h1(p, m);
    for (int swaps = 1 + i % 3; swaps > 0; --swaps) {
      auto& list = schedule.actions[random() % p];
      const std::size_t at = random() % (list.size() - 1);
      std::swap(list[at], list[at + 1]);
    }
    if (!is_accepted(schedule)) continue;
    ++num_accepted;
    const Outcome all = together(on_ranks(
        schedule, pair_layers(), cut_uniform(kLayers, p), options, pieces));
    EXPECT_EQ(all.losses, one.losses);
    EXPECT_LT(largest_difference(all.grads, one.grads), 1e-13);
  }
  EXPECT_GE(num_accepted, 10);
}

TEST(EngineTest, TiedEmbeddingsAreSummedOverTheirRanks) {
  const ModelConfig config = [] {
    ModelConfig c;
    c.vocab_size = kVocab;
    c.n_positions = 4;
    c.n_embd = 8;
    c.n_layer = 2;
    c.n_head = 2;
    return c;
  }();
  const std::shared_ptr<const LayerList> layers = layers_of(config);
  const Options options = small_options(6, DType::kF64);
  const auto pieces = ceil_micro_batches(6, 3);
  const Outcome one = on_one_device(*layers, options, pieces, ascending(3));
  for (const int p : {1, 2, 4}) {
    bool agree = false;
    const Outcome all = together(on_ranks(schedules::one_f_one_b(p, 3), layers,
                                          cut_uniform(4, p), options, pieces),
                                 &agree);
    EXPECT_TRUE(agree);
    EXPECT_LT(largest_difference(all.grads, one.grads), 1e-12);
  }
}

TEST(EngineTest, RefusesWhatDoesNotFit) {
  const Options options = small_options(4);
  const std::pair<Schedule, const char*> cases[] = {
      {schedules::one_f_one_b(3, 2), "made for 3 ranks; there are 2"},
      {schedules::interleaved(2, 2, 2),
       "has 4 stages; the model is cut into 2"},
      {schedules::pipedream(2, 2), "updates the weights before its end"}};
  for (const auto& [schedule, part] : cases) {
    const auto run = [&, &schedule = schedule](ProcessGroup& world) {
      const Dataset data = small_data(options);
      pipeline::LanguageFeed feed(options, data, ceil_micro_batches(4, 2));
      PipelineModel model(options, pair_layers(),
                          one_stage_per_rank(cut_uniform(kLayers, 2)), world);
      pipeline::Engine(schedule, model, world, feed);
    };
    expect_error([&] { run_ranks(2, run); }, {part});
  }
}

}  // namespace
}  // namespace shardbook::pipeline_test
