// Training on cut sequences: equal weights, the bill to the byte and second.

#include "chapters/12_sequence_parallel/sequence_strategy.h"

#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/common/run/program.h"
#include "tests/chapters/12_sequence_parallel/sequence_support.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::sequence_parallel {
namespace {

Options small_options(int world_size) {
  Options options = tiny_gpt("12_sequence_parallel", world_size);
  options.model =
      R"({"n_embd": 24, "n_layer": 2, "n_head": 12, "vocab_size": 31,
                      "n_positions": 60})";
  options.dtype = DType::kF32;
  options.batch = 4;
  options.seq = 48;
  options.cluster = "textbook";
  return options;
}

Report train_on(const Options& options, const StrategyOptions& setup) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    SequenceStrategy strategy(options, setup, world);
    run.train(options, strategy);
  };
  chapter.fold_class = fold_class(setup);
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, setup.micro_batches);
  };
  return run_and_compare(options, chapter);
}

std::vector<StrategyOptions> all_kinds() {
  std::vector<StrategyOptions> all;
  for (Layout layout : all_layouts()) {
    all.push_back({{Kind::kRing, layout, false}});
  }
  all.push_back({{Kind::kRsa, Layout::kContiguous, false}});
  all.push_back({{Kind::kRsa, Layout::kContiguous, true}});
  all.push_back({{Kind::kUlysses, Layout::kContiguous, false}});
  return all;
}

std::string name_of(const StrategyOptions& setup) {
  const char* const kinds[] = {"ring ", "rsa ", "ulysses "};
  return kinds[static_cast<int>(setup.sequence.kind)] +
         std::string(layout_name(setup.sequence.layout)) +
         (setup.sequence.all_reduce ? " all-reduce" : "") + " x" +
         std::to_string(setup.micro_batches);
}

void expect_every_claim(const Report& report) {
  sharded_test::expect_claims(report, "");
  textbook::expect_closed_form(report);
}

class SequenceTraining : public testing::TestWithParam<int> {};

TEST_P(SequenceTraining, EveryClaimHolds) {
  for (const StrategyOptions& setup : all_kinds()) {
    SCOPED_TRACE(name_of(setup));
    expect_every_claim(train_on(small_options(GetParam()), setup));
  }
}
INSTANTIATE_TEST_SUITE_P(WorldSizes, SequenceTraining,
                         testing::Values(1, 2, 3, 4));

// Fewer heads of keys, which divide the ranks or not; heads wider than their part
// of the hidden size; norms of heads; tied tables; biases. With 16 bits, sums on
// their way are wider than what they sum.
TEST(SequenceLlama, EveryClaimHolds) {
  const std::string more = R"(, "num_hidden_layers": 2, "vocab_size": 31,)"
                           R"( "max_position_embeddings": 60})";
  for (const std::string model :
       {R"({"model_type": "llama", "hidden_size": 24, "intermediate_size": 20,
            "num_attention_heads": 24, "num_key_value_heads": 6,
            "head_dim": 2, "attention_bias": true)",
        R"({"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 40,
            "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 6, "tie_word_embeddings": true)",
        R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 24,
            "num_attention_heads": 8, "num_key_value_heads": 1)"}) {
    for (const auto& [c, dtype] :
         {std::pair{1, DType::kF32}, std::pair{2, DType::kBF16},
          std::pair{4, DType::kF64}, std::pair{8, DType::kF64}}) {
      Options options = small_options(c);
      options.model = model + more;
      options.dtype = dtype;
      for (StrategyOptions setup : all_kinds()) {
        setup.micro_batches = c == 4 ? 2 : 1;
        SCOPED_TRACE(name_of(setup) + " c=" + std::to_string(c) + model);
        expect_every_claim(train_on(options, setup));
      }
    }
  }
}

TEST(SequenceBill, HoldsForOtherShapes) {
  // Odd and even; wide vocabularies, long sequences, one layer
  struct Shape3 {
    int c;
    std::int64_t batch, seq;
    const char* model;
  };
  for (const Shape3& shape :
       {Shape3{3, 1, 30,
               R"({"n_embd": 9, "n_layer": 1, "n_head": 3, "vocab_size": 7,
                   "n_positions": 30})"},
        Shape3{2, 3, 20,
               R"({"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 300,
                   "n_positions": 32})"},
        Shape3{4, 2, 200,
               R"({"n_embd": 16, "n_layer": 2, "n_head": 8, "vocab_size": 16,
                   "n_positions": 200})"},
        // Rows of scores that outweigh everything else
        Shape3{2, 2, 24,
               R"({"n_embd": 32, "n_layer": 1, "n_head": 8, "vocab_size": 20,
                   "n_positions": 24})"},
        Shape3{2, 8, 12,
               R"({"n_embd": 24, "n_layer": 2, "n_head": 12,
                   "vocab_size": 300, "n_positions": 24})"},
        // Few tokens of a wide vocabulary
        Shape3{2, 2, 12,
               R"({"n_embd": 24, "n_layer": 6, "n_head": 2,
                   "vocab_size": 600, "n_positions": 24})"}}) {
    for (const StrategyOptions& setup : all_kinds()) {
      SCOPED_TRACE(name_of(setup) + " c=" + std::to_string(shape.c));
      Options options = small_options(shape.c);
      options.model = shape.model;
      options.batch = shape.batch, options.seq = shape.seq;
      options.dtype = shape.c == 4 ? DType::kF64 : DType::kF32;
      expect_every_claim(train_on(options, setup));
      StrategyOptions in_pieces = setup;
      in_pieces.micro_batches = shape.batch;
      if (shape.batch > 1) expect_every_claim(train_on(options, in_pieces));
    }
  }
}

