// Plans: the numbers of one device, the calls of the table, and errors that say
// what is wrong.

#include "chapters/11_dtensor/parallelize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "chapters/common/models/models.h"
#include "core/layers.h"
#include "core/optim.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

InitOptions f64_init() {
  InitOptions init;
  init.seed = 1;
  init.dtype = DType::kF64;
  return init;
}

Sequential make_mlp(std::int64_t in, std::int64_t hidden, std::int64_t out) {
  Sequential model;
  model.add(Linear("0", in, hidden, f64_init()));
  model.add(Relu());
  model.add(Linear("2", hidden, out, f64_init()));
  return model;
}

/// Parameters, and gradients of parameters, by name.
using Named = std::map<std::string, Tensor>;

Named named(const std::vector<NamedTensor>& list) {
  Named map;
  for (const NamedTensor& each : list) map[each.name] = each.tensor;
  return map;
}

/// Gradients of a parallelized model, whole: parameters become gradients.
Named whole_gradients(Module& model, const Mesh& mesh,
                      const std::vector<CutParameter>& cuts) {
  const auto grads = model.clone();
  grads->replace_tensors([](const std::string&, const Tensor& tensor) {
    return tensor.grad().defined() ? tensor.grad() : tensor.zeros_like();
  });
  return named(full_parameters(*grads, mesh, cuts));
}

double worst_error(const Named& got, Module& plain) {
  double worst = 0;
  for (const NamedTensor& each : plain.named_parameters()) {
    worst =
        std::max(worst, error_between(got.at(each.name), each.tensor.grad()));
  }
  return worst;
}

// --- The toy of the documents ---------------------------------------------------

// Linear 10-32, ReLU, 32-5: equal inputs, one pair of all-reduces.
TEST(DTensorPairwise, EqualsOneDeviceWithAnAllReduceEachWay) {
  for (const int t : {1, 2, 3, 4}) {
    on_ranks(t, [t](ProcessGroup& world) {
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      const Mesh tp(devices);
      Sequential plain = make_mlp(10, 32, 5), model = make_mlp(10, 32, 5);
      const Tensor x = normal({20, 10}, 1), mine = x.clone();
      x.set_requires_grad();
      mine.set_requires_grad();
      const Tensor right = plain(x);
      sum(square(right)).backward();

      const auto cuts = parallelize_module(model, tp, {{"", pairwise()}});
      const Tensor y = model(mine);
      sum(square(y)).backward();
      SB_CHECK(error_between(y, right) < 1e-12, "forward");
      SB_CHECK(error_between(mine.grad(), x.grad()) < 1e-11, "input");
      SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-11,
               "parameters");
      return 0;
    });
  }
  const auto log = on_ranks(2, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    Sequential model = make_mlp(10, 32, 5);
    parallelize_module(model, Mesh(devices), {{"", pairwise()}});
    const Tensor x = normal({20, 10}, 1);
    x.set_requires_grad();
    sum(model(x)).backward();
    return log_since(world, 0);
  });
  EXPECT_EQ(log[0], "all_reduce world 100, all_reduce world 200");
}

// A pair on [16, 256] over 4 ranks: 12288 elements on the wire per rank.
TEST(DTensorPairwise, SendsTheGoldenNumberOfElements) {
  on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {4}));
    Sequential model = make_mlp(256, 1024, 256);
    parallelize_module(model, Mesh(devices), {{"", pairwise()}});
    const Tensor x = normal({16, 256}, 1);
    x.set_requires_grad();
    sum(model(x)).backward();
    SB_CHECK(world.sent_bytes() == 12288 * 8, world.sent_bytes());
    return 0;
  });
}

// torch 2.1's SequenceParallel: different rows on every rank, 20 W in all. The
// gradients are sums over the slices' losses.
TEST(DTensorPairwiseSequence, SlicesAreOneBatch) {
  for (const int t : {1, 2, 4}) {
    on_ranks(t, [t](ProcessGroup& world) {
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      const Mesh tp(devices);
      Sequential plain = make_mlp(10, 32, 5), model = make_mlp(10, 32, 5);
      const Tensor whole = normal({20 * t, 10}, 1);
      whole.set_requires_grad();
      const Tensor right = plain(whole);
      sum(square(right)).backward();

      const auto cuts =
          parallelize_module(model, tp, {{"", pairwise_sequence()}});
      const std::int64_t first = 20 * world.rank();
      const Tensor x = whole.rows_view(first, first + 20).clone();
      x.set_requires_grad();
      const Tensor y = model(x);
      sum(square(y)).backward();
      SB_CHECK(error_between(y, right.rows_view(first, first + 20)) < 1e-12,
               "local rows");
      SB_CHECK(error_between(x.grad(),
                             whole.grad().rows_view(first, first + 20)) < 1e-11,
               "input");
      SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-10,
               "parameters");
      const std::int64_t n = 20 * t;
      const std::string in = std::to_string(10 * n);
      const std::string out = std::to_string(5 * n);
      SB_CHECK(t == 1 || log_since(world, 0).find("all_gather world " + in +
                                                  ", reduce_scatter world " +
                                                  out) == 0,
               log_since(world, 0));
      return 0;
    });
  }
}

