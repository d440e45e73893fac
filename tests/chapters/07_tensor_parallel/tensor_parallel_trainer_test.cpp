// A GPT whose blocks are cut over ranks trains as on one device; what it sends
// and keeps are the closed formulas of the page.

#include <gtest/gtest.h>
#include <functional>
#include <memory>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/07_tensor_parallel/layers.h"
#include "chapters/07_tensor_parallel/trainer.h"
#include "chapters/common/models/checkpoint.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/on_ranks.h"
#include "tests/support/temp_folder.h"

namespace shardbook::tensor_parallel {
namespace {

using sharded_test::expect_claims;
using sharded_test::report_of;
using sharded_test::small_gpt;

class TensorParallelTrainer : public ::testing::TestWithParam<int> {};

TEST_P(TensorParallelTrainer, EveryClaimHolds) {
  const int t = GetParam();
  TrainerOptions how;
  expect_claims(report_of<Trainer>(small_gpt(t), how), "f64");
  Options options = small_gpt(t);
  options.dropout = 0.2;
  how.micro_batches = 2;
  options.clip = 0.05;
  expect_claims(report_of<Trainer>(options, how), "dropout, micro-batches");
  how.recompute = true;
  expect_claims(report_of<Trainer>(options, how), "recomputation");
  options = small_gpt(t, DType::kF32);
  options.optimizer = "sgd";
  options.optimizer_options.momentum = 0.9;
  options.steps = 10;
  how = {};
  how.vocabulary_divisible_by = 7;  // pads 96 tokens to a multiple of 7 t
  expect_claims(report_of<Trainer>(options, how), "f32, ten steps");
}

INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallelTrainer,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(TensorParallelTrainer, TenStepsOfBothOptimizersAreThoseOfOneDevice) {
  for (const std::string name : {"adamw", "sgd"}) {
    Options options = small_gpt(3);
    options.optimizer = name;
    if (name == "sgd") options.optimizer_options.momentum = 0.9;
    options.steps = 10;
    expect_claims(report_of<Trainer>(options, TrainerOptions{}), name);
  }
}

TEST(TensorParallelTrainer, ExactGeluEqualsOneDevice) {
  Options options = small_gpt(3);
  options.model.replace(0, 1, R"({"activation_function":"gelu",)");
  expect_claims(report_of<Trainer>(options, TrainerOptions{}), "gelu");
}

// Per block: two all-reduces of every token's vector in forward, two in
// backward. One more each for the embedding and the head, three of a value per
// token for the loss, one for the norm.
TEST(TensorParallelTrainer, ABlockAllReducesFourTimes) {
  Options options = small_gpt(4);
  options.steps = 1;
  const auto logs = on_ranks(4, [&](ProcessGroup& tp) {
    Trainer trainer(options, {}, tp);
    tp.clear_records();
    trainer.step(0);
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

// Wrong random streams, or an f that is missing, would show here.
TEST(TensorParallelTrainer, ReplicasStayEqualBitForBit) {
  Options options = small_gpt(4);
  options.dropout = 0.1;
  const auto replicas = on_ranks(4, [&](ProcessGroup& tp) {
    Trainer trainer(options, {}, tp);
    train(options, trainer.optimizer(), false,
          [&](std::int64_t k) { return trainer.step(k); });
    std::vector<double> values;
    for (const NamedTensor& each : trainer.model().named_parameters()) {
      if (!layout(each.name, 0, 4).empty()) continue;
      const auto mine = each.tensor.to_vector<double>();
      values.insert(values.end(), mine.begin(), mine.end());
    }
    return values;
  });
  for (const auto& each : replicas) EXPECT_EQ(each, replicas[0]);
}

/// A GPT whose layers `change` may make wrong.
class ChangedLayers : public ShardedTrainer {
 public:
  using Change = std::function<void(LayerFactory& layers, ProcessGroup& tp)>;
  ChangedLayers(const Options& options, ProcessGroup& tp, const Change& change)
      : ShardedTrainer(options, sharded(options, tp, change), tp) {}
  std::vector<Bill> bills() override { return {}; }

 private:
  static ShardedModel sharded(const Options& options, ProcessGroup& tp,
                              const Change& change) {
    ShardedModel model;
    model.layers = layers(model_config(options), tp);
    if (change) change(model.layers, tp);
    model.layout = [t = tp.size()](const std::string& name, int rank) {
      return layout(name, rank, t);
    };
    return model;
  }
};

/// Columns whose input's gradient nobody sums.
class ColumnsWithoutF : public ModuleOf<ColumnsWithoutF> {
 public:
  ColumnsWithoutF(const std::string& name, const LinearShape& shape,
                  const InitOptions& init, ProcessGroup& tp)
      : columns_(name, shape, init, tp) {}
  Tensor forward(const Tensor& x) override {
    return linear(x, columns_.weight, columns_.bias);
  }
  void members(MemberVisitor& visit) override { columns_.members(visit); }

 private:
  ColumnParallelLinear columns_;
};

/// By rank, what ten steps make of the parameters that all ranks have.
std::vector<std::vector<double>> replicas_after_ten_steps(
    const ChangedLayers::Change& change) {
  Options options = small_gpt(3);
  options.dropout = 0.1;
  options.steps = 10;
  return on_ranks(3, [&](ProcessGroup& tp) {
    ChangedLayers trainer(options, tp, change);
    train(options, trainer.optimizer(), false,
          [&](std::int64_t k) { return trainer.step(k); });
    std::vector<double> values;
    for (const NamedTensor& each : trainer.model().named_parameters()) {
      if (!layout(each.name, 0, 3).empty()) continue;
      const auto mine = each.tensor.to_vector<double>();
      values.insert(values.end(), mine.begin(), mine.end());
    }
    return values;
  });
}

TEST(TensorParallelTraps, WithoutFReplicasDrift) {
  const auto right = replicas_after_ten_steps(nullptr);
  for (const auto& each : right) EXPECT_EQ(each, right[0]);
  const auto wrong =
      replicas_after_ten_steps([](LayerFactory& layers, ProcessGroup& tp) {
        layers.linear = [&tp, usual = layers.linear](
                            const std::string& name, std::int64_t in,
                            std::int64_t out, double stddev,
                            const InitOptions& init) -> AnyModule {
          if (!name.ends_with(".c_fc")) {
            return usual(name, in, out, stddev, init);
          }
          return {std::make_unique<ColumnsWithoutF>(
              name, LinearShape{in, out, 1, stddev}, init, tp)};
        };
      });
  EXPECT_NE(wrong[1], wrong[0]);
  EXPECT_NE(wrong[2], wrong[0]);
}

TEST(TensorParallelTrainer, CheckpointsMoveBetweenNumbersOfRanks) {
  const TempFolder folder;
  const std::string first = folder.path() + "/first.safetensors";
  const std::string again = folder.path() + "/again.safetensors";
  Options options = small_gpt(4, DType::kF32);
  options.save = first;
  report_of<Trainer>(options, TrainerOptions{});
  // Loaded by another number of ranks with another padding, and saved untouched
  options.world_size = 3;
  options.load = first;
  options.save = again;
  options.steps = 0;
  TrainerOptions how;
  how.vocabulary_divisible_by = 5;
  report_of<Trainer>(options, how);
  options = small_gpt(1, DType::kF32);
  options.load = first;
  const LoadedModel a = build_model(options);
  options.load = again;
  const LoadedModel b = build_model(options);
  const auto mine = a.model->named_parameters();
  const auto theirs = b.model->named_parameters();
  ASSERT_EQ(mine.size(), theirs.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(mine[i].tensor, theirs[i].tensor))
        << mine[i].name;
  }
}

TEST(TensorParallelTrainer, HeadsThatDoNotDivideAreRefusedWithASizeThatWould) {
  const std::string error = error_on_ranks(
      5, [](ProcessGroup& tp) { Trainer trainer(small_gpt(5), {}, tp); });
  EXPECT_NE(error.find("the ranks share 24 heads; give a divisor of 24"),
            std::string::npos)
      << error;
  const std::string model = error_on_ranks(1, [](ProcessGroup& tp) {
    Options options = small_gpt(1);
    options.model = "mlp";
    Trainer trainer(options, {}, tp);
  });
  EXPECT_NE(model.find("shards the layers of a GPT"), std::string::npos);
}

// Odd and even sizes: the formulas that stand on the page, written out again.
TEST(TensorParallelBill, BytesAreThoseOfThePage) {
  struct Case {
    std::int64_t batch, seq;
    int t;
    bool recompute;
    double bytes;
  };
  // 2 (t - 1)/t ((4 L + 2) B S h e + 3 B S e), L = 2, h = 48, e = 8
  const std::vector<Case> cases = {
      {8, 6, 2, false, 1.0 * (10 * 48 * 48 * 8 + 3 * 48 * 8)},
      {3, 5, 4, false, 1.5 * (10 * 15 * 48 * 8 + 3 * 15 * 8)},
      {7, 16, 8, true, 1.75 * (14 * 112 * 48 * 8 + 3 * 112 * 8)},
  };
  for (const Case& each : cases) {
    Options options = small_gpt(each.t);
    options.batch = each.batch;
    options.seq = each.seq;
    BillSizes sizes;
    sizes.t = each.t;
    sizes.recompute = each.recompute;
    EXPECT_DOUBLE_EQ(bytes_per_step(options, model_config(options), sizes),
                     each.bytes);
  }
}

// Where the vocabulary is small beside the width, the peak is in a block: at the
// GELU with few ranks, at c_fc with many, in the forward that is computed again.
TEST(TensorParallelBill, ThePeakInABlockIsPredicted) {
  for (const int t : {1, 2, 4, 8, 12}) {
    for (const bool recompute : {false, true}) {
      for (const double dropout : {0.0, 0.1}) {
        Options options = small_gpt(t, DType::kBF16);
        options.model =
            R"({"model_type":"gpt2","vocab_size":24,"n_positions":64,)"
            R"("n_embd":768,"n_layer":2,"n_head":24})";
        options.backend = "sim";
        options.cluster = "dgx-a100";
        options.seq = 64;
        options.dropout = dropout;
        TrainerOptions how;
        how.recompute = recompute;
        ChapterRun chapter;
        chapter.rank = [&](const Options& as, ProcessGroup& world,
                           shardbook::Run& run) {
          Trainer strategy(as, how, world);
          run.train(as, strategy);
        };
        const Report report = run_and_compare(options, chapter);
        for (const RankReport& rank : report.ranks) {
          const Claim& claim =
              rank.peak[static_cast<std::size_t>(MemoryKind::kActivation)];
          EXPECT_EQ(claim.predicted, claim.counted)
              << t << " ranks, recompute " << recompute << ", dropout "
              << dropout;
        }
      }
    }
  }
}

// The closed form of the page.
TEST(TensorParallelBill, AStepOnTheTextbookClusterTakesTheClosedForm) {
  // Messages take longer than the products beside them, then products
  const std::vector<std::pair<int, int>> cases = {
      {1, 768}, {2, 768}, {4, 768}, {8, 768}, {2, 6144}, {4, 6144}};
  for (const auto& [t, width] : cases) {
    Options options = textbook::mlp_options(t, 6);
    options.model =
        R"({"model_type":"gpt2","vocab_size":960,"n_positions":64,"n_embd":)" +
        std::to_string(width) + R"(,"n_layer":3,"n_head":24})";
    options.seq = 40;
    const double tokens = 6 * 40, h = width;
    const double parts = t;
    const auto product = [&](double flops) {
      return flops / parts / textbook::kRate;
    };
    const double c = product(6 * tokens * h * h),
                 p = product(2 * tokens * h * h);
    const double f = product(8 * tokens * h * h), g = f;
    const double k = product(2 * tokens * 41 * h);
    const double head = product(2 * tokens * h * 960);
    const double a = textbook::all_reduce(t, tokens * h * 4);
    const double block =
        (c + k + p + a + f + g + a) +
        (2 * g + f + std::max(f, a) + 2 * p + 2.5 * k + c + std::max(c, a));
    const double rest = a + 3 * head + a +
                        3 * textbook::all_reduce(t, tokens * 4) +
                        textbook::all_reduce(t, 8);
    const Report report = run_chapter(
        options, [&](const Options& as, ProcessGroup& world, Report& result) {
          Trainer trainer(as, {}, world);
          const TrainingLog log =
              train(as, trainer.optimizer(), false,
                    [&](std::int64_t step) { return trainer.step(step); });
          const Bill bill = trainer.bills()[0];
          finish_rank(as, world, log, bill.bytes, bill.memory, result);
        });
    textbook::expect_time(report.time.step_s, 3 * block + rest);
  }
}

}  // namespace
}  // namespace shardbook::tensor_parallel
