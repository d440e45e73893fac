// The page's table against runs on shapes: bytes, memory, time of a step.

#include <gtest/gtest.h>

#include <string>

#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"
#include "tests/support/errors.h"

namespace shardbook::textbook::summa_bill {
namespace {

using sharded_test::activation_peak;

struct Case {
  int q = 1, d = 1;
  std::int64_t vocabulary = 0, batch = 0;
  Passes passes = {};
};

void expect_bill_of(const Case& c, DType dtype, double dropout) {
  SCOPED_TRACE(testing::Message()
               << "q " << c.q << " d " << c.d << " V " << c.vocabulary << " m "
               << c.passes.micro_batches << " recompute " << c.passes.recompute
               << " " << dtype_name(dtype));
  Options options = gpt_options(1, c.vocabulary, c.batch);
  options.dtype = dtype;
  options.dropout = dropout;
  const Report report = on_squares(options, c.q, c.d, c.passes);
  sharded_test::expect_bill(report);
  expect_closed_form(report);
}

TEST(SummaBill, EqualsARunOnShapes) {
  for (const Case& c :
       {Case{1, 1, 64, 6}, Case{2, 1, 64, 6}, Case{2, 1, 1001, 10},
        Case{3, 1, 50, 9}, Case{4, 1, 4096, 4}, Case{1, 3, 33, 6},
        Case{2, 2, 50, 8}, Case{2, 3, 1000, 12}, Case{3, 2, 64, 6},
        Case{1, 1, 64, 6, {3, true}}, Case{2, 1, 64, 6, {3, false}},
        Case{2, 1, 1001, 10, {1, true}}, Case{3, 1, 50, 18, {2, true}},
        Case{1, 3, 33, 12, {2, true}}, Case{2, 2, 50, 16, {4, true}},
        Case{2, 3, 1000, 12, {2, false}}}) {
    expect_bill_of(c, DType::kF32, 0);
  }
  for (const Case& c : {Case{2, 1, 1000, 12, {3, true}}, Case{2, 2, 64, 8},
                        Case{1, 3, 64, 6, {2, false}}}) {
    expect_bill_of(c, DType::kF64, 0.1);
    expect_bill_of(c, DType::kBF16, 0.1);
  }
}

TEST(SummaBill, OfALlamaEqualsARunOnShapes) {
  for (const std::string family : {"llama", "qwen2", "qwen3"}) {
    for (const Case& c :
         {Case{1, 1}, Case{2, 1}, Case{3, 1}, Case{2, 2},
          Case{1, 3, 0, 0, {2, false}}, Case{2, 2, 0, 0, {2, true}}}) {
      Options options = odd_llama(family);
      options.backend = "sim";
      options.cluster = "textbook";
      const Report report = on_squares(options, c.q, c.d, c.passes);
      sharded_test::expect_bill(report);
      expect_closed_form(report);
    }
  }
}

// At the loss, 80 tokens on a rank (2.5D with two squares: 40): blocks of 16 *
// 72 columns with statistics and gathered vectors of 13 * 72; the last norm;
// logits, 2048 columns, and their gradient; the loss and its gradient.
TEST(SummaBill, ThePeakIsWhatForwardKeepsAndTheLogitsGradient) {
  for (const int d : {1, 2}) {
    const Report report = on_squares(gpt_options(4 * d, 4096, 8), 2, d);
    const double tokens = 80.0 / d;
    const double block = tokens * (16 * 72 * 4 + (4 + 6) * 4) + 13 * 72 * 4;
    const double norm = tokens * (2 * 72 + 2) * 4 + 2 * 72 * 4;
    EXPECT_EQ(activation_peak(report.ranks[0]),
              2 * block + norm + tokens * (2 * 2048 + 1) * 4 + 8);
  }
}

using shardbook::error_of;
std::string error_of(const Options& options) {
  return error_of([&] { on_squares(options, 2, 1); });
}

TEST(SummaBill, RefusesSizesAndNamesTheNext) {
  expect_text(error_of(gpt_options(4, 64, 7)),
              {"--batch 7: the batch is cut into 2 parts; give 8"});
  Options odd = gpt_options(4, 64, 8);
  odd.model = R"({"n_embd": 54, "n_head": 3})";
  expect_text(error_of(odd), {"n_head 3: heads are cut into 2 parts; give 4"});
  odd.model = R"({"n_embd": 54, "n_head": 6})";
  expect_text(error_of(odd), {"n_embd 54: vectors are cut into 4 parts; give "
                              "56"});
  const auto llama = [](const std::string& sizes) {
    Options options = gpt_options(4, 64, 8);
    options.model = R"({"model_type": "llama", "hidden_size": 32, )" + sizes +
                    R"("num_hidden_layers": 1, "num_attention_heads": 4})";
    return error_of(options);
  };
  expect_text(
      llama(R"("num_key_value_heads": 1, )"),
      {"num_key_value_heads 1: heads of keys are cut into 2 parts; give "
       "2"});
  expect_text(llama(R"("intermediate_size": 55, )"),
              {"rows of mlp.down_proj 55: they are cut into 2 parts; give 56"});
  expect_text(
      llama(R"("intermediate_size": 55, "mlp_bias": true, )"),
      {"bias of mlp.gate_up_proj 110: it is cut into 4 parts; give 112"});
}

}  // namespace
}  // namespace shardbook::textbook::summa_bill
