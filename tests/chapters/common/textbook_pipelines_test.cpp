// Virtual time against closed forms: pipelines.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/feed.h"
#include "core/ops.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::pipelines {
namespace {

class TextbookPipelines : public ::testing::TestWithParam<int> {};

constexpr std::int64_t kWidth = 4096;
constexpr int kSeq = 64;

/// A product with 4096 x 4096 weights, trained or frozen; the first one looks
/// up its input, so that it has a gradient to send nobody.
class EqualLayer : public ModuleOf<EqualLayer> {
 public:
  EqualLayer(int index, bool is_trained, const InitOptions& init)
      : name_("layer" + std::to_string(index)) {
    weight_ = make_parameter(name_ + ".weight", {kWidth, kWidth}, 0.1, init);
    weight_.set_requires_grad(is_trained);
    if (index > 0) return;
    vectors_ = make_parameter(name_ + ".vectors", {kWidth, kWidth}, 1, init);
  }
  Tensor forward(const Tensor& x) {
    return linear(vectors_.defined() ? embedding(vectors_, x) : x, weight_);
  }
  void members(MemberVisitor& visit) override {
    visit.parameter(name_ + ".weight", weight_);
    if (vectors_.defined()) visit.parameter(name_ + ".vectors", vectors_);
  }

 private:
  std::string name_;
  Tensor weight_, vectors_;
};

/// Every second layer may be frozen.
class EqualLayers : public LayerList {
 public:
  EqualLayers(int size, bool is_half_frozen)
      : size_(size), is_half_frozen_(is_half_frozen) {}
  int size() const override { return size_; }
  std::string name(int layer) const override {
    return "layer" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    const bool is_trained = !is_half_frozen_ || layer % 2 == 0;
    return std::make_unique<EqualLayer>(layer, is_trained, init);
  }

 private:
  int size_;
  bool is_half_frozen_;
};

/// p ranks with v stages of two layers each, m micro-batches of `rows` samples.
struct Shape {
  int p = 1, m = 1;
  std::int64_t rows = 1;
  int v = 1;
  bool is_half_frozen = false;

  double tokens() const { return static_cast<double>(rows * kSeq); }
  /// Of a stage. The gradient of its input takes as long.
  double forward_s() const {
    return 2 * 2 * kWidth * kWidth * tokens() / kRate;
  }
  /// The gradient of a stage's weights.
  double weights_s() const { return forward_s() / (is_half_frozen ? 2 : 1); }
  double message_s() const { return message(tokens() * kWidth * 4); }
  /// The loss and the norm, at the end.
  double end_s() const { return all_reduce(p, 16); }
  std::vector<int> cuts() const {
    std::vector<int> cuts;
    for (int s = 0; s <= p * v; ++s) cuts.push_back(2 * s);
    return cuts;
  }
  Options options() const {
    Options options = mlp_options(p, m * rows);
    options.seq = kSeq;
    options.optimizer = "sgd";
    return options;
  }
};

/// The second of two steps.
double schedule_step_s(const Shape& shape, const pipeline::Schedule& schedule,
                       const pipeline::EngineOptions& how = {}) {
  const Options options = shape.options();
  const auto layers = std::make_shared<EqualLayers>(2 * shape.p * shape.v,
                                                    shape.is_half_frozen);
  const Dataset data = Dataset::open("random", kSeq, kWidth, 0);
  double step_s = 0;
  run_on_shapes(options, shape.p, [&](ProcessGroup& group) {
    PipelineModel model(options, layers,
                        pipeline::layout_of(schedule, shape.cuts()), group);
    const auto optimizer = make_optimizer(options.optimizer, model.parameters(),
                                          options.optimizer_options);
    pipeline::LanguageFeed feed(options, data,
                                ceil_micro_batches(options.batch, shape.m));
    pipeline::Engine engine(schedule, model, group, feed, nullptr, how);
    sim::VirtualClock& clock = *sim::VirtualClock::current();
    clock.begin_steps();
    for (int step = 0; step < 2; ++step) {
      const double loss = engine.run();
      model.reduce_shared_gradients();
      model.update(options, *optimizer, loss);
      clock.end_step();
    }
    step_s = std::max(step_s, clock.last_step_s());
  });
  return step_s;
}

// --- GPipe -------------------------------------------------------------------

double gpipe_step_s(const Shape& shape, pipeline::Recompute recompute,
                    bool early) {
  pipeline::EngineOptions how;
  how.recompute = recompute;
  how.early_recompute = early;
  how.reads_losses_late = true;
  return schedule_step_s(shape, gpipe::schedule(shape.p, shape.m), how);
}

// Fill, then one micro-batch at a time: (m + p - 1)(f + b), and a message from
// stage to stage, there and back.
TEST_P(TextbookPipelines, GpipeIsFillPlusOneMicroBatchAtATime) {
  const int p = GetParam();
  for (const Shape& shape : {Shape{p, 1, 4}, Shape{p, 8, 4}}) {
    const double f = shape.forward_s(), c = shape.message_s();
    ASSERT_LE(c, f) << "messages must not be what the pipeline waits for";
    const int m = shape.m;
    SCOPED_TRACE(m);
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kNever, false),
                (m + p - 1) * (f + 2 * f) + 2 * (p - 1) * c + shape.end_s());
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kAlways, false),
                (m + p - 1) * (f + 3 * f) + 2 * (p - 1) * c + shape.end_s());
    // While the first gradient is on its way, stages make their graph again
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kAlways, true),
                (m + p - 1) * f + m * 3 * f + (p - 1) * 2 * f +
                    2 * (p - 1) * c + shape.end_s());
    // The last micro-batch is kept
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kExceptLast, true),
                (m + p - 1) * f + (m - 1) * 3 * f + p * 2 * f +
                    2 * (p - 1) * c + shape.end_s());
  }
}

