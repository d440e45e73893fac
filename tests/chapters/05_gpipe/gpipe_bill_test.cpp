// Memory of GPipe: the page's bill against counts. Its time is in
// common/textbook_pipelines_test.cpp.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "chapters/05_gpipe/gpipe.h"
#include "core/autograd.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"

namespace shardbook::gpipe_test {
namespace {

using pipeline::Engine;
using pipeline::EngineOptions;
using pipeline::Recompute;

constexpr std::int64_t kBillWidth = 8;

/// Counted peak of activations on each of two ranks, for m micro-batches of
/// `rows` rows.
std::vector<double> peaks(int m, std::int64_t rows, Recompute recompute) {
  return on_ranks(2, [&](ProcessGroup& world) {
    const SkipNet net(6, kBillWidth);
    const auto layers = borrowed(net);
    Options options;
    PipelineModel model(options, layers, one_stage_per_rank({0, 3, 6}), world);
    const auto pieces = ceil_micro_batches(rows * m, m);
    RowsFeed feed(pieces, kBillWidth, DType::kF32);
    const EngineOptions engine_options{.recompute = recompute};
    Engine engine(gpipe::schedule(2, m), model, world, feed, nullptr,
                  engine_options);
    RankContext::current().device.reset_peak_memory();
    engine.run();
    return static_cast<double>(
        RankContext::current().device.memory().peak(MemoryKind::kActivation));
  });
}

// Without recomputation, every micro-batch keeps its graph, which has at least
// the inputs of its layers.
TEST(GpipeBill, WithoutRecomputationEachMicroBatchKeepsItsActivations) {
  const std::int64_t rows = 5;
  for (int s = 0; s < 2; ++s) {
    const double first = peaks(2, rows, Recompute::kNever)[at(s)];
    const double kept = peaks(3, rows, Recompute::kNever)[at(s)] - first;
    EXPECT_EQ(peaks(6, rows, Recompute::kNever)[at(s)], first + 4 * kept);
    // The input of each layer but the first; the last output was sent
    EXPECT_GE(kept, 2 * rows * kBillWidth * 4.0);
  }
}

// With recomputation, every micro-batch keeps its input, and only one graph
// exists at any time: m |input| + A.
TEST(GpipeBill, WithRecomputationItKeepsItsInput) {
  const std::int64_t rows = 5;
  const double input = rows * kBillWidth * 4.0;
  const double one = peaks(2, rows, Recompute::kAlways)[1];
  for (const int m : {3, 6}) {
    EXPECT_EQ(peaks(m, rows, Recompute::kAlways)[1], one + (m - 2) * input);
    EXPECT_EQ(peaks(m, rows, Recompute::kAlways)[0],
              peaks(2, rows, Recompute::kAlways)[0]);
    EXPECT_LT(peaks(m, rows, Recompute::kAlways)[1],
              peaks(m, rows, Recompute::kNever)[1]);
  }
}

/// The same tokens in each micro-batch. The first stage continues only when the
/// second one has received its output.
class TokenFeed : public pipeline::Feed {
 public:
  TokenFeed(const std::vector<MicroBatch>& pieces, Tensor tokens,
            std::atomic<int>& num_received)
      : pieces_(pieces), tokens_(std::move(tokens)), received_(num_received) {}
  pipeline::Piece piece(int b) const override {
    return {0, pieces_[at(b)].slice, pieces_[at(b)].rows, 1};
  }
  Tensors inputs(int b) override {
    while (received_ < b) std::this_thread::yield();
    return {tokens_};
  }
  Tensor loss(int, const Tensors& outputs) override {
    ++received_;
    return language_loss(outputs[0], tokens_);
  }
  Tensors example(std::int64_t) const override { return {tokens_}; }
  DType dtype() const override { return DType::kF32; }

 private:
  std::vector<MicroBatch> pieces_;
  Tensor tokens_;
  std::atomic<int>& received_;
};

// A sent output is freed when the next stage has received it, long before its
// backward.
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
    TokenFeed feed(pieces, tokens, num_received);
    Engine engine(gpipe::schedule(2, m), model, world, feed);
    engine.run();
    return static_cast<double>(RankContext::current().device.memory().peak(
        MemoryKind::kCommunication));
  })[0];
  const auto output = static_cast<double>(4 * rows * seq * config.n_embd);
  EXPECT_GE(peak, output);
  EXPECT_LE(peak, 2 * output);  // the current and the previous one
}

/// Two linear layers: from a narrow value to a wide one, and back.
class WideInside : public LayerList {
 public:
  explicit WideInside(std::int64_t wide) : wide_(wide) {}
  int size() const override { return 2; }
  std::string name(int layer) const override {
    return layer == 0 ? "widen" : "narrow";
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    const auto [in, out] = layer == 0 ? std::pair(kBillWidth, wide_)
                                      : std::pair(wide_, kBillWidth);
    return std::make_unique<Linear>(name(layer), in, out, init);
  }

 private:
  std::int64_t wide_;
};

// A recomputed output is not sent, so it must not wait beside its gradient.
// Catches a recomputation that keeps its outputs.
TEST(GpipeBill, RecomputedOutputsDoNotWaitForTheirGradients) {
  const std::int64_t rows = 3, wide = 64;
  const auto peak = on_ranks(2, [&](ProcessGroup& world) {
    PipelineModel model(Options{}, std::make_shared<WideInside>(wide),
                        one_stage_per_rank({0, 1, 2}), world);
    RowsFeed feed(ceil_micro_batches(rows, 1), kBillWidth, DType::kF32);
    const EngineOptions engine_options{.recompute = Recompute::kAlways};
    Engine engine(gpipe::schedule(2, 1), model, world, feed, nullptr,
                  engine_options);
    engine.run();
    return RankContext::current().device.memory().peak(MemoryKind::kActivation);
  })[0];
  EXPECT_EQ(peak, 4 * rows * wide);
}

}  // namespace
}  // namespace shardbook::gpipe_test
