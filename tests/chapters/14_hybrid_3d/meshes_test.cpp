// gpt-nano on many meshes: the losses, norms and weights of one device, and the
// bill to the byte.

#include <fstream>
#include <sstream>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::hybrid {
namespace {

HybridOptions mesh(int dp, int tp, int cp, int pp, int zero = 0,
                   bool sequence_parallel = false) {
  return {.dp = dp,
          .tp = tp,
          .pp = pp,
          .cp = cp,
          .zero_stage = zero,
          .sequence_parallel = sequence_parallel,
          .micro_batches = 2};
}

/// One run on one device for all meshes: the batch is the same.
void expect_equal_to_one_device(const HybridOptions& setup) {
  static ReferenceRun one;
  expect_trained_as(nano_options(ranks_of(setup)), setup, one);
}

TEST(HybridMeshes, TrainAsOneDevice) {
  const std::vector<HybridOptions> all = {
      mesh(1, 1, 1, 1),       mesh(2, 1, 1, 1),       mesh(3, 1, 1, 1, 1),
      mesh(1, 2, 1, 1),       mesh(1, 4, 1, 1, 0, 1), mesh(1, 1, 2, 1),
      mesh(1, 1, 1, 2),       mesh(1, 1, 1, 3, 1),    mesh(1, 1, 1, 6),
      mesh(2, 2, 1, 1),       mesh(2, 2, 1, 1, 1, 1), mesh(2, 1, 1, 2),
      mesh(3, 1, 1, 2, 1),    mesh(2, 1, 2, 1, 1),    mesh(1, 2, 1, 2),
      mesh(1, 2, 1, 2, 1, 1), mesh(1, 2, 2, 1, 0, 1), mesh(1, 1, 2, 2, 1),
      mesh(2, 2, 1, 2),       mesh(2, 2, 1, 2, 1),    mesh(2, 2, 1, 2, 0, 1),
      mesh(2, 2, 1, 2, 1, 1), mesh(1, 2, 2, 2),       mesh(2, 1, 2, 2, 1),
      mesh(2, 2, 2, 1, 1, 1), mesh(3, 2, 1, 2, 1, 1), mesh(1, 4, 1, 3, 1),
      mesh(2, 2, 2, 2),       mesh(2, 2, 2, 2, 1, 1), mesh(4, 1, 1, 4, 1),
      mesh(1, 4, 2, 2, 1, 1),
  };
  const std::vector<HybridOptions> few = {mesh(2, 2, 1, 2, 1, 1),
                                          mesh(1, 2, 2, 2)};
  for (const HybridOptions& setup : sized(all, few)) {
    expect_equal_to_one_device(setup);
  }
}

// The weights are gathered over the axes' groups after the trace has ended.
TEST(HybridMeshes, ATraceEndsBeforeTheWeightsAreGathered) {
  const TempFolder folder;
  const HybridOptions setup = mesh(1, 2, 1, 2);
  Options options = nano_options(ranks_of(setup));
  options.steps = 1;
  options.trace = folder / "trace.json";
  expect_claims(train_on(options, setup));
  std::stringstream text;
  text << std::ifstream(options.trace).rdbuf();
  for (const char* seen : {"\"all_reduce", "\"send", "\"matmul"}) {
    EXPECT_TRUE(has_text(text.str(), seen)) << seen;
  }
  EXPECT_FALSE(has_text(text.str(), "gather")) << "the trace had ended";
}

TEST(HybridMeshes, TrainAsOneDeviceUnderZero2And3) {
  const std::vector<HybridOptions> all = {
      mesh(1, 1, 1, 1, 2),    mesh(2, 1, 1, 1, 2), mesh(3, 1, 1, 1, 3),
      mesh(2, 2, 1, 1, 2),    mesh(2, 2, 1, 1, 3), mesh(2, 2, 1, 1, 2, 1),
      mesh(3, 2, 1, 1, 3, 1), mesh(2, 1, 2, 1, 2), mesh(2, 1, 2, 1, 3),
      mesh(2, 2, 2, 1, 2, 1), mesh(2, 2, 2, 1, 3)};
  const std::vector<HybridOptions> few = {mesh(2, 2, 1, 1, 2, 1),
                                          mesh(2, 2, 1, 1, 3)};
  for (const HybridOptions& setup : sized(all, few)) {
    expect_equal_to_one_device(setup);
  }
}

// From eight ranks on, the whole c_proj bias is larger than a rank's part of
// c_fc's bias.
TEST(HybridMeshes, CutEightTimesUnderZero2And3) {
  for (const int zero : {2, 3}) {
    const HybridOptions setup = mesh(1, 8, 1, 1, zero);
    SCOPED_TRACE(name_of(setup));
    Options options = nano_options(ranks_of(setup));
    options.model = R"({"model_type": "gpt2", "vocab_size": 50, "n_embd": 64,
                        "n_positions": 16, "n_layer": 1, "n_head": 8})";
    options.data = "random";
    options.steps = 1;
    expect_claims(train_on(options, setup));
  }
}

