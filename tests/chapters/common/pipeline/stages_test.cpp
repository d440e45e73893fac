// A model's stages together compute the same as the model.

#include "chapters/common/pipeline/stages.h"

#include <gtest/gtest.h>

#include <numeric>

#include "chapters/common/pipeline/partition.h"
#include "core/autograd.h"
#include "core/check.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"

namespace shardbook::gpipe_test {
namespace {

TEST(Stages, PiecesOfAModelBeginAsItDoesAndComputeTheSame) {
  for (const char* name : {"mlp", "gpt-nano"}) {
    const ModelConfig config = ModelConfig::read(name);
    InitOptions init;
    init.seed = 5;
    const auto whole = make_model(config, init);
    const auto layers = layers_of(config);
    const Tensor tokens = tokens_of(3, 8, config.vocab_size);
    const Tensor expected = (*whole)(tokens);
    for (int p = 1; p <= 4; ++p) {
      const std::vector<int> cuts = cut_uniform(layers->size(), p);
      std::map<std::string, Tensor> values;
      Tensors x = {tokens};
      for (int s = 0; s < p; ++s) {
        Stage stage(*layers, cuts[at(s)], cuts[at(s) + 1], init);
        for (const NamedTensor& each : stage.named_parameters()) {
          values[each.name] = each.tensor;
        }
        x = stage(x);
      }
      EXPECT_TRUE(bitwise_equal(x[0], expected)) << name << " " << p;
      std::size_t count = 0;
      for (const NamedTensor& each : whole->named_parameters()) {
        ASSERT_EQ(values.count(each.name), 1u) << each.name;
        EXPECT_TRUE(bitwise_equal(values[each.name], each.tensor));
        ++count;
      }
      EXPECT_EQ(values.size(), count);
    }
  }
}

TEST(Stages, AParameterOfTwoLayersIsOneTensorInsideAStage) {
  const auto layers = layers_of(ModelConfig::read("gpt-nano"));
  EXPECT_EQ(shared_parameters(*layers),
            (std::map<std::string, std::vector<int>>{
                {"transformer.wte.weight", {0, layers->size() - 1}}}));
  Stage stage(*layers, 0, layers->size(), InitOptions{});
  int tables = 0;
  for (const NamedTensor& each : stage.named_parameters()) {
    tables += each.name == "transformer.wte.weight" ? 1 : 0;
  }
  EXPECT_EQ(tables, 1);
}

TEST(Stages, CutsAreThoseOfTheRule) {
  EXPECT_EQ(cut_uniform(6, 4), (std::vector<int>{0, 2, 4, 5, 6}));
  EXPECT_EQ(cut_uniform(8, 1), (std::vector<int>{0, 8}));
  EXPECT_EQ(cut_by_balance(6, {2, 1, 3}), (std::vector<int>{0, 2, 3, 6}));
  EXPECT_EQ(cut_by_cost({1, 1, 1, 9}, 2), (std::vector<int>{0, 3, 4}));
  EXPECT_EQ(cut_by_cost({4, 4, 1, 1, 6}, 3), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(error_of([] { cut_uniform(4, 5); }),
            "5 stages: the model has 4 layers; give at most one stage per "
            "layer");
  const std::vector<int> empty_stage = {2, 0, 4}, too_few = {2, 3};
  EXPECT_EQ(error_of([&] { cut_by_balance(6, empty_stage); }),
            "balance: 0 layers in a stage; give at least one");
  EXPECT_EQ(error_of([&] { cut_by_balance(6, too_few); }),
            "balance: adds up to 5 layers, the model has 6");
  EXPECT_THROW(cut_by_cost({1, 2}, 3), Error);
}

// Compared with every possible cut.
TEST(Stages, NoOtherCutHasACheaperWorstStage) {
  const std::vector<double> costs = {3, 1, 4, 1, 5, 9, 2, 6};
  const auto worst_of = [&](const std::vector<int>& cuts) {
    double worst = 0;
    for (std::size_t s = 0; s + 1 < cuts.size(); ++s) {
      worst = std::max(worst, std::accumulate(costs.begin() + cuts[s],
                                              costs.begin() + cuts[s + 1], 0.));
    }
    return worst;
  };
  for (int p = 1; p <= 8; ++p) {
    const std::vector<int> found = cut_by_cost(costs, p);
    ASSERT_EQ(found.size(), at(p) + 1);
    for (unsigned mask = 0; mask < 128; ++mask) {
      std::vector<int> cuts = {0};
      for (int i = 0; i < 7; ++i) {
        if ((mask >> i & 1u) != 0) cuts.push_back(i + 1);
      }
      cuts.push_back(8);
      if (cuts.size() != found.size()) continue;
      EXPECT_LE(worst_of(found), worst_of(cuts));
    }
  }
}

TEST(Stages, CostsOfLayersAreTheirParametersOrTheirTime) {
  const ModelConfig config = ModelConfig::read("gpt-nano");
  const auto layers = layers_of(config);
  const std::vector<double> parameters = layer_parameters(*layers);
  const auto whole = make_model(config, InitOptions{});
  const double total =
      std::accumulate(parameters.begin(), parameters.end(), 0.0);
  EXPECT_EQ(total - static_cast<double>(config.vocab_size * config.n_embd),
            static_cast<double>(whole->num_parameters()));
  const auto flops = [](const OpEvent& event) { return event.flops; };
  const std::vector<double> seconds = layer_seconds(
      *layers, {tokens_of(2, 8, config.vocab_size)}, DType::kF32, flops);
  ASSERT_EQ(seconds.size(), parameters.size());
  EXPECT_EQ(seconds[1], seconds[2]);
  EXPECT_GT(seconds[1], seconds[0]);
}

TEST(Stages, ShapesAreKnownBeforeTheRun) {
  const ModelConfig config = ModelConfig::read("gpt-nano");
  const auto layers = layers_of(config);
  const auto specs = trace_shapes(*layers, {tokens_of(3, 8, 256)}, DType::kF64);
  ASSERT_EQ(specs.size(), at(layers->size()) + 1);
  EXPECT_EQ(specs[0].values[0].dtype, DType::kI64);
  EXPECT_FALSE(specs[0].values[0].needs_grad);
  EXPECT_EQ(specs[1].values[0].shape, (Shape{3, 8, config.n_embd}));
  EXPECT_EQ(specs[1].values[0].dtype, DType::kF64);
  EXPECT_TRUE(specs[1].values[0].needs_grad);
  EXPECT_EQ(specs.back().values[0].shape, (Shape{3, 8, 256}));
}

// The n-th random operation is the same in a stage as in the whole model.
TEST(Stages, RandomOperationsAreCountedThroughTheModel) {
  ModelConfig config = ModelConfig::read("gpt-nano");
  config.dropout = 0.1;
  const auto layers = layers_of(config);
  const auto specs = trace_shapes(*layers, {tokens_of(2, 8, 256)}, DType::kF32);
  EXPECT_EQ(specs[0].first_random_op, 0u);
  EXPECT_EQ(specs[1].first_random_op, 1u);
  const auto per_block = specs[2].first_random_op - specs[1].first_random_op;
  EXPECT_EQ(per_block, 3u);
  InitOptions init;
  RandomState& random = RankContext::current().random;
  random = RandomState{7, 3, 0, {}};
  const Tensor tokens = tokens_of(2, 8, 256);
  const Tensor expected = Stage(*layers, 0, layers->size(), init)(tokens);
  Tensors x = {tokens};
  for (int i = 0; i < layers->size(); ++i) {
    random.next_op = specs[at(i)].first_random_op;
    x = Stage(*layers, i, i + 1, init)(x);
  }
  EXPECT_TRUE(bitwise_equal(x[0], expected));
}

// --- Skip connections --------------------------------------------------------

TEST(Skips, AStageTakesAndHandsOnWhatItDoesNotHaveBothEndsOf) {
  const SkipNet net(6, 4, {{0, 4}, {1, 2}, {2, 5}});
  EXPECT_EQ(Stage(net, 0, 6, {}).incoming().size(), 0u);
  Stage middle(net, 1, 3, {});
  EXPECT_EQ(middle.incoming(), std::vector<std::string>{});
  EXPECT_EQ(middle.outgoing(), std::vector<std::string>{"net/2"});
  Stage last(net, 3, 6, {});
  EXPECT_EQ(last.incoming(), (std::vector<std::string>{"net/0", "net/2"}));
  const auto routes = skip_routes(net, {0, 1, 3, 6});
  ASSERT_EQ(routes.size(), 2u);
  EXPECT_EQ(routes[0].name, "net/0");
  EXPECT_EQ(routes[0].from_stage, 0);
  EXPECT_EQ(routes[0].to_stage, 2);
  EXPECT_EQ(routes[1].name, "net/2");
  EXPECT_EQ(routes[1].from_stage, 1);
  EXPECT_EQ(routes[1].to_stage, 2);
}

TEST(Skips, PiecesComputeWhatTheWholeDoes) {
  const SkipNet net(6, 4, {{0, 4}, {1, 2}, {2, 5}});
  const Tensor x = rows_of(3, 4, DType::kF32);
  const Tensor expected = Stage(net, 0, 6, {})(x);
  Tensors a = Stage(net, 0, 2, {})(Tensors{x});  // value, net/0, net/1
  ASSERT_EQ(a.size(), 3u);
  Tensors b = Stage(net, 2, 4, {})(Tensors{a[0], a[2]});  // value, net/2
  ASSERT_EQ(b.size(), 2u);
  const Tensors c = Stage(net, 4, 6, {})(Tensors{b[0], a[1], b[1]});
  EXPECT_TRUE(bitwise_equal(c[0], expected));
}

TEST(Skips, TraceKnowsWhatIsStashed) {
  const SkipNet net(6, 4, {{0, 4}, {2, 5}});
  const auto specs =
      trace_shapes(net, {rows_of(3, 4, DType::kF32)}, DType::kF32);
  EXPECT_TRUE(specs[0].skips.empty());
  EXPECT_EQ(specs[1].skips.size(), 1u);
  EXPECT_EQ(specs[3].skips.size(), 2u);
  EXPECT_EQ(specs[5].skips.size(), 1u);
  EXPECT_EQ(specs[4].skips.at("net/0").shape, (Shape{3, 4}));
  EXPECT_TRUE(specs[4].skips.at("net/0").needs_grad);
}

TEST(Skips, NamesThatDoNotMatchAreSaidBeforeTheRun) {
  const auto error = [](std::vector<std::pair<int, int>> skips,
                        const std::string& shared_name = "") {
    return error_of([&] {
      skip_routes(SkipNet(6, 4, std::move(skips), shared_name), {0, 3, 6});
    });
  };
  EXPECT_EQ(error({{0, 2}, {1, 4}}, "net/x"),
            "skip 'net/x': layers 0 and 1 stash it; a name is unique in its "
            "namespace");
  EXPECT_EQ(error({{0, -1}}),
            "skip 'net/0': layer 0 (layer0) stashes it, and no layer pops it");
  EXPECT_EQ(error({{4, 2}}),
            "skip 'net/4': layer 2 (layer2) pops it, and no layer before "
            "stashes it");
}

}  // namespace
}  // namespace shardbook::gpipe_test
