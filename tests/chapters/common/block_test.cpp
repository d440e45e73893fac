// The table of a decoder's block against sums written by hand.

#include "chapters/common/models/block.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "chapters/common/models/models.h"
#include "core/context.h"
#include "tests/chapters/common/latent_support.h"

namespace shardbook {
namespace {

double sum(const BlockTable& block, double (BlockPart::*value)(double) const,
           double argument) {
  double total = 0;
  for (const BlockPart& part : block.parts()) total += (part.*value)(argument);
  return total;
}

double sum(const BlockTable& block,
           double (BlockPart::*value)(double, double) const, double seq) {
  double total = 0;
  for (const BlockPart& part : block.parts()) total += (part.*value)(seq, 1);
  return total;
}

// Radford et al. 2019: 12 h^2 + 13 h. t ranks share all but the two norms and the
// biases behind the sums.
TEST(BlockTable, OfGpt2HasTheSumsOfThePages) {
  const double h = 64, heads = 4, s = 24;
  const BlockTable block = block_table(ModelConfig());
  for (const double t : {1, 2, 4}) {
    EXPECT_EQ(sum(block, &BlockPart::parameters, t),
              (12 * h * h + 7 * h) / t + 6 * h);
    EXPECT_EQ(sum(block, &BlockPart::kept, t), 4 * h + 12 * h / t);
    EXPECT_EQ(sum(block, &BlockPart::statistics, t), 4 + heads / t);
    EXPECT_EQ(sum(block, &BlockPart::deferred, t), 4 * h + 12 * h / t);
  }
  EXPECT_EQ(sum(block, &BlockPart::operations, s),
            24 * h * h + 2 * (s + 1) * h);
  EXPECT_EQ(sum(block, &BlockPart::backward_operations, s),
            48 * h * h + 5 * (s + 1) * h);
}

TEST(BlockTable, OfALlamaKeepsSharedHeadsOnce) {
  const ModelConfig config = ModelConfig::read("llama-nano");
  const double h = 64, a = 4, k = 2, d = 16, f = 176, s = 24;
  const BlockTable block = block_table(config);
  for (const double t : {1, 2}) {
    EXPECT_EQ(sum(block, &BlockPart::parameters, t),
              (2 * a * d * h + 2 * k * d * h + 3 * h * f) / t + 2 * h);
    EXPECT_EQ(sum(block, &BlockPart::kept, t),
              4 * h + (2 * a * d + 2 * k * d + 3 * f) / t);
    EXPECT_EQ(sum(block, &BlockPart::statistics, t), 2 + a / t);
  }
  EXPECT_EQ(
      sum(block, &BlockPart::operations, s),
      2 * (2 * a * d * h + 2 * k * d * h + 3 * h * f) + 2 * (s + 1) * a * d);
}

// Sizes: latent_support.h
TEST(BlockTable, OfLatentAttentionCutsWhatComesOutByHeads) {
  const double h = 48, a = 4, d = 16, v = 12, q = 20, kv = 14, r = 6, f = 64;
  const double s = 24;
  const BlockTable block = block_table(small_deepseek(), 0);
  const double in = h * q + h * (kv + r);
  const double out = q * a * d + kv * a * (d - r + v) + a * v * h;
  for (const double t : {1, 2, 4}) {
    EXPECT_EQ(sum(block, &BlockPart::parameters, t),
              in + q + kv + (out + 3 * h * f) / t + 2 * h);
    // Inputs of norms and products; x is kept once for both latent vectors
    EXPECT_EQ(sum(block, &BlockPart::kept, t),
              4 * h + 2 * q + 2 * kv + (2 * a * d + a * v + a * v + 3 * f) / t);
    EXPECT_EQ(sum(block, &BlockPart::statistics, t), 4 + a / t);
  }
  const double products = in + out + 3 * h * f;
  EXPECT_EQ(sum(block, &BlockPart::operations, s),
            2 * products + (s + 1) * a * (d + v));
  EXPECT_EQ(sum(block, &BlockPart::backward_operations, s),
            4 * products + (s + 1) * a * (3 * d + 2 * v));
}

TEST(BlockTable, SharedExpertsSeeEveryToken) {
  const ModelConfig config = small_deepseek();
  const double h = 48, e = 8, f = 24, shared = 32;
  const BlockTable dense = block_table(config, 0),
                   block = block_table(config, 1);
  EXPECT_TRUE(dense.shared.empty());
  double parameters = 0, operations = 0;
  for (const BlockPart& part : block.parts()) {
    if (part.name.rfind("mlp.", 0) != 0) continue;
    parameters += part.parameters();
    operations += part.operations(1);
  }
  EXPECT_EQ(parameters, h * e + 3 * h * f * e + 3 * h * shared);
  EXPECT_EQ(operations, 2 * (h * e + 3 * h * f * 3 + 3 * h * shared));
  EXPECT_EQ(block.of_shared().down.in, shared);
  EXPECT_EQ(static_cast<double>(num_parameters(config)),
            2 * 256 * h + h + sum(dense, &BlockPart::parameters, 1) +
                sum(block, &BlockPart::parameters, 1));
}

// Four ranks share two heads of keys and values: two ranks hold each.
TEST(BlockTable, RanksThatOutnumberHeadsOfKeysHoldOne) {
  const double h = 64, a = 4, d = 16, f = 176, s = 24, t = 4;
  const BlockTable block = block_table(ModelConfig::read("llama-nano"));
  EXPECT_EQ(sum(block, &BlockPart::parameters, t),
            (2 * a * d * h + 3 * h * f) / t + 2 * d * h + 2 * h);
  EXPECT_EQ(sum(block, &BlockPart::kept, t),
            4 * h + (2 * a * d + 3 * f) / t + 2 * d);
  EXPECT_EQ(block.qkv.deferred(t), h + a * d / t + 2 * d);
  EXPECT_EQ(block.qkv.operations(s, t), 2 * h * (a * d / t + 2 * d));
  EXPECT_EQ(block.qkv.operations(s, t) + block.attention.operations(s, t) +
                block.proj.operations(s, t) + block.up.operations(s, t) +
                block.down.operations(s, t),
            2 * ((2 * a * d * h + 3 * h * f) / t + 2 * d * h) +
                2 * (s + 1) * a * d / t);
}

// Norms of heads have the width of a head, and keep a number for each head.
TEST(BlockTable, OfQwen3HasNormsOfHeads) {
  const ModelConfig config = ModelConfig::read("qwen3-0.6b");
  const BlockTable block = block_table(config);
  ASSERT_EQ(block.head_norms.size(), 2u);
  EXPECT_EQ(block.head_norms[0].parameters(), 128);
  EXPECT_EQ(block.head_norms[0].kept(), 16 * 128);
  EXPECT_EQ(block.head_norms[1].kept(2), 8 * 128 / 2);
  EXPECT_EQ(block.head_norms[1].kept(16), 128);
  EXPECT_EQ(block.head_norms[1].statistics(), 8);
}

// The modules of a model are the rows: no parameter is missing, none is added.
TEST(BlockTable, RowsAreTheParametersOfTheModel) {
  RankContext context(Device::meta(0), /*rank=*/0);
  const RankContext::Scope scope(context);
  for (const char* name : {"gpt-nano", "llama-nano", "qwen3-0.6b",
                           "qwen2.5-0.5b", "llama-3.1-8b"}) {
    SCOPED_TRACE(name);
    const ModelConfig config = ModelConfig::read(name);
    const auto model = make_model(config, InitOptions{});
    const std::string block = decoder_names(config).block(1) + ".";
    double counted = 0, expected = 0;
    std::set<std::string> names;
    for (const NamedTensor& each : model->named_parameters()) {
      if (each.name.rfind(block, 0) != 0) continue;
      counted += static_cast<double>(each.tensor.numel());
      const std::string part = each.name.substr(block.size());
      names.insert(part.substr(0, part.rfind('.')));
    }
    std::set<std::string> rows;
    for (const BlockPart& part : block_table(config).parts()) {
      expected += part.parameters();
      if (!part.name.empty()) rows.insert(part.name);
    }
    EXPECT_EQ(counted, expected);
    EXPECT_EQ(names, rows);
    if (config.is_llama()) {
      EXPECT_EQ(model->num_parameters(), num_parameters(config));
    }
  }
}

// An output layer of its own is no second use of the token table.
TEST(BlockTable, AnUntiedHeadIsAParameterOfItsOwn) {
  EXPECT_EQ(decoder_names(ModelConfig::read("llama-nano")).output(), "lm_head");
  EXPECT_EQ(decoder_names(ModelConfig::read("smollm2-135m")).output(),
            "model.embed_tokens");
  EXPECT_EQ(decoder_names(ModelConfig()).output(), "transformer.wte");
}

}  // namespace
}  // namespace shardbook