// Enough steps for momentum and for bias corrections.
TEST(HybridMeshes, FiveStepsTrainAsOneDevice) {
  for (const std::string optimizer : {"sgd", "adamw"}) {
    for (const bool has_experts : {false, true}) {
      HybridOptions setup = mesh(2, 2, 1, 2, 1, true);
      if (has_experts) {
        setup.experts = 4, setup.ep = 2;
        setup.aux_coefficient = 0.3;
      }
      SCOPED_TRACE(optimizer);
      Options options = nano_options(ranks_of(setup));
      options.steps = kSanitized ? 2 : 5;
      options.optimizer = optimizer;
      if (optimizer == "sgd") {
        options.optimizer_options.lr = 0.1;
        options.optimizer_options.momentum = 0.9;
      }
      ReferenceRun one = reference_run(options, setup);
      ASSERT_EQ(one.losses.size(), static_cast<std::size_t>(options.steps));
      expect_trained_as(options, setup, one);
    }
  }
}

// Stages and shards of tensors and sequences use the config's activation.
TEST(HybridMeshes, ExactGeluTrainsAsOneDevice) {
  const HybridOptions setup = mesh(1, 2, 1, 2, 1, true);
  Options options = nano_options(ranks_of(setup));
  options.model = R"({"activation_function": "gelu", "n_embd": 16,
      "n_layer": 2, "n_head": 4, "n_positions": 16})";
  expect_claims(train_on(options, setup));
}

TEST(HybridSchedules, EachThatFlushesRunsUnderEveryAxis) {
  for (const std::string schedule : {"1f1b", "gpipe", "naive", "interleaved",
                                     "zb-h1", "zb-h2", "zb-auto", "dualpipe"}) {
    HybridOptions setup = mesh(1, 2, 1, 2, 1, true);
    setup.schedule = schedule;
    setup.micro_batches = 4;
    if (schedule != "interleaved" && !kSanitized) setup.dp = 2;
    expect_equal_to_one_device(setup);
  }
}

TEST(HybridSchedules, RecomputationSendsForwardsAgain) {
  for (const std::string recompute : {"always", "except_last"}) {
    for (const HybridOptions& shape :
         {mesh(1, 2, 1, 2), mesh(1, 2, 1, 2, 1, true), mesh(1, 2, 2, 2)}) {
      HybridOptions setup = shape;
      setup.recompute = recompute;
      expect_equal_to_one_device(setup);
    }
  }
}

// Blocks alone, or attention alone, under every axis and stage of ZeRO.
TEST(HybridSchedules, RecomputationOfPartsChangesNoNumbers) {
  const std::vector<HybridOptions> all = {
      mesh(1, 2, 1, 2),    mesh(1, 2, 1, 2, 0, true), mesh(1, 2, 2, 2),
      mesh(2, 1, 1, 1, 2), mesh(2, 2, 1, 1, 3),       mesh(2, 1, 2, 1, 1)};
  for (const std::string recompute : {"blocks", "attention"}) {
    for (const HybridOptions& shape : all) {
      HybridOptions setup = shape;
      setup.recompute = recompute;
      expect_equal_to_one_device(setup);
    }
    HybridOptions split = mesh(1, 2, 1, 2);
    split.schedule = "zb-h1";
    split.recompute = recompute;
    expect_equal_to_one_device(split);
  }
}

TEST(HybridOrders, MoveRanksAndNoNumbers) {
  for (const std::string order :
       {"megatron", "megatron-pp-dp", "deepspeed", "colossal-ai", "pp-dp-cp-tp",
        "dp-tp-pp-cp"}) {
    HybridOptions setup = mesh(2, 2, 1, 2, 1);
    setup.order = order;
    expect_equal_to_one_device(setup);
  }
  HybridOptions setup;
  setup.dp = setup.pp = 2, setup.tp = 4;
  EXPECT_EQ(topology_of(setup).text(), "pp=2 x dp=2 x cp=1 x tp=4");
  setup.order = "colossal-ai";
  EXPECT_EQ(topology_of(setup).text(), "dp=2 x pp=2 x cp=1 x tp=4");
}

TEST(HybridContext, EveryKindAndLayoutMeetsTensorsAndStages) {
  for (const char* kind : {"ring", "rsa", "ulysses"}) {
    for (const char* layout : {"contiguous", "zigzag", "striped"}) {
      if (kind != std::string("ring") && layout != std::string("contiguous")) {
        continue;
      }
      for (const HybridOptions& shape :
           {mesh(1, 1, 2, 2), mesh(1, 2, 2, 1, 1, true)}) {
        HybridOptions setup = shape;
        setup.cp_kind = kind, setup.cp_layout = layout;
        expect_equal_to_one_device(setup);
      }
    }
  }
}

// Masks equal one device's, even when other micro-batches have begun before a
// backward.
TEST(HybridDropout, DrawsAsOneDevice) {
  for (const HybridOptions& setup :
       {mesh(2, 2, 1, 2, 1), mesh(1, 2, 1, 2, 0, true), mesh(1, 1, 2, 2),
        mesh(2, 1, 2, 2, 1), mesh(2, 2, 1, 1, 3)}) {
    SCOPED_TRACE(name_of(setup));
    Options options = nano_options(ranks_of(setup));
    options.dropout = 0.2;
    expect_claims(train_on(options, setup));
  }
}

TEST(HybridBuckets, OfAnySizeGiveTheSameSums) {
  for (const std::int64_t bytes : {1, 20000, 100000}) {
    for (const int zero : {0, 1, 2}) {
      if (bytes == 1 && zero != 1) continue;  // slow: a message per parameter
      HybridOptions setup = mesh(2, 2, 1, zero < 2 ? 2 : 1, zero, true);
      setup.bucket_bytes = bytes;
      expect_equal_to_one_device(setup);
    }
  }
}

}  // namespace
}  // namespace shardbook::hybrid
