// Kept activations and the time of a step by the page's formulas, in runs on
// shapes on the cluster `textbook`.

#include <gtest/gtest.h>

#include "tests/chapters/13_moe/moe_run_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::moe {
namespace {

struct ModelShape {
  int b = 4, s = 16, h = 32, layers = 2, vocabulary = 64;
  int experts = 8, k = 1, micro_batches = 1;
  double factor = 1;
  DType dtype = DType::kF64;
};

StrategyOptions how_of(const ModelShape& shape, const Form& form) {
  StrategyOptions setup = setup_of(form);
  setup.micro_batches = shape.micro_batches;
  setup.moe.gate.num_experts = shape.experts;
  setup.moe.gate.k = shape.k;
  setup.moe.gate.capacity_factor = shape.factor;
  return setup;
}

Report report_of(const ModelShape& shape, const Form& form,
                 const StrategyOptions& setup, double dropout = 0) {
  Options options = textbook::mlp_options(
      form.world, form.world / form.tp * shape.micro_batches * shape.b);
  options.chapter = "13_moe";
  options.model =
      "{\"n_embd\": " + std::to_string(shape.h) +
      ", \"n_layer\": " + std::to_string(shape.layers) +
      ", \"n_head\": 4, \"vocab_size\": " + std::to_string(shape.vocabulary) +
      ", \"n_positions\": " + std::to_string(shape.s) + "}";
  options.seq = shape.s;
  options.dtype = shape.dtype;
  options.dropout = dropout;
  return train_on(options, setup);
}

TEST(MoeBill, HoldsForEveryForm) {
  std::vector<Form> all = {{"E", 4, 4},
                           {"E+D", 8, 2},
                           {"D", 2, 1},
                           {"D+Z", 2, 1, 1, 2},
                           {"E+Z", 4, 4, 1, 1},
                           {"E+Z2", 8, 8, 1, 2},
                           {"E+D+M", 8, 2, 2},
                           {"E+D+M, cut experts", 16, 2, 4},
                           {"E+D+Z+M", 8, 2, 2, 1},
                           {"E+D+Z", 8, 2, 1, 2},
                           {"E+D+Z-Off", 4, 2, 1, 2},
                           {"E+Z-Off+M", 4, 2, 2, 2}};
  all[7].expert_tp = true;
  all[10].offload = all[11].offload = true;
  // Few tokens and many, odd and even; wide models and large vocabularies;
  // scarce slots, and slots that stay empty; products that outlast messages
  const std::vector<ModelShape> shapes = {
      {},
      {3, 11, 20, 3, 100, 4},
      {1, 5, 8, 1, 1000, 12, 1, 2},
      {4, 16, 32, 2, 64, 8, 2},
      {3, 16, 128, 2, 60, 8, 3, 3, 1.25},
      {8, 31, 20, 1, 16, 4, 1, 2, 2, DType::kF32},
      {2, 16, 64, 3, 300, 8, 2, 2, 2, DType::kBF16},
      {64, 64, 512, 2, 512, 8, 2, 2, 1, DType::kF32},
      {4, 31, 8, 2, 28, 8, 1, 1, 0.5, DType::kBF16}};
  int compared = 0;
  for (const Form& form : sized(all, {all[4], all[7]})) {
    int of_form = 0;
    for (const ModelShape& shape : shapes) {
      GateOptions gate;
      gate.num_experts = shape.experts, gate.k = shape.k;
      gate.capacity_factor = shape.factor;
      if (capacity(shape.b * shape.s, gate, true) % form.tp != 0) continue;
      if (shape.experts % form.ep != 0) continue;
      SCOPED_TRACE(form.name + ", b " + std::to_string(shape.b) + " s " +
                   std::to_string(shape.s) + " h " + std::to_string(shape.h) +
                   " k " + std::to_string(shape.k));
      const Report report = report_of(shape, form, how_of(shape, form));
      sharded_test::expect_bill(report);
      textbook::expect_closed_form(report);
      ++of_form;
    }
    EXPECT_GE(of_form, 3) << form.name;
    compared += of_form;
  }
  EXPECT_GE(compared, kSanitized ? 6 : 72);
}

// An MLP beside the experts, layers without experts, dropout.
TEST(MoeBill, HoldsForOtherLayers) {
  for (const ModelShape& shape :
       {ModelShape{4, 16, 32, 3, 64, 8, 2},
        ModelShape{4, 16, 32, 3, 64, 8, 1, 2, 1, DType::kBF16}}) {
    for (const Form& form : {Form{"E", 4, 4}, Form{"E+M", 4, 2, 2}}) {
      for (const int kind : {0, 1, 2, 3}) {
        SCOPED_TRACE(form.name + " " + std::to_string(kind));
        StrategyOptions setup = how_of(shape, form);
        setup.moe.use_residual = kind == 0;
        setup.moe.shared_expert = kind == 1 || kind == 2;
        setup.moe.gate_shared_expert = kind == 2;
        if (kind == 3) setup.moe.num_experts = {1, 4, 8};
        sharded_test::expect_bill(
            report_of(shape, form, setup, /*dropout=*/0.1));
      }
    }
  }
}

// At the loss, in f64 on one of 4 ranks with 64 tokens, h = 8, 2 experts of 32
// slots, one block: attention 8h + 8 (norms, 4 heads), the gate 2 and 3 and 2 *
// 2 per all, the slots 1 + 10h, rows h; the last norm 2h + 2; 600 logits, their
// gradient, the softmax; the loss and its gradient.
TEST(MoeBill, ThePeakIsAtTheLoss) {
  const ModelShape shape{4, 16, 8, 1, 600, 2};
  const Form form{"D", 4, 1};
  const Report report = report_of(shape, form, how_of(shape, form));
  const double block = 64 * (8 * 8 + 8 + 2 + 3 + (1 + 10 * 8) + 8) + 2 * 2;
  EXPECT_EQ(sharded_test::activation_peak(report.ranks[0]),
            8 * (block + 64 * (2 * 8 + 2 + 2 * 600 + 1) + 2));
}

}  // namespace
}  // namespace shardbook::moe
