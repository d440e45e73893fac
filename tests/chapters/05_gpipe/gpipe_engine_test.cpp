// GPipe's schedule and engine, on layers of one width.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "core/autograd.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::gpipe_test {
namespace {

using pipeline::Action;
using pipeline::Engine;
using pipeline::EngineOptions;
using pipeline::Recompute;
using testing::HasSubstr;

// --- The schedule -----------------------------------------------------------

TEST(GpipePieces, HaveTheCeilingOfTheShareAndMayBeFewer) {
  const auto rows = [](std::int64_t batch, std::int64_t n) {
    std::vector<std::int64_t> sizes;
    for (const auto& piece : ceil_micro_batches(batch, n)) {
      sizes.push_back(piece.rows);
    }
    return sizes;
  };
  EXPECT_EQ(rows(10, 4), (std::vector<std::int64_t>{3, 3, 3, 1}));
  EXPECT_EQ(rows(6, 4), (std::vector<std::int64_t>{2, 2, 2}));
}

// Where F and B take one slot each, F of micro-batch b on stage s is in slot b
// + s, and its B is as many slots before the last one.
TEST(GpipeSchedule, SlotsAreThoseOfAReplay) {
  pipeline::Costs slots;
  slots.forward = slots.backward = 1;
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {1, 2, 3, 4, 8, 17}) {
      const pipeline::Schedule schedule = gpipe::schedule(p, m);
      const pipeline::Replay played = replay(schedule, slots);
      for (int s = 0; s < p; ++s) {
        for (std::size_t i = 0; i < schedule.actions[at(s)].size(); ++i) {
          const Action& action = schedule.actions[at(s)][i];
          const int slot = action.micro_batch + s;
          EXPECT_EQ(played.spans[at(s)][i].begin,
                    action.kind == pipeline::ActionKind::kForward
                        ? slot
                        : 2 * (m + p - 1) - 1 - slot);
        }
      }
      EXPECT_EQ(played.makespan, 2 * (m + p - 1));
      EXPECT_DOUBLE_EQ(pipeline::idle_share(played), gpipe::idle_share(p, m));
    }
  }
}

// --- The engine -------------------------------------------------------------

constexpr std::int64_t kWidth = 6;

EngineOptions with(Recompute recompute, bool early = true) {
  return {.recompute = recompute,
          .early_recompute = early,
          .reads_losses_late = true};
}

struct Case {
  int rows = 8;
  int chunks = 4;
  EngineOptions engine_options = with(Recompute::kExceptLast);
  DType dtype = DType::kF64;
  /// A schedule of this many stages and micro-batches.
  std::function<pipeline::Schedule(int, int)> schedule = gpipe::schedule;
};

struct Trained {
  std::map<std::string, Tensor> grads;
  double loss = 0;
  int max_live = 0;
  double bytes = 0, predicted = 0;
  std::vector<std::string> messages;
};

std::vector<Tensors> data_of(const Case& c) {
  Tensor x = rows_of(c.rows, kWidth, c.dtype), y = x.empty_like();
  fill_normal(y, /*seed=*/12, /*stream=*/2, 0, 1);
  std::vector<Tensors> pieces;
  for (const MicroBatch& each : ceil_micro_batches(c.rows, c.chunks)) {
    const std::int64_t begin = each.slice.first, end = begin + each.rows;
    pieces.push_back({x.rows_view(begin, end), y.rows_view(begin, end)});
  }
  return pieces;
}

/// The mini-batch, in pieces.
class PiecesFeed : public RowsFeed {
 public:
  explicit PiecesFeed(const Case& c)
      : RowsFeed(ceil_micro_batches(c.rows, c.chunks), kWidth, c.dtype),
        data_(data_of(c)) {}
  Tensors inputs(int b) override { return {data_[at(b)][0]}; }
  Tensor loss(int b, const Tensors& outputs) override {
    return mse_loss(outputs[0], data_[at(b)][1]);
  }
  int num_pieces() const { return static_cast<int>(data_.size()); }

 private:
  std::vector<Tensors> data_;
};

