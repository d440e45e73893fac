// The page's bill: memory and idle time of GPipe, counted.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/common/pipeline/stage_memory.h"
#include "core/autograd.h"
#include "sim/world.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"

namespace shardbook::gpipe_test {
namespace {

using gpipe::Checkpoint;
using gpipe::Pipeline;

// --- Memory ------------------------------------------------------------------

constexpr std::int64_t kBillWidth = 8;

/// Counted peak of activations of each of two ranks, m micro-batches of
/// `rows` rows.
std::vector<double> peaks(int m, std::int64_t rows, Checkpoint checkpoint) {
  return on_ranks(2, [&](ProcessGroup& world) {
    const SkipNet net(6, kBillWidth);
    const std::shared_ptr<const LayerList> layers(&net,
                                                  [](const LayerList*) {});
    Options options;
    PipelineModel model(options, layers, one_stage_per_rank({0, 3, 6}), world);
    const auto pieces = ceil_micro_batches(rows * m, m);
    const Tensor x = rows_of(rows, kBillWidth, DType::kF32);
    x.set_memory_kind(MemoryKind::kInput);
    Pipeline pipeline(model, world, pieces,
                      gpipe::trace_pieces(net, pieces, {x}, DType::kF32),
                      {checkpoint, true});
    RankContext::current().device.reset_peak_memory();
    pipeline.train(
        {[&](int) { return Tensors{x}; },
         [&](const Tensors& out, int) { return mse_loss(out[0], x); }});
    return static_cast<double>(
        RankContext::current().device.memory().peak(MemoryKind::kActivation));
  });
}

MicroBatchMemory measured(int begin, int end, std::int64_t rows,
                          bool recompute) {
  const SkipNet net(6, kBillWidth);
  const Tensor x =
      Tensor::empty({rows, kBillWidth}, {DType::kF32, Device::meta()});
  StageMemoryOptions how;
  how.recompute = recompute;
  if (end == 6) {
    how.loss = [&](const Tensors& out) {
      const MemoryScope kind(MemoryKind::kInput);
      const Tensor y = Tensor::empty({rows, kBillWidth});
      const MemoryScope computed(MemoryKind::kActivation);
      return mse_loss(out[0], y);
    };
  }
  return measure_micro_batch(net, begin, end,
                             trace_shapes(net, {x}, DType::kF32), how);
}

// Every micro-batch keeps its graph ...
TEST(GpipeBill, WithoutRecomputationEachMicroBatchKeepsItsActivations) {
  const std::int64_t rows = 5;
  for (int s = 0; s < 2; ++s) {
    const double kept = measured(3 * s, 3 * s + 3, rows, false).kept;
    const double first = peaks(2, rows, Checkpoint::kNever)[at(s)];
    for (const int m : {3, 6}) {
      EXPECT_EQ(peaks(m, rows, Checkpoint::kNever)[at(s)],
                first + (m - 2) * kept);
    }
    // What each layer hands to the next; the last one's was sent
    EXPECT_GE(kept, 2 * rows * kBillWidth * 4.0);
  }
}

// ... or its input, and one graph is there at a time: m |input| + A.
TEST(GpipeBill, WithRecomputationItKeepsItsInput) {
  const std::int64_t rows = 5;
  const double input = rows * kBillWidth * 4.0;
  EXPECT_EQ(measured(0, 3, rows, true).kept, 0);  // data: not an activation
  EXPECT_EQ(measured(3, 6, rows, true).kept, input);
  const double one = peaks(2, rows, Checkpoint::kAlways)[1];
  for (const int m : {3, 6}) {
    EXPECT_EQ(peaks(m, rows, Checkpoint::kAlways)[1], one + (m - 2) * input);
    EXPECT_EQ(peaks(m, rows, Checkpoint::kAlways)[0],
              peaks(2, rows, Checkpoint::kAlways)[0]);
    EXPECT_LT(peaks(m, rows, Checkpoint::kAlways)[1],
              peaks(m, rows, Checkpoint::kNever)[1]);
  }
}

// What was sent goes when the next stage has it, long before its backward.
TEST(GpipeBill, SentOutputsDoNotWaitForTheirGradients) {
  const std::int64_t rows = 3, seq = 8;
  const int m = 8;
  const ModelConfig config = ModelConfig::read("gpt-nano");
  std::atomic<int> num_received = 0;  // by the second stage
  const auto peak = on_ranks(2, [&](ProcessGroup& world) {
    const std::shared_ptr<const LayerList> layers = layers_of(config);
    PipelineModel model(Options{}, layers, one_stage_per_rank({0, 3, 6}),
                        world);
    const auto pieces = ceil_micro_batches(rows * m, m);
    const Tensor tokens = tokens_of(rows, seq, config.vocab_size);
    Pipeline pipeline(
        model, world, pieces,
        gpipe::trace_pieces(*layers, pieces, {tokens}, DType::kF32),
        {Checkpoint::kNever, true});
    // The first stage goes on when the second one has what was sent
    const auto inputs = [&](int b) {
      while (num_received < b) std::this_thread::yield();
      return Tensors{tokens};
    };
    const auto loss = [&](const Tensors& out, int) {
      ++num_received;
      return language_loss(out[0], tokens);
    };
    pipeline.train({inputs, loss});
    return static_cast<double>(RankContext::current().device.memory().peak(
        MemoryKind::kCommunication));
  })[0];
  const auto output = static_cast<double>(4 * rows * seq * config.n_embd);
  EXPECT_GE(peak, output);
  EXPECT_LE(peak, 2 * output);  // this one, and the one before
}

TEST(StageMemory, AScheduleIsWalkedThrough) {
  MicroBatchMemory each;
  each.forward_peak = 10;
  each.kept = 4;
  each.first_backward_peak = 9;
  each.later_backward_peak = 12;
  each.first_gradients = 5;
  each.later_gradients = 6;
  const auto of = [&](int) -> const MicroBatchMemory& { return each; };
  const auto peak = [&](const std::vector<StageEvent>& events) {
    return stage_peaks(events, of).activations;
  };
  const StageEvent f0{false, 0}, f1{false, 1}, b0{true, 0}, b1{true, 1};
  EXPECT_EQ(peak({f0, b0}), 10);          // forward's
  EXPECT_EQ(peak({f0, f1, b1, b0}), 14);  // forward beside what f0 keeps
  EXPECT_EQ(peak({f0, b0, f1, b1}), 12);  // the later backward's
  EXPECT_EQ(stage_peaks({f0, b0}, of).gradients, 5);
  EXPECT_EQ(stage_peaks({f0, b0, f1, b1}, of).gradients, 6);
  EXPECT_EQ(stage_peaks({}, of).activations, 0);
}

// --- Time --------------------------------------------------------------------

struct Timed {
  double step_s = 0, idle_share = 0;
};

/// Equal stages of wide layers, whose messages take little beside them.
Timed timed(int p, int m, Checkpoint checkpoint, bool early,
            const std::string& cluster = "dgx-a100") {
  const std::int64_t rows = 4096, width = 8192;
  const SkipNet net(16 * p, width);
  const std::shared_ptr<const LayerList> layers(&net, [](const LayerList*) {});
  sim::WorldOptions options;
  options.launch.backend = "sim";
  options.cost = std::make_shared<sim::CostModel>(sim::Cluster::read(cluster));
  options.fold_class = [](int rank) { return rank; };
  std::vector<Timed> ranks(at(p));
  sim::run_world(
      p,
      [&](ProcessGroup& world) {
        PipelineModel model(Options{}, layers,
                            one_stage_per_rank(cut_uniform(16 * p, p)), world);
        const auto pieces = ceil_micro_batches(rows * m, m);
        const Tensor x = Tensor::empty({rows, width});
        Pipeline pipeline(model, world, pieces,
                          gpipe::trace_pieces(net, pieces, {x}, DType::kF32),
                          {checkpoint, early});
        sim::VirtualClock* clock = sim::VirtualClock::current();
        clock->begin_steps();
        for (int step = 0; step < 2; ++step) {
          for (const Tensor& each : model.parameters()) each.clear_grad();
          pipeline.train(
              {[&](int) { return Tensors{x}; },
               [&](const Tensors& out, int) { return mse_loss(out[0], x); }});
          world.barrier();
          clock->end_step();
        }
        const sim::TimeSummary summary = clock->main().summary();
        ranks[at(world.rank())] = {summary.step_s, summary.idle_share};
      },
      options);
  Timed mean;
  for (const Timed& rank : ranks) {
    mean.step_s = std::max(mean.step_s, rank.step_s);
    mean.idle_share += rank.idle_share / p;
  }
  return mean;
}

// Forward and backward need not take the same time: a stage is idle for p - 1
// forwards and p - 1 backwards of p - 1 + m.
TEST(GpipeBill, IdleShareIsPMinusOneOverMPlusPMinusOne) {
  for (const int p : {2, 4}) {
    for (const int m : {1, 4, 16}) {
      EXPECT_NEAR(timed(p, m, Checkpoint::kNever, true).idle_share,
                  gpipe::idle_share(p, m), 0.02)
          << p << " " << m;
    }
  }
}

// The forward that is run again starts while the gradient is still being made
// next door, and on its way.
TEST(GpipeBill, EarlyRecomputationIsShorter) {
  for (const int m : {2, 4}) {
    const double early = timed(4, m, Checkpoint::kAlways, true).step_s;
    const double late = timed(4, m, Checkpoint::kAlways, false).step_s;
    const double never = timed(4, m, Checkpoint::kNever, true).step_s;
    EXPECT_LT(early, late);
    EXPECT_LT(never, early);
  }
}

}  // namespace
}  // namespace shardbook::gpipe_test
