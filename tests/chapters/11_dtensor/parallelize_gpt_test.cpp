// Plans for a GPT, and dropout under a plan.

#include <gtest/gtest.h>

#include "chapters/common/models/models.h"
#include "core/optim.h"
#include "tests/chapters/11_dtensor/parallelize_support.h"

namespace shardbook::dtensor_test {
namespace {

ModelConfig small_gpt() {
  ModelConfig config;
  config.vocab_size = 11;
  config.n_positions = 8;
  config.n_embd = 24;
  config.n_layer = 2;
  config.n_head = 6;
  return config;
}

Plan gpt_plan() {
  return {{"transformer.h.*.attn", pairwise()},
          {"transformer.h.*.mlp", pairwise()}};
}

/// Numbers a i + b i^2 + c below 11.
Tensor numbers(const Shape& shape, std::int64_t a, std::int64_t b,
               std::int64_t c) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < shape_numel(shape); ++i) {
    values.push_back((a * i + b * i * i + c) % 11);
  }
  return Tensor::from_values(values, shape);
}

TEST(DTensorGpt, HeadsDoNotFitEveryNumberOfRanks) {
  const std::string heads = error_on_tp(4, [](const Mesh& tp, ProcessGroup&) {
    Gpt model(small_gpt(), f64_init());
    parallelize_module(model, tp, gpt_plan());
  });
  expect_text(heads, {"has 6 heads for tp=4"});
}

TEST(DTensorGpt, BlocksEqualOneDeviceWithTwoAllReducesEachWay) {
  const std::int64_t n = 3, s = 8, h = 24, layers = 2;
  for (const int t : {1, 2, 3}) {
    on_tp(t, [&](const Mesh& tp, ProcessGroup& world) {
      Gpt plain(small_gpt(), f64_init()), model(small_gpt(), f64_init());
      const Tensor ids = numbers({n, s}, 5, 1, 0);
      const Tensor targets = numbers({n, s}, 7, 0, 3);
      language_loss(plain(ids), targets).backward();

      const auto cuts = parallelize_module(model, tp, gpt_plan());
      language_loss(model(ids), targets).backward();
      const std::vector<CommRecord> log = world.records();
      SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-12,
               "gradients");
      for (const CommRecord& record : log) {
        SB_CHECK(record.op == CommOp::kAllReduce && record.numel == n * s * h,
                 record_text(record));
      }
      const std::size_t expected =
          t == 1 ? 0 : static_cast<std::size_t>(4 * layers);
      SB_CHECK(log.size() == expected, log.size());
    });
  }
}

// Each rank has other heads and drops the same elements of them as one device.
TEST(DTensorGpt, DropsWhatOneDeviceDrops) {
  ModelConfig config = small_gpt();
  config.dropout = 0.3;
  for (const int t : {1, 2, 3}) {
    on_tp(t, [&](const Mesh& tp, ProcessGroup&) {
      Gpt plain(config, f64_init()), model(config, f64_init());
      const Tensor ids = numbers({3, 8}, 5, 1, 0);
      RankContext::current().random = RandomState();
      const Tensor right = plain(ids);
      RankContext::current().random = RandomState();
      parallelize_module(model, tp, gpt_plan());
      SB_CHECK(error_between(model(ids), right) < 1e-12, "another mask");
    });
  }
}

ModelConfig small_llama(const std::string& type) {
  return ModelConfig::from_json(
      R"({"model_type": ")" + type +
          R"(", "vocab_size": 11, "hidden_size": 24,)"
          R"( "intermediate_size": 18, "num_hidden_layers": 1,)"
          R"( "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4})",
      "small");
}

/// PyTorch's recipe of a block: norms on a rank's own tokens, and a gather and a
/// scatter around attention and MLP.
Plan block_plan(const ModelConfig& config) {
  const BlockTable block = block_table(config);
  Style inside = pairwise();
  inside.input = inside.output = shard(1);
  return {{block.norm_1.name, sequence()},
          {block.attention_module, inside},
          {block.norm_2.name, sequence()},
          {block.mlp_module, inside}};
}

