// The parts of a pipeline other than its schedule.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/pipeline/mailbox.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/pipeline/stages.h"
#include "core/autograd.h"
#include "core/optim.h"
#include "core/tensor_storage.h"
#include "tests/chapters/05_gpipe/gpipe_support.h"

namespace shardbook::gpipe_test {
namespace {

using testing::HasSubstr;

Options options_of(const std::string& model, DType dtype = DType::kF64) {
  Options options;
  options.model = model;
  options.dtype = dtype;
  options.seed = 3;
  return options;
}

TEST(PipelineModelShelf, ParametersInTwoStagesStayEqual) {
  const Options options = options_of("gpt-nano");
  const auto tables = on_ranks(2, [&](ProcessGroup& world) {
    std::shared_ptr<const LayerList> layers =
        layers_of(ModelConfig::read("gpt-nano"));
    PipelineModel model(options, layers,
                        one_stage_per_rank(cut_uniform(layers->size(), 2)),
                        world);
    for (const NamedTensor& each :
         model.stage(world.rank()).named_parameters()) {
      if (each.name != "transformer.wte.weight") continue;
      // Rank r's share of the gradient is r + 1; rank 1's may be missing
      if (world.rank() == 0)
        each.tensor.set_grad(
            Tensor::full(each.tensor.shape(), 1, each.tensor.options()));
      model.reduce_shared_gradients();
      return std::vector<Tensor>{each.tensor.clone(),
                                 each.tensor.grad().clone()};
    }
    return std::vector<Tensor>{};
  });
  ASSERT_EQ(tables[0].size(), 2u);
  EXPECT_TRUE(bitwise_equal(tables[0][0], tables[1][0]));
  EXPECT_TRUE(bitwise_equal(tables[0][1], tables[1][1]));
  EXPECT_EQ(tables[1][1].to_vector<double>()[0], 1.0);
}

TEST(PipelineModelShelf, AskingForAnothersStageIsAnError) {
  const auto ask = [](ProcessGroup& world) {
    PipelineModel model(options_of("mlp"), layers_of(ModelConfig::read("mlp")),
                        one_stage_per_rank({0, 2, 4}), world);
    if (world.rank() == 1) model.stage(0);
    world.barrier();
    return 0;
  };
  EXPECT_EQ(error_of([&] { on_ranks(2, ask); }), "stage 0: not on rank 1");
}

// --- A micro-batch inside a stage --------------------------------------------

TEST(StageRuns, OutputsMayGoBeforeBackward) {
  // A product's gradient needs the inputs, but not the product
  const Tensor weight = rows_of(4, 4, DType::kF32);
  weight.set_requires_grad();
  const StageFunction stage = [&](const Tensors& in) {
    return Tensors{matmul(tanh(in[0]), weight)};
  };
  const Tensor x = rows_of(3, 4, DType::kF32);
  const Tensor grad = rows_of(3, 4, DType::kF32);
  const Tensor leaf = autograd::graph_input(x);
  autograd::backward(stage({leaf}), {grad});
  const Tensor expected = leaf.grad();
  LayerInput spec;
  spec.values = {{{3, 4}, DType::kF32, true}};
  const Device& device = RankContext::current().device;
  StageRun run = run_forward(stage, {x}, spec);
  const std::int64_t with = device.memory().current(MemoryKind::kActivation);
  const std::int64_t size = run.outputs[0].bytes();
  run.outputs.clear();
  EXPECT_EQ(device.memory().current(MemoryKind::kActivation), with - size);
  const Tensors back = run_backward(std::move(run), {grad});
  EXPECT_TRUE(bitwise_equal(back[0], expected));
}

TEST(StageRuns, NotEveryOutputNeedsAGradientNorEveryInput) {
  // Two values in, one of them an index; two out, one of them an index
  const Tensor weight = rows_of(4, 4, DType::kF32);
  weight.set_requires_grad();
  const StageFunction stage = [&](const Tensors& in) {
    return Tensors{matmul(in[0], weight), in[1]};
  };
  LayerInput spec;
  spec.values = {{{3, 4}, DType::kF32, true}, {{3}, DType::kI64, false}};
  const Tensors inputs = {rows_of(3, 4, DType::kF32),
                          Tensor::zeros({3}, {DType::kI64, Device()})};
  StageRun run = run_forward(stage, inputs, spec);
  EXPECT_EQ(run.needs_grad, (std::vector<bool>{true, false}));
  const Tensors back =
      run_backward(std::move(run), {rows_of(3, 4, DType::kF32), Tensor()});
  EXPECT_TRUE(back[0].defined());
  EXPECT_FALSE(back[1].defined());
  EXPECT_TRUE(weight.grad().defined());
  // No gradient arrives, so none is returned
  weight.clear_grad();
  run = run_forward(stage, inputs, spec);
  EXPECT_FALSE(run_backward(std::move(run), {Tensor(), Tensor()})[0].defined());
  EXPECT_FALSE(weight.grad().defined());
}

// --- Between stages ----------------------------------------------------------

TEST(Mailboxes, ValuesOfAnyTypeTravelAndGradientsComeBack) {
  const LayerInput spec = {{{{2, 3}, DType::kF32, true},
                            {{4}, DType::kI64, false},
                            {{2}, DType::kF64, true}},
                           {},
                           0};
  EXPECT_EQ(forward_bytes(spec), 24 + 32 + 16);
  EXPECT_EQ(backward_bytes(spec), 24 + 16);
  const auto bytes = on_ranks(2, [&](ProcessGroup& world) {
    Mailbox mailbox(world, 2);
    bool is_equal = true;
    for (int b = 0; b < 3; ++b) {
      if (world.rank() == 0) {
        mailbox.send_forward({Tensor::full({2, 3}, b),
                              Tensor::full({4}, 10 + b, {DType::kI64, {}}),
                              Tensor::full({2}, b, {DType::kF64, {}})},
                             b, 1, 1);
      } else {
        const Tensors got = mailbox.receive_forward(spec, b, 1, 0);
        is_equal = is_equal && got[1].to_vector<std::int64_t>()[3] == 10 + b;
        // An undefined gradient travels as zeros
        mailbox.send_backward({got[0], Tensor(), Tensor()}, spec, b, 1, 0);
      }
    }
    // In an order other than the sending order
    for (int b = 2; b >= 0 && world.rank() == 0; --b) {
      const Tensors grads = mailbox.receive_backward(spec, b, 1, 1);
      is_equal = is_equal && !grads[1].defined() &&
                 grads[0].to_vector<float>()[5] == static_cast<float>(b) &&
                 grads[2].to_vector<double>()[0] == 0;
    }
    mailbox.flush();
    return is_equal ? wire_bytes(world.records()) : -1;
  });
  EXPECT_EQ(bytes[0], 3 * 72);
  EXPECT_EQ(bytes[1], 3 * 40);
}

TEST(Mailboxes, StagesOfOneRankHandOver) {
  on_ranks(1, [](ProcessGroup& world) {
    Mailbox mailbox(world, 2);
    const LayerInput spec = {{{{2}, DType::kF32, true}}, {}, 0};
    const Tensor value = Tensor::full({2}, 4);
    mailbox.send_forward({value}, 0, 1, 0);
    EXPECT_TRUE(
        mailbox.receive_forward(spec, 0, 1, 0)[0].shares_storage(value));
    EXPECT_THAT(error_of([&] { mailbox.receive_forward(spec, 0, 1, 0); }),
                HasSubstr("not computed yet"));
    EXPECT_TRUE(world.records().empty());
    return 0;
  });
}

// A message that waits for its receiver does not count as an activation: the
// length of its wait is unknown.
TEST(Mailboxes, WhatWasSentIsBookedAsCommunication) {
  const auto kinds = on_ranks(2, [](ProcessGroup& world) {
    Mailbox mailbox(world, 2);
    const LayerInput spec = {{{{2}, DType::kF32, true}}, {}, 0};
    const Tensor value = Tensor::full({2}, 4);
    if (world.rank() == 0) {
      mailbox.send_forward({value}, 0, 1, 1);
    } else {
      mailbox.receive_forward(spec, 0, 1, 0);
    }
    mailbox.flush();
    return memory_kind_of(value);
  });
  EXPECT_EQ(kinds[0], MemoryKind::kCommunication);
  EXPECT_EQ(kinds[1], MemoryKind::kActivation);
}

}  // namespace
}  // namespace shardbook::gpipe_test