Report train_megatron(const Options& options, const MegatronOptions& setup = {},
                      std::int64_t micro_batches = 1) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    MegatronStrategy strategy(options, setup, micro_batches, world);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, micro_batches);
  };
  return run_and_compare(options, chapter);
}

TEST(MegatronStrategy, EveryClaimHolds) {
  for (int t : {1, 2, 3, 4}) {
    SCOPED_TRACE(t);
    expect_every_claim(train_megatron(small_options(t)));
    expect_every_claim(train_megatron(small_options(t), {true}));
    expect_every_claim(train_megatron(small_options(t), {}, 3));
  }
}

// One row of tokens and several, in all precisions, with dropout.
TEST(MegatronStrategy, EveryClaimHoldsForOtherShapes) {
  struct Case {
    int t;
    std::int64_t batch, micro_batches;
    const char* vocabulary;
    DType dtype;
    double dropout;
  };
  for (const Case& c : {Case{2, 1, 1, "31", DType::kF32, 0.1},
                        Case{2, 6, 3, "31", DType::kF64, 0.1},
                        Case{3, 4, 2, "300", DType::kBF16, 0},
                        Case{4, 2, 1, "31", DType::kBF16, 0.1},
                        Case{1, 4, 2, "31", DType::kF32, 0}}) {
    Options options = small_options(c.t);
    options.model = R"({"n_embd": 24, "n_layer": 2, "n_head": 12,)"
                    R"( "n_positions": 60, "vocab_size": )" +
                    std::string(c.vocabulary) + "}";
    options.batch = c.batch, options.dtype = c.dtype;
    options.dropout = c.dropout;
    SCOPED_TRACE(testing::Message() << "t " << c.t << " V " << c.vocabulary);
    for (const bool recomputes : {false, true}) {
      expect_every_claim(
          train_megatron(options, {recomputes}, c.micro_batches));
    }
  }
}

// Norms of heads see all tokens, other norms a rank's own; two ranks of four share
// the keys of a head, or all share the only one.
TEST(MegatronStrategy, EveryClaimHoldsForALlama) {
  for (const int t : {1, 2, 3, 4}) {
    for (const int keys : {1, t == 3 ? 3 : 2}) {
      for (const std::string family : {"llama", "qwen3"}) {
        SCOPED_TRACE(testing::Message() << t << family << keys);
        Options options = small_options(t);
        options.model =
            R"({"hidden_size":24,"num_hidden_layers":2,"head_dim":4,)"
            R"("num_attention_heads":12,"intermediate_size":36,)"
            R"("max_position_embeddings":60,"vocab_size":31,)"
            R"("attention_bias":true,"num_key_value_heads":)" +
            std::to_string(keys) + R"(,"model_type":")" + family + "\"" +
            (family == "llama" ? R"(,"mlp_bias":true})" : "}");
        options.dtype = DType::kF64;
        expect_every_claim(train_megatron(options));
        expect_every_claim(train_megatron(options, {true}, 2));
        if (family == "qwen3") continue;
        // No biases
        options.model.replace(options.model.find("\"attention_bias\":true,"),
                              22, "");
        expect_every_claim(train_megatron(options));
      }
    }
  }
}

// At the loss, in f32 on each of two ranks, which share 48 tokens: a block
// keeps 16 * 8 numbers and 4 + 4 statistics per own token, the last norm 8 and
// 2; all 48 tokens gathered, their 500 logits, as many gradients, the softmax;
// the loss and its gradient.
TEST(MegatronStrategy, ThePeakIsAtTheLoss) {
  Options options = small_options(2);
  options.model =
      R"({"n_embd": 8, "n_layer": 1, "n_head": 4, "vocab_size": 1000,)"
      R"( "n_positions": 60})";
  options.data = "random";
  options.batch = 1;
  const double own = 24 * (16 * 8 + 4 + 4 + 8 + 2);
  EXPECT_EQ(sharded_test::activation_peak(train_megatron(options).ranks[0]),
            4 * (own + 48 * (8 + 2 * 500 + 1) + 2));
}

TEST(MegatronStrategy, NamesTheSizesThatWork) {
  Options options = small_options(8);
  expect_error([&] { train_megatron(options); },
               {"--world-size 8", "12 heads"});
  options = small_options(4);
  options.seq = 42;
  expect_error([&] { train_megatron(options); }, {"--seq 42", "44"});
}

