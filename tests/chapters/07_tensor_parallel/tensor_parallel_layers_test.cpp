// Columns, rows and the vocabulary: forward, gradients and messages of each
// layer against one device.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/support/errors.h"

namespace shardbook::tensor_parallel {
namespace {

Linear whole_linear(std::int64_t in, std::int64_t out) {
  Linear whole;
  whole.weight = make_parameter("l.weight", {in, out}, 1, f64_init());
  whole.bias = make_constant_parameter({out}, 0, f64_init());
  // Not zero, so a bias that counts t times shows
  whole.bias.copy_from(noise({out}, 77));
  return whole;
}

class TensorParallelLayers : public ::testing::TestWithParam<int> {};

// With gather_output every rank continues with all columns, so their gradient
// is cut, not added.
TEST_P(TensorParallelLayers, ColumnsAreThoseOfOneDeviceBitForBit) {
  const int t = GetParam();
  on_ranks(t, [&](ProcessGroup& tp) {
    const Shards columns = {{1, tp.rank(), t}}, piece = {{0, tp.rank(), t}};
    for (const bool gathers : {false, true}) {
      Linear whole = whole_linear(24, 48);
      ColumnParallelLinear part("l", {24, 48, {}, 1}, f64_init(), tp, gathers);
      EXPECT_TRUE(bitwise_equal(part.weight.detach(),
                                take_part(whole.weight.detach(), columns)));
      part.bias.copy_from(take_part(whole.bias.detach(), piece));
      const Tensor x = noise({2, 4, 24}, 1).set_requires_grad();
      const Tensor x_whole = noise({2, 4, 24}, 1).set_requires_grad();
      const Tensor dy = noise({2, 4, 48}, 2);
      const Shards seen = gathers ? Shards{} : Shards{{2, tp.rank(), t}};

      tp.clear_records();
      const Tensor y = part(x), expected = whole(x_whole);
      EXPECT_TRUE(
          bitwise_equal(y.detach(), take_part(expected.detach(), seen)));
      autograd::backward({y}, {take_part(dy, seen)});
      autograd::backward({expected}, {dy});
      expect_near(x.grad(), x_whole.grad());
      expect_near(part.weight.grad(), take_part(whole.weight.grad(), columns));
      expect_near(part.bias.grad(), take_part(whole.bias.grad(), piece));
      Log log = {"all_reduce 192"};
      if (gathers) log.insert(log.begin(), "all_gather 384");
      EXPECT_EQ(log_of(tp.records()), t > 1 ? log : Log{});
    }
  });
}

TEST_P(TensorParallelLayers, RowsAreSummedAndTheBiasCountsOnce) {
  const int t = GetParam();
  on_ranks(t, [&](ProcessGroup& tp) {
    const Shards rows = {{0, tp.rank(), t}}, last = {{2, tp.rank(), t}};
    Linear whole = whole_linear(48, 24);
    const Tensor dy = noise({2, 4, 24}, 2);
    const Tensor x_whole = noise({2, 4, 48}, 1).set_requires_grad();
    const Tensor expected = whole(x_whole);
    autograd::backward({expected}, {dy});
    for (const bool is_parallel : {true, false}) {
      RowParallelLinear part("l", {48, 24, {}, 1}, f64_init(), tp, is_parallel);
      part.bias.copy_from(whole.bias.detach());
      const Tensor x =
          (is_parallel ? take_part(x_whole.detach(), last) : x_whole.detach())
              .clone()
              .set_requires_grad();
      const Tensor y = part(x);
      expect_near(y.detach(), expected.detach());
      autograd::backward({y}, {dy});
      expect_near(x.grad(), is_parallel ? take_part(x_whole.grad(), last)
                                        : x_whole.grad());
      expect_near(part.weight.grad(), take_part(whole.weight.grad(), rows));
      expect_near(part.bias.grad(), whole.bias.grad());
    }
  });
}

// The sum of two halves has only one order.
TEST(TensorParallelLayers, TwoHalvesOfRowsAreTheSumOfTwoHalves) {
  on_ranks(2, [](ProcessGroup& tp) {
    RowParallelLinear part("l", {48, 24, {}, 1}, f64_init(), tp);
    const Linear whole = whole_linear(48, 24);
    const Tensor x = noise({2, 4, 48}, 1);
    const auto half = [&](int r) {
      return linear(take_part(x, {{2, r, 2}}),
                    take_part(whole.weight.detach(), {{0, r, 2}}));
    };
    EXPECT_TRUE(bitwise_equal(part(take_part(x, {{2, tp.rank(), 2}})).detach(),
                              add(add(half(0), half(1)), part.bias.detach())));
  });
}

// [BIT] Replicated tensors are the same on all ranks.
TEST(TensorParallelLayers, WhatAllRanksHaveHasTheSameBits) {
  for (const int t : {2, 3, 4, 8}) {
    const auto found = on_ranks(t, [](ProcessGroup& tp) {
      ColumnParallelLinear fc("a", {24, 48, {}, 1}, f64_init(), tp);
      RowParallelLinear proj("b", {48, 24, {}, 1}, f64_init(), tp);
      const Tensor x = noise({5, 24}, 1).set_requires_grad();
      const Tensor y = proj(gelu(fc(x)));
      autograd::backward({y}, {noise({5, 24}, 2)});
      std::vector<double> values;
      for (const Tensor& each : {y.detach(), x.grad(), proj.bias.grad()}) {
        for (const double v : each.to_vector<double>()) values.push_back(v);
      }
      return values;
    });
    for (const auto& each : found) EXPECT_EQ(each, found[0]) << t;
  }
}

TEST_P(TensorParallelLayers, ColumnsInF32HaveTheBitsOfOneDevice) {
  const int t = GetParam();
  on_ranks(t, [&](ProcessGroup& tp) {
    InitOptions init = f64_init();
    init.dtype = DType::kF32;
    ColumnParallelLinear part("l", {24, 48, {}, 1}, init, tp);
    const Tensor weight = make_parameter("l.weight", {24, 48}, 1, init);
    const Tensor bias = make_constant_parameter({48}, 0, init);
    const Tensor x = to_dtype(noise({2, 4, 24}, 1), DType::kF32);
    const Tensor expected = linear(x, weight, bias).detach();
    EXPECT_TRUE(bitwise_equal(part(x).detach(),
                              take_part(expected, {{2, tp.rank(), t}})));
  });
}

TEST_P(TensorParallelLayers, AFrozenWeightStillSumsTheGradientOfTheInput) {
  const int t = GetParam();
  on_ranks(t, [&](ProcessGroup& tp) {
    ColumnParallelLinear part("l", {24, 48, {}, 1}, f64_init(), tp);
    part.set_requires_grad(false);
    const Tensor x = noise({4, 24}, 1).set_requires_grad();
    const Tensor y = part(x);
    autograd::backward({y}, {Tensor::full(y.shape(), 1, y.options())});
    EXPECT_FALSE(part.weight.grad().defined());
    const Tensor weight = make_parameter("l.weight", {24, 48}, 1, f64_init());
    const Tensor ones = Tensor::full({4, 48}, 1, y.options());
    expect_near(x.grad(), matmul(ones, weight.detach(), false, true));
  });
}

TEST_P(TensorParallelLayers, TheVocabularyIsLookedUpAndTrainedInParts) {
  const int t = GetParam();
  on_ranks(t, [&](ProcessGroup& tp) {
    Embedding whole("e", 24, 6, f64_init(), 1);
    VocabParallelEmbedding part("e", 24, 6, 1, f64_init(), tp);
    Tensor ids = Tensor::empty({2, 8}, {DType::kI64, Device()});
    for (int i = 0; i < 16; ++i) ids.data<std::int64_t>()[i] = 5 * i % 24;
    const Tensor y = part(ids), expected = whole(ids);
    EXPECT_TRUE(bitwise_equal(y.detach(), expected.detach()));
    const Tensor dy = noise({2, 8, 6}, 3);
    autograd::backward({y}, {dy});
    autograd::backward({expected}, {dy});
    EXPECT_TRUE(
        bitwise_equal(part.weight.grad(),
                      take_part(whole.weight.grad(), {{0, tp.rank(), t}})));
    // A sum, not a gather: every rank has the whole width of every token
    EXPECT_EQ(log_of(tp.records()), t > 1 ? Log{"all_reduce 96"} : Log{});
  });
}

/// Compares the loss of logits [5, 24] in parts with one device's; `classes` of
/// the columns are tokens.
void expect_loss_of_one_device(ProcessGroup& tp, const Tensor& logits,
                               std::int64_t classes, Reduction reduction,
                               double tolerance) {
  const Shards part = {{1, tp.rank(), tp.size()}};
  Tensor targets = Tensor::empty({5}, {DType::kI64, Device()});
  for (int i = 0; i < 5; ++i) targets.data<std::int64_t>()[i] = 5 * i % classes;
  const Tensor whole = slice(logits, 1, 0, classes).set_requires_grad();
  const Tensor mine = take_part(logits, part).set_requires_grad();
  const Tensor loss =
      vocab_parallel_cross_entropy(mine, targets, classes, tp, reduction);
  const Tensor expected = cross_entropy(whole, targets, reduction);
  EXPECT_NEAR(loss.item(), expected.item(), tolerance);
  loss.backward();
  expected.backward();
  const Tensor padding = Tensor::zeros({5, 24 - classes}, logits.options());
  const Tensor gradient =
      classes == 24 ? whole.grad() : concat({whole.grad(), padding}, 1);
  expect_near(mine.grad(), take_part(gradient, part), tolerance);
  EXPECT_EQ(log_of(tp.records()),
            tp.size() > 1 ? Log(3, "all_reduce 5") : Log{});
}

// 21 tokens on t ranks: of 24 columns three pad; on 8 ranks one only pads.
TEST_P(TensorParallelLayers, TheLossOfAPaddedVocabularyIsThatOfOneDevice) {
  for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
    on_ranks(GetParam(), [&](ProcessGroup& tp) {
      expect_loss_of_one_device(tp, noise({5, 24}, 4), 21, reduction, 1e-12);
    });
  }
}

// The maximum over all ranks is subtracted, not the sum of their maxima, which
// would make every exponential vanish.
TEST_P(TensorParallelLayers, TheLossOfLargeLogitsIsThatOfOneDevice) {
  on_ranks(GetParam(), [&](ProcessGroup& tp) {
    const Tensor logits = add_scalar(scale(noise({5, 24}, 4), 300), 5000);
    expect_loss_of_one_device(tp, logits, 24, Reduction::kMean, 1e-9);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelLayers,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(TensorParallelLayers, TheVocabularyIsPaddedAsInMegatron) {
  EXPECT_EQ(padded_vocabulary(50257, 4), 50688);
  EXPECT_EQ(padded_vocabulary(50257, 4) / 4, 12672);
  EXPECT_EQ(padded_vocabulary(256, 4, 1), 256);
}

TEST(TensorParallelLayers, PartsThatWouldNotBeEqualAreRefused) {
  const auto expect_refused = [](auto make) {
    expect_text(error_on_ranks(2, make), {"does not divide into"});
  };
  expect_refused([](ProcessGroup& tp) {
    VocabParallelEmbedding part("e", 25, 6, 1, f64_init(), tp);
  });
  expect_refused([](ProcessGroup& tp) {
    ColumnParallelLinear part("l", {24, 49, {}, 1}, f64_init(), tp);
  });
  expect_refused([](ProcessGroup& tp) {
    RowParallelLinear part("l", {49, 24, {}, 1}, f64_init(), tp);
  });
}

// The documents' pair, [16, 256] through 256 -> 1024 -> 256: 12288 elements.
TEST(TensorParallelLayers, APairOnFourRanksSends12288Elements) {
  on_ranks(4, [](ProcessGroup& tp) {
    ColumnParallelLinear fc("a", {256, 1024, {}, 1}, f64_init(), tp);
    RowParallelLinear proj("b", {1024, 256, {}, 1}, f64_init(), tp);
    const Tensor x = noise({16, 256}, 1).set_requires_grad();
    const Tensor y = proj(gelu(fc(x)));
    autograd::backward({y}, {noise({16, 256}, 2)});
    double sent = 0;
    for (const CommRecord& record : tp.records()) sent += wire_elements(record);
    EXPECT_EQ(sent, 12288);
  });
}

// A layer of another model must not be cut by a rule that was not made for it.
TEST(TensorParallelLayout, APartWithoutARuleIsNamed) {
  const std::string gate_up = "model.layers.0.mlp.gate_up_proj";
  const ModelConfig gpt2;
  expect_error([&] { layout(gpt2, gate_up + ".weight", 0, 2); }, {gate_up});
  expect_error([&] { layout(gpt2, "lm_head.weight", 0, 2); }, {"lm_head"});
  expect_error([&] { takes_rows(gate_up, {.name = "gate_up_proj"}); },
               {gate_up});
  const BlockTable block = block_table(gpt2);
  EXPECT_TRUE(takes_rows("transformer.h.0.attn.c_proj", block.proj));
  EXPECT_FALSE(takes_rows("transformer.h.0.mlp.c_fc", block.up));
  const LoadedModel gpt = build_model(Options());
  for (const auto& [name, tensor] : gpt.model->named_parameters()) {
    EXPECT_EQ(error_of([&, text = name] { layout(gpt2, text, 1, 2); }), "")
        << name;
  }
}

}  // namespace
}  // namespace shardbook::tensor_parallel
