// ResNets over replicas and stages: losses, weights and running statistics
// equal one device's with the same micro-batches; the bill to the byte.

#include <random>

#include "tests/chapters/14_hybrid_3d/image_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

/// One run on one device for all meshes with this many micro-batches.
ReferenceRun& image_reference(const HybridOptions& setup) {
  static std::map<std::int64_t, ReferenceRun> known;
  return known[setup.dp * setup.micro_batches];
}

void expect_equal_on_images(const HybridOptions& setup) {
  expect_trained_as(image_options(ranks_of(setup)), setup,
                    image_reference(setup));
}

// --- The numbers, the bytes, the memory --------------------------------------

TEST(HybridImages, TrainAsOneDevice) {
  const std::vector<HybridOptions> all = {
      image_mesh(1, 1),    image_mesh(1, 2),      image_mesh(2, 1),
      image_mesh(2, 1, 1), image_mesh(1, 2, 1),   image_mesh(3, 1, 1, 2),
      image_mesh(2, 2),    image_mesh(2, 2, 1),   image_mesh(2, 4),
      image_mesh(2, 4, 1), image_mesh(4, 2),      image_mesh(4, 2, 1),
      image_mesh(1, 8),    image_mesh(3, 2, 1, 4)};
  for (const HybridOptions& setup : sized(all, {image_mesh(2, 2, 1)})) {
    expect_equal_on_images(setup);
  }
}

TEST(HybridImages, EachScheduleThatFlushesTrainsAsOneDevice) {
  for (const std::string& schedule :
       sized<std::string>({"gpipe", "naive", "interleaved", "zb-h1", "zb-h2",
                           "zb-auto", "dualpipe"},
                          {"zb-h1", "dualpipe"})) {
    for (const int dp : {1, 2}) {
      HybridOptions setup = image_mesh(dp, 2, dp - 1);
      setup.schedule = schedule;
      if (kSanitized && dp == 1) continue;
      expect_equal_on_images(setup);
    }
  }
  for (const std::string& schedule :
       sized<std::string>({"gpipe", "interleaved", "zb-h1"}, {})) {
    HybridOptions setup = image_mesh(2, 4, 1);
    setup.schedule = schedule;
    expect_equal_on_images(setup);
    setup = image_mesh(4, 2);
    setup.schedule = schedule;
    expect_equal_on_images(setup);
  }
}

// A recomputed forward does not count its images twice.
TEST(HybridImages, RecomputationChangesNoNumbers) {
  for (const std::string recompute : {"always", "except_last", "blocks"}) {
    HybridOptions setup = image_mesh(2, 2, 1);
    setup.recompute = recompute;
    expect_equal_on_images(setup);
  }
  // A head without blocks before it keeps what its stage has received
  HybridOptions setup = image_mesh(1, 2);
  setup.recompute = "blocks";
  setup.partition = "7,1";
  expect_equal_on_images(setup);
}

TEST(HybridImages, BucketsOfAnySizeGiveTheSameSums) {
  for (const int zero : {0, 1}) {
    HybridOptions setup = image_mesh(2, 2, zero);
    setup.bucket_bytes = 3000;
    expect_equal_on_images(setup);
  }
}

TEST(HybridImages, BottlenecksTrainAsOneDevice) {
  const HybridOptions setup = image_mesh(2, 2, 1, 2);
  Options options = image_options(4);
  options.model = R"({"model_type": "resnet", "layer_type": "bottleneck",
      "depths": [1, 1], "embedding_size": 4, "num_labels": 5})";
  options.optimizer = "sgd";
  options.optimizer_options.momentum = 0.9;
  options.steps = 10;
  expect_claims(train_on(options, setup));
}

// f16 begins with a scale that overflows: all replicas skip these steps.
TEST(HybridImages, TrainInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Options options = image_options(4);
    options.dtype = dtype;
    options.optimizer = "sgd";
    options.optimizer_options.lr = 0.01;
    expect_claims(train_on(options, image_mesh(2, 2, 1, 2)));
  }
}

