// Steps that are validated later have the same bits as steps that are checked
// first.

#include "chapters/06_1f1b/post_validation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/partition.h"
#include "core/inplace.h"
#include "tests/chapters/common/pipeline/pipeline_engine_support.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::PostValidation;
using pipeline::Schedule;
namespace schedules = pipeline::schedules;

constexpr int kSteps = 5;

struct Training {
  Values weights;
  std::map<std::string, std::vector<std::vector<double>>> state;
  std::vector<double> norms;
  std::vector<bool> skipped;
  std::vector<double> losses;
  int amended = 0;
};

/// The check before the step: one all-reduce of the squared norm, then all
/// ranks scale and step, or skip. Returns the norm.
double checked_update(PipelineModel& model, Optimizer& optimizer, double clip,
                      ProcessGroup& world) {
  const double here = grad_norm(model.counted_parameters());
  const Tensor sum = Tensor::full({}, here * here, {DType::kF64, Device()});
  world.all_reduce(sum).wait();
  const double norm = std::sqrt(sum.item());
  if (std::isfinite(norm)) {
    for (const Tensor& each : model.parameters()) {
      if (clip > 0 && each.grad().defined()) {
        scale_in_place(each.grad(), clip_factor(norm, clip));
      }
    }
    optimizer.step();
  }
  for (const Tensor& each : model.parameters()) each.clear_grad();
  return norm;
}

/// `poison`: the stage whose gradient has an inf in step 2 (-1: none).
Training run(const Schedule& schedule,
             const std::shared_ptr<const LayerList>& layers, double clip,
             bool validates_later, int poison = -1) {
  const int p = schedule.num_ranks, m = schedule.num_micro_batches;
  Options options = small_options(m);
  const auto pieces = ceil_micro_batches(m, m);
  const auto ranks = shardbook::on_ranks(p, [&](ProcessGroup& world) {
    Training mine;
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    pipeline::LanguageFeed feed(options, data, pieces);
    PipelineModel model(options, layers,
                        one_stage_per_rank(cut_uniform(layers->size(), p)),
                        world);
    const auto optimizer = make_optimizer("adamw", model.parameters(), {});
    pipeline::Engine engine(schedule, model, world, feed);
    PostValidation post(model, *optimizer, clip, world);
    const auto validate = [&] {
      const bool stands = post.validate();
      mine.norms.push_back(post.grad_norm());
      mine.skipped.push_back(!std::isfinite(post.grad_norm()));
      return stands;
    };
    for (int step = 0; step < kSteps; ++step) {
      feed.set_first_step(step);
      // A trap: a redone step must use its own learning rate
      optimizer->set_lr(0.02 / (step + 1));
      mine.losses.push_back(validates_later && step > 0 ? engine.run(validate)
                                                        : engine.run());
      model.reduce_shared_gradients();
      if (step == 2 && world.rank() == poison) {
        for (const Tensor& each : model.parameters()) {
          if (!each.grad().defined()) continue;
          each.grad().fill(std::numeric_limits<double>::infinity());
          break;
        }
      }
      if (validates_later) {
        post.step();
      } else {
        mine.norms.push_back(checked_update(model, *optimizer, clip, world));
        mine.skipped.push_back(!std::isfinite(mine.norms.back()));
      }
    }
    if (validates_later) validate();
    mine.amended = post.num_amended();
    Stage& stage = model.stage(world.rank());
    for (const NamedTensor& each : stage.named_parameters()) {
      mine.weights[each.name + " " + std::to_string(world.rank())] =
          each.tensor.to_vector<double>();
    }
    for (std::size_t i = 0; i < optimizer->slots().size(); ++i) {
      const OptimizerSlot& slot = optimizer->slots()[i];
      auto& state =
          mine.state[std::to_string(world.rank()) + " " + std::to_string(i)];
      state.push_back({static_cast<double>(slot.step)});
      for (const Tensor& each : slot.state) {
        state.push_back(each.to_vector<double>());
      }
    }
    return mine;
  });
  Training all = ranks[0];
  for (const Training& each : ranks) {
    all.weights.insert(each.weights.begin(), each.weights.end());
    all.state.insert(each.state.begin(), each.state.end());
    EXPECT_EQ(each.amended, ranks[0].amended);
    EXPECT_EQ(each.skipped, ranks[0].skipped);
  }
  all.losses = ranks.back().losses;
  return all;
}

