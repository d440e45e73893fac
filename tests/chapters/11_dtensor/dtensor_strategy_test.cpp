// The strategy: one device's numbers, and the page's formulas for bytes, memory
// and time, on odd and even shapes.

#include "chapters/11_dtensor/dtensor_strategy.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/common/run/program.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/errors.h"

namespace shardbook::dtensor_test {
namespace {

Options small_options(int ranks, std::int64_t batch, std::int64_t seq) {
  Options options;
  options.chapter = "11_dtensor";
  options.world_size = ranks;
  options.model =
      R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 64,)"
      R"( "n_embd": 24, "n_layer": 2, "n_head": 6})";
  options.dtype = DType::kF64;
  options.steps = 3;
  options.batch = batch;
  options.seq = seq;
  options.cluster = "textbook";
  return options;
}

/// With `prepare`, changes each rank's model first.
Report run(
    const Options& options, const StrategyOptions& setup,
    const std::function<void(DTensorStrategy&, int rank)>& prepare = {}) {
  ChapterRun chapter;
  chapter.fold_class = fold_class(options, setup);
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, topology_of(setup, world.size()));
    DTensorStrategy strategy(options, setup, mesh);
    if (prepare) prepare(strategy, world.rank());
    run.train(options, strategy);
  };
  chapter.reference = [](const Options& options) {
    return train_one_device(options);
  };
  return run_and_compare(options, chapter);
}

struct TrainingCase {
  const char* mesh;
  int ranks;
  const char* data_parallel;
  std::int64_t batch, seq;
  double dropout = 0;
  DType dtype = DType::kF64;
  std::int64_t micro_batches = 1;
  int vocabulary = 256;
  bool is_mlp = false;
  bool sequence_parallel = false;
};

const TrainingCase kCases[] = {
    {"1", 1, "fsdp", 2, 5},
    {"2", 2, "fsdp", 3, 7, 0.2},
    {"3", 3, "fsdp", 6, 32},
    {"2x2", 4, "ddp", 12, 64},
    {"2x2", 4, "fsdp", 12, 61, 0.2},
    {"4x1", 4, "fsdp", 16, 64},
    {"2x1", 2, "ddp", 12, 33},
    {"2x2", 4, "fsdp", 12, 61, 0, DType::kBF16},
    {"2", 2, "fsdp", 6, 16, 0.2, DType::kF64, 3},
    {"3", 3, "fsdp", 4, 3, 0, DType::kF32, 4},
    {"1", 1, "fsdp", 4, 33, 0, DType::kBF16, 2},
    // Shards of uneven rows; 9 ranks leave one without
    {"2x2", 4, "fsdp", 4, 9, 0.2, DType::kF64, 2, 257},
    {"3x1", 3, "fsdp", 3, 8, 0, DType::kF32, 1, 257},
    {"5x2", 10, "fsdp", 5, 8, 0, DType::kF64, 1, 256},
    {"9x1", 9, "fsdp", 9, 8, 0, DType::kF64, 1, 256},
    // The MLP: one pair of layers between two whole ones
    {"1", 1, "fsdp", 12, 16, 0, DType::kF64, 1, 256, true},
    {"3", 3, "fsdp", 6, 8, 0, DType::kF64, 2, 256, true},
    {"2x2", 4, "ddp", 12, 16, 0, DType::kF64, 1, 256, true},
    {"2x2", 4, "fsdp", 12, 13, 0, DType::kF32, 2, 257, true},
    {"3x1", 3, "fsdp", 3, 8, 0, DType::kF64, 1, 257, true},
    // Tokens cut over tp, and a vocabulary that it does not divide
    {"1", 1, "fsdp", 4, 7, 0, DType::kF64, 1, 256, false, true},
    {"3", 3, "fsdp", 4, 6, 0.2, DType::kF64, 2, 257, false, true},
    {"2x2", 4, "ddp", 12, 62, 0.2, DType::kF64, 1, 256, false, true},
    {"2x3", 6, "fsdp", 8, 9, 0, DType::kF32, 2, 257, false, true},
    {"2x2", 4, "fsdp", 12, 16, 0, DType::kBF16, 1, 257, false, true},
    // 87, 87, 86 rows, and halves of 44 and 43, 43 and 43: other ranks' halves
    {"2x3", 6, "fsdp", 4, 6, 0, DType::kF64, 1, 260, false, true}};