Trained on_one_rank(const LayerList& net, const Case& c, ProcessGroup& world) {
  Options options;
  options.seed = 5;
  options.dtype = c.dtype;
  RankContext::current().random = RandomState{21, 3, 0, {}};
  const auto layers = borrowed(net);
  PipelineModel model(options, layers,
                      one_stage_per_rank(cut_uniform(net.size(), world.size())),
                      world);
  PiecesFeed feed(c);
  Engine engine(c.schedule(world.size(), feed.num_pieces()), model, world, feed,
                nullptr, c.engine_options);
  Trained result;
  engine.run();
  if (world.rank() == world.size() - 1) {
    for (int b = feed.num_pieces(); b-- > 0;) result.loss += engine.loss(b);
  }
  for (const NamedTensor& each : model.stage(world.rank()).named_parameters()) {
    result.grads[each.name] = each.tensor.grad();
  }
  result.max_live = engine.max_live();
  result.bytes = wire_bytes(world.records());
  result.predicted = engine.predicted_bytes();
  for (const CommRecord& record : world.records()) {
    result.messages.push_back((record.op == CommOp::kSend ? "to " : "from ") +
                              std::to_string(record.root_or_peer) + " " +
                              record.label);
  }
  return result;
}

std::vector<Trained> on_pipeline(const LayerList& net, int p, const Case& c) {
  return on_ranks(
      p, [&](ProcessGroup& world) { return on_one_rank(net, c, world); });
}

/// One device, one micro-batch after the other, from the last to the first.
Trained on_one_device(const LayerList& net, const Case& c,
                      bool reversed = true) {
  RankContext context(Device::cpu(0), 0, 1);
  context.deterministic = true;
  const RankContext::Scope scope(context);
  InitOptions init;
  init.seed = 5;
  init.dtype = c.dtype;
  Stage model(net, 0, net.size(), init);
  const auto data = data_of(c);
  auto pieces = ceil_micro_batches(c.rows, c.chunks);
  Trained result;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::size_t b = reversed ? pieces.size() - 1 - i : i;
    context.random = RandomState{21, 3, 0, pieces[b].slice};
    const Tensor loss = mse_loss(model(data[b][0]), data[b][1]);
    const double share = static_cast<double>(pieces[b].rows) / c.rows;
    result.loss += loss.item() * share;
    autograd::backward({loss}, {Tensor::full({}, share, loss.options())});
  }
  for (const NamedTensor& each : model.named_parameters()) {
    result.grads[each.name] = each.tensor.grad();
  }
  return result;
}

void expect_same_bits(const std::vector<Trained>& ranks,
                      const Trained& reference, const std::string& what) {
  std::size_t count = 0;
  for (const Trained& rank : ranks) {
    for (const auto& [name, grad] : rank.grads) {
      EXPECT_TRUE(bitwise_equal(grad, reference.grads.at(name)))
          << what << " " << name;
      ++count;
    }
    EXPECT_DOUBLE_EQ(rank.bytes, rank.predicted) << what;
  }
  EXPECT_EQ(count, reference.grads.size());
  EXPECT_EQ(ranks.back().loss, reference.loss) << what;
}

class GpipeEngine : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, GpipeEngine,
                         testing::ValuesIn(world_sizes()));

// Nine layers; skips over one and more stages, also within one.
SkipNet net_with_skips(double dropout = 0) {
  return SkipNet(9, kWidth, {{0, 8}, {1, 5}, {2, 3}}, "", dropout);
}

TEST_P(GpipeEngine, GradientsHaveTheBitsOfOneDeviceInReverseOrder) {
  const int p = GetParam();
  for (const bool skips : {false, true}) {
    const SkipNet net = skips ? net_with_skips() : SkipNet(9, kWidth);
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      // Even; uneven last piece; fewer pieces than asked for; one row each
      for (const auto& [rows, chunks] :
           {std::pair{8, 4}, {7, 3}, {5, 4}, {3, 3}, {6, 1}}) {
        const Case c{rows, chunks, with(Recompute::kExceptLast), dtype};
        expect_same_bits(on_pipeline(net, p, c), on_one_device(net, c),
                         std::to_string(rows) + "/" + std::to_string(chunks));
      }
    }
  }
}

TEST_P(GpipeEngine, RecomputationChangesNoBitAlsoWithDropout) {
  const SkipNet net = net_with_skips(/*dropout=*/0.3);
  const Case c{7, 3, with(Recompute::kNever), DType::kF32};
  const Trained reference = on_one_device(net, c);
  for (const Recompute mode :
       {Recompute::kAlways, Recompute::kExceptLast, Recompute::kNever}) {
    for (const bool early : {true, false}) {
      Case other = c;
      other.engine_options = with(mode, early);
      expect_same_bits(on_pipeline(net, GetParam(), other), reference,
                       "mode " + std::to_string(static_cast<int>(mode)));
    }
  }
}

