// A GPT's layers from a factory. The chapters with sharded layers test that
// these start, compute and draw as one device's do.

#include <gtest/gtest.h>

#include <memory>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/run/training.h"
#include "comm/launch.h"

namespace shardbook {
namespace {

ModelConfig two_layers() {
  ModelConfig config;
  config.n_layer = 2;
  return config;
}

Options small_batches() {
  Options options;
  options.batch = 4;
  options.seq = 8;
  return options;
}

// One device adds the same numbers in another order.
constexpr double kSameSum = 1e-12;

// Each way of training uses the loss that it is given.
TEST(LayerFactory, TrainingUsesTheLossOfTheFactory) {
  const ModelConfig config = two_layers();
  const Options options = small_batches();
  const Dataset data = Dataset::open("walk", options.seq, config.vocab_size, 1);
  LayerFactory layers;
  layers.loss = [](const Tensor& logits, const Tensor& targets) {
    return scale(language_loss(logits, targets), 2);
  };
  Gpt model(config, {}, layers);
  const auto pieces = ceil_micro_batches(options.batch, 1);
  const double once = accumulate_gradients(options, model, data, 0, pieces);
  EXPECT_EQ(
      accumulate_gradients(options, model, data, 0, pieces, 1, layers.loss),
      2 * once);
  pipeline::LanguageFeed feed(options, data, pieces, layers.loss);
  EXPECT_EQ(feed.loss(0, {model(feed.inputs(0)[0])}).item(), 2 * once);
  run_ranks(1, [&](ProcessGroup& dp) {
    Gpt model(config, {}, layers);
    const Tensor loss = data_parallel_gradients(
        options, dp, data, 0, 1, [](bool) {},
        [&](const Tensor& inputs) { return model(inputs); }, layers.loss);
    EXPECT_NEAR(loss.item(), 2 * once, kSameSum);
  });
}

/// A chapter's layer that extends core's.
class DoubledLinear : public ModuleOf<DoubledLinear, Linear> {
 public:
  Tensor forward(const Tensor& x) override {
    return scale(Linear::forward(x), 2);
  }
};

// gelu_mlp must not bypass a layer that is observed or replaced.
TEST(GptMlp, UsesItsLayersAsTheyAre) {
  const ModelConfig config = two_layers();
  const InitOptions init;
  const Tensor x = Tensor::empty({2, 8, config.n_embd});
  fill_normal(x, 1, 1, 0, 1);
  GptMlp plain("mlp", config, init);
  const Tensor y = plain(x);
  EXPECT_TRUE(bitwise_equal(y, plain.c_proj(gelu(plain.c_fc(x)))));

  for (const bool is_first : {true, false}) {
    GptMlp watched("mlp", config, init);
    int calls = 0;
    Module& layer = *(is_first ? watched.c_fc : watched.c_proj);
    layer.add_forward_hook([&](Module&, Tensors&) { ++calls; });
    layer.add_forward_pre_hook([&](Module&, Tensors&) { ++calls; });
    EXPECT_TRUE(bitwise_equal(watched(x), y));
    EXPECT_EQ(calls, 2);

    GptMlp replaced("mlp", config, init);
    auto doubled = std::make_unique<DoubledLinear>();
    const Linear& old =
        (is_first ? replaced.c_fc : replaced.c_proj).as<Linear>();
    doubled->weight = old.weight, doubled->bias = old.bias;
    (is_first ? replaced.c_fc : replaced.c_proj) =
        AnyModule(std::move(doubled));
    EXPECT_TRUE(
        bitwise_equal(replaced(x), replaced.c_proj(gelu(replaced.c_fc(x)))));
    EXPECT_FALSE(bitwise_equal(replaced(x), y));
  }
}

}  // namespace
}  // namespace shardbook