// Deep networks on few images amplify differences thousands of times per step,
// so the last bit of a sum would change the weights. One device therefore sums
// within each replica first, then over replicas.
TEST(HybridImages, SumInTheOrderOfOneDevice) {
  for (const std::string& schedule :
       sized<std::string>({"1f1b", "gpipe", "zb-h1"}, {"gpipe"})) {
    HybridOptions setup = image_mesh(3, 2, 1, 4);
    setup.schedule = schedule;
    SCOPED_TRACE(name_of(setup));
    Options options = image_options(6);
    options.dtype = DType::kF32;
    options.steps = 6;
    options.clip = 0;  // a norm's last bit would change all gradients
    const Report report = train_on(options, setup);
    // Running statistics are f64 sums in another order: rounding differs
    EXPECT_LT(report.parity.max_rel, 1e-6);
    expect_claims(report);
  }
}

// The page's formulas, worked out for this model.
TEST(HybridImageBill, IsThatOfThePage) {
  const auto all_reduce = [](double k, double bytes) {
    return 2 * (k - 1) / k * bytes;
  };
  const double steps = 3, e = 8;
  const ResNetSize size = resnet_size(model_config(image_options(1)));
  // Seven norms of 4 channels, and seven of 8
  EXPECT_EQ(size.statistics, 2 * (4 * 7 + 8 * 7));
  for (const int d : {2, 4}) {
    for (const int zero : {0, 1}) {
      const Report report = train_on(image_options(d), image_mesh(d, 1, zero),
                                     &image_reference(image_mesh(d, 1)));
      // All parameters in one bucket, with ZeRO-1 a multiple of 2 d
      const double elements =
          zero == 0 ? size.trained : std::ceil(size.trained / 2 / d) * 2 * d;
      const double step = all_reduce(d, elements * e) +
                          all_reduce(d, 8 * size.statistics) +
                          all_reduce(d, 16);
      EXPECT_DOUBLE_EQ(report.ranks[0].bytes.counted, steps * step);
      const auto held = [&](MemoryKind kind) {
        return report.ranks[0].held[static_cast<std::size_t>(kind)].counted;
      };
      EXPECT_EQ(held(MemoryKind::kParameter), e * (elements + size.statistics));
      EXPECT_EQ(held(MemoryKind::kOptimizerState),
                16 * elements / (zero == 0 ? 1 : d));
    }
  }
}

TEST(HybridImages, RunOnShapes) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    HybridOptions setup = image_mesh(2, 2, 1);
    setup.schedule = schedule;
    Options options = image_options(4);
    const Report all = expect_folded_as_all(options, setup);
    EXPECT_GT(all.time.step_s, 0);
    for (const RankReport& rank : all.ranks) {
      EXPECT_NEAR(rank.bytes.counted, rank.bytes.predicted,
                  1e-9 * rank.bytes.counted);
    }
    // With data, threads take the time that the run on shapes has predicted
    options.cluster = "dgx-a100";
    const Report real = train_on(options, setup, &image_reference(setup));
    EXPECT_NEAR(real.time.step_s / all.time.step_s, 1, 1e-9);
  }
}

// --- Checkpoints -------------------------------------------------------------

TEST(HybridImageCheckpoints, GoOnBitForBit) {
  for (const int zero : sized<int>({0, 1}, {1})) {
    TempFolder folder;
    const HybridOptions setup = image_mesh(2, 2, zero);
    Options options = image_options(4);
    options.steps = 4;
    options.save = folder / "whole";
    ReferenceRun one;
    train_on(options, setup, &one);
    options.save = folder / "parts";
    options.checkpoint = folder / "checkpoints";
    options.steps = 2;
    train_on(options, setup);
    options.steps = 4;
    options.resume = true;
    expect_claims(train_on(options, setup, &one));
    EXPECT_EQ(state_in(folder / "whole"), state_in(folder / "parts"));
    // The same micro-batches on another mesh are the same training
    HybridOptions other = image_mesh(4, 1, 1);
    options.steps = 5;
    expect_claims(train_on(options, other));
    // Other micro-batches are another training
    other.micro_batches = 3;
    expect_error(
        [&] { train_on(options, other); },
        {"batch norms see 3 images in a row there, 2 images in a row here"});
  }
}

