// A GPT whose blocks are cut over ranks trains as on one device; messages and
// memory follow the page's closed formulas.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/errors.h"

namespace shardbook::tensor_parallel {
namespace {

using sharded_test::expect_claims;
using sharded_test::report_of;
using sharded_test::small_gpt;

class TensorParallelTraining : public ::testing::TestWithParam<int> {};

TEST_P(TensorParallelTraining, EveryClaimHolds) {
  const int t = GetParam();
  StrategyOptions setup;
  expect_claims(report_of<TensorParallelStrategy>(small_gpt(t), setup), "f64");
  Options options = small_gpt(t);
  options.dropout = 0.2;
  setup.micro_batches = 2;
  options.clip = 0.05;
  expect_claims(report_of<TensorParallelStrategy>(options, setup),
                "dropout, micro-batches");
  setup.recompute = true;
  expect_claims(report_of<TensorParallelStrategy>(options, setup),
                "recomputation");
  options = small_gpt(t, DType::kF32);
  options.optimizer = "sgd";
  options.optimizer_options.momentum = 0.9;
  options.steps = 10;
  setup = {};
  setup.vocabulary_divisible_by = 7;  // pads 96 tokens to a multiple of 7 t
  expect_claims(report_of<TensorParallelStrategy>(options, setup),
                "f32, ten steps");
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelTraining,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(TensorParallelTraining, ExactGeluEqualsOneDevice) {
  Options options = small_gpt(3);
  options.model.replace(0, 1, R"({"activation_function":"gelu",)");
  expect_claims(report_of<TensorParallelStrategy>(options, StrategyOptions{}),
                "gelu");
}

// Per block: two all-reduces of every token's vector in forward, two in
// backward. One more each for the embedding and the head, three of a value per
// token for the loss, one for the norm.
TEST(TensorParallelTraining, ABlockAllReducesFourTimes) {
  Options options = small_gpt(4);
  options.steps = 1;
  const auto logs = on_ranks(4, [&](ProcessGroup& tp) {
    TensorParallelStrategy strategy(options, {}, tp);
    tp.clear_records();
    strategy.step(0);
    std::vector<std::string> log;
    for (const CommRecord& record : tp.records()) {
      log.push_back(comm_op_name(record.op) +
                    (" " + record.label + " " + std::to_string(record.numel)));
    }
    return log;
  });
  const std::string values = std::to_string(8 * 6);
  const std::string vectors = std::to_string(8 * 6 * 48);
  std::vector<std::string> expected(5, "all_reduce g " + vectors);
  expected.insert(expected.end(), 3, "all_reduce loss " + values);
  expected.insert(expected.end(), 5, "all_reduce f " + vectors);
  expected.push_back("all_reduce norm 1");
  for (const auto& log : logs) EXPECT_EQ(log, expected);
}

TEST(TensorParallelTraining, HeadsThatDoNotDivideAreRefusedWithASizeThatWould) {
  const std::string error = error_on_ranks(5, [](ProcessGroup& tp) {
    TensorParallelStrategy strategy(small_gpt(5), {}, tp);
  });
  expect_text(error, {"the ranks share 24 heads; give a divisor of 24"});
  const std::string model = error_on_ranks(1, [](ProcessGroup& tp) {
    Options options = small_gpt(1);
    options.model = "mlp";
    TensorParallelStrategy strategy(options, {}, tp);
  });
  expect_text(model, {"shards the layers of a GPT"});
}

// Odd and even sizes, against the page's formulas, written out again.
TEST(TensorParallelBill, BytesAreThoseOfThePage) {
  struct Case {
    std::int64_t batch, seq;
    int t;
    bool recompute, distribute;
  };
  for (const Case& each :
       {Case{8, 6, 2, false, false}, Case{3, 5, 4, false, false},
        Case{7, 16, 8, true, false}, Case{8, 6, 2, true, true},
        Case{3, 5, 4, true, true}, Case{7, 16, 8, true, true}}) {
    Options options = small_gpt(each.t);
    options.batch = each.batch;
    options.seq = each.seq;
    BillSizes sizes;
    sizes.t = each.t;
    sizes.recompute = each.recompute;
    sizes.distribute_saved_activations = each.distribute;
    // 2 (t - 1)/t ((4 L + 2) B S h e + 3 B S e), L = 2, h = 48, e = 8; 6 L with
    // recomputation, 6.5 L where inputs are distributed
    const double vectors = each.distribute ? 15 : each.recompute ? 14 : 10;
    const auto tokens = static_cast<double>(each.batch * each.seq);
    EXPECT_DOUBLE_EQ(
        bytes_per_step(options, model_config(options), sizes),
        2 * (each.t - 1.0) / each.t * (vectors * 48 + 3) * tokens * 8);
  }
}

// At the loss: logits [2, 64, 512] on each of two ranks, and their gradient; a
// block's 128 tokens keep (4 + 12/2) 8 numbers and 4 + 4/2 statistics, the last
// norm 2 * 8 and 2, the softmax 1; the loss and its gradient. All of f32.
TEST(TensorParallelBill, ThePeakIsWhatForwardKeepsAndTheLogitsGradient) {
  Options options = small_gpt(2, DType::kF32);
  options.model =
      R"({"vocab_size":1024,"n_positions":64,"n_embd":8,"n_layer":1,)"
      R"("n_head":4})";
  options.batch = 2, options.seq = 64;
  const Report report = textbook::run_on_textbook<TensorParallelStrategy>(
      options, StrategyOptions{});
  for (const RankReport& rank : report.ranks) {
    EXPECT_EQ(sharded_test::activation_peak(rank),
              4 * (128 * (10 * 8 + 6 + 2 * 8 + 2 + 1 + 2 * 512) + 2));
  }
}

// Messages take longer than the products beside them, then less long.
TEST(TensorParallelBill, AStepOnTheTextbookClusterTakesTheClosedForm) {
  for (const int t : {1, 2, 4, 8}) {
    for (const int width : {768, 6144}) {
      for (const bool recompute : {false, true}) {
        for (const bool distribute : {false, recompute}) {
          SCOPED_TRACE(testing::Message()
                       << t << " ranks, h " << width << ", recompute "
                       << recompute << ", distribute " << distribute);
          Options options =
              small_gpt(t, recompute ? DType::kBF16 : DType::kF32);
          options.model =
              R"({"vocab_size":961,"n_positions":64,"n_layer":3,"n_head":24,)"
              R"("n_embd":)" +
              std::to_string(width) + "}";
          options.seq = 40;
          StrategyOptions setup;
          setup.micro_batches = recompute ? 3 : 1;  // of 3, 3 and 2 samples
          setup.recompute = recompute;
          setup.distribute_saved_activations = distribute;
          const Report report =
              textbook::run_on_textbook<TensorParallelStrategy>(options, setup);
          sharded_test::expect_bill(report);
          textbook::expect_closed_form(report);
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::tensor_parallel