void expect_same(const Training& later, const Training& before) {
  EXPECT_EQ(later.weights, before.weights);
  EXPECT_EQ(later.state, before.state);
  EXPECT_EQ(later.losses, before.losses);
  EXPECT_EQ(later.skipped, before.skipped);
  EXPECT_EQ(later.norms, before.norms);
}

class PostValidationRanks : public ::testing::TestWithParam<int> {};

TEST_P(PostValidationRanks, HasTheBitsOfTheCheckBefore) {
  const int p = GetParam(), m = 2 * p;
  const auto layers = std::make_shared<PairLayers>();
  // Clip: off; never, sometimes, always (the first ranks' sums suffice)
  for (const double clip : {0.0, 1e9, 1.2, 0.01}) {
    SCOPED_TRACE(clip);
    const Schedule schedule = schedules::zb_h2(p, m);
    const Training before = run(schedule, layers, clip, false);
    const Training later = run(schedule, layers, clip, true);
    expect_same(later, before);
    int clipped = 0;
    for (const double norm : before.norms) {
      clipped += clip > 0 && clip < norm + 1e-6 ? 1 : 0;
    }
    EXPECT_EQ(later.amended, clipped);
    if (clip == 0.01) {
      EXPECT_EQ(clipped, kSteps);
    }
  }
}

TEST_P(PostValidationRanks, OverflowSkipsTheStepEverywhere) {
  const int p = GetParam(), m = 2 * p;
  const auto layers = std::make_shared<PairLayers>();
  for (const int poison : {0, p / 2, p - 1}) {
    SCOPED_TRACE(poison);
    for (const Schedule& schedule :
         {schedules::zb_h2(p, m), schedules::one_f_one_b(p, m)}) {
      const Training before = run(schedule, layers, 0, false, poison);
      const Training later = run(schedule, layers, 0, true, poison);
      // The norm of that step is inf in both
      expect_same(later, before);
      EXPECT_EQ(later.amended, 1);
      EXPECT_TRUE(later.skipped[2]);
      EXPECT_FALSE(later.skipped[1]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, PostValidationRanks,
                         ::testing::ValuesIn(world_sizes()));

TEST(PostValidationTest, TiedEmbeddingsCountOnce) {
  const std::shared_ptr<const LayerList> layers =
      layers_of(ModelConfig{"gpt2", kVocab, 4, 8, 2, 2});
  const Schedule schedule = schedules::zb_h2(3, 6);
  const Training before = run(schedule, layers, 0.7, false);
  expect_same(run(schedule, layers, 0.7, true), before);
  EXPECT_EQ(before.weights.at("transformer.wte.weight 0"),
            before.weights.at("transformer.wte.weight 2"));
}

TEST(PostValidationTest, Verdicts) {
  EXPECT_FALSE(pipeline::verdict_of(9, 0).skips);
  EXPECT_EQ(pipeline::verdict_of(9, 0).factor, 1);
  EXPECT_EQ(pipeline::verdict_of(9, 4).factor, 1);
  EXPECT_DOUBLE_EQ(pipeline::verdict_of(9, 1.5).factor, 1.5 / (3 + 1e-6));
  EXPECT_TRUE(pipeline::verdict_of(std::nan(""), 1).skips);
  EXPECT_TRUE(
      pipeline::verdict_of(std::numeric_limits<double>::infinity(), 0).skips);
}

}  // namespace
}  // namespace shardbook::pipeline_test