// --- What does not go with images --------------------------------------------

TEST(HybridImages, RefuseWhatCutsNoConvolution) {
  const auto refused = [](const HybridOptions& setup, const std::string& part) {
    expect_refusal(image_options(ranks_of(setup)), setup, {part});
  };
  refused({.dp = 1, .tp = 2},
          "--tp 2: this tensor parallelism cuts the matrices");
  refused({.dp = 1, .cp = 2}, "--cp 2: images have no sequence");
  refused({.dp = 1, .cp_kind = "ulysses"}, "--cp-kind ulysses");
  refused({.dp = 1, .sequence_parallel = true},
          "--sequence-parallel: images have no sequence");
  refused({.dp = 2, .experts = 4},
          "--num-experts 4: experts take the place of a GPT's MLPs");
  for (const int stage : {2, 3}) {
    refused({.dp = 2, .zero_stage = stage},
            "--zero-stage " + std::to_string(stage) + ": stages 2 and 3");
    refused({.dp = 1, .pp = 2, .zero_stage = stage}, "give --zero-stage 1");
  }
  refused({.dp = 1, .pp = 2, .recompute = "attention"},
          "--recompute attention: a resnet has none; give blocks");
  refused({.dp = 1, .pp = 2, .accumulate_f32 = true},
          "--accumulate-f32: one device sums in 16 bits");
  refused({.dp = 1, .pp = 2, .schedule = "pipedream"},
          "give a schedule that flushes");
  refused({.dp = 1, .pp = 9}, "--pp 9, --schedule 1f1b: 9 stages");
}

// One image with a single value in its last maps: a variance of zero.
TEST(HybridImages, BatchNormNeedsTwoValues) {
  HybridOptions setup = image_mesh(4, 1, 0, 6);
  Options options = image_options(4);
  EXPECT_EQ(refusal(options, setup), "");
  options.image_size = 8;
  expect_text(refusal(options, setup), {"--batch 24: 4 replicas"});
  expect_text(refusal(options, setup), {"give --batch 48"});
  options.batch = 48;
  EXPECT_EQ(refusal(options, setup), "");
}

// --- Random meshes -----------------------------------------------------------

TEST(HybridImageFuzz, RandomMeshesTrainAsOneDevice) {
  std::mt19937 random(27);
  const auto one_of = [&](auto values) {
    return values[std::uniform_int_distribution<std::size_t>(
        0, values.size() - 1)(random)];
  };
  for (int legal = 0, draws = 0; legal < (kSanitized ? 1 : 6) && draws < 200;
       ++draws) {
    HybridOptions setup = image_mesh(
        one_of(std::vector{1, 2, 3, 4}), one_of(std::vector{1, 2, 3, 4}),
        one_of(std::vector{0, 1}), one_of(std::vector{2, 4, 6}));
    setup.schedule = one_of(std::vector<std::string>{
        "1f1b", "gpipe", "interleaved", "zb-h1", "zb-auto", "dualpipe"});
    setup.order =
        one_of(std::vector<std::string>{"megatron", "megatron-pp-dp"});
    setup.partition = one_of(std::vector<std::string>{"uniform", "parameters"});
    setup.recompute = one_of(
        std::vector<std::string>{"never", "always", "except_last", "blocks"});
    setup.bucket_bytes = one_of(std::vector<std::int64_t>{2000, 1 << 20});
    if (!refusal(image_options(ranks_of(setup)), setup).empty()) continue;
    ++legal;
    expect_equal_on_images(setup);
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace shardbook::hybrid
