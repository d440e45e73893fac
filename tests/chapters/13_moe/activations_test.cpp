// Peak bytes of activations by the page's formula, in a run on shapes that
// counts them.

#include "chapters/13_moe/activations.h"

#include <gtest/gtest.h>

#include "chapters/13_moe/trainer.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "tests/support/sanitized.h"

namespace shardbook::moe {
namespace {

struct ModelShape {
  int b = 4, s = 16, h = 32, layers = 2, vocabulary = 64;
  int experts = 8, k = 1, micro_batches = 1;
  double factor = 1;
  DType dtype = DType::kF64;
};

struct Combination {
  std::string name;
  int ep = 4, edp = 1, t = 1, zero = 0;
  bool offload = false, expert_tp = false;
};

Report run_on_shapes_of(const ModelShape& shape, const Combination& form) {
  TrainerOptions how;
  how.ep = form.ep, how.tp = form.t, how.zero_stage = form.zero;
  how.cpu_offload = form.offload;
  how.micro_batches = shape.micro_batches;
  how.moe.expert_tensor_parallel = form.expert_tp;
  how.moe.gate.num_experts = shape.experts;
  how.moe.gate.k = shape.k;
  how.moe.gate.capacity_factor = shape.factor;
  Options options;
  options.chapter = "13_moe";
  options.world_size = form.ep * form.edp * form.t;
  options.model =
      "{\"n_embd\": " + std::to_string(shape.h) +
      ", \"n_layer\": " + std::to_string(shape.layers) +
      ", \"n_head\": 4, \"vocab_size\": " + std::to_string(shape.vocabulary) +
      ", \"n_positions\": " + std::to_string(shape.s) + "}";
  options.data = "random";
  options.backend = "sim";
  options.cluster = "textbook";
  options.steps = 2;
  options.batch = form.ep * form.edp * shape.micro_batches * shape.b;
  options.seq = shape.s;
  options.dtype = shape.dtype;
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, expert_topology(group_sizes(as, how)));
    Trainer strategy(as, how, mesh);
    run.train(as, strategy);
  };
  chapter.fold_class = fold_class(options, how);
  return run_and_compare(options, chapter);
}

TEST(MoeActivations, AreThePagesFormula) {
  const std::vector<Combination> all = {
      {"E"},
      {"E+D", 2, 2},
      {"E+Z", 4, 1, 1, 1},
      {"E+Z2", 4, 1, 1, 2},
      {"E+D+M", 2, 2, 2},
      {"E+D+M, cut experts", 2, 2, 4, 0, false, true},
      {"E+D+Z", 2, 2, 1, 2},
      {"E+Z-Off+M", 2, 1, 2, 2, true}};
  // Few tokens and many, odd and even; wide models and large vocabularies; slots
  // that are rare, and slots that stay empty
  const std::vector<ModelShape> shapes = {
      {},
      {3, 11, 20, 3, 100, 4},
      {1, 5, 8, 1, 1000, 12, 1, 2},
      {4, 16, 32, 2, 64, 8, 2},
      {3, 16, 128, 2, 60, 8, 3, 3, 1.25},
      {8, 31, 20, 1, 16, 4, 1, 2, 2, DType::kF32},
      {2, 16, 64, 3, 300, 8, 2, 2, 2, DType::kBF16},
      {4, 31, 8, 2, 28, 8, 1, 1, 0.5, DType::kBF16}};
  int compared = 0;
  for (const Combination& form : sized(all, {all[3], all[5]})) {
    int of_form = 0;
    for (const ModelShape& shape : shapes) {
      GateOptions gate;
      gate.num_experts = shape.experts, gate.k = shape.k;
      gate.capacity_factor = shape.factor;
      if (capacity(shape.b * shape.s, gate, true) % form.t != 0) continue;
      SCOPED_TRACE(form.name + ", b " + std::to_string(shape.b) + " s " +
                   std::to_string(shape.s) + " h " + std::to_string(shape.h) +
                   " k " + std::to_string(shape.k));
      for (const RankReport& rank : run_on_shapes_of(shape, form).ranks) {
        const auto& peak =
            rank.peak[static_cast<std::size_t>(MemoryKind::kActivation)];
        ASSERT_GT(peak.predicted, 0);
        EXPECT_DOUBLE_EQ(peak.counted, peak.predicted);
      }
      ++of_form;
    }
    EXPECT_GE(of_form, 3) << form.name;
    compared += of_form;
  }
  EXPECT_GE(compared, kSanitized ? 6 : 48);
}

}  // namespace
}  // namespace shardbook::moe
