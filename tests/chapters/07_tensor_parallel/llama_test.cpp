// A Llama whose blocks are cut over ranks: unequal columns of queries and keys,
// keys that ranks share, norms of heads, an output layer of its own.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/partial_gradients.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::tensor_parallel {
namespace {

using sharded_test::expect_bill;
using sharded_test::expect_claims;
using sharded_test::report_of;
using sharded_test::small_gpt;

/// 24 heads of queries of width 4 on a hidden size of 48, untied, with an odd
/// vocabulary. Qwen3 has norms of heads; Llama may have biases everywhere.
Options small_llama(int t, int keys, const std::string& family,
                    DType dtype = DType::kF64) {
  Options options = small_gpt(t, dtype);
  options.model = R"({"vocab_size":95,"max_position_embeddings":16,)"
                  R"("hidden_size":48,"intermediate_size":48,)"
                  R"("num_hidden_layers":2,"num_attention_heads":24,)"
                  R"("head_dim":4,"attention_bias":true,)"
                  R"("num_key_value_heads":)" +
                  std::to_string(keys) + R"(,"model_type":")" + family + "\"" +
                  (family == "llama" ? R"(,"mlp_bias":true})" : "}");
  return options;
}

class TensorParallelLlama : public ::testing::TestWithParam<int> {};