TEST_P(GpipeEngine, AllMicroBatchesLiveAtTheTurn) {
  const SkipNet net(8, kWidth);
  for (const int m : {1, 3, 8}) {
    for (const Trained& rank : on_pipeline(net, GetParam(), {8, m})) {
      EXPECT_EQ(rank.max_live,
                static_cast<int>(ceil_micro_batches(8, m).size()));
    }
  }
}

TEST(GpipeOrder, MessagesFollowTheSchedule) {
  const SkipNet net(3, kWidth);
  const auto ranks = on_pipeline(net, 3, {4, 2});
  EXPECT_EQ(ranks[1].messages, (std::vector<std::string>{
                                   "from 0 activations micro-batch 0 stage 1",
                                   "to 2 activations micro-batch 0 stage 2",
                                   "from 0 activations micro-batch 1 stage 1",
                                   "to 2 activations micro-batch 1 stage 2",
                                   "from 2 gradients micro-batch 1 stage 2",
                                   "to 0 gradients micro-batch 1 stage 1",
                                   "from 2 gradients micro-batch 0 stage 2",
                                   "to 0 gradients micro-batch 0 stage 1"}));
}

// A skip from stage 0 to stage 2 does not touch the rank in between.
TEST(GpipeSkips, TravelDirectly) {
  const SkipNet net(3, kWidth, {{0, 2}});
  const auto ranks = on_pipeline(net, 3, {2, 1});
  EXPECT_EQ(ranks[0].messages, (std::vector<std::string>{
                                   "to 1 activations micro-batch 0 stage 1",
                                   "to 2 activations micro-batch 0 stage 2",
                                   "from 1 gradients micro-batch 0 stage 1",
                                   "from 2 gradients micro-batch 0 stage 2"}));
  EXPECT_EQ(ranks[1].messages.size(), 4u);
  for (const std::string& message : ranks[1].messages) {
    EXPECT_THAT(message, testing::Not(HasSubstr("skip")));
  }
  const double bytes = 2 * kWidth * 8;
  EXPECT_EQ(ranks[0].bytes, 2 * bytes);  // forward: the value and the skip
  EXPECT_EQ(ranks[1].bytes, 2 * bytes);  // one forward, one backward
  EXPECT_EQ(ranks[2].bytes, 2 * bytes);  // backward: of both
}

// Skips work under every schedule: 1F1B equals, bit for bit, one device that
// computes the micro-batches from first to last.
TEST_P(GpipeEngine, SkipsTravelUnderOtherSchedules) {
  const SkipNet net = net_with_skips(/*dropout=*/0.3);
  for (const Recompute mode : {Recompute::kAlways, Recompute::kNever}) {
    const Case c{7, 3, with(mode), DType::kF32,
                 pipeline::schedules::one_f_one_b};
    const Trained reference = on_one_device(net, c, /*reversed=*/false);
    for (const Trained& rank : on_pipeline(net, GetParam(), c)) {
      for (const auto& [name, grad] : rank.grads) {
        EXPECT_TRUE(bitwise_equal(grad, reference.grads.at(name))) << name;
      }
      EXPECT_DOUBLE_EQ(rank.bytes, rank.predicted);
    }
  }
}

TEST(GpipeSkips, NeedRanksWithOneStage) {
  const SkipNet net(4, kWidth, {{0, 3}});
  const auto layers = borrowed(net);
  const std::string error = error_of([&] {
    on_ranks(2, [&](ProcessGroup& world) {
      const auto schedule = pipeline::schedules::interleaved(2, 2, 2);
      PipelineModel model(Options{}, layers,
                          layout_of(schedule, {0, 1, 2, 3, 4}), world);
      RowsFeed feed(ceil_micro_batches(2, 2), kWidth, DType::kF32);
      Engine engine(schedule, model, world, feed);
    });
  });
  EXPECT_EQ(error,
            "skip 'net/0': rank 0 has several stages in schedule "
            "'interleaved'; skips travel between ranks with one stage");
}

TEST(GpipeSkips, NamesThatDoNotMatchStopTheRunBeforeItBegins) {
  const SkipNet net(4, kWidth, {{0, -1}});
  EXPECT_THAT(error_of([&] { on_pipeline(net, 2, {}); }),
              HasSubstr("skip 'net/0': layer 0 (layer0) stashes it, and no "
                        "layer pops it"));
}

TEST(GpipeOptions, BadOnesAreOneSentence) {
  EXPECT_EQ(error_of([] { pipeline::recompute_from_name("sometimes"); }),
            "--recompute sometimes: give always, except_last or never");
}

}  // namespace
}  // namespace shardbook::gpipe_test
