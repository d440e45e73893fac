// Virtual time against closed forms: ZeRO and FSDP.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/trainer.h"
#include "core/layers.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::sharded {
namespace {

class TextbookSharded : public ::testing::TestWithParam<int> {};

// One unit: all parameters are gathered before forward and stay until backward
// has used them; gradients are scattered after it.
TEST_P(TextbookSharded, FsdpOfOneUnitGathersAndScattersOnce) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  zero_fsdp::TrainerOptions how;
  how.strategy = "fsdp";
  how.wrap = "none";
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double padded = std::ceil(kParameters / n) * n;
  expect_time(step_s<zero_fsdp::Trainer>(options, how),
              all_gather(n, 4 * padded) + 3 * kLayers * f +
                  reduce_scatter(n, 4 * padded) + all_reduce(n, 8));
}

// The same messages in another order: gradients are scattered, then parameters
// gathered.
TEST_P(TextbookSharded, ZeroStagesScatterThenGather) {
  const int n = GetParam();
  for (const char* strategy : {"zero1", "zero2"}) {
    const Options options = mlp_options(n, 80000);
    zero_fsdp::TrainerOptions how;
    how.strategy = strategy;
    const double f = layer_forward_s(80000.0 * 64 / n);
    const double padded = std::ceil(kParameters / n) * n;
    SCOPED_TRACE(strategy);
    expect_time(step_s<zero_fsdp::Trainer>(options, how),
                3 * kLayers * f + reduce_scatter(n, 4 * padded) +
                    all_gather(n, 4 * padded) + all_reduce(n, 8));
  }
}

// --- A unit per layer --------------------------------------------------------

constexpr std::int64_t kWidth = 1024, kSeq = 64;
constexpr double kLayerBytes = 4 * kWidth * kWidth;
constexpr int kTableRows = 3 * kWidth;

/// A table, which costs nothing here, and layers of equal size. Each has
/// gradients of its input and of its weights.
class Tower : public ModuleOf<Tower> {
 public:
  Tower(int num_layers, const InitOptions& init)
      : table_("table", kTableRows, kWidth, init, 1.0) {
    for (int i = 0; i < num_layers; ++i) {
      layers_.emplace_back(name(i), kWidth, kWidth, init, /*with_bias=*/false);
    }
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = table_(tokens);
    for (Linear& layer : layers_) x = layer(x);
    return x;
  }
  void members(MemberVisitor& visit) override {
    visit.module("table", table_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      visit.module(name(static_cast<int>(i)), layers_[i]);
    }
  }

 private:
  static std::string name(int i) { return "layer" + std::to_string(i); }

  Embedding table_;
  std::vector<Linear> layers_;
};

struct TowerRun {
  std::string strategy;
  int ranks = 1, layers = 2, micro_batches = 1;
  std::int64_t rows = 1;  ///< of one rank and micro-batch
  int prefetched = 1;     ///< zero3: layers gathered ahead
  bool keeps = false;     ///< zero3: from forward to backward
  fsdp::BackwardPrefetch backward_prefetch = fsdp::BackwardPrefetch::kPre;

  double forward_s() const {
    return 2.0 * kWidth * kWidth * static_cast<double>(rows * kSeq) / kRate;
  }
  double gather_s() const { return all_gather(ranks, kLayerBytes); }
  double table_s() const {
    return all_gather(ranks, 4.0 * kTableRows * kWidth);
  }
  /// The loss and the norm, one after the other.
  double sums_s() const { return 2 * all_reduce(ranks, 8); }
  bool is_zero() const { return strategy == "zero3"; }
};

/// Trains a batch of the tower as the chapter's trainer does; returns the last
/// of three steps.
double tower_step_s(const TowerRun& run) {
  Options options =
      mlp_options(run.ranks, run.rows * run.ranks * run.micro_batches);
  options.seq = kSeq;
  const Dataset data = Dataset::open("random", kSeq, kWidth, 0);
  double step_s = 0;
  run_on_shapes(options, run.ranks, [&](ProcessGroup& group) {
    Tower tower(run.layers, {});
    std::unique_ptr<zero::ZeroOptimizer> zero;
    std::unique_ptr<fsdp::FullyShardedDataParallel> fsdp;
    std::unique_ptr<Optimizer> optimizer;
    if (run.is_zero()) {
      zero::ZeroOptions how;
      how.stage = 3;
      how.unit_types = {"Linear"};
      how.persistence_threshold = 0;
      how.prefetch_bucket_size = run.prefetched * kWidth * kWidth;
      if (run.keeps) how.max_reuse_distance = 1'000'000'000;
      zero = zero::make_zero(tower, group, how, "sgd", {});
    } else {
      fsdp::FsdpOptions how;
      how.auto_wrap_policy = fsdp::transformer_auto_wrap_policy({"Linear"});
      how.per_parameter = run.strategy == "fsdp2";
      how.backward_prefetch = run.backward_prefetch;
      fsdp =
          std::make_unique<fsdp::FullyShardedDataParallel>(tower, group, how);
      optimizer = make_optimizer("sgd", fsdp->parameters(), {});
    }
    sim::VirtualClock& clock = *sim::VirtualClock::current();
    clock.begin_steps();
    for (int step = 0; step < 3; ++step) {
      data_parallel_gradients(
          options, group, data, step, run.micro_batches, [](bool) {},
          [&](const Tensor& x) { return zero ? (*zero)(x) : (*fsdp)(x); });
      if (zero) {
        zero->step();
      } else {
        fsdp->clip_grad_norm_(1);
        optimizer->step();
        fsdp->clear_grad();
      }
      clock.end_step();
    }
    step_s = std::max(step_s, clock.last_step_s());
  });
  return step_s;
}