// Heads of keys, gate and up, and a norm over heads are cut as the table says;
// gradients of norms and of biases behind rows are sums over all tokens.
TEST(DTensorBlock, OfBothDialectsEqualsOneDeviceOnOwnTokens) {
  const std::int64_t n = 2, s = 6, h = 24;
  for (const ModelConfig& config :
       {small_gpt(), small_llama("llama"), small_llama("qwen3")}) {
    for (const int t : {1, 2, 3}) {
      on_tp(t, [&](const Mesh& tp, ProcessGroup& world) {
        GptBlock plain("h", config, f64_init()), model("h", config, f64_init());
        const Tensor x = noise({n, s, h}, 1), weights = noise({n, s, h}, 2);
        x.set_requires_grad();
        const Tensor right = plain(x);
        sum(mul(right, weights)).backward();

        const auto cuts = parallelize_module(model, tp, block_plan(config));
        const auto own = [&](const Tensor& all) {
          const std::int64_t first = s / t * world.rank();
          return slice(all, 1, first, first + s / t);
        };
        const Tensor mine = own(x.detach()).clone();
        mine.set_requires_grad();
        const Tensor y = model(mine);
        const std::string forward = log_since(world, 0);
        sum(mul(y, own(weights))).backward();
        SB_CHECK(error_between(y, own(right)) < 1e-12, config.type);
        SB_CHECK(error_between(mine.grad(), own(x.grad())) < 1e-11,
                 config.type);
        SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-11,
                 config.type);
        const std::string all = std::to_string(n * s * h);
        const std::string pair =
            "all_gather world " + all + ", reduce_scatter world " + all;
        SB_CHECK(forward == (t == 1 ? "" : pair + ", " + pair), forward);
      });
    }
  }
}

// Replicated parameters stay equal on all ranks, bit for bit, and the model
// trains as on one device.
TEST(DTensorGpt, TrainsAsOneDevice) {
  const auto train = [](Module& model) {
    const auto optimizer = make_optimizer("adamw", model.parameters(), {});
    for (int step = 0; step < 5; ++step) {
      language_loss(model(numbers({2, 8}, 5, 1, step)),
                    numbers({2, 8}, 7, 0, 3 * step))
          .backward();
      optimizer->step();
      model.clear_grad();
    }
  };
  on_tp(2, [&](const Mesh& tp, ProcessGroup&) {
    Gpt plain(small_gpt(), f64_init()), model(small_gpt(), f64_init());
    train(plain);
    const auto cuts = parallelize_module(model, tp, gpt_plan());
    train(model);
    const Named whole = named(full_parameters(model, tp, cuts));
    for (const NamedTensor& each : plain.named_parameters()) {
      // The gradient of attention's key bias is only rounding, which Adam turns
      // into steps
      if (has_text(each.name, "c_attn.bias")) continue;
      SB_CHECK(error_between(whole.at(each.name), each.tensor) < 1e-9,
               each.name);
    }
    for (const NamedTensor& each : model.named_parameters()) {
      if (has_text(each.name, "ln_") || has_text(each.name, "c_proj.bias")) {
        from_local(each.tensor.detach(), tp, {replicate()}, std::nullopt,
                   /*run_check=*/true);
      }
    }
  });
}

// Shards draw different numbers: their parts of one device's mask.
TEST(DTensorSequence, DropsWhatOneDeviceDrops) {
  for (const int t : {1, 2, 4}) {
    on_tp(t, [t](const Mesh& tp, ProcessGroup& world) {
      Sequential plain, model;
      plain.add(Dropout(0.5));
      model.add(Dropout(0.5));
      const Tensor x = noise({2, 8, 6}, 1);
      RankContext::current().random = RandomState();
      const Tensor right = plain(x);
      RankContext::current().random = RandomState();
      parallelize_module(model, tp, {{"0", sequence()}});
      const std::int64_t n = 8 / t, first = n * world.rank();
      const Tensor y = model(slice(x, 1, first, first + n));
      SB_CHECK(error_between(y, slice(right, 1, first, first + n)) == 0,
               "another mask");
      SB_CHECK(world.records().empty(), "a call");
      model.train(false);
      const Tensor rest = model(slice(x, 1, first, first + n));
      SB_CHECK(error_between(rest, slice(x, 1, first, first + n)) == 0,
               "drops where nothing is trained");
    });
  }
}

}  // namespace
}  // namespace shardbook::dtensor_test