TEST(SequenceTraining, EveryClaimHoldsForMicroBatchesAndDropout) {
  for (StrategyOptions setup : all_kinds()) {
    for (const std::int64_t micro_batches : {1, 2, 3}) {
      setup.micro_batches = micro_batches;
      SCOPED_TRACE(name_of(setup));
      if (micro_batches > 1)
        expect_every_claim(train_on(small_options(2), setup));
      Options options = small_options(3);
      options.dropout = 0.2;
      if (micro_batches < 3) expect_every_claim(train_on(options, setup));
    }
  }
}

/// Messages that are long relative to products, and short ones.
std::vector<Options> textbook_shapes() {
  std::vector<Options> all;
  for (int c : {2, 4, 8}) {
    for (std::int64_t seq : {256, 16384}) {
      for (std::int64_t batch : {1, 16}) {
        Options options = textbook::mlp_options(c, batch);
        options.model =
            R"({"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 32,)"
            R"( "n_positions": )" +
            std::to_string(seq) + "}";
        options.seq = seq;
        all.push_back(options);
      }
    }
  }
  return all;
}

void expect_bill(const Report& report) {
  sharded_test::expect_bill(report);
  textbook::expect_closed_form(report);
}

TEST(TextbookSequence, StepsTakeThePagesForms) {
  for (const Options& options : textbook_shapes()) {
    double slices_s = 0;
    for (const StrategyOptions& setup : all_kinds()) {
      SCOPED_TRACE(testing::Message()
                   << name_of(setup) << " c " << options.world_size << " s "
                   << options.seq << " b " << options.batch);
      const Report report = train_on(options, setup);
      expect_bill(report);
      // Zigzag balances the pairs: faster where hops hide behind them
      if (setup.sequence.kind != Kind::kRing) continue;
      const double step_s = report.time.step_s;
      if (setup.sequence.layout == Layout::kContiguous) slices_s = step_s;
      if (setup.sequence.layout == Layout::kZigzag && options.seq > 256 &&
          options.batch > 1) {
        ASSERT_GT(slices_s, 0);
        EXPECT_LT(step_s, 0.9 * slices_s);
      }
    }
  }
}

TEST(TextbookSequence, ALlamasStepTakesThePagesForm) {
  for (Options options : textbook_shapes()) {
    options.model =
        R"({"model_type": "llama", "hidden_size": 48, "vocab_size": 32,
            "num_hidden_layers": 2, "intermediate_size": 80,
            "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": )" +
        std::to_string(options.seq) + "}";
    for (const StrategyOptions& setup : all_kinds()) {
      SCOPED_TRACE(testing::Message()
                   << name_of(setup) << " c " << options.world_size << " s "
                   << options.seq << " b " << options.batch);
      expect_bill(train_on(options, setup));
    }
  }
}

TEST(TextbookSequence, MegatronsStepTakesThePagesForm) {
  for (const Options& options : textbook_shapes()) {
    for (const bool recomputes : {false, true}) {
      expect_bill(
          train_megatron(options, {recomputes}, options.batch > 1 ? 3 : 1));
    }
  }
}

TEST(SequenceBill, FormulasOfTheSpecification) {
  // Elements per rank and layer of b s h = 8 * 2 * 16 on 4 ranks
  const SequenceOptions ring, rsa{Kind::kRsa, Layout::kContiguous, false},
      quirk{Kind::kRsa, Layout::kContiguous, true},
      ulysses{Kind::kUlysses, Layout::kContiguous, false};
  EXPECT_EQ(layer_elements(ring, 4, 256).forward, 384);
  EXPECT_EQ(layer_elements(ring, 4, 256).backward, 384);
  EXPECT_EQ(layer_elements(ring, 4, 256).backward_sums, 512);
  EXPECT_EQ(layer_elements(rsa, 4, 256).forward, 384);
  EXPECT_EQ(layer_elements(rsa, 4, 256).backward, 768);
  EXPECT_EQ(layer_elements(quirk, 4, 256).backward, 1152);
  EXPECT_EQ(layer_elements(ulysses, 4, 256).forward, 192);
  EXPECT_EQ(layer_elements(ulysses, 4, 256).backward, 192);
  // With one key head for each four of queries
  EXPECT_EQ(layer_elements(ring, 4, 256, 0.25).backward, 96);
  EXPECT_EQ(layer_elements(rsa, 4, 256, 0.25).backward, 192);
  EXPECT_EQ(layer_elements(ulysses, 4, 256, 0.25).backward, 120);
  const ModelConfig nano = ModelConfig::read("llama-nano");
  EXPECT_EQ(key_share(ring, nano, 4), 0.5);
  EXPECT_EQ(key_share(ulysses, nano, 2), 0.5);
  EXPECT_EQ(key_share(ulysses, nano, 4), 1);
}

}  // namespace
}  // namespace shardbook::sequence_parallel