// torch 2.3's: norms and dropout on slices of the sequence, without calls
// forward; gradients of the parameters are reduced.
TEST(DTensorSequence, NormalisesSlicesAndReducesParameterGradients) {
  on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {4}));
    const Mesh tp(devices);
    Sequential plain, model;
    plain.add(LayerNorm(6, f64_init()));
    model.add(LayerNorm(6, f64_init()));
    const Tensor x = normal({2, 8, 6}, 1), weight = normal({2, 8, 6}, 2);
    sum(mul(plain(x), weight)).backward();

    parallelize_module(model, tp, {{"0", sequence()}});
    const std::int64_t first = 2 * world.rank();
    const Tensor y = model(slice(x, 1, first, first + 2));
    SB_CHECK(world.records().empty(), "a call forward");
    sum(mul(y, slice(weight, 1, first, first + 2))).backward();
    SB_CHECK(log_since(world, 0) == "all_reduce world 6, all_reduce world 6",
             log_since(world, 0));
    SB_CHECK(worst_error(whole_gradients(model, tp, {}), plain) < 1e-12,
             "gradients");
    return 0;
  });
}

// --- Single layers, layouts, uneven sizes -----------------------------------------

TEST(DTensorStyles, LayoutsOfInputsAndOutputsCanBeChosen) {
  for (const int t : {2, 3}) {
    on_ranks(t, [t](ProcessGroup& world) {
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      const Mesh tp(devices);
      const Tensor x = normal({6, 5}, 1);
      for (const bool is_column : {true, false}) {
        Sequential plain, model;
        plain.add(Linear("0", 5, 7, f64_init()));
        model.add(Linear("0", 5, 7, f64_init()));
        const Tensor whole = x.clone(), mine = x.clone();
        whole.set_requires_grad();
        mine.set_requires_grad();
        const Tensor right = plain(whole);
        sum(square(right)).backward();
        Style style = is_column ? colwise() : rowwise();
        style.input = style.output = replicate();
        const auto cuts = parallelize_module(model, tp, {{"0", style}});
        const Tensor y = model(mine);
        sum(square(y)).backward();
        SB_CHECK(error_between(y, right) < 1e-12, "forward");
        SB_CHECK(error_between(mine.grad(), whole.grad()) < 1e-12, "input");
        SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-12,
                 "parameters");
      }
      return 0;
    });
  }
}

TEST(DTensorStyles, EmbeddingsAreCutByRowsOrColumns) {
  on_ranks(3, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {3}));
    const Mesh tp(devices);
    const Tensor ids =
        Tensor::from_values(std::vector<std::int64_t>{6, 0, 3, 3, 1, 5}, {6});
    for (const bool by_rows : {true, false}) {
      Sequential plain, model;
      plain.add(Embedding("0", 7, 5, f64_init()));
      model.add(Embedding("0", 7, 5, f64_init()));
      const Tensor right = plain(ids);
      sum(square(right)).backward();
      Style style = by_rows ? rowwise() : colwise();
      style.output = replicate();
      const auto cuts = parallelize_module(model, tp, {{"0", style}});
      const Tensor y = model(ids);
      sum(square(y)).backward();
      SB_CHECK(error_between(y, right) < 1e-14, "forward");
      SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-14,
               "gradient");
    }
    return 0;
  });
}

// --- A GPT -----------------------------------------------------------------------------

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

TEST(DTensorGpt, BlocksEqualOneDeviceWithTwoAllReducesEachWay) {
  const std::int64_t n = 3, s = 8, h = 24, layers = 2;
  std::vector<std::int64_t> tokens, next;
  for (std::int64_t i = 0; i < n * s; ++i) {
    tokens.push_back((5 * i + i * i) % 11);
    next.push_back((7 * i + 3) % 11);
  }
  for (const int t : {1, 2, 3}) {
    on_ranks(t, [&](ProcessGroup& world) {
      DeviceMesh devices(world, Topology({"tp"}, {t}));
      const Mesh tp(devices);
      Gpt plain(small_gpt(), f64_init()), model(small_gpt(), f64_init());
      const Tensor ids = Tensor::from_values(tokens, {n, s});
      const Tensor targets = Tensor::from_values(next, {n, s});
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
      return 0;
    });
  }
}