// With one key for all queries, all ranks share it; of two, four and eight ranks
// share each; with 24 there is nothing to share.
TEST_P(TensorParallelLlama, EveryClaimHolds) {
  const int t = GetParam();
  for (const int keys : {1, t == 3 ? 3 : 2, 24}) {
    for (const std::string family : {"llama", "qwen3"}) {
      SCOPED_TRACE(family + " " + std::to_string(keys));
      Options options = small_llama(t, keys, family);
      StrategyOptions setup;
      if (keys == 1 || family == "qwen3") {
        setup.micro_batches = 2;
        setup.recompute = true;
        options.clip = 0.05;
        options.optimizer = "sgd";
      }
      expect_claims(report_of<TensorParallelStrategy>(options, setup), "f64");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelLlama,
                         ::testing::Values(1, 2, 3, 4, 8));

// A block sends as one of a GPT-2. Behind the last micro-batch are the norms of
// heads, 2 L d, and the keys and values of neighbours, 2 L d (h + 1).
TEST(TensorParallelLlama, PartialGradientsAreAddedOnceAStep) {
  Options options = small_llama(4, 2, "qwen3");
  options.steps = 1;
  StrategyOptions setup;
  setup.micro_batches = 2;
  const auto logs = on_ranks(4, [&](ProcessGroup& tp) {
    TensorParallelStrategy strategy(options, setup, tp);
    tp.clear_records();
    strategy.step(0);
    std::vector<std::string> log;
    int ends = 0;  // of the products' messages
    for (const CommRecord& record : tp.records()) {
      const std::string label = record.label;
      if (label == "f" || label == "g") ++ends;
      if (label == "f" || label == "g" || label == "loss") continue;
      log.push_back(label + " " + std::to_string(record.numel));
    }
    EXPECT_EQ(ends, 2 * (4 * 2 + 2));
    return log;
  });
  for (const auto& log : logs) {
    EXPECT_EQ(log, (std::vector<std::string>{"norms of heads 16",
                                             "shared keys 784", "norm 1"}));
  }
  const PartialSizes sizes = partial_sizes(model_config(options), 4);
  EXPECT_EQ(sizes.norms, 2 * 2 * 4);
  EXPECT_EQ(sizes.shared, 2 * 2 * 4 * (48 + 1));
  EXPECT_EQ(sizes.sharers, 2);
  EXPECT_EQ(partial_sizes(model_config(options), 2).shared, 0);
}

// [BIT] Neighbours hold the same columns of keys and values, and update them
// equally; those that hold others have others.
TEST(TensorParallelLlama, RanksThatShareKeysHoldTheSameBits) {
  const auto keys = on_ranks(8, [](ProcessGroup& tp) {
    TensorParallelStrategy strategy(small_llama(8, 2, "qwen3"), {}, tp);
    for (int step = 0; step < 3; ++step) strategy.step(step);
    std::vector<double> values;
    for (const NamedTensor& each : strategy.model().named_parameters()) {
      if (each.name.find("qkv_proj") == std::string::npos) continue;
      // 3 heads of queries, and one of keys and of values
      const std::int64_t dim = each.tensor.ndim() - 1;
      EXPECT_EQ(each.tensor.size(dim), (3 + 1 + 1) * 4);
      for (const double value :
           slice(each.tensor.detach(), dim, 12, 20).to_vector<double>()) {
        values.push_back(value);
      }
    }
    return values;
  });
  for (std::size_t r = 0; r < 8; ++r) EXPECT_EQ(keys[r], keys[r / 4 * 4]) << r;
  EXPECT_NE(keys[0], keys[4]);
}

// A part of unequal columns says in a checkpoint which elements it has.
TEST(TensorParallelLlama, ACheckpointOfFourRanksContinuesOnTwo) {
  const TempFolder folder;
  const auto loss_of = [&](const std::string& more) {
    return run("07_tensor_parallel --model " SHARDBOOK_ROOT
               "/tests/golden/qwen3_qk_norm/config.json --data walk --seq 24 "
               "--batch 8 --dtype f64 --no-check " +
               more)
        .losses.back();
  };
  const std::string checkpoint = " --checkpoint " + (folder / "c");
  loss_of("--world-size 4 --steps 2" + checkpoint);
  EXPECT_NEAR(loss_of("--world-size 2 --steps 4 --resume" + checkpoint),
              loss_of("--world-size 4 --steps 4"), 1e-12);
}

TEST(TensorParallelLlama, PartsAreThoseOfTheBlocksTable) {
  const ModelConfig config = model_config(small_llama(4, 2, "qwen3"));
  const std::string block = "model.layers.1.";
  const Columns q{96, 24}, kv{8, 2};
  EXPECT_EQ(layout(config, block + "self_attn.qkv_proj.weight", 1, 4),
            (Shards{{1, 1, 4, 1, 0, {q, kv, kv}}}));
  EXPECT_EQ(layout(config, block + "self_attn.qkv_proj.bias", 1, 4),
            (Shards{{0, 1, 4, 1, 0, {q, kv, kv}}}));
  EXPECT_EQ(layout(config, block + "self_attn.o_proj.weight", 1, 4),
            (Shards{{0, 1, 4}}));
  // Gate and up are cut one by one: a contiguous half would be the gate alone
  EXPECT_EQ(layout(config, block + "mlp.gate_up_proj.weight", 1, 4),
            (Shards{{1, 1, 4, 2}}));
  for (const std::string table : {"model.embed_tokens", "lm_head"}) {
    EXPECT_EQ(layout(config, table + ".weight", 1, 4), (Shards{{0, 1, 4}}));
  }
  for (const std::string& whole :
       {block + "self_attn.o_proj.bias", block + "self_attn.q_norm.weight",
        block + "input_layernorm.weight", std::string("model.norm.weight")}) {
    EXPECT_EQ(layout(config, whole, 1, 4), Shards{}) << whole;
  }
}

TEST(TensorParallelLlama, SizesThatDoNotDivideNameThoseThatWould) {
  const auto error_of = [](int t, int keys, std::int64_t hidden) {
    ModelConfig config = model_config(small_llama(t, keys, "llama"));
    config.llama.intermediate_size = hidden;
    return shardbook::error_of([&] { check_ranks(config, t, "x"); });
  };
  expect_text(error_of(5, 2, 48), {"x: the ranks share 24 heads; give a "
                                   "divisor of 24"});
  expect_text(error_of(4, 6, 48), {"x: the ranks share 6 heads of keys; give a "
                                   "divisor or a multiple of 6"});
  expect_text(error_of(4, 2, 50),
              {"x: the ranks share 50 hidden units; give a divisor of 50"});
  EXPECT_EQ(error_of(8, 2, 48), "");
  EXPECT_EQ(error_of(2, 6, 48), "");
}

// The two additions behind the last micro-batch take their time; products of
// shared keys are repeated on each rank that holds them.
TEST(TensorParallelLlama, AStepOnTheTextbookClusterTakesTheClosedForm) {
  for (const int t : {1, 2, 4, 8}) {
    for (const std::string family : {"llama", "qwen3"}) {
      for (const bool recompute : {false, true}) {
        SCOPED_TRACE(testing::Message() << t << family << recompute);
        Options options = small_llama(t, 2, family, DType::kF32);
        StrategyOptions setup;
        setup.micro_batches = recompute ? 3 : 1;
        setup.recompute = recompute;
        setup.distribute_saved_activations = recompute;
        const Report report =
            textbook::run_on_textbook<TensorParallelStrategy>(options, setup);
        expect_bill(report);
        textbook::expect_closed_form(report);
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::tensor_parallel