class DTensorTraining : public testing::TestWithParam<TrainingCase> {};
INSTANTIATE_TEST_SUITE_P(Meshes, DTensorTraining, testing::ValuesIn(kCases));

TEST_P(DTensorTraining, EqualsOneDeviceAndItsBill) {
  const TrainingCase& c = GetParam();
  Options options = small_options(c.ranks, c.batch, c.seq);
  options.data = "walk";  // the book's text changes, and with it what is learnt
  options.dropout = c.dropout;
  options.dtype = c.dtype;
  options.model.replace(options.model.find("256"), 3,
                        std::to_string(c.vocabulary));
  if (c.is_mlp) {
    options.model = R"({"model_type": "mlp", "n_embd": 24, "vocab_size": )" +
                    std::to_string(c.vocabulary) + "}";
  }
  StrategyOptions setup;
  setup.mesh = c.mesh;
  setup.data_parallel = c.data_parallel;
  setup.micro_batches = c.micro_batches;
  setup.sequence_parallel = c.sequence_parallel;
  const Report report = run(options, setup);
  EXPECT_TRUE(report.parity.passed) << report.parity.max_rel;
  EXPECT_LT(report.losses.back(), report.losses.front());
  sharded_test::expect_bill(report);
  if (!c.is_mlp) textbook::expect_closed_form(report);
}

// At the loss, 48 tokens in f64 on each of two ranks: a block keeps (4 + 12/2)
// 2 numbers and 4 + 2/2 statistics, the last norm 2 * 2 and 2, the loss 200
// logits, their gradient, the softmax, itself and its gradient.
TEST(DTensorTraining, ThePeakIsAtTheLoss) {
  Options options = small_options(2, 3, 16);
  options.model =
      R"({"n_layer": 1, "n_embd": 2, "n_head": 2, "vocab_size": 200,)"
      R"( "n_positions": 40})";
  options.data = "random";
  EXPECT_EQ(sharded_test::activation_peak(run(options, {}).ranks[0]),
            8 * (48 * (10 * 2 + 5 + 2 * 2 + 2 + 2 * 200 + 1) + 2));
}

TEST(DTensorTrainingOptions, NameWhatDoesNotDivide) {
  const auto error = [](const std::string& mesh, int ranks,
                        std::int64_t batch) {
    return shardbook::error_of([&] {
      StrategyOptions setup;
      setup.mesh = mesh;
      run(small_options(ranks, batch, 8), setup);
    });
  };
  expect_text(error("4", 4, 4), {"6 heads do not divide over tp=4"});
  // Also when classes of ranks are requested before ranks exist
  StrategyOptions four;
  four.mesh = "4";
  expect_error([&] { fold_class(small_options(4, 4, 8), four); },
               {"6 heads do not divide over tp=4"});
  expect_text(error("3x2", 4, 6),
              {"--mesh 3x2: give DPxTP with a product of 4"});
  expect_text(error("two", 2, 6), {"--mesh two: give DPxTP"});
  expect_text(error("2x1", 2, 3), {"--batch 3: dp=2 times --micro-batches 1"});
  Options mlp = small_options(5, 5, 8);
  mlp.model = "mlp";
  expect_error([&] { run(mlp, {}); },
               {"256 hidden units do not divide over tp=5"});
  Options images = small_options(2, 4, 1);
  images.model = "resnet18";
  expect_error([&] { run(images, {}); }, {"--model resnet18"});
}

TEST(DTensorTrainingOptions, SequenceParallelCutsWholeTokensOfDecoders) {
  StrategyOptions setup;
  setup.sequence_parallel = true;
  Options odd = small_options(2, 4, 7);
  expect_error([&] { run(odd, setup); },
               {"--seq 7: --sequence-parallel cuts it over tp=2; give a "
                "multiple of 2"});
  odd.model = "mlp";
  expect_error([&] { run(odd, setup); }, {"--sequence-parallel: the mlp"});
}