// --- 1F1B and its family -----------------------------------------------------

// As GPipe, and each micro-batch after the first waits for a message on its way
// to the last stage or back, but for one in p.
TEST_P(TextbookPipelines,
       OneForwardOneBackwardWaitsForMessagesInItsSteadyState) {
  const int p = GetParam();
  for (const int m : {1, 2, 8, 11}) {
    const Shape shape{p, m, 4};
    const double f = shape.forward_s(), c = shape.message_s();
    ASSERT_LE(c, f) << "messages must not be what the pipeline waits for";
    const int waits = (p - 1) + (m - 1) - (m - 1 + p - 1) / p;
    SCOPED_TRACE(m);
    expect_time(schedule_step_s(shape, pipeline::schedules::one_f_one_b(p, m)),
                (m + p - 1) * (f + 2 * f) + 2 * waits * c + shape.end_s());
  }
}

// A message waits wherever a chunk begins, there and back; the steady state
// hides the rest, however many micro-batches there are.
TEST_P(TextbookPipelines, InterleavingWaitsForAMessagePerChunkOfTheFill) {
  const int p = GetParam();
  for (const int v : {2, 3}) {
    for (const int m : {p, 2 * p, 3 * p}) {
      const Shape shape{p, m, 4, v};
      const double f = shape.forward_s(), c = p > 1 ? shape.message_s() : 0;
      ASSERT_LE(c, f) << "messages must not be what the pipeline waits for";
      SCOPED_TRACE(std::to_string(v) + " chunks, " + std::to_string(m));
      expect_time(
          schedule_step_s(shape, pipeline::schedules::interleaved(p, m, v)),
          (v * m + p - 1) * (f + 2 * f) + 2 * (v * p - 1) * c + shape.end_s());
    }
  }
}

/// Times of the zero-bubble schedules, by their parts.
struct Parts {
  double f = 0, i = 0, w = 0, c = 0;
};

/// Calls `expect(shape, parts, how)` for all and for half of the weights
/// trained, and with and without recomputation, which makes I longer.
template <typename Expect>
void for_each_split(int p, int m, const Expect& expect) {
  for (const bool is_half_frozen : {false, true}) {
    for (const bool recomputes : {false, true}) {
      const Shape shape{p, m, 4, 1, is_half_frozen};
      pipeline::EngineOptions how;
      how.recompute = recomputes ? pipeline::Recompute::kAlways
                                 : pipeline::Recompute::kNever;
      how.early_recompute = false;
      const double f = shape.forward_s();
      const Parts parts{f, recomputes ? 2 * f : f, shape.weights_s(),
                        shape.message_s()};
      ASSERT_LE(parts.c, f) << "messages must not be what ranks wait for";
      SCOPED_TRACE(std::to_string(m) + " micro-batches" +
                   (is_half_frozen ? ", W = F/2" : "") +
                   (recomputes ? ", I = 2F" : ""));
      expect(shape, parts, how);
    }
  }
}

// W hides a message there and back in the steady state, where it is as long.
TEST_P(TextbookPipelines, ZbH1HidesMessagesBehindWeights) {
  const int p = GetParam();
  for (const int m : {p + 1, 2 * p, 3 * p + 2}) {
    for_each_split(p, m, [&](const Shape& shape, const Parts& t, auto how) {
      const bool hides = 2 * t.c <= t.w;
      ASSERT_EQ(hides, !shape.is_half_frozen) << "both cases are needed";
      const int waits = m - p - (m - 1 + p - 1) / p;
      expect_time(schedule_step_s(shape, pipeline::schedules::zb_h1(p, m), how),
                  (m + p - 1) * (t.f + t.i) + (m - p + 1) * t.w +
                      4 * (p - 1) * t.c +
                      (hides ? 0 : waits * (2 * t.c - t.w)) + shape.end_s());
    });
  }
}

// Messages count on the way to the last stage, and on the way back as far as
// two W do not cover I and a message.
TEST_P(TextbookPipelines, ZbH2WaitsWhereTwoWeightsAreShorterThanAnInput) {
  const int p = GetParam();
  for (const int m : {2 * p - 1, 2 * p, 3 * p + 2}) {
    for_each_split(p, m, [&](const Shape& shape, const Parts& t, auto how) {
      const bool covers = t.i + t.c <= 2 * t.w;
      ASSERT_EQ(covers, !shape.is_half_frozen && t.i == t.f)
          << "both cases are needed";
      expect_time(schedule_step_s(shape, pipeline::schedules::zb_h2(p, m), how),
                  m * (t.f + t.i + t.w) + (p - 1) * (t.f + t.c) +
                      (covers ? 0 : (p - 1) * (t.i + t.c - 2 * t.w)) +
                      shape.end_s());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookPipelines,
                         ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook::pipelines