// Replicated parameters stay equal on all ranks, bit for bit, and the model
// trains as one device does.
TEST(DTensorGpt, TrainsAsOneDevice) {
  const auto train = [](Module& model) {
    const auto optimizer = make_optimizer("adamw", model.parameters(), {});
    for (int step = 0; step < 5; ++step) {
      std::vector<std::int64_t> ids, next;
      for (std::int64_t i = 0; i < 16; ++i) {
        ids.push_back((5 * i + i * i + step) % 11);
        next.push_back((7 * i + 3 * step) % 11);
      }
      language_loss(model(Tensor::from_values(ids, {2, 8})),
                    Tensor::from_values(next, {2, 8}))
          .backward();
      optimizer->step();
      model.clear_grad();
    }
  };
  on_ranks(2, [&](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    const Mesh tp(devices);
    Gpt plain(small_gpt(), f64_init()), model(small_gpt(), f64_init());
    train(plain);
    const auto cuts = parallelize_module(model, tp, gpt_plan());
    train(model);
    const Named whole = named(full_parameters(model, tp, cuts));
    for (const NamedTensor& each : plain.named_parameters()) {
      // The bias of attention's keys has no gradient but rounding, from which
      // Adam makes steps
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
    return 0;
  });
}

// --- Traps and errors --------------------------------------------------------------------

std::string plan_error(const Plan& plan, bool with_optimizer = false,
                       int ranks = 2) {
  return error_on_ranks(ranks, [&](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {ranks}));
    Sequential model = make_mlp(10, 32, 5);
    model.add(Linear("3", 5, 5, f64_init()));
    std::unique_ptr<Optimizer> optimizer;
    if (with_optimizer) {
      optimizer = make_optimizer("sgd", model.parameters(), {});
    }
    parallelize_module(model, Mesh(devices), plan);
  });
}

TEST(DTensorPlanErrors, NameWhatIsWrong) {
  EXPECT_TRUE(has_text(plan_error({{"", pairwise()}}),
                       "'' (Sequential) has 3 Linear layers; pairwise styles "
                       "need an even number"));
  EXPECT_TRUE(has_text(plan_error({{"7", colwise()}}),
                       "the plan names '7', and no module has that name"));
  EXPECT_TRUE(has_text(plan_error({{"1", colwise()}}),
                       "'1' is a Relu; colwise and rowwise are for Linear and "
                       "Embedding"));
  EXPECT_EQ(plan_error({{"0", colwise()}, {"2", rowwise()}}), "");
  const std::string heads = error_on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {4}));
    Gpt model(small_gpt(), f64_init());
    parallelize_module(model, Mesh(devices), gpt_plan());
  });
  EXPECT_TRUE(has_text(heads, "has 6 heads for tp=4"));
}

TEST(DTensorPlanErrors, AnOptimizerThatCameFirstIsFound) {
  EXPECT_TRUE(has_text(
      plan_error({{"0", colwise()}, {"2", rowwise()}}, /*with_optimizer=*/true),
      "'0.weight' is replaced, and is also held outside the model; create the "
      "optimizer after parallelize_module"));
}

// Trap: the optimizer of the whole model trains tensors that nobody uses.
TEST(DTensorTrap, AnOptimizerOfTheOldParametersTrainsNothing) {
  on_ranks(2, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    Sequential model = make_mlp(10, 32, 5), old = make_mlp(10, 32, 5);
    const auto early = make_optimizer("sgd", old.parameters(), {});
    parallelize_module(model, Mesh(devices), {{"", pairwise()}});
    const auto late = make_optimizer("sgd", model.parameters(), {});
    const Tensor before = model.parameters()[0].clone();
    sum(square(model(normal({4, 10}, 1)))).backward();
    early->step();
    SB_CHECK(bitwise_equal(model.parameters()[0], before), "no change");
    late->step();
    SB_CHECK(!bitwise_equal(model.parameters()[0], before), "a change");
    return 0;
  });
}

// Trap: pairwise with other inputs on every rank computes neither batch.
TEST(DTensorTrap, PairwiseNeedsEqualInputs) {
  on_ranks(2, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"tp"}, {2}));
    Sequential plain = make_mlp(10, 32, 5), model = make_mlp(10, 32, 5);
    const auto stream = static_cast<std::uint64_t>(world.rank());
    const Tensor x = normal({20, 10}, stream);
    parallelize_module(model, Mesh(devices), {{"", pairwise()}});
    SB_CHECK(error_between(model(x), plain(x)) > 1e-2, "mixed batches");
    return 0;
  });
}

}  // namespace
}  // namespace shardbook::dtensor_test