/// Calls `expect` where a gather takes longer than a layer's backward, longer
/// than its forward, and less; for micro-batches and numbers of layers.
template <typename Expect>
void for_each_tower(int ranks, const std::vector<std::string>& strategies,
                    const Expect& expect) {
  for (const std::string& strategy : strategies) {
    for (const int layers : {2, 3, 6}) {
      for (const int micro_batches : {1, 3}) {
        for (const double share : {0.3, 0.7, 1.5}) {
          TowerRun run{strategy, ranks, layers, micro_batches};
          // Forward takes this share of a gather
          run.rows = std::llround(share * run.gather_s() / run.forward_s());
          run.rows = std::max<std::int64_t>(run.rows, 1);
          if (ranks > 1) {
            ASSERT_NEAR(run.forward_s() / run.gather_s(), share, 0.05);
          }
          SCOPED_TRACE(strategy + ", " + std::to_string(layers) + " layers, " +
                       std::to_string(micro_batches) + " micro-batches of " +
                       std::to_string(run.rows));
          expect(run);
        }
      }
    }
  }
}

// A layer computes while the next one is gathered; in backward the gradients of
// the one before travel as well. The ends are left: the gathers that forward and
// backward begin with, and the last reductions.
TEST_P(TextbookSharded, UnitsHideTheirMessagesButForTheEnds) {
  for_each_tower(GetParam(), {"zero3", "fsdp", "fsdp2"}, [](TowerRun run) {
    const double f = run.forward_s(), g = run.gather_s();
    // FSDP keeps the table from forward to backward
    const double ends = 3 * g + (run.is_zero() ? 3 : 2) * run.table_s();
    const double middle =
        f + 2 * std::max(2 * f, g) + (3 * run.layers - 5) * std::max(f, g);
    expect_time(tower_step_s(run),
                run.micro_batches * (ends + middle) + run.sums_s());
    if (f >= g) {
      EXPECT_NEAR(middle, 3 * run.layers * f, 1e-12);
    } else if (g >= 2 * f) {
      EXPECT_NEAR(middle, f + 3 * (run.layers - 1) * g, 1e-12);
    }
  });
}

// Layers that stay whole are not gathered for backward: only the reductions
// travel there, each while the next layer computes, and the sum of the losses
// travels while the last layer does.
TEST_P(TextbookSharded, KeptLayersAreGatheredOnce) {
  for_each_tower(GetParam(), {"zero3"}, [](TowerRun run) {
    run.keeps = true;
    const double f = run.forward_s(), g = run.gather_s();
    if (2 * f < run.sums_s() / 2) return;  // the losses would show
    const double middle =
        3 * f + (run.layers - 1) * (std::max(f, g) + std::max(2 * f, g));
    expect_time(tower_step_s(run),
                run.micro_batches * (middle + 2 * g + 2 * run.table_s()) +
                    run.sums_s() / 2);
  });
}

// Where messages hide, gathering further ahead changes nothing.
TEST_P(TextbookSharded, DeepPrefetchHidesNoMoreThanTheNextLayer) {
  for_each_tower(GetParam(), {"zero3"}, [](TowerRun run) {
    if (run.forward_s() < run.gather_s()) return;
    run.prefetched = 4;
    expect_time(tower_step_s(run),
                run.micro_batches * (3 * run.layers * run.forward_s() +
                                     3 * run.gather_s() + 3 * run.table_s()) +
                    run.sums_s());
  });
}

// Gathered when it is needed, a layer waits for its own gather and for the
// reduction before it: nothing hides.
TEST_P(TextbookSharded, WithoutPrefetchingComputationAndMessagesAddUp) {
  for_each_tower(GetParam(), {"zero3"}, [](TowerRun run) {
    run.prefetched = 0;
    expect_time(tower_step_s(run),
                run.micro_batches *
                        (3 * run.layers * (run.forward_s() + run.gather_s()) +
                         3 * run.table_s()) +
                    run.sums_s());
  });
}

// After or before a layer's backward: its reduction is the next message in
// either case. When the next layer asks, the gather is behind that reduction.
TEST_P(TextbookSharded, FsdpGathersAheadInBackwardUnlessToldOtherwise) {
  for_each_tower(GetParam(), {"fsdp"}, [](TowerRun run) {
    const double f = run.forward_s(), g = run.gather_s();
    const double pre = tower_step_s(run);
    run.backward_prefetch = fsdp::BackwardPrefetch::kPost;
    EXPECT_DOUBLE_EQ(tower_step_s(run), pre);
    run.backward_prefetch = fsdp::BackwardPrefetch::kNone;
    expect_time(tower_step_s(run),
                run.micro_batches * ((2 * run.layers + 1) * (f + g) +
                                     (run.layers - 1) * std::max(f, g) +
                                     2 * run.table_s()) +
                    run.sums_s());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookSharded, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook::sharded