// Three numbers per token travel for the loss, where the logits would be 256
TEST(DTensorTraining, NoRankHasAllLogits) {
  const auto activations_of = [](bool sequence_parallel) {
    StrategyOptions setup;
    setup.sequence_parallel = sequence_parallel;
    return run(small_options(2, 3, 16), setup).ranks[0];
  };
  const RankReport plain = activations_of(false), cut = activations_of(true);
  // Two norms of two blocks and the last one, with half of the tokens; and a half
  // of the logits
  const auto kept = static_cast<std::size_t>(MemoryKind::kActivation);
  EXPECT_EQ(plain.held[kept].counted - cut.held[kept].counted,
            8 * 48 * (5 * (24 + 2) + 256) / 2);
  // Table and head: a gather and a scatter of [48, 24] each way; two vectors of
  // 24 for each norm, two biases per block, the gradient of 16 positions
  EXPECT_EQ(cut.bytes.counted - plain.bytes.counted,
            3 * 8 * (2 * 48 * 24 + 3 * 48 + 5 * 2 * 24 + 4 * 24 + 16 * 24 / 2));
}

// As PyTorch's plan has it (tests/pytorch/compare_dtensor.py): [3, 16] tokens on
// two ranks, which hold S(1) between attention and MLP, and S(2) inside. The hook
// of the cut table looks up the tokens, and leaves one to the layer.
TEST(DTensorTraining, TensorsBetweenModulesLieAsInPyTorchsPlan) {
  const std::map<std::string, std::string> expected = {
      {"model.embed_tokens", "[1] [3, 8, 24]"},
      {"input_layernorm", "[3, 8, 24] [3, 8, 24]"},
      {"self_attn.qkv_proj", "[3, 16, 24] [3, 16, 24]"},
      {"self_attn.o_proj", "[3, 16, 12] [3, 8, 24]"},
      {"post_attention_layernorm", "[3, 8, 24] [3, 8, 24]"},
      {"mlp.gate_up_proj", "[3, 16, 24] [3, 16, 20]"},
      {"mlp.down_proj", "[3, 16, 10] [3, 8, 24]"},
      {"model.norm", "[3, 8, 24] [3, 8, 24]"},
      {"", "[3, 16] [3, 16, 128]"}};  // tokens to logits
  Options options = small_options(2, 3, 16);
  options.steps = 1;
  options.model =
      R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 24,)"
      R"( "intermediate_size": 20, "num_hidden_layers": 1,)"
      R"( "num_attention_heads": 4, "num_key_value_heads": 2})";
  StrategyOptions setup;
  setup.sequence_parallel = true;
  std::map<std::string, std::string> seen;
  run(options, setup, [&](DTensorStrategy& strategy, int rank) {
    for (const NamedModule& each : strategy.model().named_modules()) {
      const std::string block = "model.layers.0.";
      const std::string name =
          each.name.substr(each.name.starts_with(block) ? block.size() : 0);
      if (rank != 1 || expected.count(name) == 0) continue;
      each.module->add_forward_pre_hook([&seen, name](Module&, Tensors& x) {
        seen[name] = shape_text(x[0].shape());
      });
      each.module->add_forward_hook([&seen, name](Module&, Tensors& y) {
        seen[name] += " " + shape_text(y[0].shape());
      });
    }
  });
  EXPECT_EQ(seen, expected);
}

TEST(DTensorPicture, ShowsTheRanksOfEveryBlock) {
  EXPECT_EQ(
      picture_text({held_by("w", {4, 4}, {shard(0), replicate()}, {2, 2})}),
      "w [4, 4]  (S(0), R)\n"
      "+-----+\n"
      "| 0 1 |\n"
      "+-----+\n"
      "| 2 3 |\n"
      "+-----+\n");
  // 5 rows over 4 ranks: the last has none
  EXPECT_EQ(picture_text({held_by("v", {5}, {shard(0)}, {4})}),
            "v [5]  (S(0))\n"
            "+---+\n"
            "| 0 |\n"
            "+---+\n"
            "| 1 |\n"
            "+---+\n"
            "| 2 |\n"
            "+---+\n");
  const std::string svg =
      picture_svg("Columns", {held_by("w", {2, 4}, {shard(1)}, {2}),
                              held_by("c_attn", {2, 6}, 2, [](int rank) {
                                return Shards{{1, rank, 2, 3}};
                              })});
  EXPECT_EQ(svg.substr(0, 4), "<svg");
  std::size_t cells = 0;
  for (std::size_t at = svg.find("<rect"); at != std::string::npos;
       at = svg.find("<rect", at + 1)) {
    ++cells;
  }
  EXPECT_EQ(cells, 1u + 2u + 6u);  // and the ground
  expect_text(svg, {"ranks of each block: 0 | 1."});
}

}  // namespace
}  // namespace shardbook::dtensor_test
